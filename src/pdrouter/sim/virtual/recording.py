"""A router's life as a list of calls, and that life lived again by another router (I4).

The three verbs are all that changes the core, and the moment is an argument: so the same calls, in the same order, on a
router with the same options and seed give the same decisions, whoever made the calls, live traffic or the simulator.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from pdrouter.core.admission import Admission, Admitted, Queued, Rejected, Shed
from pdrouter.core.decision import Decision, Placement, Rejection
from pdrouter.core.entrance import EntranceOptions, MustWait
from pdrouter.core.events import Event
from pdrouter.core.gate import Gate
from pdrouter.core.ledger import LegKind, RankKey
from pdrouter.core.line import Place, Waiting
from pdrouter.core.request import RequestFacts
from pdrouter.core.router import Router, RouterOptions
from pdrouter.errors import RouterError

Answer = Decision | Rejection | MustWait


class Decided(NamedTuple):
    """``decide`` was called; ``outcome`` puts the answer into words that can be compared."""

    at_s: float
    facts: RequestFacts
    avoid: frozenset[RankKey]
    is_admitted: bool
    number: int
    outcome: str


class Observed(NamedTuple):
    """``observe`` was called; ``number`` is that of the event's decision, 0 if it has none."""

    at_s: float
    event: Event
    number: int


class Settled(NamedTuple):
    """``settle`` was called; ``at_fault`` are the kinds of the legs to blame."""

    at_s: float
    number: int
    error: RouterError | None
    at_fault: tuple[LegKind, ...]


class Offered(NamedTuple):
    """A request was offered to the queue: its ``ticket`` stands for it."""

    at_s: float
    ticket: int
    waiting: Waiting[object]


class Cancelled(NamedTuple):
    """A request left the queue by itself."""

    at_s: float
    ticket: int


class Looked(NamedTuple):
    """The queue was asked who has waited too long, or, with ``is_release``, who goes on: tickets, in order."""

    at_s: float
    is_release: bool
    tickets: tuple[object, ...]


Call = Decided | Observed | Settled | Offered | Cancelled | Looked


class _RecordedQueue(Admission[object]):
    """A queue that tells of each call."""

    def __init__(self, options: EntranceOptions, router: "RecordedRouter") -> None:
        super().__init__(options.admission, Gate(options.gate, router.work, router.live))
        self._router = router
        self._tickets: dict[Waiting[object], int] = {}
        self._last_ticket = 0

    def offer(self, waiting: Waiting[object], now_s: float) -> Admitted | Queued[object] | Rejected:
        self._last_ticket += 1
        self._tickets[waiting] = self._last_ticket
        self._router.note(Offered(now_s, self._last_ticket, waiting))
        return super().offer(waiting, now_s)

    def cancel(self, place: Place[object]) -> bool:
        self._router.note(Cancelled(self._router.noted_at_s, self._tickets[place.waiting]))
        return super().cancel(place)

    def expire(self, now_s: float) -> list[Shed[object]]:
        shed = super().expire(now_s)
        tickets = tuple(self._tickets.pop(one.waiting) for one in shed)
        self._router.note(Looked(now_s, is_release=False, tickets=tickets))
        return shed

    def release(self, now_s: float) -> Waiting[object] | None:
        waiting = super().release(now_s)
        tickets = () if waiting is None else (self._tickets.pop(waiting),)
        self._router.note(Looked(now_s, is_release=True, tickets=tickets))
        return waiting


class RecordedRouter(Router):
    """A router that remembers its first ``limit`` calls (I9); ``missed`` counts those that came later."""

    def __init__(self, options: RouterOptions, limit: int) -> None:
        super().__init__(options)
        self.calls: list[Call] = []
        self.missed = 0
        self.noted_at_s = 0.0
        self._most_calls = limit
        if self.entrance is not None and options.entrance is not None:
            self.entrance.admission = _RecordedQueue(options.entrance, self)

    def decide(
        self, facts: RequestFacts, now_s: float, avoid: frozenset[RankKey] = frozenset(), *, is_admitted: bool = False
    ) -> Answer:
        """Place a request as any router does."""
        answer = super().decide(facts, now_s, avoid, is_admitted=is_admitted)
        number = answer.number if isinstance(answer, Decision) else 0
        self.note(Decided(now_s, facts, avoid, is_admitted, number, outcome_of(answer)))
        return answer

    def observe(self, event: Event, now_s: float) -> None:
        """Take in what happened."""
        decision = getattr(event, "decision", None)
        self.note(Observed(now_s, event, decision.number if decision is not None else 0))
        super().observe(event, now_s)

    def settle(
        self, decision: Decision, now_s: float, error: RouterError | None = None, at_fault: Sequence[Placement] = ()
    ) -> bool:
        """Return the load of a decision."""
        self.note(Settled(now_s, decision.number, error, tuple(place.kind for place in at_fault)))
        return super().settle(decision, now_s, error, at_fault)

    def note(self, call: Call) -> None:
        """Remember a call."""
        self.noted_at_s = call.at_s
        if len(self.calls) < self._most_calls:  # I9
            self.calls.append(call)
        else:
            self.missed += 1


def outcome_of(answer: Answer) -> str:
    """Return a decision's endpoints, ranks and predicted prefix, or a rejection's code."""
    if isinstance(answer, MustWait):
        return "waits"
    if isinstance(answer, Rejection):
        return answer.error.code
    places = [f"{place.kind} {place.endpoint.address} {place.rank}" for place in answer.placements]
    return f"{', '.join(places)}, {answer.prefix_tokens} cached"


def replay(calls: Sequence[Call], router: Router) -> Iterator[tuple[str, str]]:
    """Make the calls on another router.

    Returns the outcome of each decision, and of each look into the queue, as it was and as it is now.
    """
    decisions: dict[int, Decision] = {}
    queue = _Queue(router)
    for call in calls:
        match call:
            case Decided():
                answer = router.decide(call.facts, call.at_s, call.avoid, is_admitted=call.is_admitted)
                if isinstance(answer, Decision):
                    decisions[call.number] = answer
                yield call.outcome, outcome_of(answer)
            case Observed():
                event = call.event
                if call.number:
                    event = msgspec.structs.replace(event, decision=decisions[call.number])
                router.observe(event, call.at_s)
            case Settled():
                decision = decisions[call.number]
                at_fault = [place for place in decision.placements if place.kind in call.at_fault]
                router.settle(decision, call.at_s, call.error, at_fault)
            case Looked():
                yield str(call.tickets), str(queue.look(call))
            case _:
                queue.enter_or_leave(call)


class _Queue:
    """The queue of a router that lives again: requests are their tickets."""

    def __init__(self, router: Router) -> None:
        self._admission = None if router.entrance is None else router.entrance.admission
        self._places: dict[int, Place[object]] = {}

    def enter_or_leave(self, call: Offered | Cancelled) -> None:
        """Offer or cancel a request."""
        if self._admission is None:
            return
        if isinstance(call, Offered):
            waiting = msgspec.structs.replace(call.waiting, request=call.ticket)
            answer = self._admission.offer(waiting, call.at_s)
            if isinstance(answer, Queued):
                self._places[call.ticket] = answer.place
        elif call.ticket in self._places:
            self._admission.cancel(self._places[call.ticket])

    def look(self, call: Looked) -> tuple[object, ...]:
        """Return who is turned away, or goes on."""
        if self._admission is None:
            return ()
        if not call.is_release:
            return tuple(shed.waiting.request for shed in self._admission.expire(call.at_s))
        waiting = self._admission.release(call.at_s)
        return () if waiting is None else (waiting.request,)
