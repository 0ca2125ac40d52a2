"""The load view: ledger and reports joined without counting anything twice."""

import math
from collections.abc import Sequence

import pytest

from pdrouter.core import events
from pdrouter.core.fleet import Role
from pdrouter.core.ledger import Account, LegKind
from pdrouter.core.load import LoadView, PeerMean, RankReport
from pdrouter.errors import InvariantViolation

from .builders import (
    decide,
    decode,
    effective,
    facts,
    make_endpoint,
    make_options,
    make_router,
    prefill,
    report,
    report_requests,
)


def make_view(*dp_sizes: int, visible_delay_s: float = 0.0, history_events: int = 1000) -> LoadView:
    """Return a view of prefill endpoints ``e0``, ``e1``... whose reports are good for 10 s."""
    view = LoadView(report_max_age_s=10.0, visible_delay_s=visible_delay_s, history_events=history_events)
    for number, dp_size in enumerate(dp_sizes):
        view.add(prefill(f"e{number}", dp_size=dp_size))
    return view


def account(view: LoadView, address: str = "e0", rank: int = 0) -> Account:
    """Return a rank's account."""
    return view.endpoints[address].ranks[rank].account


def tokens(view: LoadView, address: str = "e0") -> list[float]:
    """Return the effective tokens by rank."""
    return [rank.effective_tokens for rank in view.endpoints[address].ranks]


def tell(view: LoadView, numbers: Sequence[float | None], t_s: float, now_s: float | None = None) -> int:
    """Let ``e0`` report tokens by rank."""
    ranks = [RankReport(rank, tokens=number) for rank, number in enumerate(numbers)]
    return view.accept("e0", ranks, t_s, t_s if now_s is None else now_s)


@pytest.mark.invariant("I11")
def test_work_of_others_is_added_until_the_next_report() -> None:
    """What the engine has beyond our work stays, while ours comes and goes."""
    view = make_view(1)
    leg = account(view).reserve(LegKind.DECODE, 100, 100, 1.0)
    tell(view, [250], 2.0)
    assert tokens(view) == [250]
    account(view).reserve(LegKind.DECODE, 30, 30, 3.0)
    assert tokens(view) == [280]
    account(view).settle(leg, 4.0)
    assert tokens(view) == [180]
    tell(view, [30], 5.0)
    assert tokens(view) == [30]


@pytest.mark.invariant("I11")
def test_a_report_replaces_only_what_it_can_include() -> None:
    """Effective is reported, plus what was reserved since, minus what was settled since, however late it comes."""
    view = make_view(1)
    ended = account(view).reserve(LegKind.DECODE, 100, 100, 1.0)
    account(view).reserve(LegKind.DECODE, 200, 200, 1.5)
    account(view).reserve(LegKind.DECODE, 40, 40, 3.0)
    account(view).settle(ended, 4.0)
    tell(view, [350], 2.0, now_s=5.0)
    assert tokens(view) == [350 + 40 - 100]


@pytest.mark.invariant("I11")
def test_what_was_generated_since_a_low_report_still_counts() -> None:
    """A report that sees nothing of a leg takes away what the leg was then, not what it grew since."""
    view = make_view(1)
    leg = account(view).reserve(LegKind.DECODE, 100, 100, 0.0)
    account(view).grow(leg, 50, 2.0)
    tell(view, [0], 1.0, now_s=3.0)
    assert tokens(view) == [50]


@pytest.mark.invariant("I11")
def test_a_low_report_takes_no_more_than_it_can_see() -> None:
    """Where our estimate was too high, the difference fades with the work it belongs to, and never turns negative."""
    view = make_view(1)
    legs = [account(view).reserve(LegKind.DECODE, 100, 100, 1.0) for _ in range(2)]
    tell(view, [150], 2.0)
    assert tokens(view) == [150]
    account(view).settle(legs[0], 3.0)
    assert tokens(view) == [75]
    account(view).settle(legs[1], 4.0)
    assert tokens(view) == [0]


@pytest.mark.invariant("I11")
def test_cached_tokens_that_the_engine_counts_are_ours() -> None:
    """The engine counts the whole prompt, the policy only what isn't cached; the rest isn't work of others."""
    view = make_view(1)
    account(view).reserve(LegKind.PREFILL, 20, 100, 1.0)
    tell(view, [100], 2.0)
    assert tokens(view) == [20]


@pytest.mark.invariant("I11")
@pytest.mark.parametrize(("t_report_s", "expected"), [(1.4, 80.0), (1.5, 30.0)])
def test_work_within_the_visible_delay_is_not_replaced(t_report_s: float, expected: float) -> None:
    """A leg younger than the delay can't be in the report, so a report of 30 is of others."""
    view = make_view(1, visible_delay_s=0.5)
    account(view).reserve(LegKind.DECODE, 50, 50, 1.0)
    tell(view, [30], t_report_s)
    assert tokens(view) == [expected]


def test_tokens_and_requests_are_corrected_apart() -> None:
    """A report of the one says nothing of the other."""
    view = make_view(1)
    account(view).reserve(LegKind.DECODE, 100, 100, 1.0)
    view.accept("e0", [RankReport(0, tokens=150, requests=4)], 2.0, 2.0)
    rank = view.endpoints["e0"].ranks[0]
    assert (rank.effective_tokens, rank.effective_requests) == (150, 4)
    view.accept("e0", [RankReport(0, requests=0)], 3.0, 3.0)
    assert (rank.effective_tokens, rank.effective_requests) == (100, 0)
    assert rank.age_s(5.0) == 2.0


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("reports", "t_s", "good", "rejected"),
    [
        pytest.param([(0, -1.0), (1, 5.0)], 99.0, {1: 5.0}, {"not_a_load": 1}, id="minus one"),
        pytest.param([(0, NAN), (1, INF)], 99.0, {}, {"not_a_load": 2}, id="not finite"),
        pytest.param([(0, 1e300), (1, -INF)], 99.0, {}, {"not_a_load": 2}, id="beyond belief"),
        pytest.param([(0, None), (1, 5.0)], 99.0, {1: 5.0}, {"not_a_load": 1}, id="no number"),
        pytest.param([(1, 5.0)], 99.0, {1: 5.0}, {"missing_rank": 1}, id="missing rank"),
        pytest.param([], 99.0, {}, {"missing_rank": 2}, id="nothing"),
        pytest.param(
            [(0, 5.0), (1, 5.0), (2, 5.0), (-1, 5.0)], 99.0, {0: 5.0, 1: 5.0}, {"unknown_rank": 2}, id="unknown rank"
        ),
        pytest.param([(0, 5.0), (0, 9.0)], 99.0, {}, {"rank_twice": 1}, id="rank twice"),
        pytest.param([(0, 5.0), (0, -1.0), (1, 1.0)], 99.0, {}, {"rank_twice": 1}, id="rank twice, once bad"),
        pytest.param([(0, 5.0), (1, 5.0)], 92.0, {}, {"out_of_order": 2}, id="out of order"),
        pytest.param([(0, 5.0), (1, 5.0)], 95.0, {}, {"out_of_order": 2}, id="the same again"),
        pytest.param([(0, 5.0), (1, 5.0)], 89.0, {}, {"too_old": 1}, id="too old"),
        pytest.param([(0, 5.0), (1, 5.0)], 101.0, {}, {"from_the_future": 1}, id="from the future"),
        pytest.param([(0, 5.0), (1, 5.0)], NAN, {}, {"from_the_future": 1}, id="no time"),
        pytest.param([(0, 5.0), (1, 5.0)], -INF, {}, {"too_old": 1}, id="before all time"),
    ],
)
def test_what_cannot_be_a_load_is_no_report(
    reports: list[tuple[int, float | None]], t_s: float, good: dict[int, float], rejected: dict[str, int]
) -> None:
    """It is counted by its reason and changes nothing on the ranks it was about."""
    view = make_view(2)
    tell(view, [70, 80], 95.0)
    assert view.accept("e0", [RankReport(r, tokens=n) for r, n in reports], t_s, 100.0) == len(good)
    assert view.rejected_reports == rejected
    assert tokens(view) == [good.get(0, 70), good.get(1, 80)]


def test_a_report_of_an_unknown_endpoint_is_counted() -> None:
    """Nothing is made up for it."""
    view = make_view(1)
    assert view.accept("gone", [RankReport(0, tokens=1)], 1.0, 1.0) == 0
    assert view.rejected_reports == {"unknown_endpoint": 1}
    assert list(view.endpoints) == ["e0"]


@pytest.mark.invariant("I11")
def test_a_report_from_before_the_folded_past_is_no_report() -> None:
    """Once the past is too long to remember, a report from then can't be compared with it."""
    view = make_view(2, history_events=2)
    for second in range(5):
        account(view).reserve(LegKind.DECODE, 10, 10, float(second))
    assert tell(view, [20, 0], 1.5, now_s=5.0) == 1
    assert view.rejected_reports == {"out_of_order": 1}
    assert tokens(view) == [50, 0]


@pytest.mark.invariant("I11")
def test_a_report_from_before_the_folded_past_of_unassigned_work_is_no_report() -> None:
    """Work whose rank the engine chose is ours as well; if its past is gone, no rank's report can be compared."""
    view = make_view(2, history_events=2)
    unassigned = view.endpoints["e0"].unassigned
    for second in range(5):
        unassigned.reserve(LegKind.DECODE, 10, 10, float(second))
    assert tell(view, [10, 5], 0.5, now_s=5.0) == 0
    assert view.rejected_reports == {"out_of_order": 2}
    assert tell(view, [25, 25], 4.5, now_s=5.0) == 2
    assert view.endpoints["e0"].comparable_tokens == 50


@pytest.mark.invariant("I11")
def test_a_stale_report_has_no_weight() -> None:
    """At the age limit it still counts, after it the ledger alone does."""
    view = make_view(1)
    account(view).reserve(LegKind.DECODE, 100, 100, 1.0)
    tell(view, [900], 2.0)
    view.expire(12.0)
    assert tokens(view) == [900]
    view.expire(12.1)
    assert tokens(view) == [100]
    assert view.endpoints["e0"].ranks[0].age_s(12.1) is None


@pytest.mark.invariant("I11")
def test_a_late_report_grows_stale_by_its_own_age() -> None:
    """Neither a younger report of another endpoint that came first nor its own late arrival keeps it alive."""
    view = make_view(1, 1)
    view.accept("e1", [RankReport(0, tokens=7)], 10.0, 10.0)
    tell(view, [900], 1.0, now_s=10.5)
    view.expire(11.5)
    assert (tokens(view, "e0"), tokens(view, "e1")) == ([0], [7])


def test_a_renewed_report_stays() -> None:
    """The first report's end is not the second one's."""
    view = make_view(1)
    tell(view, [100], 1.0)
    tell(view, [200], 6.0)
    view.expire(12.0)
    assert tokens(view) == [200]
    view.expire(16.1)
    assert tokens(view) == [0]


@pytest.mark.invariant("I9")
def test_many_reports_leave_one_mark_each_rank() -> None:
    """What is remembered of reports is bounded by the ranks, however often they are polled."""
    view = make_view(2)
    for step in range(1, 200):
        tell(view, [step, step], step / 100)
    assert len(view._fresh) == 2


class TestUnknownIsNotIdle:
    """A rank that hasn't reported is judged by its ledger and by what a typical peer carries for others."""

    def test_it_gets_what_peers_carry_for_others(self) -> None:
        """The mean over the reporting ranks of the same role and model, our own work aside."""
        view = make_view(1, 1, 1)
        account(view, "e0").reserve(LegKind.PREFILL, 50, 50, 0.5)
        for address, number in (("e0", 150), ("e1", 300)):
            view.accept(address, [RankReport(0, tokens=number, requests=number / 10)], 1.0, 1.0)
        account(view, "e2").reserve(LegKind.PREFILL, 5, 5, 2.0)
        fresh = view.endpoints["e2"].ranks[0]
        assert (fresh.effective_tokens, fresh.comparable_tokens) == (5, 5 + (100 + 300) / 2)
        assert (fresh.effective_requests, fresh.comparable_requests) == (1, 1 + (14 + 30) / 2)

    def test_it_is_known_again_with_its_own_report(self) -> None:
        """Then it is idle if it says so."""
        view = make_view(1, 1)
        view.accept("e1", [RankReport(0, tokens=300)], 1.0, 1.0)
        tell(view, [0], 1.0)
        assert view.endpoints["e0"].ranks[0].comparable_tokens == 0

    @pytest.mark.parametrize("numbers", [{"requests": 0.0}, {"tokens": 0.0}])
    def test_a_number_that_a_report_leaves_out_is_unknown(self, numbers: dict[str, float]) -> None:
        """An engine that tells only requests isn't idle in tokens, and dilutes no mean of them."""
        view = make_view(1, 1, 1)
        view.accept("e1", [RankReport(0, tokens=300, requests=6)], 1.0, 1.0)
        view.accept("e0", [RankReport(0, **numbers)], 1.0, 1.0)
        partly, unknown = view.endpoints["e0"].ranks[0], view.endpoints["e2"].ranks[0]
        if "tokens" in numbers:
            assert (partly.comparable_tokens, partly.comparable_requests) == (0, 6)
            assert (unknown.comparable_tokens, unknown.comparable_requests) == (150, 6)
        else:
            assert (partly.comparable_tokens, partly.comparable_requests) == (300, 0)
            assert (unknown.comparable_tokens, unknown.comparable_requests) == (300, 3)

    def test_stale_and_removed_peers_no_longer_count(self) -> None:
        """The guess is made of fresh reports only."""
        view = make_view(1, 1, 1)
        view.accept("e0", [RankReport(0, tokens=100)], 1.0, 1.0)
        view.accept("e1", [RankReport(0, tokens=300)], 5.0, 5.0)
        unknown = view.endpoints["e2"].ranks[0]
        assert unknown.comparable_tokens == 200
        view.expire(11.5)
        assert unknown.comparable_tokens == 300
        view.remove("e1")
        assert unknown.comparable_tokens == 0

    def test_peers_are_of_one_role_and_model(self) -> None:
        """Busy decode endpoints say nothing of prefill; an endpoint that learns its model changes its peers."""
        view = make_view(1)
        view.add(make_endpoint("d", Role.DECODE, model="m"))
        view.accept("d", [RankReport(0, tokens=500)], 1.0, 1.0)
        assert view.endpoints["e0"].ranks[0].comparable_tokens == 0
        view.add(make_endpoint("d2", Role.DECODE))
        assert view.endpoints["d2"].ranks[0].comparable_tokens == 0
        view.add(make_endpoint("d2", Role.DECODE, model="m"))
        assert view.endpoints["d2"].ranks[0].comparable_tokens == 500

    def test_a_report_goes_along_to_new_peers(self) -> None:
        """The old peers no longer count it, the new ones do."""
        view = make_view(1)
        view.add(make_endpoint("a", Role.DECODE))
        view.add(make_endpoint("b", Role.DECODE))
        view.add(make_endpoint("c", Role.DECODE, model="m"))
        view.accept("a", [RankReport(0, tokens=500)], 1.0, 1.0)
        view.add(make_endpoint("a", Role.DECODE, model="m"))
        assert view.endpoints["b"].ranks[0].comparable_tokens == 0
        assert view.endpoints["c"].ranks[0].comparable_tokens == 500

    def test_a_mean_of_nobody_is_zero(self) -> None:
        """Also after the last one left, whatever was rounded on the way."""
        mean = PeerMean()
        assert mean.value == 0.0
        for number in (0.1, 0.2, 0.3):
            mean.add(number, 1)
        for number in (0.3, 0.2, 0.1):
            mean.add(number, -1)
        assert mean.value == 0.0


class TestUnassigned:
    """Work whose rank the engine chooses is ours wherever the report shows it."""

    @pytest.mark.invariant("I11")
    def test_it_is_not_counted_twice(self) -> None:
        """Ranks that report it hold no work of others for it."""
        view = make_view(2)
        load = view.endpoints["e0"]
        leg = load.unassigned.reserve(LegKind.DECODE, 100, 100, 1.0)
        view.accept("e0", [RankReport(0, tokens=100, requests=1), RankReport(1, tokens=0, requests=0)], 2.0, 2.0)
        assert (load.comparable_tokens, load.comparable_requests) == (100, 1)
        load.unassigned.settle(leg, 3.0)
        assert (load.comparable_tokens, load.comparable_requests) == (0, 0)

    @pytest.mark.invariant("I11")
    def test_it_is_looked_for_where_the_report_shows_more_than_we_assigned(self) -> None:
        """A rank that holds just what we put there holds none of it."""
        view = make_view(2)
        load = view.endpoints["e0"]
        account(view, rank=0).reserve(LegKind.DECODE, 100, 100, 1.0)
        load.unassigned.reserve(LegKind.DECODE, 100, 100, 1.0)
        tell(view, [100, 100], 2.0)
        assert (tokens(view), load.comparable_tokens) == ([100, 0], 200)

    def test_others_work_beside_it_counts(self) -> None:
        """What the ranks show beyond it is shared out by what they show."""
        view = make_view(2)
        view.endpoints["e0"].unassigned.reserve(LegKind.DECODE, 100, 100, 1.0)
        tell(view, [300, 100], 2.0)
        assert tokens(view) == [225, 75]
        assert view.endpoints["e0"].comparable_tokens == 400

    def test_a_report_that_shows_less_takes_nothing_from_ranks(self) -> None:
        """Unassigned work isn't corrected downwards, and no rank pays for it."""
        view = make_view(2)
        view.endpoints["e0"].unassigned.reserve(LegKind.DECODE, 100, 100, 1.0)
        account(view, rank=1).reserve(LegKind.DECODE, 50, 50, 1.0)
        tell(view, [30, 50], 2.0)
        assert (tokens(view), view.endpoints["e0"].comparable_tokens) == ([0, 50], 150)


class TestChange:
    """Load belongs to the address, and survives what doesn't end the endpoint."""

    def test_more_ranks_keep_the_load_of_those_there(self) -> None:
        """A description with more ranks adds empty ones."""
        view = make_view(1)
        account(view).reserve(LegKind.PREFILL, 10, 10, 1.0)
        tell(view, [30], 2.0)
        view.add(prefill("e0", dp_size=3))
        assert tokens(view) == [30, 0, 0]

    def test_fewer_ranks_forget_the_rest(self) -> None:
        """Legs on a rank that is gone settle without a trace, and its report counts no more."""
        view = make_view(2, 1)
        gone = account(view, rank=1)
        leg = gone.reserve(LegKind.PREFILL, 10, 10, 1.0)
        tell(view, [0, 800], 2.0)
        view.add(prefill("e0", dp_size=1))
        assert tokens(view) == [0]
        assert view.endpoints["e1"].ranks[0].comparable_tokens == 0
        assert gone.settle(leg, 3.0)
        assert gone.tokens == 0
        view.expire(99.0)

    def test_an_endpoint_that_left_is_forgotten(self) -> None:
        """Its legs settle on books that nobody reads, and it comes back empty; leaving twice is no matter."""
        view = make_view(1)
        old = account(view)
        leg = old.reserve(LegKind.PREFILL, 10, 10, 1.0)
        tell(view, [30], 2.0)
        view.remove("e0")
        view.remove("e0")
        view.add(prefill("e0"))
        tell(view, [5], 2.0)
        view.expire(12.0)
        assert tokens(view) == [5]
        assert old.settle(leg, 3.0)
        view.validate()

    def test_sums_over_an_endpoint(self) -> None:
        """Requests and tokens of all ranks and of unassigned work."""
        view = make_view(2)
        load = view.endpoints["e0"]
        account(view, rank=1).reserve(LegKind.DECODE, 10, 10, 1.0)
        load.unassigned.reserve(LegKind.DECODE, 5, 5, 1.0)
        assert (load.ledger_requests, load.comparable_requests, load.comparable_tokens) == (2, 2, 15)

    def test_wrong_books_are_found(self) -> None:
        """``validate`` looks at every rank and at unassigned work."""
        view = make_view(2)
        view.validate()
        view.endpoints["e0"].unassigned.tokens = 1
        with pytest.raises(InvariantViolation):
            view.validate()


def test_a_failed_poll_is_no_report() -> None:
    """It is counted by its reason and the last report goes on ageing."""
    router = make_router([prefill("p")], make_options(report_max_age_s=10.0))
    report(router, "p", [400], 1.0)
    for _ in range(2):
        router.observe(events.LoadMissing("p", "timeout"), 5.0)
    assert router.missing_reports == {"timeout": 2}
    assert router.load.endpoints["p"].ranks[0].effective_tokens == 400
    router.load.expire(11.5)
    assert router.load.endpoints["p"].ranks[0].effective_tokens == 0


def test_requests_alone_are_a_report() -> None:
    """An engine that doesn't tell tokens still corrects the requests."""
    router = make_router([prefill("p", dp_size=2)])
    report_requests(router, "p", [4, 7], 1.0)
    assert [r.effective_requests for r in router.load.endpoints["p"].ranks] == [4, 7]


def test_a_report_that_lags_takes_nothing_away() -> None:
    """What it doesn't show yet is still there; what it shows beyond ours is others' work."""
    router = make_router([prefill("p", dp_size=2, reports_lag=True), decode("d")])
    for _ in range(2):
        decide(router, facts(300), 1.0)
    report(router, "p", [0, 0], 2.0)
    assert effective(router, "p") == [300, 300]
    report(router, "p", [0, 500], 3.0)
    assert effective(router, "p") == [300, 500]
