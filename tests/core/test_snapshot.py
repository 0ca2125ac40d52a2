"""Snapshots: what is so at a moment, and nothing is changed by looking."""

import random

import msgspec
import pytest

from pdrouter.core import events
from pdrouter.core.load import RankReport
from pdrouter.core.router import Router
from tests.core.builders import decide, decode, effective, facts, make_options, make_router, prefill, report
from tests.state import state_of

MAX_AGE_S = 30.0
READ_BY_THEN_S = 40.0


def make_pair() -> Router:
    """Return a router of one pair that is chosen by least work."""
    return make_router([prefill("p", dp_size=2), decode("d")], make_options(policy="least_work"))


def test_what_was_reported_and_what_is_held() -> None:
    """Every rank with its report, its age, the ledger and both together."""
    router = make_pair()
    report(router, "p", [50, 70], 1.0)
    decide(router, facts(100, prefill_rank=1), 2.0)
    snapshot = router.snapshot(4.0)
    assert snapshot.live_decisions == 1
    one, other = snapshot.endpoints
    assert (one.endpoint.address, one.is_ready, one.out, one.known_tokens) == ("p", True, None, 220)
    assert [rank.reported and rank.reported.tokens for rank in one.ranks] == [50, 70]
    assert [rank.report_age_s for rank in one.ranks] == [3.0, 3.0]
    assert [rank.ledger.tokens for rank in one.ranks] == [0, 100]
    assert [rank.effective.tokens for rank in one.ranks] == [50, 170]
    assert (other.known_tokens, other.ranks[0].reported) == (100, None)


def test_an_old_report_is_left_out_though_the_core_still_has_it() -> None:
    """At its last moment it counts, behind it the ledger alone does."""
    router = make_pair()
    report(router, "p", [50, 70], 1.0)
    decide(router, facts(100, prefill_rank=1), 2.0)
    (one, _) = router.snapshot(1.0 + MAX_AGE_S).endpoints
    assert one.known_tokens == 220
    (one, _) = router.snapshot(1.1 + MAX_AGE_S).endpoints
    assert [(rank.reported, rank.report_age_s, rank.effective.tokens) for rank in one.ranks] == [
        (None, None, 0),
        (None, None, 100),
    ]
    assert effective(router, "p") == [50, 170]


def test_nothing_is_known() -> None:
    """Of an endpoint that doesn't report and holds nothing of ours."""
    router = make_pair()
    assert [one.known_tokens for one in router.snapshot(1.0).endpoints] == [None, None]
    report(router, "p", [50], 1.0)
    assert [one.known_tokens for one in router.snapshot(1.0).endpoints] == [None, None]


@pytest.mark.invariant("I4")
def test_looking_changes_no_decision() -> None:
    """A rank is as free after a look as without one: the report of others' work is dropped with what it stood for."""
    free_at_s = []
    for looks in (False, True):
        router = make_pair()
        ranks = [RankReport(rank, tokens=2e6, requests=2.0) for rank in (0, 1)]
        router.observe(events.LoadReported("p", ranks, 1.0), 1.0)
        if looks:
            before = state_of(router)
            router.snapshot(1.1 + MAX_AGE_S)
            assert state_of(router) == before
        decision = decide(router, facts(10, prefill_rank=0), 1.2 + MAX_AGE_S)
        router.settle(decision, 1.3 + MAX_AGE_S)
        free_at_s.append([worker.free_at_s for worker in router.work.sites["p"].workers])
    assert free_at_s[0] == free_at_s[1]
    assert max(free_at_s[0]) < READ_BY_THEN_S


def test_a_snapshot_is_frozen() -> None:
    """Whoever has one can't change it."""
    snapshot = make_pair().snapshot(1.0)
    for value, name in ((snapshot, "live_decisions"), (snapshot.endpoints[0], "out"), (snapshot, "endpoints")):
        with pytest.raises(AttributeError):
            setattr(value, name, None)
    assert isinstance(snapshot.endpoints, tuple)
    assert hash(msgspec.json.encode(snapshot.endpoints[0].ranks[0])) is not None


def test_states_are_compared_to_any_depth() -> None:
    """The comparison sees a report that was dropped, a number drawn, and nothing where nothing has changed."""
    router = make_pair()
    report(router, "p", [50, 70], 1.0)
    before = state_of(router)
    assert state_of(router) == before
    router.fleet.ready(router.load.endpoints["p"].endpoint.role, None)
    assert state_of(router) == before
    router.load.expire(2.0)
    assert state_of(router) == before
    router.load.expire(99.0)
    assert state_of(router) != before
    chance = random.Random(1)
    before = state_of(chance)
    chance.random()
    assert state_of(chance) != before
