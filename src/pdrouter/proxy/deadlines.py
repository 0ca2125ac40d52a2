"""Time limits: of what waits equally long, and of requests, which have a limit as a whole and one for each stage.

One timer looks after all of a kind, because a timer for each request costs more than to look at them all now and then.
It knows nothing of legs: ``flight.py`` says what is to be ended.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from pdrouter.core.decision import Decision, Placement
from pdrouter.core.outcomes import suspects
from pdrouter.errors import (
    DeadlineExceeded,
    DecodeNeverStarted,
    FirstTokenTimeout,
    InvalidRequest,
    PrefillTimeout,
    RouterError,
    StreamStalled,
    UpstreamTimeout,
)
from pdrouter.proxy.client import Client
from pdrouter.proxy.relay import Observer

T = TypeVar("T")

_OWN = b"x-request-timeout-ms"
"""The header by which a client limits its request's time."""

_OWN_DIGITS = 12

_MAX_LOOK_S = 1.0
_LOOKS = 4
"""Longest time until a first look, and how many there are within the shortest limit: a stall is noticed so much late.
Chosen."""

_LEAST_LOOK_S = 0.005
"""Shortest time between two looks, however many are due (I9); chosen."""


class TimeLimits(msgspec.Struct, frozen=True):
    """Limits of one request's time; ``config.py`` says what they mean. ``keepalive_s``: between comments, 0: none."""

    request_s: float
    prefill_s: float
    first_token_s: float
    idle_s: float
    keepalive_s: float

    @property
    def patience_s(self) -> float:
        """After what time to look at a request again."""
        return min(self.prefill_s, self.first_token_s, self.idle_s) / _LOOKS

    @property
    def look_s(self) -> float:
        """How often to look at new ones."""
        return min(_MAX_LOOK_S, self.patience_s, self.keepalive_s or _MAX_LOOK_S)

    def request_of(self, header: Mapping[bytes, bytes]) -> float:
        """Return a request's limit: the client's own counts if it is the smaller.

        Raises: InvalidRequest.
        """
        return min(self.request_s, _own_s(header)) if _OWN in header else self.request_s

    def too_late(self, header: Mapping[bytes, bytes]) -> RouterError:
        """Return what to tell when a request's time is over."""
        own_s = _own_s(header) if _OWN in header else math.inf
        if own_s < self.request_s:
            return DeadlineExceeded(f"the request took longer than {own_s:g} s, its {_OWN.decode()}")
        return UpstreamTimeout(f"the request took longer than {self.request_s:g} s (request_timeout_secs)")


class Late(msgspec.Struct, frozen=True):
    """A stage that takes too long, and on whom it waits."""

    error: RouterError
    places: Sequence[Placement]


def _own_s(header: Mapping[bytes, bytes]) -> float:
    text = header[_OWN].strip()
    if not text.isdigit() or len(text) > _OWN_DIGITS or not int(text):
        raise InvalidRequest(f"{_OWN.decode()} is milliseconds, a whole number above 0", param=_OWN.decode())
    return int(text) / 1e3


def end_of_stage(
    decision: Decision, observer: Observer, client: Client, limits: TimeLimits, now_s: float, *, is_met: bool
) -> "float | Late":
    """Return until when the present stage of a request may last, or that it has lasted too long.

    Only of a stream more can be seen than that its prompt was read; one whose client is behind isn't expected to grow.
    ``is_met``: both legs run at once, and neither goes on before it has met the other.
    """
    place, waits_for = decision.prefill, [decision.decode]
    if observer.has_begun:
        since_s, limit_s = observer.quiet_since_s(now_s, is_excused=client.is_full), limits.idle_s
        kind: type[RouterError] = StreamStalled
        what, name = "sent nothing", "stream_idle_timeout_secs"
        if not observer.is_stream:
            return math.inf
    elif place is not None and decision.first_token_at_s is None:
        since_s, limit_s, kind = decision.decided_at_s, limits.prefill_s, PrefillTimeout
        waits_for = [*suspects(decision)] if is_met else [place]
        what, name = "didn't read the prompt", "prefill_timeout_secs"
        if observer.is_stream and limits.first_token_s < limit_s:
            limit_s, name = limits.first_token_s, "first_token_timeout_secs"
    elif observer.is_stream:
        since_s, limit_s = decision.decided_at_s, limits.first_token_s
        kind = FirstTokenTimeout if place is None else DecodeNeverStarted
        what, name = "didn't begin to answer", "first_token_timeout_secs"
    else:
        return math.inf
    if now_s < since_s + limit_s:
        return since_s + limit_s
    who = " and ".join(place.label for place in waits_for)
    return Late(kind(f"{who} {what} within {limit_s:g} s ({name})"), waits_for)


class Timed(Protocol):
    """A request under way."""

    def check_time(self, now_s: float) -> float:
        """End what takes too long; return until when there is time."""


R = TypeVar("R", bound=Timed)


class Pace(Protocol):
    """How often a sweep looks: for new ones every ``look_s``, at the same one again after ``patience_s``."""

    @property
    def look_s(self) -> float:
        """Seconds."""

    @property
    def patience_s(self) -> float:
        """Seconds."""


class Sweep(Generic[R]):
    """All requests under way, each with the moment of the next look at it, which is sooner where one is due sooner.

    Looks that nobody is in a hurry for fall together, so that there are few, and most requests are over before theirs.
    """

    def __init__(self, pace: Callable[[], Pace]) -> None:
        self._pace = pace
        self._look_at_s: dict[R, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf
        self._tick_s = -math.inf  # when all that are new are looked at

    def __iter__(self) -> Iterator[R]:
        """Yield those that were under way at the beginning."""
        return iter(list(self._look_at_s))

    def put(self, item: R, due_s: float) -> None:
        """Look after a request from now on."""
        if self._timer is None:
            self._tick_s = time.monotonic() + self._pace().look_s
        at_s = self._look_at_s[item] = due_s if due_s < self._tick_s else self._tick_s  # noqa: FURB136 - a call costs more
        if at_s < self._timer_s:
            self._set_timer(at_s, time.monotonic())

    def take_out(self, item: R) -> None:
        """It is over."""
        self._look_at_s.pop(item, None)

    def _set_timer(self, at_s: float, now_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = max(at_s, now_s + _LEAST_LOOK_S)
        self._timer = asyncio.get_running_loop().call_later(self._timer_s - now_s, self._look)

    def _look(self) -> None:
        items, now_s, pace = self._look_at_s, time.monotonic(), self._pace()
        if self._tick_s <= now_s:
            self._tick_s = now_s + pace.look_s
        self._timer, self._timer_s = None, math.inf
        try:
            for item in [item for item, at_s in items.items() if at_s <= now_s]:
                if item in items:
                    items[item] = now_s + pace.patience_s  # also if the look fails
                    due_s = item.check_time(now_s)
                    if item in items:
                        items[item] = min(due_s, now_s + pace.patience_s)
        finally:
            if items:
                self._set_timer(min(items.values()), now_s)


class Deadlines(Generic[T]):
    """Calls ``expire`` with whatever hasn't been taken out ``limit_s`` after it was put in."""

    def __init__(self, limit_s: float, expire: Callable[[T], None]) -> None:
        self.limit_s = limit_s
        self._expire = expire
        self._due_s: dict[T, float] = {}  # the first to expire comes first
        self._timer: asyncio.TimerHandle | None = None

    def put(self, item: T) -> None:
        """Begin to wait."""
        self._due_s[item] = time.monotonic() + self.limit_s
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.limit_s, self._look)

    def take_out(self, item: T) -> None:
        """Wait no more."""
        self._due_s.pop(item, None)

    def _look(self) -> None:
        self._timer = None
        now_s = time.monotonic()
        try:
            for item, due_s in list(self._due_s.items()):
                if due_s > now_s:
                    return
                if self._due_s.pop(item, None) is not None:
                    self._expire(item)
        finally:
            if self._due_s and self._timer is None:
                delay_s = max(0.0, next(iter(self._due_s.values())) - now_s)
                self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)
