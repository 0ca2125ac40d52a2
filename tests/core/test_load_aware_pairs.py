"""``load_aware`` generation 2: the published tables, the scores, and the choice of a pair."""

import math
from collections import Counter
from collections.abc import Sequence

import pytest

from pdrouter.core import events
from pdrouter.core.fleet import Role
from pdrouter.core.load import RankReport
from pdrouter.core.policies import POLICIES, pair_policy
from pdrouter.core.policies.load_aware import LoadAware
from pdrouter.core.policies.load_aware_pairs import LoadAwarePairs, _prefill_imbalance
from pdrouter.core.policies.measures import kv_use
from pdrouter.core.policies.pairs import Group, grouped
from pdrouter.core.policies.scores import decode_scores, prefill_scores, throughput

from .builders import decide, decode, facts, make_options, make_router, prefill, prefill_of
from .pools import SEEDS, Row, ask, busy_pool, hold, options, picks, telling_pool

GENERATION_2 = {"load_aware_generation": 2}


class TestPrefillImbalance:
    """Spread of the requests in flight above 16."""

    @pytest.mark.parametrize(
        ("counts", "right"),
        [
            ((5, 5, 5), None),
            ((10, 15, 20), None),
            ((5, 40, 45), {"p0"}),
            ((2, 2, 50, 45), {"p0", "p1"}),
            ((), None),
            ((99,), None),
            ((0, 50), {"p0"}),
            ((0, 16), None),
            ((0, 17), {"p0"}),
        ],
    )
    def test_the_published_table(self, counts: Sequence[int], right: set[str] | None) -> None:
        """One of the least, or no imbalance."""
        pool = busy_pool(counts)
        order = _prefill_imbalance(pool)
        assert (order is None) is (right is None)
        if right:
            assert set(picks(LoadAwarePairs, ask(held={"p2": 99}), pool)) == right


class TestDecodeImbalance:
    """Requests, throughput, drain: the first that fires."""

    @pytest.mark.parametrize(
        ("rows", "right", "rule"),
        [
            (((5, 100, 0.5), (7, 120, 0.6)), None, ""),
            (((2, 100, 0.3), (40, 120, 0.8), (35, 110, 0.7)), {"d0"}, "fewest requests"),
            (((10, 50, 0.4), (12, 3000, 0.5)), {"d0"}, "lowest throughput"),
            (((0, 100, 0.1), (15, 100, 0.1)), None, ""),
            (((0, 100, 0.1), (16, 100, 0.1)), {"d0"}, "fewest requests"),
            (((9, 0, 0.1), (9, 2048, 0.1)), None, ""),
            (((9, 0, 0.1), (9, 2049, 0.1)), {"d0"}, "lowest throughput"),
            (((0, 0, 0.0), (30, 9, 0.1), (None, None, None)), {"d0"}, "fewest requests"),
            (((30, 9, 0.1), (None, None, None)), None, ""),
            (((3, 9, 0.1), (3, 9000, 0.1), (3, None, 0.1)), {"d0"}, "lowest throughput"),
        ],
    )
    def test_the_published_table(self, rows: Sequence[Row], right: set[str] | None, rule: str) -> None:
        """One without a metric takes no part in its spread."""
        pool = telling_pool(rows)
        order = LoadAwarePairs(options())._decode_imbalance(pool, 0.0)
        assert (order is None) is (right is None)
        if order is not None:
            assert rule in order.rule
            assert set(picks(LoadAwarePairs, ask(Role.DECODE), pool)) == right

    @pytest.mark.parametrize(
        ("requests", "ended", "right"),
        [
            pytest.param((8, 6), (120, 18), "d0", id="4 s against 20 s"),
            pytest.param((8, 6), (120, 0), None, id="one doesn't drain"),
            pytest.param((6, 4), (60, 60), None, id="1.5 times is not more than 1.5 times"),
            pytest.param((7, 4), (60, 60), "d1", id="a little more"),
            pytest.param((4, 2), (3, 1), "d1", id="slower than 0.1 a second counts as that: 40 s against 20 s"),
        ],
    )
    def test_the_drain(self, requests: Sequence[int], ended: Sequence[int], right: str | None) -> None:
        """Requests over the answers that ended in a second, of the last minute."""
        made = options()
        pool = telling_pool([(count, 100.0, 0.1) for count in requests])
        for load, answers in zip(pool, ended, strict=True):
            made.drains.add(load.key)
            for _ in range(answers):
                made.drains.ended(load.key, 1000.0)
        policy = LoadAwarePairs(made)
        order = policy._decode_imbalance(pool, 1010.0)
        assert (order is None) is (right is None)
        if order is not None:
            assert pool[policy.choose(ask(Role.DECODE, now_s=1010.0), pool).index].key == right
            assert "soonest drained" in order.rule

    def test_what_was_sent_and_isnt_reported_yet_counts(self) -> None:
        """Running and dispatched: a burst doesn't see one idle endpoint."""
        pool = telling_pool(((0, 1, 0.1), (20, 1, 0.1)))
        hold(pool[0], 37)
        assert set(picks(LoadAwarePairs, ask(Role.DECODE), pool)) == {"d1"}


class TestScores:
    """The formulas, and that nothing in them is infinite."""

    def test_prefill(self) -> None:
        """(100 - match %) / 10, plus the share of the most requests."""
        pool = busy_pool((0, 4, 2))
        assert prefill_scores(ask(held={"p1": 50}), pool, [0, 4, 2]) == [10.0, 6.0, 10.5]
        assert prefill_scores(ask(), pool, [0, 0, 0]) == [10.0, 10.0, 10.0]

    def test_decode(self) -> None:
        """(running / most + 1 - throughput / most) / (free / most)."""
        pool = telling_pool(((4, 100, 0.5), (2, 400, 0.2)))
        assert decode_scores(pool) == pytest.approx([(1 + 0.75) / (50 / 80), 0.5])

    def test_decode_is_finite_when_all_is_zero_or_full(self) -> None:
        """A full KV counts as 0.1 %, and idle endpoints that do nothing score alike."""
        assert decode_scores(telling_pool(((0, 0, 0), (0, 0, 0)))) == [1.0, 1.0]
        assert decode_scores(telling_pool(((1, 1, 1.0), (1, 1, 0.9)))) == pytest.approx([100.0, 1.0])

    def test_a_cold_start_scores_one_and_its_own(self) -> None:
        """While others have a metric; where nobody has, all are judged by what we hold."""
        pool = telling_pool(((4, 100, 0.5), (None, None, None)))
        hold(pool[1], 2)
        assert decode_scores(pool)[1] == 3.0
        cold = telling_pool(((None, None, None), (None, None, None)))
        hold(cold[0], 2)
        assert decode_scores(cold) == [2.0, 1.0]

    def test_what_isnt_told_is_the_others_mean(self) -> None:
        """Neither the best nor the worst."""
        pool = telling_pool(((4, 100, 0.5), (4, 300, 0.1), (4, None, None)))
        assert decode_scores(pool)[2] == pytest.approx((1 + 1 - 200 / 300) / (70 / 90))

    @pytest.mark.parametrize("lie", [-1.0, math.nan, math.inf])
    def test_what_cant_be_isnt_told(self, lie: float) -> None:
        """So no such number can win."""
        pool = telling_pool(((4, lie, lie),))
        assert (throughput(pool[0]), kv_use(pool[0])) == (None, None)
        assert all(map(math.isfinite, decode_scores(pool)))


class TestOneSide:
    """Where the other side has another policy, and for regular endpoints."""

    def test_the_best_score_wins(self) -> None:
        """A match of 5 % weighs half of the load's whole range."""
        assert set(picks(LoadAwarePairs, ask(held={"p1": 10}), busy_pool((0, 1)))) == {"p0", "p1"}
        assert set(picks(LoadAwarePairs, ask(held={"p1": 11}), busy_pool((0, 1)))) == {"p1"}
        assert set(picks(LoadAwarePairs, ask(held={"p1": 9}), busy_pool((0, 1)))) == {"p0"}

    def test_the_overloaded_are_passed_over(self) -> None:
        """Above mean + sigma deviations no match helps."""
        pool = busy_pool((1, 1, 1, 8))
        assert set(picks(LoadAwarePairs, ask(held={"p3": 99}), pool)) == {"p0", "p1", "p2"}

    def test_decode_takes_the_least_score(self) -> None:
        """When nothing is out of balance."""
        pool = telling_pool(((4, 100, 0.5), (2, 400, 0.2)))
        assert set(picks(LoadAwarePairs, ask(Role.DECODE), pool)) == {"d1"}

    def test_ranks_are_candidates_too(self) -> None:
        """A rank is its own only one."""
        ranks = busy_pool((3,), dp_size=2)[0].ranks
        for role in (Role.PREFILL, Role.DECODE):
            assert LoadAwarePairs(options()).choose(ask(role), ranks).index == 1


def make_groups(prefills: Sequence[Sequence[int]], decodes: Sequence[Sequence[Row]]) -> list[Group]:
    """Return groups of endpoints with these requests, and these reports."""
    flat = iter(busy_pool([count for group in prefills for count in group]))
    told = iter(telling_pool([row for group in decodes for row in group]))
    return [
        Group([next(flat) for _ in counts], [next(told) for _ in rows])
        for counts, rows in zip(prefills, decodes, strict=True)
    ]


def pairs(groups: Sequence[Group], held: dict[str, int] | None = None) -> Counter[str]:
    """Return which pairs are picked over many seeds."""
    found: Counter[str] = Counter()
    for seed in SEEDS:
        pick = LoadAwarePairs(options(seed)).choose_pair(ask(held=held), groups)
        found[f"{pick.prefill.key} {pick.decode.key}"] += 1
    return found


class TestPairs:
    """Both sides at once, within one group."""

    def test_prefill_imbalance_leads_and_decode_is_of_its_group(self) -> None:
        """Even if the decodes elsewhere are idle."""
        groups = make_groups([[20, 30], [2]], [[(0, 1, 0.1)], [(9, 1, 0.9), (8, 1, 0.1)]])
        assert set(pairs(groups, {"p0": 99})) == {"p2 d2"}

    def test_decode_imbalance_comes_next(self) -> None:
        """The prefill is the best of the decode's group."""
        groups = make_groups([[0], [3, 2]], [[(40, 1, 0.1)], [(2, 1, 0.1), (35, 1, 0.1)]])
        assert set(pairs(groups, {"p0": 99})) == {"p2 d1"}

    def test_else_the_least_sum_of_both_shares(self) -> None:
        """10.5 / 11 + 0.75 / 1.5 beats 11 / 11 + ..., and the other group's better prefill has a worse decode."""
        groups = make_groups([[2], [1]], [[(2, 100, 0.2)], [(8, 100, 0.2)]])
        assert set(pairs(groups)) == {"p0 d0"}

    def test_a_group_whose_prefills_are_all_overloaded_is_out(self) -> None:
        """However good its decode is."""
        groups = make_groups([[1, 1, 1], [8]], [[(8, 1, 0.9)], [(0, 1, 0.1)]])
        assert {pair.split()[1] for pair in pairs(groups, {"p3": 99})} == {"d0"}

    def test_equal_pairs_share_alike(self) -> None:
        """By chance, over groups and within them."""
        groups = make_groups([[0], [0]], [[(0, 0, 0)], [(0, 0, 0), (0, 0, 0)]])
        found = pairs(groups)
        assert set(found) == {"p0 d0", "p1 d1", "p1 d2"}
        assert found["p0 d0"] > len(SEEDS) / 3

    def test_full_matches_and_idle_decodes_divide_by_nothing(self) -> None:
        """Scores of zero have no greatest."""
        assert pairs(make_groups([[0]], [[(0, 5, 0)]]), {"p0": 100}) == {"p0 d0": len(SEEDS)}

    def test_groups_are_those_that_may_be_paired(self) -> None:
        """Prefill endpoints alike share their partners."""
        mine, others = busy_pool((0, 0), group="a"), busy_pool((0,), group="b")
        asked = []

        def partners(load: object) -> list:  # type: ignore[type-arg]
            asked.append(load)
            return []

        assert [len(g.prefills) for g in grouped([*mine, *others], partners)] == [2, 1]
        assert asked == [mine[0], others[0]]


class TestThroughTheRouter:
    """Generation 2 is a setting; both sides must have it to choose together."""

    def test_it_is_off_by_default(self) -> None:
        """And needs the policy on both sides."""
        assert isinstance(POLICIES["load_aware"](options()), LoadAware)
        assert isinstance(POLICIES["load_aware"](options(**GENERATION_2)), LoadAwarePairs)
        assert pair_policy({"load_aware"}, options()) is None
        assert pair_policy({"load_aware", "random"}, options(**GENERATION_2)) is None
        assert isinstance(pair_policy({"load_aware"}, options(**GENERATION_2)), LoadAwarePairs)

    def test_the_group_follows_both_sides(self) -> None:
        """A busy decode moves the pair to the other group; an endpoint without partner is no candidate."""
        prefills = [prefill(f"p:{number}", group=group) for number, group in enumerate("abc", 1)]
        router = make_router(
            [*prefills, decode("d:1", group="a"), decode("d:2", group="b")],
            make_options(policy="load_aware", ancestors=options(**GENERATION_2).ancestors),
        )
        for address, requests in (("d:1", 30), ("d:2", 2)):
            report = RankReport(0, tokens=1, requests=requests)
            router.observe(events.LoadReported(address, [report], 1.0), 1.0)
        decision = decide(router, facts(), 2.0)
        assert (prefill_of(decision).endpoint.address, decision.decode.endpoint.address) == ("p:2", "d:2")
        assert "decode imbalance" in decision.story()

    def test_an_explanation_of_many_names_the_chosen_one(self) -> None:
        """Though the numbers are of those alone that have a metric."""
        names = [f"d:{number}" for number in range(1, 100)]
        router = make_router(
            [prefill("p:1"), *map(decode, names)],
            make_options(policy="load_aware", ancestors=options(**GENERATION_2).ancestors),
        )
        for address in names[40:]:
            report = RankReport(0, tokens=1, requests=0 if address == "d:99" else 50)
            router.observe(events.LoadReported(address, [report], 1.0), 1.0)
        leg = decide(router, facts(), 2.0).decode
        assert leg.endpoint.address == "d:99"
        assert ("d:99", 0.0) in leg.endpoint_why.seen()

    def test_a_clients_rank_is_honoured(self) -> None:
        """Then each side is chosen alone, among those that have it."""
        router = make_router(
            [prefill("p:1"), prefill("p:2", dp_size=2), decode("d:1")],
            make_options(policy="load_aware", ancestors=options(**GENERATION_2).ancestors),
        )
        for _ in range(5):
            decision = decide(router, facts(prefill_rank=1), 1.0)
            assert prefill_of(decision).endpoint.address == "p:2"

    def test_answers_that_end_are_the_drain(self) -> None:
        """Once each, on the decode endpoint, and only those that began."""
        router = make_router([prefill("p:1"), decode("d:1")])
        for begins in (True, True, False):
            decision = decide(router, facts(), 1.0)
            if begins:
                router.observe(events.FirstTokenSeen(decision), 2.0)
            router.settle(decision, 3.0)
            router.settle(decision, 3.0)
        assert router.drains.rate_per_s("d:1", 4.0) == 2 / 60
        assert router.drains.rate_per_s("p:1", 4.0) == 0
        router.observe(events.EndpointLeft("d:1"), 5.0)
        assert router.drains.rate_per_s("d:1", 5.0) == 0
