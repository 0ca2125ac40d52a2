"""What an endpoint that has begun anew loses, and what it keeps."""

import pytest

from pdrouter.core import events
from pdrouter.core.load import RankReport
from tests.core.builders import decide, facts, make_options, make_router, regular

BLOCKS = tuple(range(1, 9))


@pytest.mark.invariant("I1")
@pytest.mark.parametrize("policy", ["least_work", "dynamo", "llm_d", "minimum_tokens"])
def test_a_restart(policy: str) -> None:
    """Cache and reports are forgotten, its own only; what is placed there stays until it is settled."""
    router = make_router([regular("a", dp_size=2), regular("b")], make_options(policy=policy))
    decisions = [decide(router, facts(prompt_tokens=800, prefix_blocks=BLOCKS), 0.0) for _ in range(4)]
    for address, ranks in (("a", 2), ("b", 1)):
        reports = [RankReport(rank, tokens=9000, requests=9) for rank in range(ranks)]
        router.observe(events.LoadReported(address, reports, 1.0), 1.0)
        for rank in range(ranks):
            router.prefixes.insert(BLOCKS, router.load.endpoints[address].ranks[rank].key)
    held = [rank.account.tokens for rank in router.load.endpoints["a"].ranks]
    router.observe(events.EndpointRestarted("a"), 2.0)
    assert {rank.endpoint for rank in router.prefixes.find(BLOCKS).longest(9)} == {"b"}
    assert [rank.report for rank in router.load.endpoints["a"].ranks] == [None, None]
    assert [rank.report is not None for rank in router.load.endpoints["b"].ranks] == [True]
    assert [rank.account.tokens for rank in router.load.endpoints["a"].ranks] == held
    assert [rank.effective_tokens for rank in router.load.endpoints["a"].ranks] == held
    assert router.fleet.is_ready("a")
    for decision in decisions:
        assert router.settle(decision, 3.0)
    router.validate()
    assert [rank.account.tokens for rank in router.load.endpoints["a"].ranks] == [0, 0]


def test_many_restarts_leave_nothing_behind() -> None:
    """Each rank has one entry among the fresh reports, however often its endpoint begins anew (I9)."""
    router = make_router([regular("a", dp_size=2)])
    for n in range(50):
        reports = [RankReport(rank, tokens=1, requests=1) for rank in range(2)]
        router.observe(events.LoadReported("a", reports, float(n)), float(n))
        router.observe(events.EndpointRestarted("a"), n + 0.5)
    assert len(router.load._fresh) <= 2
    router.observe(events.EndpointRestarted("nobody"), 99.0)
