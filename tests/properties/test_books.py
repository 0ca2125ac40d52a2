"""The books are right whatever happens: decide, observe and settle in any order, judged by an oracle of the test's own.

The oracle keeps its own list of live legs and its own view of the fleet; it never asks the router what it holds.
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from pdrouter.config import Settings
from pdrouter.core import events
from pdrouter.core.breaker import BreakerOptions
from pdrouter.core.cost import NEUTRAL
from pdrouter.core.decision import Decision, Placement, Rejection
from pdrouter.core.ejections import EjectionOptions
from pdrouter.core.entrance import EntranceOptions
from pdrouter.core.fleet import Disaggregation, Endpoint, Role
from pdrouter.core.ledger import UNASSIGNED, LegKind, RankKey
from pdrouter.core.load import EndpointLoad, RankReport
from pdrouter.core.policies import ENGINE, POLICIES, RANK_POLICIES
from pdrouter.core.request import RequestFacts
from pdrouter.core.router import Router, RouterOptions
from pdrouter.errors import InvalidRank, ModelNotFound, NoReadyPair
from pdrouter.options import ancestors

MAX_AGE_S = 10.0
PREFIX_BYTES = 10_000
HISTORY_EVENTS = 24
ANCESTORS = msgspec.structs.replace(
    ancestors(Settings()), balance_abs_threshold=2, max_idle_s=5.0, bucket_adjust_interval_s=1.0
)

ADDRESSES = st.sampled_from([f"{role}{number}" for role in ("prefill", "decode", "regular") for number in range(3)])
GROUPS = st.sampled_from(["a", "b"])
MODELS = st.sampled_from([None, "m", "m", "n"])
DP_SIZES = st.integers(1, 3)
NUMBERS = st.one_of(st.integers(0, 2000), st.sampled_from([-1.0, math.nan, math.inf, -math.inf, 1e300, 0.5]))
WRONG_RANKS = st.sampled_from([-1, 0, 1, 2, 3, 7])
DELAYS_S = st.sampled_from([0.0, 0.5])
BREAKER = BreakerOptions(failure_threshold=2, success_threshold=1, open_s=3.0, window_s=10.0, is_disabled=False)
FAILED = st.frozensets(st.builds(RankKey, ADDRESSES, st.sampled_from([UNASSIGNED, 0, 0, 1])), max_size=3)


class Leg:
    """A leg as the oracle has it."""

    def __init__(self, placement: Placement, tokens: int, held: int, decided_at_s: float) -> None:
        self.address = placement.endpoint.address
        self.rank = placement.rank
        self.kind = placement.kind
        self.tokens = tokens  # what the policy weighs
        self.held = held  # what the engine counts: cached tokens, too
        self.decided_at_s = decided_at_s
        self.is_there = True  # False once its rank or endpoint is gone: then nobody may be charged for it


class Request:
    """A placed request as the oracle has it."""

    def __init__(self, decision: Decision, legs: list[Leg]) -> None:
        self.decision = decision
        self.legs = legs
        self.is_settled = False


class Books(RuleBasedStateMachine):
    """Random courses over one fleet; ``policy`` and ``rank_policy`` are set by the subclasses below."""

    policy = "minimum_tokens"
    rank_policy = "minimum_tokens"
    ancestors = ANCESTORS
    entrance: EntranceOptions | None = None
    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.live: list[Request] = []
        self.fleet: dict[str, Endpoint] = {}
        self.out: dict[str, str] = {}
        self.epochs: Counter[str] = Counter()  # how often an endpoint's ranks changed, its reports being of no use
        self.under_way: list[tuple[events.LoadReported, int, int]] = []

    @initialize(delay_s=DELAYS_S, chance=st.integers(0, 9), address=ADDRESSES, group=GROUPS)
    def start(self, delay_s: float, chance: int, address: str, group: str) -> None:
        """A router with a pair in each group, so that most requests can be placed."""
        self.delay_s = delay_s
        self.router = Router(
            RouterOptions(
                policy=self.policy,
                prefill_policy=self.policy,
                decode_policy=self.policy,
                rank_policy=self.rank_policy,
                disaggregation=Disaggregation.AUTO,
                accept_any_model=True,
                breaker=BREAKER,
                ejections=EjectionOptions(most=1.0, panic=0.0),
                entrance=self.entrance,
                report_max_age_s=MAX_AGE_S,
                visible_delay_s=delay_s,
                history_events=HISTORY_EVENTS,
                bytes_per_token=4.0,
                max_models=2,
                prefix_bytes=PREFIX_BYTES,
                prefix_block_tokens=10.0,
                output_tokens=50.0,
                profile=NEUTRAL,
                profiles={},
                chance=random.Random(chance),
                load_aware_spread_requests=2,
                load_aware_sigma=1.0,
                ancestors=self.ancestors,
                journal_decisions=8,
            )
        )
        for number, its_group in enumerate(("a", "b")):
            for role in ("prefill", "decode"):
                self.join(f"{role}{number}", its_group, 2, None, None)
        self.join(address, group, 3, None, None)

    # The fleet

    @rule(address=ADDRESSES, group=GROUPS, dp_size=DP_SIZES, model=MODELS, out=st.sampled_from([None, None, "new"]))
    def join(self, address: str, group: str, dp_size: int, model: str | None, out: str | None) -> None:
        """An endpoint is discovered, perhaps again."""
        endpoint = Endpoint(
            address=address, host=address, port=80, role=Role(address[:-1]), group=group, dp_size=dp_size, model=model
        )
        if address not in self.fleet and out is not None:
            self.out[address] = out
        self._put(endpoint)
        self.router.observe(events.EndpointJoined(endpoint, out), self.now_s)

    @rule(address=ADDRESSES, group=GROUPS, dp_size=DP_SIZES, model=MODELS)
    def describe(self, address: str, group: str, dp_size: int, model: str | None) -> None:
        """An endpoint tells of itself, perhaps after it has left."""
        known = self.fleet.get(address)
        endpoint = Endpoint(
            address=address, host=address, port=80, role=Role(address[:-1]), group=group, dp_size=dp_size, model=model
        )
        if known is not None:
            self._put(endpoint)
        self.router.observe(events.EndpointDescribed(endpoint), self.now_s)

    def _put(self, endpoint: Endpoint) -> None:
        known = self.fleet.get(endpoint.address)
        if known is None or known.dp_size != endpoint.dp_size:
            self.epochs[endpoint.address] += 1
        self.fleet[endpoint.address] = endpoint
        for leg in self._legs():
            if leg.address == endpoint.address and leg.rank is not None and leg.rank >= endpoint.dp_size:
                leg.is_there = False

    @rule(address=ADDRESSES, out=st.sampled_from([None, None, "unhealthy", "draining"]))
    def change_readiness(self, address: str, out: str | None) -> None:
        """An endpoint goes out or comes back."""
        if address in self.fleet:
            self.out.pop(address, None)
            if out is not None:
                self.out[address] = out
        self.router.observe(events.ReadinessChanged(address, out), self.now_s)

    @rule(address=ADDRESSES)
    def leave(self, address: str) -> None:
        """An endpoint is gone, with requests on it or without."""
        self.fleet.pop(address, None)
        self.epochs[address] += 1
        self.out.pop(address, None)
        for leg in self._legs():
            if leg.address == address:
                leg.is_there = False
        self.router.observe(events.EndpointLeft(address), self.now_s)

    # Requests

    @rule(
        target=requests,
        tokens=st.integers(1, 500),
        blocks=st.integers(0, 3),
        prompt=st.integers(0, 2),
        model=st.sampled_from([None, None, None, "m", "n", "unknown"]),
        prefill_rank=st.sampled_from([*[None] * 9, 0, 2, 9]),
        decode_rank=st.sampled_from([*[None] * 9, 1, -1]),
        key=st.sampled_from([None, 1, 2**64 - 1]),
        failed=FAILED,
        copies=st.integers(1, 4),
    )
    def decide(
        self,
        tokens: int,
        blocks: int,
        prompt: int,
        model: str | None,
        prefill_rank: int | None,
        decode_rank: int | None,
        key: int | None,
        failed: frozenset[RankKey],
        copies: int,
    ) -> object:
        """A request is placed on a ready, compatible pair, not where it failed before, or it is said why not."""
        facts = RequestFacts(
            request_id="same for all",
            prompt_tokens=tokens,
            model=model,
            prompt_bytes=tokens * 3,
            prefix_blocks=tuple(prompt * 10 + depth for depth in range(blocks)),
            block_tokens=tokens / 4,
            prefill_rank=prefill_rank,
            decode_rank=decode_rank,
            routing_key=key,
            client_key=key,
        )
        placed = [self._ask(facts, failed) for _ in range(copies)]
        return multiple(*(request for request in placed if request is not None))

    def _ask(self, facts: RequestFacts, failed: frozenset[RankKey], *, is_admitted: bool = False) -> Request | None:
        return self._judge(self.router.decide(facts, self.now_s, failed, is_admitted=is_admitted), facts, failed)

    def _ready(self) -> list[Endpoint]:
        return [e for e in self.fleet.values() if e.address not in self.out]

    def _ranks(self, endpoint: Endpoint) -> list[int]:
        return list(range(endpoint.dp_size))

    def _is_failed(self, endpoint: Endpoint, rank: int | None, failed: frozenset[RankKey]) -> bool:
        """Whether it failed on a rank, or without one, wherever on the endpoint it may run."""
        if RankKey(endpoint.address, UNASSIGNED) in failed:
            return True
        ranks = self._ranks(endpoint) if rank is None else [rank]
        return all(RankKey(endpoint.address, r) in failed for r in ranks)

    def _judge(self, answer: object, facts: RequestFacts, failed: frozenset[RankKey]) -> Request | None:
        ready = self._ready()
        if isinstance(answer, Rejection):
            self._judge_rejection(answer, ready, facts)
            return None
        assert isinstance(answer, Decision)
        self._judge_pair(answer, ready)
        if (facts.prefill_rank, facts.decode_rank) == (None, None):
            self._judge_repetition(answer, ready, failed)
        request = Request(answer, [self._leg(p, facts, answer.prefix_tokens) for p in answer.placements])
        self.live.append(request)
        return request

    def _leg(self, placement: Placement, facts: RequestFacts, prefix_tokens: int) -> Leg:
        assert 0 <= prefix_tokens < facts.prompt_tokens
        tokens = facts.prompt_tokens - (prefix_tokens if placement.kind is LegKind.PREFILL else 0)
        return Leg(placement, tokens, facts.prompt_tokens, self.now_s)

    def _judge_pair(self, decision: Decision, ready: list[Endpoint]) -> None:  # I6
        for placement in decision.placements:
            known = self.fleet[placement.endpoint.address]
            assert placement.endpoint == known
            assert known in ready
            assert placement.rank is None or placement.rank in self._ranks(known)
            assert self.rank_policy == ENGINE or placement.rank is not None
            asked = decision.facts.model
            assert len(self._models()) <= 1 or asked is None or known.model in {None, asked}
        if decision.prefill is None:
            assert decision.decode.endpoint.role is Role.REGULAR
            return
        left, right = decision.prefill.endpoint, decision.decode.endpoint
        assert (left.role, right.role) == (Role.PREFILL, Role.DECODE)
        assert left.group == right.group
        assert None in {left.model, right.model} or left.model == right.model

    def _judge_repetition(self, decision: Decision, ready: list[Endpoint], failed: frozenset[RankKey]) -> None:  # I8
        repeated = sum(self._is_failed(p.endpoint, p.rank, failed) for p in decision.placements)
        asked = decision.facts.model if len(self._models()) > 1 else None
        ready = [e for e in ready if asked in {None, e.model}]
        regular = [self._is_failed(e, None, failed) for e in ready if e.role is Role.REGULAR]
        pairs = [
            self._is_failed(p, None, failed) + self._is_failed(d, None, failed)
            for p, d in itertools.product(ready, ready)
            if (p.role, d.role) == (Role.PREFILL, Role.DECODE) and (p.group, p.model) == (d.group, d.model)
        ]
        assert not repeated or all([*pairs, *regular])
        assert repeated <= min(regular if decision.prefill is None else pairs, default=2)

    def _judge_rejection(self, rejection: Rejection, ready: list[Endpoint], facts: RequestFacts) -> None:
        error = rejection.error
        assert isinstance(error, NoReadyPair | InvalidRank | ModelNotFound), error
        if isinstance(error, ModelNotFound):
            assert facts.model not in self._models()
        if isinstance(error, InvalidRank):
            assert (facts.prefill_rank, facts.decode_rank) != (None, None)
        if isinstance(error, NoReadyPair) and error.message.startswith("rank "):
            pinned = {facts.prefill_rank, facts.decode_rank}
            assert any(pinned & (set(range(e.dp_size)) - set(self._ranks(e))) for e in ready), error
        elif isinstance(error, NoReadyPair) and facts.model is None:
            assert not any(e.role is Role.REGULAR for e in ready)
            assert not any(
                p.group == d.group and (None in {p.model, d.model} or p.model == d.model)
                for p, d in itertools.product(ready, ready)
                if (p.role, d.role) == (Role.PREFILL, Role.DECODE)
            )

    def _models(self) -> set[str]:
        return {e.model for e in self.fleet.values() if e.model is not None}

    @rule(request=requests)
    def see_first_token(self, request: Request) -> None:
        """The prefill leg ends, once; after the request ended it is no news."""
        self.router.observe(events.FirstTokenSeen(request.decision), self.now_s)
        request.legs = [leg for leg in request.legs if leg.kind is not LegKind.PREFILL]

    @rule(request=requests, tokens=st.integers(0, 50))
    def generate(self, request: Request, tokens: int) -> None:
        """The answer grows, and after its end no more."""
        self.router.observe(events.TokensGenerated(request.decision, tokens), self.now_s)
        if not request.is_settled:
            request.legs[-1].tokens += tokens
            request.legs[-1].held += tokens

    @rule(request=requests, tokens=st.integers(0, 900))
    def see_usage(self, request: Request, tokens: int) -> None:
        """Usage teaches and moves no load."""
        self.router.observe(events.UsageSeen(request.decision, tokens, tokens, 3), self.now_s)

    @rule(request=requests)
    def settle(self, request: Request) -> None:
        """A request ends, the first time for good, again to no effect."""
        assert self.router.settle(request.decision, self.now_s) is not request.is_settled  # I2
        if not request.is_settled:
            self.live.remove(request)
        request.is_settled = True

    # Time and reports

    @rule(wait_s=st.sampled_from([0.01, 0.3, 1.0, 6.0, 30.0]))
    def wait(self, wait_s: float) -> None:
        """Time passes; the next look at the load drops what is stale."""
        self.now_s += wait_s
        self.router.load.expire(self.now_s)

    @rule(
        address=ADDRESSES,
        numbers=st.lists(st.tuples(WRONG_RANKS, st.none() | NUMBERS, st.none() | NUMBERS), max_size=4),
        late_s=st.sampled_from([0.0, 0.2, 1.0, 5.0, 11.0, -3.0, math.nan]),
    )
    def report_anything(
        self, address: str, numbers: list[tuple[int, float | None, float | None]], late_s: float
    ) -> None:
        """A report with any ranks and numbers, late, too late or from the future."""
        ranks = [RankReport(rank, tokens, requests) for rank, tokens, requests in numbers]
        self.router.observe(events.LoadReported(address, ranks, self.now_s - late_s), self.now_s)

    @rule(address=ADDRESSES, others=st.integers(0, 300))
    def take_report(self, address: str, others: int) -> None:
        """An engine counts what it can have seen of our legs, and as much of others on each rank."""
        self.now_s += 0.01
        legs = [leg for leg in self._legs() if leg.is_there and leg.address == address]
        if address not in self.fleet or any(leg.rank is None for leg in legs):
            return
        seen = [leg for leg in legs if leg.decided_at_s + self.delay_s <= self.now_s]
        held = [sum(leg.held for leg in seen if leg.rank == rank) for rank in range(self.fleet[address].dp_size)]
        ranks = [RankReport(rank, tokens=tokens + others) for rank, tokens in enumerate(held)]
        report = events.LoadReported(address, ranks, self.now_s)
        self.under_way.append((report, others, self.epochs[address]))
        self.now_s += 0.01

    @rule(which=st.integers(0, 9))
    def deliver_report(self, which: int) -> None:
        """However late it comes, it is believed to the token: our work as it is now, and the others'."""
        if not self.under_way:
            return
        report, others, epoch = self.under_way.pop(which % len(self.under_way))
        self.router.observe(report, self.now_s)
        load = self.router.load.endpoints.get(report.address)
        if load is None or epoch != self.epochs[report.address]:
            return
        for told, rank_load in zip(report.ranks, load.ranks, strict=True):
            if rank_load.report is told:  # I11
                assert rank_load.effective_tokens == self._tokens(load, told.rank) + others

    @rule(address=ADDRESSES, reason=st.sampled_from(["timeout", "http_500"]))
    def miss_report(self, address: str, reason: str) -> None:
        """A failed poll changes no load."""
        before = self._loads()
        self.router.observe(events.LoadMissing(address, reason), self.now_s)
        assert self._loads() == before

    def _loads(self) -> list[float]:
        return [rank.effective_tokens for load in self.router.load.endpoints.values() for rank in load.ranks]

    # What holds after every step

    def _legs(self) -> Iterator[Leg]:
        return itertools.chain.from_iterable(request.legs for request in self.live)

    def _tokens(self, load: EndpointLoad, rank: int | None) -> int:
        return sum(leg.tokens for leg in self._legs_on(load, rank))

    def _legs_on(self, load: EndpointLoad, rank: int | None) -> list[Leg]:
        return [leg for leg in self._legs() if leg.is_there and leg.address == load.key and leg.rank == rank]

    @invariant()
    def each_rank_holds_its_live_legs(self) -> None:  # I1
        """By the oracle's own sums, and by the router's own check."""
        for address, load in self.router.load.endpoints.items():
            assert len(load.ranks) == self.fleet[address].dp_size
            accounts = [(None, load.unassigned), *((r, rank.account) for r, rank in enumerate(load.ranks))]
            for rank, account in accounts:
                assert account.tokens == self._tokens(load, rank)
                assert account.requests == len(self._legs_on(load, rank))
        self.router.validate()

    @invariant()
    def what_is_live_is_live(self) -> None:  # I2
        """Neither more nor less, each once."""
        assert {d.number for d in self.router.live.values()} == {r.decision.number for r in self.live}

    @invariant()
    def loads_can_be_compared(self) -> None:  # I11
        """Finite, not negative, the ledger alone where nothing fresh was told, and no report older than its limit."""
        for load in self.router.load.endpoints.values():
            for rank in load.ranks:
                for number in (rank.comparable_tokens, rank.comparable_requests):
                    assert math.isfinite(number)
                    assert number >= -1e-6
                age_s = rank.age_s(self.now_s)
                assert age_s is None or 0 <= age_s <= MAX_AGE_S + 0.02
                if age_s is None:
                    assert (rank.effective_tokens, rank.effective_requests) == (
                        rank.account.tokens,
                        rank.account.requests,
                    )

    @invariant()
    def memory_is_bounded(self) -> None:  # I9
        """The past of a rank and the prefixes of all stay within their limits."""
        assert self.router.prefixes.used_bytes <= PREFIX_BYTES
        for load in self.router.load.endpoints.values():
            for account in (load.unassigned, *(rank.account for rank in load.ranks)):
                assert len(account._history) <= HISTORY_EVENTS

    def teardown(self) -> None:
        """Everything ends, and nothing is left."""
        if not hasattr(self, "router"):
            return
        for request in list(self.live):
            self.settle(request)
        self.wait(2 * MAX_AGE_S)
        assert not self.router.live
        self.each_rank_holds_its_live_legs()
        for load in self.router.load.endpoints.values():
            assert (load.comparable_tokens, load.comparable_requests) == (0, 0)
            assert not load.unassigned.live


COMBINATIONS = list(itertools.product(POLICIES, [*RANK_POLICIES, ENGINE]))


@pytest.mark.invariant("I1")
@pytest.mark.invariant("I2")
@pytest.mark.invariant("I6")
@pytest.mark.invariant("I8")
@pytest.mark.invariant("I9")
@pytest.mark.invariant("I11")
@pytest.mark.parametrize(("policy", "rank_policy"), COMBINATIONS)
def test_the_books_are_right_after_every_step(policy: str, rank_policy: str) -> None:
    """Under every policy and rank policy, whatever happens in whatever order, and zero at the end."""
    machine = type("PolicyBooks", (Books,), {"policy": policy, "rank_policy": rank_policy})
    seed(COMBINATIONS.index((policy, rank_policy)))(machine)
    examples = max(1, settings().max_examples // 2)
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=40, max_examples=examples))


VARIANTS = [
    ("load_aware", {"load_aware_generation": 2}),
    ("minimum_tokens", {"minimum_tokens_published": True}),
    ("manual", {"assignment_mode": "min_load"}),
    ("manual", {"assignment_mode": "min_group"}),
]


@pytest.mark.invariant("I1")
@pytest.mark.invariant("I2")
@pytest.mark.invariant("I6")
@pytest.mark.parametrize(("policy", "changes"), VARIANTS)
def test_the_books_are_right_under_variants_too(policy: str, changes: dict[str, object]) -> None:
    """Generations and modes of a policy keep the same books."""
    changed = msgspec.structs.replace(ANCESTORS, **changes)
    machine = type("VariantBooks", (Books,), {"policy": policy, "ancestors": changed})
    seed(VARIANTS.index((policy, changes)))(machine)
    examples = max(1, settings().max_examples // 2)
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=40, max_examples=examples))
