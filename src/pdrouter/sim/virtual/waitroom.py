"""Requests that wait in the router, in virtual time: the same queue (``core/admission.py``), looked at as often.

Looked at when an answer has ended, when time alone makes room, and while anybody waits as often as the live router does
(``proxy/waitroom.py``).
"""

from collections.abc import Callable
from math import inf

from pdrouter.core.admission import Admission, Admitted, Rejected
from pdrouter.core.line import Waiting
from pdrouter.errors import RouterError
from pdrouter.sim.virtual.agenda import Agenda

_LOOK_S = 0.05
"""Longest time between two looks while anybody waits. Source: ``proxy/waitroom.py``."""

_SHORTEST_S = 0.001


class Waiter:
    """A request that waits: what to do when it has its turn, or won't have one."""

    __slots__ = ("go_on", "turn_away")

    def __init__(self, go_on: Callable[[float], None], turn_away: Callable[[RouterError], None]) -> None:
        self.go_on = go_on
        self.turn_away = turn_away


class Waitroom:
    """The queue of one router, whose requests are all ``Waiter``."""

    def __init__(self, admission: Admission[object], agenda: Agenda) -> None:
        self._admission = admission
        self._agenda = agenda
        self._look_at_s = inf

    def enter(self, waiting: Waiting[object], now_s: float) -> None:
        """Let a request wait, unless it needn't or can't."""
        answer = self._admission.offer(waiting, now_s)
        if isinstance(answer, Admitted):
            _waiter(waiting).go_on(now_s)
        elif isinstance(answer, Rejected):
            _waiter(waiting).turn_away(answer.error)
        else:
            if answer.shed is not None:
                _waiter(answer.shed.waiting).turn_away(answer.shed.error)
            self._look_later(now_s)

    def room_may_be(self, now_s: float) -> None:
        """Something was returned: look once all that happens now has happened."""
        if len(self._admission):
            self._look_at(now_s)

    def _look_later(self, now_s: float) -> None:
        delay_s = self._admission.wake_at_s(now_s) - now_s
        self._look_at(now_s + min(_LOOK_S, max(_SHORTEST_S, delay_s)))

    def _look_at(self, at_s: float) -> None:
        if at_s != self._look_at_s:
            self._look_at_s = at_s
            self._agenda.put(at_s, self._look)

    def _look(self, now_s: float) -> None:
        if now_s != self._look_at_s:
            return
        self._look_at_s = inf
        admission = self._admission
        for shed in admission.expire(now_s):
            _waiter(shed.waiting).turn_away(shed.error)
        while (waiting := admission.release(now_s)) is not None:
            _waiter(waiting).go_on(now_s)
        if len(admission):
            self._look_later(now_s)


def _waiter(waiting: Waiting[object]) -> Waiter:
    waiter = waiting.request
    assert isinstance(waiter, Waiter)  # noqa: S101 (narrows the type)
    return waiter
