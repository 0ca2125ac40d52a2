"""``minimum_tokens`` as published, with its worked example."""

from collections import Counter

import pytest

from pdrouter.core import events
from pdrouter.core.load import RankReport
from pdrouter.core.policies import POLICIES, RANK_POLICIES
from pdrouter.core.policies import minimum_tokens_published as module
from pdrouter.core.policies.minimum_tokens import MinimumTokens
from pdrouter.core.policies.minimum_tokens_published import MinimumTokensPublished
from pdrouter.core.router import Router

from .builders import decide, decode, facts, make_options, make_router, prefill, prefill_of, report
from .pools import ask, busy_pool, options


def published_router() -> Router:
    """Return a router of one prefill endpoint with four ranks and one decode endpoint with two."""
    settings = make_options(ancestors=options(minimum_tokens_published=True).ancestors)
    return make_router([prefill("p", dp_size=4), decode("d", dp_size=2)], settings)


def table(router: Router, now_s: float = 9.0) -> list[list[float]]:
    """Return the rows of both endpoints' ranks, as an empty request sees them; it raises none."""
    probe = decide(router, facts(0), now_s)
    router.settle(probe, now_s)
    return [list(leg.rank_why.values) for leg in probe.placements]


def test_the_worked_example() -> None:
    """Each choice raises its row, ties go to the lowest rank, and the poll erases what was sent after it was taken."""
    router = published_router()
    report(router, "p", [900, 100, 400, 100], 0.0)
    report(router, "d", [50, 70], 0.0)
    decisions = [decide(router, facts(tokens), at) for tokens, at in ((300, 1.0), (200, 2.0), (100, 3.0))]
    assert [prefill_of(d).rank for d in decisions] == [1, 3, 3]
    assert [d.decode.rank for d in decisions] == [0, 1, 1]
    assert table(router, 3.0) == [[900, 400, 400, 400], [350, 370]]
    report(router, "p", [900, 400, 400, 300], 2.5, 4.0)
    assert table(router, 4.0)[0] == [900, 400, 400, 300]


def test_nothing_is_taken_back() -> None:
    """The end of a request changes no row."""
    router = published_router()
    decision = decide(router, facts(300), 1.0)
    router.observe(events.FirstTokenSeen(decision), 2.0)
    assert router.settle(decision, 3.0)
    assert [sum(rows) for rows in table(router)] == [300, 300]


def test_a_missing_or_stale_report_leaves_the_table() -> None:
    """Neither a failed poll nor the report's age lowers a row."""
    router = published_router()
    report(router, "p", [5, 0, 9, 9], 1.0)
    decide(router, facts(300), 2.0)
    router.observe(events.LoadMissing("p", "timeout"), 3.0)
    assert table(router, 1000.0)[0] == [5, 300, 9, 9]
    assert all(rank.report is None for rank in router.load.endpoints["p"].ranks)


def test_a_report_without_tokens_overwrites_nothing() -> None:
    """Only a number of tokens is a row's."""
    router = published_router()
    report(router, "p", [5, 0, 9, 9], 1.0)
    decide(router, facts(300), 2.0)
    ranks = [RankReport(rank, requests=1) for rank in range(4)]
    router.observe(events.LoadReported("p", ranks, 3.0), 3.0)
    assert table(router)[0] == [5, 300, 9, 9]


def test_text_is_charged_by_bytes_to_both_legs() -> None:
    """As #13208 did; where there is no text, by tokens."""
    router = published_router()
    decide(router, facts(300, prompt_bytes=1200), 1.0)
    assert [sum(rows) for rows in table(router)] == [1200, 1200]


def test_endpoints_are_worth_their_least_row() -> None:
    """The row that decided is raised, so that idle equals share alike."""
    pool = busy_pool((3, 0), dp_size=2)
    policy = MinimumTokensPublished(options())
    assert Counter(policy.choose(ask(), pool).index for _ in range(8)) == {0: 4, 1: 4}


@pytest.mark.invariant("I9")
def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank known longest goes, and it is counted."""
    monkeypatch.setattr(module, "MAX_ROWS", 2)
    policy = MinimumTokensPublished(options())
    policy.choose(ask(), busy_pool((0, 0, 0)))
    assert (policy.evictions, len(policy._rows)) == (1, 2)


def test_it_is_a_variant_of_the_policy_by_a_setting() -> None:
    """Off by default, for endpoints and for ranks."""
    for policies in (POLICIES, RANK_POLICIES):
        assert isinstance(policies["minimum_tokens"](options()), MinimumTokens)
        assert isinstance(policies["minimum_tokens"](options(minimum_tokens_published=True)), MinimumTokensPublished)
