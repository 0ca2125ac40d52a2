"""The books are right while requests wait and engines fail, too: a queue before the router, breakers that open.

What a breaker does with outcomes is judged in ``test_breakers.py``, who is next in ``test_waiting.py``; here, that
router, fleet and books agree with both. Of a breaker the oracle asks only whether a failure has opened it.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from pdrouter.core.admission import AdmissionOptions, Queued, Rejected
from pdrouter.core.breaker import Phase
from pdrouter.core.decision import Decision, Placement
from pdrouter.core.ejections import Name
from pdrouter.core.entrance import Entrance, EntranceOptions, MustWait
from pdrouter.core.fleet import Endpoint
from pdrouter.core.gate import GateOptions
from pdrouter.core.ledger import RankKey
from pdrouter.core.line import Place, Waiting
from pdrouter.core.policies import ENGINE
from pdrouter.core.request import RequestFacts
from pdrouter.errors import ClientGone, ConnectFailed, RouterError, UpstreamClosed

from .test_books import ADDRESSES, BREAKER, Books, Request

ACTS = ("ask", "ask", "ask", "later", "read", "write", "answer", "leave", "break the first", "break the last", "refuse")
MAX_WAITING, MAX_RUNNING, MAX_WAIT_S = 3, 5, 20.0


class Waiter(msgspec.Struct, frozen=True, eq=False):
    """What waits."""

    facts: RequestFacts
    failed: frozenset[RankKey]


class Fates(Books):
    """The same courses, with failures of engines and requests that wait for their turn."""

    entrance = EntranceOptions(
        AdmissionOptions(
            max_waiting=MAX_WAITING,
            max_waiting_bytes=10_000,
            max_wait_s=MAX_WAIT_S,
            aging_rate=0.1,
            rate_per_s=None,
            rate_burst=1.0,
        ),
        GateOptions(max_running=MAX_RUNNING, max_queue_s=0.02, max_kv_share=None),
    )

    def __init__(self) -> None:
        super().__init__()
        self.opened_s: dict[Name, float] = {}  # since when endpoints and ranks have been out, or tried since
        self.tried: set[Name] = set()  # those of them that are half-open
        self.probes: dict[Name, int] = {}  # the number of the decision that tries one
        self.phases: Counter[Name] = Counter()  # how many each has had
        self.blames: Counter[Name] = Counter()  # of its present phase
        self.placed_in: dict[int, dict[Name, int]] = {}  # the phases in which decisions were placed
        self.line: dict[Place[object], Waiter] = {}

    # Placing and waiting

    def _ask(self, facts: RequestFacts, failed: frozenset[RankKey], *, is_admitted: bool = False) -> Request | None:
        """With each question, those are let in who have been out for long enough."""
        for name, since_s in self.opened_s.items():
            if since_s + BREAKER.open_s <= self.now_s and name not in self.tried:
                self.tried.add(name)
                self._begin_phase(name)
        return super()._ask(facts, failed, is_admitted=is_admitted)

    def _begin_phase(self, name: Name) -> None:
        self.phases[name] += 1
        del self.blames[name]

    def _ready(self) -> list[Endpoint]:
        return [e for e in super()._ready() if not self._is_shut(e.address) and self._ranks(e)]

    def _ranks(self, endpoint: Endpoint) -> list[int]:
        """Return the ranks that aren't out."""
        return [rank for rank in super()._ranks(endpoint) if not self._is_shut(RankKey(endpoint.address, rank))]

    def _is_shut(self, name: Name) -> bool:
        return name in self.probes or (name in self.opened_s and name not in self.tried)

    def _rank_names(self, endpoint: Endpoint) -> list[Name]:
        """Return the ranks that have a breaker: where there are several, and the router chooses."""
        is_one = endpoint.dp_size == 1 or self.rank_policy == ENGINE
        return [] if is_one else [RankKey(endpoint.address, rank) for rank in range(endpoint.dp_size)]

    def _names(self, placement: Placement) -> list[Name]:
        """Return whom an outcome concerns, of those that are there."""
        endpoint = self.fleet.get(placement.endpoint.address)
        if endpoint is None:
            return []
        rank = RankKey(endpoint.address, -1 if placement.rank is None else placement.rank)
        return [endpoint.address, *(name for name in self._rank_names(endpoint) if name == rank)]

    def _judge(self, answer: object, facts: RequestFacts, failed: frozenset[RankKey]) -> Request | None:
        """One that must wait does so; nothing is reserved for it."""
        if isinstance(answer, MustWait):
            self._wait_for_turn(answer, facts, failed)
            return None
        assert not isinstance(answer, Decision) or len(self.live) < MAX_RUNNING  # I9
        request = super()._judge(answer, facts, failed)
        if request is not None:
            names = [name for placement in request.decision.placements for name in self._names(placement)]
            self.placed_in[request.decision.number] = {name: self.phases[name] for name in names}
            for name in self.tried.intersection(names):
                assert name not in self.probes, "two probes at once"
                self.probes[name] = request.decision.number
        return request

    def _wait_for_turn(self, told: MustWait, facts: RequestFacts, failed: frozenset[RankKey]) -> None:
        waiter = Waiter(facts, failed)
        one: Waiting[object] = Waiting(
            request=waiter,
            model=told.model,
            priority=0,
            tenant=None,
            weight=1.0,
            work_s=told.work_s,
            size_bytes=facts.prompt_bytes,
            deadline_s=float("inf"),
        )
        answer = self._entrance.admission.offer(one, self.now_s)
        assert isinstance(answer, Queued | Rejected), "the gate is shut for the router and open for its queue"
        if isinstance(answer, Queued):
            assert answer.shed is None
            self.line[answer.place] = waiter

    @property
    def _entrance(self) -> Entrance:
        assert self.router.entrance is not None
        return self.router.entrance

    @rule(acts=st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 400)), min_size=6, max_size=24))
    def live_on(self, acts: list[tuple[str, int]]) -> None:
        """Requests come, go on and end, some of them by an engine's fault."""
        for act, number in acts:
            if act == "ask":
                self._ask(RequestFacts(request_id="plain", prompt_tokens=1 + number, prompt_bytes=number), frozenset())
            elif act == "later":
                self.wait(number / 100)
            elif self.live:
                self._act(act, self.live[number % len(self.live)])
            self._release()
            self.each_rank_holds_its_live_legs()
            self.fleet_and_breakers_agree()
            self.queue_and_outcomes_are_bounded()

    def _act(self, act: str, request: Request) -> None:
        if act == "read":
            self.see_first_token(request)
        elif act == "write":
            self.generate(request, 5)
        elif act == "answer":
            self.settle(request)
        elif act == "leave":
            self._fail(request, None)
        else:
            placement = request.decision.placements[-1 if act == "break the last" else 0]
            self._fail(request, placement, is_refused=act == "refuse")

    def _release(self) -> None:
        """Whoever waits has its turn while there is room, and is placed then without another question."""
        while (one := self._entrance.admission.release(self.now_s)) is not None:
            waiter, waiting = one.request, len(self.line)
            assert isinstance(waiter, Waiter)
            self.line = {place: other for place, other in self.line.items() if other is not waiter}
            self._ask(waiter.facts, waiter.failed, is_admitted=True)
            assert len(self.line) == waiting - 1, "one that had its turn waits again"

    @rule(which=st.integers(0, MAX_WAITING))
    def give_up(self, which: int) -> None:
        """A client that waits leaves."""
        for place in list(self.line)[which : which + 1]:
            assert self._entrance.admission.cancel(place)
            del self.line[place]

    @rule()
    def tire(self) -> None:
        """Nobody waits for longer than the limit."""
        gone = {shed.waiting.request for shed in self._entrance.admission.expire(self.now_s)}
        late = {place for place in self.line if place.since_s + MAX_WAIT_S <= self.now_s}
        assert gone == {self.line.pop(place) for place in late}

    # How requests end

    def _answers(self, request: Request, placement: Placement) -> None:
        """A leg did well: if it was the probe, its endpoint is in again, or its rank."""
        for name in self._names(placement):
            if self.probes.get(name) == request.decision.number:
                self._close(name)

    def _close(self, name: Name) -> None:
        self.probes.pop(name, None)
        self.opened_s.pop(name, None)
        self.tried.discard(name)
        self._begin_phase(name)

    @rule(request=Books.requests)
    def see_first_token(self, request: Request) -> None:
        """The prompt was read: its leg did well."""
        if not request.is_settled and request.decision.first_token_at_s is None:
            self._answers(request, request.decision.placements[0])
        super().see_first_token(request)

    @rule(request=Books.requests, tokens=st.integers(0, 50))
    def generate(self, request: Request, tokens: int) -> None:
        """The answer grows: its leg does well."""
        if not request.is_settled:
            self._answers(request, request.decision.decode)
        super().generate(request, tokens)

    @rule(request=Books.requests)
    def settle(self, request: Request) -> None:
        """A request was answered, or had ended before."""
        if not request.is_settled:
            for placement in request.decision.placements:
                self._answers(request, placement)
        super().settle(request)

    @rule(request=Books.requests, leg=st.sampled_from([None, 0, -1]), is_refused=st.booleans())
    def fail(self, request: Request, leg: int | None, is_refused: bool) -> None:
        """A request fails by one of its engines, or by nobody's fault, though it may have ended before."""
        self._fail(request, None if leg is None else request.decision.placements[leg], is_refused=is_refused)

    def _fail(self, request: Request, at_fault: Placement | None, *, is_refused: bool = False) -> None:
        decision = request.decision
        error: RouterError = ClientGone("gone") if at_fault is None else UpstreamClosed("closed")
        if at_fault is not None and is_refused:
            error = ConnectFailed("refused")
        before = self._open()
        at_faults = [] if at_fault is None else [at_fault]
        assert self.router.settle(decision, self.now_s, error, at_faults) is not request.is_settled  # I2
        opened = self._open() - before
        if request.is_settled:
            assert not opened
            return
        self.live.remove(request)
        request.is_settled = True
        freed = {name for name, number in self.probes.items() if number == decision.number}
        for name in freed:
            del self.probes[name]
        blamed = [] if at_fault is None else self._names(at_fault)[: 1 if is_refused else None]
        assert opened <= set(blamed)
        for name in blamed:
            placed_in = self.placed_in[decision.number].get(name)
            if placed_in == self.phases[name]:
                self._blamed(name, is_opened=name in opened, was_probe=name in freed)
            else:
                assert name not in opened, "what was placed in another phase counts"

    def _blamed(self, name: Name, *, is_opened: bool, was_probe: bool) -> None:
        """Only whoever is to blame is taken out: after enough failures, or by that of a probe."""
        self.blames[name] += 1
        assert not was_probe or is_opened
        if is_opened:
            assert was_probe or (name not in self.opened_s and self.blames[name] >= BREAKER.failure_threshold)
            self.opened_s[name] = self.now_s
            self.tried.discard(name)
            self._begin_phase(name)

    def _open(self) -> set[Name]:
        phase = self.router.outcomes.breakers.phase
        return {name for name in self._watched() if phase(name) is Phase.OPEN}

    def _watched(self) -> Sequence[Name]:
        """Return all that have a breaker."""
        return [*self.fleet, *(name for endpoint in self.fleet.values() for name in self._rank_names(endpoint))]

    @rule(address=ADDRESSES)
    def leave(self, address: str) -> None:
        """An endpoint is gone, with what was known of its failures."""
        before = self._watched()
        super().leave(address)
        self._forget(before)

    def _put(self, endpoint: Endpoint) -> None:
        """One that is described with fewer ranks has no breakers for the others."""
        before = self._watched()
        super()._put(endpoint)
        self._forget(before)

    def _forget(self, before: Sequence[Name]) -> None:
        for name in set(before) - set(self._watched()):
            self._close(name)

    # What holds after every step

    @invariant()
    def fleet_and_breakers_agree(self) -> None:  # I6
        """Whoever is out is out for a reason that the oracle knows, and can't be found; whoever isn't can."""
        for address in self.fleet:
            endpoint = self.fleet[address]
            is_ready = endpoint in self._ready()
            assert self.router.fleet.is_ready(address) == is_ready
            ranks = self._ranks(endpoint)
            assert [rank.key.rank for rank in self.router.load.usable[address].ranks] == ranks
            for worker in self.router.work.sites[address].workers if address in self.router.work.sites else ():
                key = worker.load.key
                assert worker.is_ready == (is_ready and key.rank in ranks)
                assert (self.router.fleet.why_out(key) is None) == (key.rank in ranks)

    @invariant()
    def queue_and_outcomes_are_bounded(self) -> None:  # I9
        """As many run and wait as may; outcomes are kept of what lives, breakers of who is there."""
        if not hasattr(self, "router"):
            return
        admission, outcomes = self._entrance.admission, self.router.outcomes
        assert len(self.router.live) <= MAX_RUNNING
        assert len(admission) == len(self.line) <= MAX_WAITING
        assert admission.waiting_bytes == sum(waiter.facts.prompt_bytes for waiter in self.line.values())
        assert outcomes._attempts.keys() <= self.router.live.keys()
        assert outcomes.breakers._breakers.keys() == set(self._watched())
        assert len(outcomes.breakers._due) == len(self._open())

    def teardown(self) -> None:
        """Everything ends, nothing is left, and nobody is kept waiting for nothing."""
        super().teardown()
        if hasattr(self, "router"):
            assert not self.router.outcomes._attempts
            for place in list(self.line):
                assert self._entrance.admission.cancel(place)
            assert self._entrance.admission.waiting_bytes == 0


COMBINATIONS = [("least_work", "least_work"), ("least_work", "engine"), ("minimum_tokens", "minimum_tokens")]


@pytest.mark.invariant("I1")
@pytest.mark.invariant("I2")
@pytest.mark.invariant("I6")
@pytest.mark.invariant("I9")
@pytest.mark.parametrize(("policy", "rank_policy"), COMBINATIONS)
def test_the_books_are_right_while_engines_fail_and_requests_wait(policy: str, rank_policy: str) -> None:
    """Whatever fails, waits, leaves and comes back, in whatever order, and zero at the end."""
    machine = type("PolicyFates", (Fates,), {"policy": policy, "rank_policy": rank_policy})
    seed(COMBINATIONS.index((policy, rank_policy)))(machine)
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=50))
