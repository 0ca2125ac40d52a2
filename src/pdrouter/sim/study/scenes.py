"""What the study compares: policies with the information that each has in life, fleets, loads.

A scene is one fleet under one or several loads. Runs themselves: ``virtual/sweep.py``. Next: ``found.py``.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from pdrouter.sim.virtual.fleet_spec import read_fleet
from pdrouter.sim.virtual.options import MakeOptions, SimulateSettings, cases_of
from pdrouter.sim.virtual.sweep import Case
from pdrouter.sim.virtual.trace import CONVERSATION

OURS = "least_work"
BOUND = "clairvoyant"

DENSE = "llama31-70b-h100-tp4-sglang-fp8"
DP_ATTENTION = "deepseek-v3-h200-dp8ep8-sglang-deepep-fp8"

_READ_TOKENS_PER_S = 24_000
"""What a rank of ``DENSE`` reads at best, for llm-d's filter. Source: the profile, prompts of 2,000 tokens."""

POLL_S = 10.0


class Policy(NamedTuple):
    """A policy as it is typed for ``pdrouter simulate``, and what it is told in life."""

    typed: str
    told: str


POLICIES: Mapping[str, Policy] = {
    OURS: Policy("least_work", "its own ledger; polls every 10 s"),
    "power_of_two": Policy("power_of_two", "polls every 10 s"),
    "minimum_tokens as published": Policy("minimum_tokens,minimum_tokens_published=true", "polls every 10 s"),
    "cache_aware": Policy("cache_aware", "its own requests in flight"),
    "load_aware": Policy("load_aware", "its own requests in flight; polls every 10 s"),
    "load_aware 2": Policy(
        "load_aware,load_aware_generation=2,report_interval=1", "its own requests in flight; polls every second"
    ),
    "llm_d": Policy("llm_d,report_interval=0.05", "polls every 50 ms"),
    "llm_d_pd": Policy(f"llm_d_pd,llm_d_prefill_tokens_per_s={_READ_TOKENS_PER_S}", "its own book"),
    "dynamo": Policy("dynamo", "its own book"),
    BOUND: Policy(BOUND, "everything"),
}


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """One fleet and what comes. ``more`` are policies beside those of ``POLICIES``, as they are typed."""

    title: str
    fleet: str
    policies: Sequence[str]
    utilisation: tuple[float, ...]
    requests: int
    seeds: int
    more: Sequence[tuple[str, str]] = ()

    def typed(self) -> Mapping[str, str]:
        """Return all its policies as they are typed, by name."""
        return {name: POLICIES[name].typed for name in self.policies} | dict(self.more)

    def cases(self, make_options: MakeOptions) -> Iterator[Case]:
        """Return its runs; each says the policy's name. Raises: ConfigError, ValueError."""
        names = {typed: name for name, typed in self.typed().items()}
        settings = SimulateSettings(
            trace=CONVERSATION,
            fleet=self.fleet,
            policy=tuple(names),
            requests=self.requests,
            utilisation=self.utilisation,
            report_interval=POLL_S,
            seeds=self.seeds,
        )
        for case in cases_of(settings, settings.loads(), read_fleet(self.fleet), make_options):
            yield msgspec.structs.replace(case, policy=names[case.policy], has_curves=False)


def dense(prefills: int) -> str:
    """Return a fleet of so many dense prefill ranks, and decode ranks enough that both sides are in use."""
    return f"prefill={prefills}x1:{DENSE},decode={prefills // 4}x1:{DENSE}"


_LEADING = ("power_of_two", "cache_aware", "load_aware", "load_aware 2", "llm_d_pd", "dynamo", BOUND)
_CLOSE = ("cache_aware", "load_aware 2", "llm_d_pd", "dynamo")

LARGE = Scene(
    title="32 ranks",
    fleet=dense(32),
    policies=tuple(POLICIES),
    utilisation=(0.9,),
    requests=5000,
    seeds=5,
)
SMALL = Scene(
    title="8 ranks",
    fleet=dense(8),
    policies=(OURS, *_CLOSE, BOUND),
    utilisation=(0.9, 1.1),
    requests=3000,
    seeds=5,
)
FULL = Scene(
    title="8 ranks, overload",
    fleet=dense(8),
    policies=(OURS, *_CLOSE),
    utilisation=(1.2, 1.4, 1.6),
    requests=3000,
    seeds=3,
)
_LOADS = (0.6, 0.75, 0.9)
IN_STEP = Scene(
    title="32 ranks with DP attention (4 endpoints of 8)",
    fleet=f"prefill=4x8:{DP_ATTENTION},decode=1x8:{DP_ATTENTION}",
    policies=(OURS, *_CLOSE),
    utilisation=_LOADS,
    requests=3000,
    seeds=2,
)
QUICK: Sequence[Scene] = (LARGE, SMALL, FULL, IN_STEP)

LOADS: Sequence[Scene] = (
    Scene(title="8 ranks", fleet=dense(8), policies=(OURS, *_LEADING), utilisation=_LOADS, requests=3000, seeds=3),
    Scene(title="32 ranks", fleet=dense(32), policies=(OURS, *_LEADING), utilisation=_LOADS, requests=5000, seeds=3),
    Scene(title="128 ranks", fleet=dense(128), policies=(OURS, *_LEADING), utilisation=_LOADS, requests=10000, seeds=2),
    msgspec.structs.replace(IN_STEP, policies=(OURS, *_LEADING)),
)
UNEQUAL = Scene(
    title="16 ranks, 4 of them at half the speed",
    fleet=f"prefill=12x1:{DENSE},prefill=4x1:{DENSE}*0.5,decode=4x1:{DENSE}",
    policies=(OURS, *_LEADING),
    utilisation=_LOADS,
    requests=4000,
    seeds=3,
)
AGES_S = (0, 1, 10)
_READERS = ("least_work", "power_of_two", "minimum_tokens,minimum_tokens_published=true", "llm_d")
AGES = Scene(
    title="32 ranks, reports every second",
    fleet=dense(32),
    policies=(),
    utilisation=(0.9,),
    requests=4000,
    seeds=3,
    more=tuple(
        (f"{typed.partition(',')[0]}, {age_s} s", f"{typed},report_interval=1,report_delay={age_s}")
        for typed in _READERS
        for age_s in AGES_S
    ),
)
OVERLOAD = Scene(
    title="8 ranks, overload",
    fleet=dense(8),
    policies=(OURS, *_CLOSE, BOUND),
    utilisation=(0.9, 1.1, 1.2, 1.3, 1.4, 1.6),
    requests=4000,
    seeds=3,
)
STUDY: Sequence[Scene] = (*LOADS, UNEQUAL, AGES, OVERLOAD)
