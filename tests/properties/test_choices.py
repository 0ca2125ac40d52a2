"""Whatever is known and whatever isn't, every policy makes a choice, with finite numbers behind it."""

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdrouter.core import events
from pdrouter.core.decision import Decision
from pdrouter.core.fleet import Endpoint, Role
from pdrouter.core.ledger import RankKey
from pdrouter.core.load import RankReport
from pdrouter.core.policies import POLICIES
from pdrouter.core.policies.base import Candidate, Policy, PolicyOptions, Question
from pdrouter.core.request import RequestFacts
from pdrouter.core.router import Router
from tests.core.builders import decode, make_options, make_policy_options, make_router, prefill, regular

VARIANTS: Mapping[str, tuple[str, dict[str, object]]] = {
    **{name: (name, {}) for name in POLICIES},
    "load_aware generation 2": ("load_aware", {"load_aware_generation": 2}),
    "minimum_tokens as published": ("minimum_tokens", {"minimum_tokens_published": True}),
}

COUNTS = st.one_of(st.none(), st.integers(0, 10**9).map(float), st.floats(0, 1e6))
SHARES = st.one_of(st.none(), st.floats(0, 2))
REPORTS = st.builds(
    RankReport,
    st.integers(0, 2),
    tokens=COUNTS,
    requests=COUNTS,
    throughput_tokens_per_s=COUNTS,
    kv_use=SHARES,
    waiting_requests=COUNTS,
)
FACTS = st.builds(
    RequestFacts,
    request_id=st.just("r"),
    prompt_tokens=st.integers(0, 10**6),
    prompt_bytes=st.integers(0, 10**7),
    prefix_blocks=st.lists(st.integers(0, 3), max_size=6).map(tuple),
    block_tokens=st.sampled_from([0.25, 16.0, 512.0, 200_000.0]),
    routing_key=st.one_of(st.none(), st.integers(0, 3)),
    client_key=st.one_of(st.none(), st.integers(0, 3)),
)


@st.composite
def fleets(draw: st.DrawFn) -> list[Endpoint]:
    """Return a few endpoints of each role."""
    makes: Sequence[tuple[str, Callable[..., Endpoint]]] = (("p", prefill), ("d", decode), ("r", regular))
    return [
        make(f"{letter}{number}", dp_size=draw(st.integers(1, 3)))
        for letter, make in makes
        for number in range(draw(st.integers(1, 4)))
    ]


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=settings().max_examples // 3)
@given(data=st.data())
def test_every_policy_chooses(variant: str, data: st.DataObject) -> None:
    """One of the candidates, endpoints or ranks, before and after reports, requests and their ends."""
    name, changes = VARIANTS[variant]
    endpoints = data.draw(fleets())
    router = make_router(endpoints, make_options(policy="least_work"))
    policy = POLICIES[name](options_of(router, changes))
    for now_s in (1.0, 2.0, 200.0):
        for endpoint in data.draw(st.lists(st.sampled_from(endpoints), max_size=4)):
            reports = data.draw(st.lists(REPORTS, max_size=3, unique_by=lambda report: report.rank))
            router.observe(events.LoadReported(endpoint.address, reports, now_s - 0.5), now_s)
        for facts in data.draw(st.lists(FACTS, max_size=4)):
            decision = router.decide(facts, now_s)
            assert isinstance(decision, Decision)
            if data.draw(st.booleans()):
                router.observe(events.FirstTokenSeen(decision), now_s)
            if data.draw(st.booleans()):
                router.settle(decision, now_s)
        for role in Role:
            look(policy, router, role, data.draw(FACTS), now_s)


def options_of(router: Router, changes: dict[str, object]) -> PolicyOptions:
    """Return settings whose books, work and drains are the router's."""
    made = make_policy_options(1)
    ancestors = msgspec.structs.replace(made.ancestors, **changes)
    return msgspec.structs.replace(
        made, work=router.work, drains=router.drains, books=router.books, ancestors=ancestors
    )


def look(policy: Policy, router: Router, role: Role, facts: RequestFacts, now_s: float) -> None:
    """Let the policy choose among the endpoints of a role, and among the ranks of each."""
    loads = [load for load in router.load.endpoints.values() if load.endpoint.role is role]
    holders: dict[RankKey, int] = {}
    if role is not Role.DECODE and facts.prefix_blocks:
        holders = {loads[0].ranks[0].key: facts.prompt_tokens // 2}
    pools: list[Sequence[Candidate]] = [loads, *(load.ranks for load in loads)]
    for number, pool in enumerate(pools):
        question = Question((role, str(number)), role, facts.prompt_tokens, holders, 50.0, now_s, facts)
        pick = policy.choose(question, pool)
        assert 0 <= pick.index < len(pool)
        assert all(map(math.isfinite, pick.why.values)), pick.why
        assert pick.why.policy == policy.name
