"""The policies by name. Adding one is one file and one line here."""

from collections.abc import Callable, Mapping

from pdrouter.core.policies.base import Policy, PolicyOptions
from pdrouter.core.policies.least_request import LeastRequest
from pdrouter.core.policies.load_aware import LoadAware
from pdrouter.core.policies.minimum_tokens import MinimumTokens
from pdrouter.core.policies.power_of_two import PowerOfTwo
from pdrouter.core.policies.random_choice import RandomChoice
from pdrouter.core.policies.round_robin import RoundRobin

ENGINE = "engine"
"""The rank policy that leaves the rank to the engine; no policy object stands behind it."""

POLICIES: Mapping[str, Callable[[PolicyOptions], Policy]] = {
    RandomChoice.name: RandomChoice,
    RoundRobin.name: RoundRobin,
    LeastRequest.name: LeastRequest,
    PowerOfTwo.name: PowerOfTwo,
    LoadAware.name: LoadAware,
    MinimumTokens.name: MinimumTokens,
}

RANK_POLICIES: Mapping[str, Callable[[PolicyOptions], Policy]] = {
    MinimumTokens.name: MinimumTokens,
    RoundRobin.name: RoundRobin,
    RandomChoice.name: RandomChoice,
}
