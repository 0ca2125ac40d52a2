"""Sends a trace's requests at their moments, whatever became of those before: an open loop.

What is sent late is measured: times count from when a request was due, because whoever waits for a client waits, too.
It knows no figures (``figures.py``) and no options.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pdrouter.sim.replay.caller import Ask, Caller, Seen
from pdrouter.sim.virtual.trace import Request

_LAG_PERIOD_S = 0.02


class Sent(NamedTuple):
    """One request that came to its end. Stamps of the monotonic clock; ``number`` is its place in the trace."""

    number: int
    request: Request
    due_s: float
    sent_s: float
    seen: Seen


class Played(NamedTuple):
    """What a replay has shown so far.

    ``held`` is how many had to wait because as many as may be were under way; ``cut`` how many were under way when it
    was stopped; ``lags_s`` how late the client's own loop was, in order.
    """

    sent: Sequence[Sent]
    start_s: float
    held: int
    cut: int
    lags_s: Sequence[float]


class Player:
    """One replay; ``make`` makes what is asked, ``speed`` is how many times faster than the trace it goes.

    At most ``most_in_flight`` are under way (I9).
    """

    def __init__(
        self,
        caller: Caller,
        requests: Sequence[Request],
        make: Callable[[int, Request], Ask],
        most_in_flight: int,
        speed: float,
    ) -> None:
        self._caller = caller
        self._requests = requests
        self._make = make
        self._slots = asyncio.Semaphore(most_in_flight)
        self._speed = speed
        self._sent: list[Sent] = []
        self._lags_s: list[float] = []
        self._held = self._under_way = 0

    async def play(self, stop: asyncio.Event, ended: Callable[[Sent], None]) -> Played:
        """Send all and wait for their ends; ``stop`` cuts off those that are under way."""
        start_s = time.monotonic()
        lagging = asyncio.create_task(self._measure_lag())
        sending = asyncio.create_task(self._send_all(start_s, ended))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([sending, stopping], return_when=asyncio.FIRST_COMPLETED)
            cut = 0 if sending.done() else self._under_way
        finally:
            for task in (sending, stopping, lagging):
                task.cancel()
            await asyncio.wait([sending, stopping, lagging])
        if not sending.cancelled():
            sending.result()
        return Played(self._sent, start_s, self._held, cut, sorted(self._lags_s))

    async def _send_all(self, start_s: float, ended: Callable[[Sent], None]) -> None:
        async with asyncio.TaskGroup() as group:
            for number, request in enumerate(self._requests):
                ask = self._make(number, request)  # before its time has come
                due_s = start_s + request.at_s / self._speed
                await asyncio.sleep(due_s - time.monotonic())
                if self._slots.locked():
                    self._held += 1
                await self._slots.acquire()
                self._under_way += 1
                group.create_task(self._send(number, request, ask, due_s, ended))

    async def _send(self, number: int, request: Request, ask: Ask, due_s: float, ended: Callable[[Sent], None]) -> None:
        sent_s = time.monotonic()
        seen = await self._caller.ask(ask)
        self._slots.release()
        self._under_way -= 1
        sent = Sent(number, request, due_s, sent_s, seen)
        self._sent.append(sent)
        ended(sent)

    async def _measure_lag(self) -> None:
        while True:
            due_s = time.monotonic() + _LAG_PERIOD_S
            await asyncio.sleep(_LAG_PERIOD_S)
            self._lags_s.append(time.monotonic() - due_s)
