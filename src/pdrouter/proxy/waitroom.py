"""[2] Requests that wait in the router. Who is next is the core's to say (``core/admission.py``), when to look is here.

Looked at in the turn after anything that may have made room, when time alone does, and while anybody waits a few times
a second, because reports and readiness change room as well.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from pdrouter.core.admission import Admission, Admitted, Rejected
from pdrouter.core.line import Place, Waiting
from pdrouter.errors import RouterError

_LOOK_S = 0.05
"""Longest time between two looks while anybody waits; chosen."""


class Waiter(Protocol):
    """A request that waits."""

    def go_on(self) -> None:
        """It is its turn."""

    def turn_away(self, error: RouterError) -> None:
        """It won't have one."""


class Waitroom:
    """The queue of one router."""

    def __init__(self, admission: Admission[Waiter], clock: Callable[[], float]) -> None:
        self._admission = admission
        self._clock = clock
        self._next_look: asyncio.Handle | None = None

    def counters(self) -> dict[str, int]:
        """Return how often what happened."""
        return dict(self._admission.counts)

    def enter(self, waiting: Waiting[Waiter]) -> Place[Waiter] | None:
        """Let a request wait; ``None`` if it needn't any more, and has gone on.

        Raises: QueueFull.
        """
        answer = self._admission.offer(waiting, self._clock())
        if isinstance(answer, Rejected):
            raise answer.error
        if isinstance(answer, Admitted):
            waiting.request.go_on()
            return None
        if answer.shed is not None:
            answer.shed.waiting.request.turn_away(answer.shed.error)
        self._look_in(self._delay_s())
        return answer.place

    def leave(self, place: Place[Waiter]) -> None:
        """Let a request go that waits no more."""
        self._admission.cancel(place)

    def room_may_be(self) -> None:
        """Something was returned: look in the next turn of the loop."""
        if len(self._admission):
            self._look_in(0.0)

    def close(self) -> None:
        """Look no more."""
        if self._next_look is not None:
            self._next_look.cancel()

    def _look_in(self, delay_s: float) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
        loop = asyncio.get_running_loop()
        self._next_look = loop.call_later(delay_s, self._look) if delay_s else loop.call_soon(self._look)

    def _look(self) -> None:
        self._next_look = None
        admission = self._admission
        try:
            for shed in admission.expire(self._clock()):
                shed.waiting.request.turn_away(shed.error)
            while (waiting := admission.release(self._clock())) is not None:
                waiting.request.go_on()
        finally:
            if len(admission):
                self._look_in(self._delay_s())

    def _delay_s(self) -> float:
        now_s = self._clock()
        return min(_LOOK_S, max(0.001, self._admission.wake_at_s(now_s) - now_s))
