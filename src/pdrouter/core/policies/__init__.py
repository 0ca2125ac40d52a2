"""The policies by name. Adding one is one file and one line here."""

from collections.abc import Callable, Collection, Mapping

from pdrouter.core.policies.base import Policy, PolicyOptions
from pdrouter.core.policies.bucket import Bucket
from pdrouter.core.policies.cache_aware import CacheAware
from pdrouter.core.policies.consistent_hashing import ConsistentHashing
from pdrouter.core.policies.dynamo import Dynamo
from pdrouter.core.policies.least_request import LeastRequest
from pdrouter.core.policies.least_work import LeastWork
from pdrouter.core.policies.llm_d import LlmD
from pdrouter.core.policies.llm_d_pd import LlmDPd
from pdrouter.core.policies.load_aware import LoadAware
from pdrouter.core.policies.load_aware_pairs import LoadAwarePairs
from pdrouter.core.policies.manual import Manual
from pdrouter.core.policies.minimum_tokens import MinimumTokens
from pdrouter.core.policies.minimum_tokens_published import MinimumTokensPublished
from pdrouter.core.policies.pairs import PairPolicy
from pdrouter.core.policies.power_of_two import PowerOfTwo
from pdrouter.core.policies.prefix_cache import PrefixCache
from pdrouter.core.policies.random_choice import RandomChoice
from pdrouter.core.policies.round_robin import RoundRobin

ENGINE = "engine"
"""The rank policy that leaves the rank to the engine; no policy object stands behind it."""


def _load_aware(options: PolicyOptions) -> Policy:
    return LoadAwarePairs(options) if options.ancestors.load_aware_generation == 2 else LoadAware(options)


def _minimum_tokens(options: PolicyOptions) -> Policy:
    return MinimumTokensPublished(options) if options.ancestors.minimum_tokens_published else MinimumTokens(options)


def pair_policy(names: Collection[str], options: PolicyOptions) -> PairPolicy | None:
    """Return what chooses both sides at once, if the policies of both sides are one that does."""
    is_joint = set(names) == {LoadAware.name} and options.ancestors.load_aware_generation == 2
    return LoadAwarePairs(options) if is_joint else None


POLICIES: Mapping[str, Callable[[PolicyOptions], Policy]] = {
    RandomChoice.name: RandomChoice,
    RoundRobin.name: RoundRobin,
    LeastRequest.name: LeastRequest,
    PowerOfTwo.name: PowerOfTwo,
    LoadAware.name: _load_aware,
    MinimumTokens.name: _minimum_tokens,
    LeastWork.name: LeastWork,
    CacheAware.name: CacheAware,
    PrefixCache.name: PrefixCache,
    ConsistentHashing.name: ConsistentHashing,
    Manual.name: Manual,
    Bucket.name: Bucket,
    Dynamo.name: Dynamo,
    LlmD.name: LlmD,
    LlmDPd.name: LlmDPd,
}

RANK_POLICIES: Mapping[str, Callable[[PolicyOptions], Policy]] = {
    LeastWork.name: LeastWork,
    MinimumTokens.name: _minimum_tokens,
    Dynamo.name: Dynamo,
    RoundRobin.name: RoundRobin,
    RandomChoice.name: RandomChoice,
}
