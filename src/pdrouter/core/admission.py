"""Who goes on to a decision at once, who waits in the router, and who is turned away.

While every rank that may serve a request is beyond its watermark (``gate.py``) requests wait here and not in the
engines, so that a late, short or urgent one can overtake (``line.py``). Waiting is bounded in number, bytes and time.

When no more may wait one has to go, the arrival or another for it (``crowd.py``).
"""

from collections import Counter
from collections.abc import Mapping
from math import ceil
from typing import Generic, Protocol, TypeVar

import msgspec

from pdrouter.core.allowance import Allowance
from pdrouter.core.crowd import Crowd
from pdrouter.core.heap import ChangingHeap, Entry
from pdrouter.core.line import Line, Place, Waiting
from pdrouter.errors import QueueFull, RouterError, WaitedTooLong

T = TypeVar("T")

_INFINITY = float("inf")

_KEPT = 0.9
"""What is kept of the mean time between two releases with each of them: it runs over about ten. Chosen."""


class AdmissionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the waiting; ``config.py`` says what they mean.

    ``rate_per_s`` is requests that go on each second, ``rate_burst`` how many at once; ``None``: any number.
    ``aging_rate`` is seconds of work that a second of waiting outweighs.
    """

    max_waiting: int
    max_waiting_bytes: int
    max_wait_s: float
    aging_rate: float
    rate_per_s: float | None
    rate_burst: float


class Opening(Protocol):
    """What admission needs of a gate."""

    def opens_at_s(self, model: str | None) -> float:
        """Return the moment from which it is open by time alone."""
        ...


class Shed(msgspec.Struct, Generic[T], frozen=True):
    """A request that was turned away while it waited, and why."""

    waiting: Waiting[T]
    error: RouterError


class Admitted(msgspec.Struct, frozen=True):
    """It goes on: decide now."""


class Queued(msgspec.Struct, Generic[T], frozen=True):
    """It waits; ``place`` is the handle to cancel it by, ``shed`` who had to go for it."""

    place: Place[T]
    shed: Shed[T] | None


class Rejected(msgspec.Struct, frozen=True):
    """It can't even wait."""

    error: RouterError


ADMITTED = Admitted()


class Admission(Generic[T]):
    """The requests that wait, of all models.

    Whoever owns it calls, whenever load was returned or told (settle, observe) and at ``wake_at_s``, first ``expire``,
    then ``release`` and ``decide`` in turn until nothing is released: each decision may shut the gate.
    ``counts`` says how often what happened.
    """

    def __init__(self, options: AdmissionOptions, gate: Opening) -> None:
        self.counts: Counter[str] = Counter()
        self.waiting_bytes = 0
        self._options = options
        self._gate = gate
        self._lines: dict[str | None, Line[T]] = {}
        self._crowd: Crowd[T] = Crowd()
        self._by_expiry: ChangingHeap[Place[T]] = ChangingHeap()
        self._expiries: dict[Place[T], Entry[Place[T]]] = {}
        rate = options.rate_per_s
        self._rate = None if rate is None else Allowance(max(1.0, options.rate_burst), rate)
        self._released_at_s = 0.0
        self._between_s: float | None = None

    def set_options(self, options: AdmissionOptions) -> None:
        """Use other bounds for those that come; whoever waits keeps its place, time and aging."""
        self._options = options

    def __len__(self) -> int:
        return len(self._expiries)

    def has_line(self, model: str | None) -> bool:
        """Whether anybody waits for a model."""
        return model in self._lines

    @property
    def waiting(self) -> Mapping[str | None, int]:
        """How many wait, by model."""
        return {model: len(line) for model, line in self._lines.items()}

    def admit(self, model: str | None, now_s: float) -> bool:
        """Whether a new request goes on at once: nobody of its model waits and there is room.

        It needs less of a request than ``offer``, which asks the same first.
        """
        if model in self._lines or not self._is_open(model, now_s):
            return False
        self._pass(now_s)
        self.counts["admitted"] += 1
        return True

    def offer(self, waiting: Waiting[T], now_s: float) -> Admitted | Queued[T] | Rejected:
        """Say whether a new request goes on, waits or is turned away; one that waits has its turn by ``release``."""
        if self.admit(waiting.model, now_s):
            return ADMITTED
        shed = None
        if not self._has_space(waiting, None):  # I9
            last = self._crowd.least_deserving(waiting)
            if last is None or not self._has_space(waiting, last):
                self.counts["rejected"] += 1
                return Rejected(self._full(now_s))
            self._leave(last)
            self.counts["displaced"] += 1
            shed = Shed(last.waiting, self._full(now_s))
        return Queued(self._join(waiting, now_s), shed)

    def cancel(self, place: Place[T]) -> bool:
        """Let a request go whose client has left; ``False`` if it waits no more."""
        if not self._leave(place):
            return False
        self.counts["cancelled"] += 1
        return True

    def expire(self, now_s: float) -> list[Shed[T]]:
        """Turn away those that have waited too long, or whose deadline has passed."""
        shed = []
        while len(self) and self._by_expiry.top().key <= now_s:
            place = self._by_expiry.top().item
            self._leave(place)
            self.counts["expired"] += 1  # I9
            waited_s = now_s - place.since_s
            message = f"waited {waited_s:.1f} s in the router; every engine that could serve it was busy"
            shed.append(Shed(place.waiting, WaitedTooLong(message)))
        return shed

    def release(self, now_s: float) -> Waiting[T] | None:
        """Take out the request that goes on next, if there is room for it: decide it before asking again.

        Between models: the highest priority, else in turns.
        """
        best: str | None = None
        line: Line[T] | None = None
        for model, other in self._lines.items():
            if (line is None or other.highest > line.highest) and self._is_open(model, now_s):
                best, line = model, other
        if line is None:
            return None
        place = line.take()
        self._forget(place)
        del self._lines[best]
        if len(line):
            self._lines[best] = line  # behind the others
        self._pass(now_s)
        self._learn_pace(now_s)
        self.counts["released"] += 1
        return place.waiting

    def wake_at_s(self, now_s: float) -> float:
        """Return the moment at which time alone releases or expires a request; infinity if none would be."""
        if not len(self):
            return _INFINITY
        rate_s = now_s if self._rate is None else self._rate.ready_at_s(now_s)
        opens_s = min(self._gate.opens_at_s(model) for model in self._lines)
        return max(now_s, min(self._by_expiry.top().key, max(opens_s, rate_s)))

    def retry_after_s(self, now_s: float) -> int:
        """Return in how many whole seconds all that waits now will have gone on, by the pace of the last releases.

        At least 1, at most the longest wait; the latter, too, where nothing has been released yet.
        """
        most = max(1, ceil(self._options.max_wait_s))
        if self._between_s is None:
            return most
        between_s = max(self._between_s, now_s - self._released_at_s)
        return max(1, min(most, ceil((len(self) + 1) * between_s)))

    def _is_open(self, model: str | None, now_s: float) -> bool:
        if self._rate is not None and self._rate.ready_at_s(now_s) > now_s:
            return False
        return self._gate.opens_at_s(model) <= now_s

    def _pass(self, now_s: float) -> None:
        if self._rate is not None:
            self._rate.take(now_s)

    def _join(self, waiting: Waiting[T], now_s: float) -> Place[T]:
        line = self._lines.get(waiting.model)
        if line is None:
            line = self._lines[waiting.model] = Line(self._options.aging_rate, self.counts)
        if not len(self):
            self._released_at_s = now_s
        place = line.join(waiting, now_s)
        self._crowd.join(place)
        until_s = min(waiting.deadline_s, now_s + self._options.max_wait_s)
        self._expiries[place] = self._by_expiry.put(until_s, place)
        self.waiting_bytes += waiting.size_bytes
        self.counts["queued"] += 1
        return place

    def _leave(self, place: Place[T]) -> bool:
        model = place.waiting.model
        line = self._lines.get(model)
        if line is None or not line.leave(place):
            return False
        if not len(line):
            del self._lines[model]
        self._forget(place)
        return True

    def _forget(self, place: Place[T]) -> None:
        self._crowd.leave(place)
        self._by_expiry.drop(self._expiries.pop(place))
        self.waiting_bytes -= place.waiting.size_bytes

    def _has_space(self, arrival: Waiting[T], gone: Place[T] | None) -> bool:
        """Whether an arrival may wait, once another has gone for it."""
        places = len(self) + 1 - (gone is not None)
        size_bytes = self.waiting_bytes + arrival.size_bytes - (0 if gone is None else gone.waiting.size_bytes)
        return places <= self._options.max_waiting and size_bytes <= self._options.max_waiting_bytes

    def _learn_pace(self, now_s: float) -> None:
        """Take in the time since the last release, or since somebody began to wait."""
        between_s, mean_s = now_s - self._released_at_s, self._between_s
        self._between_s = between_s if mean_s is None else _KEPT * mean_s + (1 - _KEPT) * between_s
        self._released_at_s = now_s

    def _full(self, now_s: float) -> QueueFull:
        after_s = self.retry_after_s(now_s)
        message = f"every engine is busy and the router's queue is full ({len(self)} wait); try again in {after_s} s"
        return QueueFull(message, retry_after_s=after_s)
