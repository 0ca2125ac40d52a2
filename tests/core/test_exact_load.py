"""DESIGN "Load": with all traffic through this router and exact reports, effective load is the true load, always."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdrouter.core import events
from pdrouter.core.decision import Decision, Placement
from pdrouter.core.ledger import LegKind, Reservation
from pdrouter.core.load import RankReport
from pdrouter.core.policies import ENGINE

from .builders import decide, decode, facts, make_options, make_router, prefill

MAX_AGE_S = 8.0
RANKS = 2


class Leg:
    """A leg as the engine has it: what it holds since when; kept apart from the router's books."""

    def __init__(self, placement: Placement, load: int, held: int, seen_from_s: float, rank: int) -> None:
        self.address = placement.endpoint.address
        self.kind = placement.kind
        self.rank = rank
        self.load = load
        self.held = held
        self.seen_from_s = seen_from_s
        self.is_assigned = placement.rank is not None


class World:
    """A router and the engines that it feeds, which count exactly what they hold."""

    def __init__(self, visible_delay_s: float, history_events: int, rank_policy: str, seed: int) -> None:
        self.delay_s = visible_delay_s
        self.chance = random.Random(seed)
        self.router = make_router(
            [prefill("p", dp_size=RANKS), decode("d", dp_size=RANKS)],
            make_options(
                report_max_age_s=MAX_AGE_S,
                visible_delay_s=visible_delay_s,
                history_events=history_events,
                rank_policy=rank_policy,
                seed=seed,
            ),
        )
        self.now_s = 0.0
        self.live: list[tuple[Decision, list[Leg]]] = []
        self.under_way: list[events.LoadReported] = []

    def dispatch(self, tokens: int, prompt: int, rank: int | None) -> None:
        """Send a request; prompts of the same number share a prefix."""
        request = facts(tokens, prefix_blocks=(prompt, -prompt), block_tokens=20.0, prefill_rank=rank)
        decision = decide(self.router, request, self.now_s)
        legs = [self._leg(p, tokens, decision.prefix_tokens) for p in decision.placements]
        self.live.append((decision, legs))

    def _leg(self, placement: Placement, tokens: int, prefix_tokens: int) -> Leg:
        load = tokens - prefix_tokens if placement.kind is LegKind.PREFILL else tokens
        rank = self.chance.randrange(RANKS) if placement.rank is None else placement.rank
        return Leg(placement, load, tokens, self.now_s + self.delay_s, rank)

    def first_token(self, which: int) -> None:
        """The prefill of a request is done."""
        if self.live:
            decision, legs = self.live[which % len(self.live)]
            self.router.observe(events.FirstTokenSeen(decision), self.now_s)
            legs[:] = [leg for leg in legs if leg.kind is not LegKind.PREFILL]

    def grow(self, which: int, tokens: int) -> None:
        """A request's answer gets longer."""
        if self.live:
            decision, legs = self.live[which % len(self.live)]
            self.router.observe(events.TokensGenerated(decision, tokens), self.now_s)
            legs[-1].load += tokens
            legs[-1].held += tokens

    def settle(self, which: int) -> None:
        """A request ends."""
        if self.live:
            decision, _ = self.live.pop(which % len(self.live))
            assert self.router.settle(decision, self.now_s)

    def poll(self, address: str) -> None:
        """An engine counts what it holds; the report is under way."""
        seen = [
            leg for _, legs in self.live for leg in legs if leg.address == address and leg.seen_from_s <= self.now_s
        ]
        ranks = [
            RankReport(
                rank,
                tokens=sum(leg.held for leg in seen if leg.rank == rank),
                requests=sum(leg.rank == rank for leg in seen),
            )
            for rank in range(RANKS)
        ]
        self.under_way.append(events.LoadReported(address, ranks, self.now_s))

    def deliver(self, which: int) -> None:
        """A report comes in, in any order, late by any amount."""
        if self.under_way:
            self.router.observe(self.under_way.pop(which % len(self.under_way)), self.now_s)

    def check(self) -> None:
        """Compare what the router thinks with what is true."""
        self.router.load.expire(self.now_s)
        for address in ("p", "d"):
            load = self.router.load.endpoints[address]
            legs = [leg for _, legs in self.live for leg in legs if leg.address == address]
            for rank, rank_load in enumerate(load.ranks):
                assigned = [leg.load for leg in legs if leg.rank == rank and leg.is_assigned]
                assert rank_load.effective_tokens == sum(assigned)
                assert rank_load.effective_requests == len(assigned)
            assert load.comparable_tokens == sum(leg.load for leg in legs)
            assert load.comparable_requests == len(legs)
        self.router.validate()


WHICH = st.integers(0, 7)
STEPS = st.one_of(
    st.tuples(st.just("dispatch"), st.integers(1, 100), st.integers(1, 3), st.none() | st.integers(0, RANKS - 1)),
    st.tuples(st.just("first_token"), WHICH),
    st.tuples(st.just("grow"), WHICH, st.integers(1, 30)),
    st.tuples(st.just("settle"), WHICH),
    st.tuples(st.just("poll"), st.sampled_from(["p", "d"])),
    st.tuples(st.just("deliver"), WHICH),
    st.tuples(st.just("deliver"), WHICH),
)
COURSE = st.lists(st.tuples(st.integers(1, 1500), STEPS), min_size=1, max_size=60)

LATE: list[tuple[int, Sequence[object]]] = [
    (100, ("dispatch", 50, 1, 0)),
    (100, ("poll", "p")),
    (100, ("dispatch", 30, 2, 0)),
    (100, ("first_token", 0)),
    (100, ("deliver", 0)),
    (100, ("settle", 0)),
]


@pytest.mark.invariant("I11")
@pytest.mark.parametrize("rank_policy", ["minimum_tokens", ENGINE])
@given(
    course=COURSE,
    visible_delay_s=st.sampled_from([0.0, 0.25, 2.0]),
    history_events=st.sampled_from([16, 1000]),
    seed=st.integers(0, 3),
)
@example(course=LATE, visible_delay_s=0.0, history_events=1000, seed=0)
def test_effective_load_is_the_true_load(
    rank_policy: str,
    course: Sequence[tuple[int, Sequence[object]]],
    visible_delay_s: float,
    history_events: int,
    seed: int,
) -> None:
    """At every moment, on every rank, however rarely and late reports come, cached prefixes and all.

    Where the engine chooses ranks, the endpoint's sum is the true one, and its ranks hold nothing beyond our own.
    """
    world = World(visible_delay_s, history_events, rank_policy, seed)
    for wait_ms, (name, *arguments) in course:
        world.now_s += wait_ms / 1024
        getattr(world, str(name))(*arguments)
        world.check()
    while world.live:
        world.settle(0)
    world.check()
    assert all(rank.effective_tokens == 0 for load in world.router.load.endpoints.values() for rank in load.ranks)


@given(
    others=st.lists(st.integers(0, 500), min_size=RANKS, max_size=RANKS),
    ours=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 100), st.integers(0, RANKS - 1)), max_size=12),
    t_report_s=st.integers(0, 10),
)
@pytest.mark.invariant("I11")
def test_work_of_others_is_added_to_ours_exactly(
    others: list[int], ours: list[tuple[int, int, int]], t_report_s: int
) -> None:
    """Another router's work, told by a report that comes at t = 10, stands beside what we hold then."""
    router = make_router([prefill("p", dp_size=RANKS), decode("d")])
    live: list[Reservation] = []
    for at_s, tokens, rank in sorted(ours):
        decision = decide(router, facts(tokens, prefill_rank=rank), float(at_s))
        live.append(decision.placements[0].reservation)
    by_rank = [[leg for leg in live if leg.account.key.rank == rank] for rank in range(RANKS)]
    counted = [
        others[rank] + sum(leg.tokens for leg in by_rank[rank] if leg.reserved_at_s <= t_report_s)
        for rank in range(RANKS)
    ]
    reports = [RankReport(rank, tokens=number) for rank, number in enumerate(counted)]
    router.observe(events.LoadReported("p", reports, float(t_report_s)), 10.0)
    for rank, rank_load in enumerate(router.load.endpoints["p"].ranks):
        assert rank_load.effective_tokens == others[rank] + sum(leg.tokens for leg in by_rank[rank])


@pytest.mark.invariant("I11")
@given(
    reported=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 10**6)), max_size=10),
    ours=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 1000), st.integers(0, 20)), max_size=10),
)
def test_effective_load_is_never_negative_or_endless(
    reported: list[tuple[int, int]], ours: list[tuple[int, int, int]]
) -> None:
    """Whatever an engine claims, a rank's load stays between nothing and what was claimed and held together."""
    router = make_router([prefill("p"), decode("d")])
    rank = router.load.endpoints["p"].ranks[0]
    moments = sorted(
        [(at_s, 0, tokens, at_s + lasts_s) for at_s, tokens, lasts_s in ours] + [(t, 1, n, t) for t, n in reported]
    )
    ends: list[tuple[int, Decision]] = []
    for (now_s, is_report, number, end_s), _ in pairwise([*moments, (99, 0, 0, 99)]):
        for _, decision in [e for e in ends if e[0] <= now_s]:
            router.settle(decision, float(now_s))
        if is_report:
            router.observe(events.LoadReported("p", [RankReport(0, tokens=number)], float(now_s)), float(now_s))
        else:
            ends.append((end_s, decide(router, facts(number), float(now_s))))
        assert -1e-6 <= rank.effective_tokens <= 10**6 + 10_000
        router.validate()
