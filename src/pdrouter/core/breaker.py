"""Takes an engine that fails out of the fleet, and lets it back in by one request at a time.

    closed --failures in a row--> open --time--> half-open --successes--> closed
                                   ^------a failure------'

Only what an engine is to blame for is a failure: not its pair's, not a client's. An attempt counts in the state in
which it was placed: what was sent before the breaker opened tells nothing of how the engine does now.
The moment is an argument; who is ready is the fleet's, which is told by ``Readiness`` values.
"""

from collections import Counter, deque
from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar

import msgspec

from pdrouter.core.heap import ChangingHeap, Entry
from pdrouter.errors import InvariantViolation

K = TypeVar("K")

_NO_EPOCH = -1
"""The epoch of attempts whose outcome tells nothing."""


class Phase(StrEnum):
    """What a breaker lets through: everything, nothing, one request at a time."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


TRANSITIONS: Mapping[Phase, frozenset[Phase]] = {
    Phase.CLOSED: frozenset({Phase.OPEN}),
    Phase.OPEN: frozenset({Phase.HALF_OPEN}),
    Phase.HALF_OPEN: frozenset({Phase.CLOSED, Phase.OPEN}),
}


class BreakerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of all breakers; ``config.py`` says what they mean.

    ``failure_threshold`` failures in a row, all within ``window_s``, open one; after ``open_s`` it is half-open;
    ``success_threshold`` successes in a row close it then. One that ``is_disabled`` never opens.
    """

    failure_threshold: int
    success_threshold: int
    open_s: float
    window_s: float
    is_disabled: bool


class Readiness(msgspec.Struct, Generic[K], frozen=True):
    """From now on ``key`` takes requests (``out`` is ``None``), or doesn't, and why."""

    key: K
    out: str | None


class Attempt(msgspec.Struct, Generic[K], frozen=True, eq=False):
    """One request on one endpoint or rank, by which its outcome is told."""

    key: K
    epoch: int
    is_probe: bool


class _Breaker(Generic[K]):
    """One endpoint or rank; ``epoch`` names its present phase, ``probe`` is under way while it is half-open."""

    __slots__ = ("cause", "due", "epoch", "failed_at_s", "phase", "probe", "successes")

    def __init__(self, options: BreakerOptions, epoch: int) -> None:
        self.phase = Phase.CLOSED
        self.epoch = epoch
        self.successes = 0
        self.probe: Attempt[K] | None = None
        self.cause = ""
        self.due: Entry[K] | None = None
        self.failed_at_s: deque[float] = deque(maxlen=options.failure_threshold)  # I9

    def enter(self, phase: Phase, epoch: int) -> None:
        """Begin a phase."""
        if phase not in TRANSITIONS[self.phase]:
            raise InvariantViolation(f"a breaker that is {self.phase} can't become {phase}")
        self.phase = phase
        self.epoch = epoch
        self.successes = 0
        self.probe = None
        self.failed_at_s.clear()


class Breakers(Generic[K]):
    """The breakers of all endpoints, and of ranks that can fail alone; O(1) for each outcome, O(log n) to open.

    What returns a ``Readiness`` wants the fleet to be told at once, so that nothing is placed in between; ``due`` is
    asked at ``wake_at_s``. ``counts`` says how often they opened, closed and were probed. Unknown ones are let through.
    ``epoch`` is that of the phase begun last: those of later phases are greater. ``disturbed`` are those with failures
    since their last success, or not closed.
    """

    def __init__(self, options: BreakerOptions) -> None:
        self.counts: Counter[str] = Counter()
        self._options = options
        self._breakers: dict[K, _Breaker[K]] = {}
        self._due: ChangingHeap[K] = ChangingHeap()
        self.disturbed: set[K] = set()
        self.epoch = 0

    @property
    def is_calm(self) -> bool:
        """Whether all are closed and none has failed since its last success."""
        return not self.disturbed

    def attempt(self, key: K, epoch: int) -> Attempt[K]:
        """Return an attempt of which nothing was kept but ``epoch`` as it was when it was placed."""
        breaker = self._breakers.get(key)
        is_counted = breaker is not None and breaker.phase is Phase.CLOSED and breaker.epoch <= epoch
        return Attempt(key, breaker.epoch if breaker is not None and is_counted else _NO_EPOCH, is_probe=False)

    def add(self, key: K) -> None:
        """Watch an endpoint or rank from now on; one that is watched stays as it is."""
        if key not in self._breakers:
            self._breakers[key] = _Breaker(self._options, self._next_epoch())

    def remove(self, key: K) -> None:
        """Forget it; attempts that are under way there count no more."""
        breaker = self._breakers.pop(key, None)
        self.disturbed.discard(key)
        if breaker is not None and breaker.due is not None:
            self._due.drop(breaker.due)

    def phase(self, key: K) -> Phase:
        """Return what is let through."""
        breaker = self._breakers.get(key)
        return Phase.CLOSED if breaker is None else breaker.phase

    def placed(self, key: K) -> tuple[Attempt[K], Readiness[K] | None]:
        """A request was placed there; while half-open it is the probe, and no other may follow until it has ended."""
        breaker = self._breakers.get(key)
        if breaker is None:
            return Attempt(key, _NO_EPOCH, is_probe=False), None
        if breaker.phase is not Phase.HALF_OPEN or breaker.probe is not None:
            epoch = breaker.epoch if breaker.phase is Phase.CLOSED else _NO_EPOCH
            return Attempt(key, epoch, is_probe=False), None
        breaker.probe = Attempt(key, breaker.epoch, is_probe=True)
        self.counts["probes"] += 1
        return breaker.probe, Readiness(key, self._reason(breaker))

    def succeeded(self, attempt: Attempt[K]) -> Readiness[K] | None:
        """It was answered; may be told at the first byte already, so that a probe needn't wait for a long answer."""
        breaker = self._concerned(attempt)
        if breaker is None:
            return None
        breaker.failed_at_s.clear()
        if breaker.phase is Phase.CLOSED:
            self.disturbed.discard(attempt.key)
            return None
        breaker.probe = None
        breaker.successes += 1
        if breaker.successes >= self._options.success_threshold:
            breaker.enter(Phase.CLOSED, self._next_epoch())
            self.disturbed.discard(attempt.key)
            self.counts["closed"] += 1
        return Readiness(attempt.key, None)

    def failed(self, attempt: Attempt[K], cause: str, now_s: float) -> Readiness[K] | None:
        """It failed, and the engine is to blame; ``cause`` in a few words."""
        breaker = self._concerned(attempt)
        if breaker is None:
            return None
        breaker.cause = cause
        self.disturbed.add(attempt.key)
        times = breaker.failed_at_s
        times.append(now_s)
        is_in_window = now_s - times[0] <= self._options.window_s
        if breaker.phase is Phase.HALF_OPEN or (len(times) == times.maxlen and is_in_window):
            return self._open(attempt.key, breaker, now_s)
        return None

    def abandoned(self, attempt: Attempt[K]) -> Readiness[K] | None:
        """It ended without telling of the engine: the client left, the pair failed, the request was at fault."""
        breaker = self._concerned(attempt)
        if breaker is None or breaker.phase is Phase.CLOSED:
            return None
        breaker.probe = None
        return Readiness(attempt.key, None)

    def due(self, now_s: float) -> list[Readiness[K]]:
        """Make those half-open that have been open for long enough: each takes one request now."""
        changes: list[Readiness[K]] = []
        while len(self._due) and self._due.top().key <= now_s:
            key = self._due.top().item
            breaker = self._breakers[key]
            self._due.drop(self._due.top())
            breaker.due = None
            breaker.enter(Phase.HALF_OPEN, self._next_epoch())
            self.counts["half_opened"] += 1
            changes.append(Readiness(key, None))
        return changes

    def wake_at_s(self) -> float:
        """Return the moment at which the next is half-open; infinity if none is open."""
        return self._due.top().key if len(self._due) else float("inf")

    def why_out(self, key: K, now_s: float) -> str | None:
        """Return why it takes no request now, ``None`` if it does."""
        breaker = self._breakers.get(key)
        if breaker is None:
            return None
        reason = self._reason(breaker)
        if breaker.due is None:
            return reason
        return f"{reason}, next try in {max(0.0, breaker.due.key - now_s):.0f} s"

    def _open(self, key: K, breaker: _Breaker[K], now_s: float) -> Readiness[K]:
        """Take it out until ``open_s`` from now."""
        times = len(breaker.failed_at_s)
        was_probed = breaker.phase is Phase.HALF_OPEN
        breaker.enter(Phase.OPEN, self._next_epoch())
        what = "a probe failed" if was_probed else f"{times} failures in a row"
        breaker.cause = f"{what}: {breaker.cause}"
        breaker.due = self._due.put(now_s + self._options.open_s, key)
        self.counts["opened"] += 1
        return Readiness(key, self._reason(breaker))

    def _next_epoch(self) -> int:
        self.epoch += 1
        return self.epoch

    def _reason(self, breaker: _Breaker[K]) -> str | None:
        if breaker.phase is Phase.OPEN:
            return f"breaker open ({breaker.cause})"
        if breaker.probe is None:
            return None
        return f"breaker half-open (probe under way, {breaker.successes} of {self._options.success_threshold} answered)"

    def _concerned(self, attempt: Attempt[K]) -> _Breaker[K] | None:
        """Return the breaker for which an outcome counts: in the phase in which it was placed, a probe only once."""
        breaker = self._breakers.get(attempt.key)
        if breaker is None or breaker.epoch != attempt.epoch or self._options.is_disabled:
            return None
        return None if attempt.is_probe and breaker.probe is not attempt else breaker
