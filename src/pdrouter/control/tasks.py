"""Supervises what runs in the background: a loop that died is started again, however it died, and that is counted."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial

import msgspec
import structlog

_FIRST_DELAY_S = 1.0
_MAX_DELAY_S = 30.0
"""Time until a loop that died starts again; it doubles with each death in a row; chosen."""

_STEADY_S = 60.0
"""A loop that has run for so long is well again; chosen."""

_MAX_DEATHS = 5
"""Deaths in a row after which a loop counts as one that can't be kept alive; it still starts again; chosen."""


class _Deaths(msgspec.Struct):
    """Deaths in a row, and when the loop starts again after the last one."""

    in_a_row: int = 0
    restart_at_s: float = 0.0


class Supervisor:
    """Runs loops until it is closed; ``counts`` are ``restarted`` loops, and ``failed`` tasks, which run once."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(restarted=0, failed=0)
        self._tasks: set[asyncio.Task[None]] = set()
        self._deaths: dict[str, _Deaths] = {}
        self._log = structlog.stdlib.get_logger("pdrouter.control")

    def counters(self) -> Mapping[str, int]:
        """Return the events counted since the start."""
        return self.counts

    def dying(self) -> Sequence[str]:
        """Return the names of loops that can't be kept alive."""
        now_s = asyncio.get_running_loop().time()
        return [
            name
            for name, deaths in self._deaths.items()
            if deaths.in_a_row >= _MAX_DEATHS and now_s < deaths.restart_at_s + _STEADY_S
        ]

    def start(self, name: str, loop: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Run a loop, which only its return and ``cancel()`` end."""
        return self._spawn(name, self._keep(name, loop))

    def once(self, name: str, call: Callable[[], Awaitable[None]], failed: Callable[[], None]) -> asyncio.Task[None]:
        """Run a task; it isn't started again, but ``failed`` is called."""
        return self._spawn(name, self._once(name, call, failed))

    async def aclose(self) -> None:
        """End all loops."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, name: str, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _once(self, name: str, call: Callable[[], Awaitable[None]], failed: Callable[[], None]) -> None:
        error = await _failure(call)
        if error is not None:
            self.counts["failed"] += 1
            await _failure(partial(self._tell, "a task failed", name, error))
            failed()

    async def _keep(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        deaths = self._deaths[name] = _Deaths()
        try:
            while (error := await _failure(loop)) is not None:
                self.counts["restarted"] += 1
                delay_s = _note_death(deaths, asyncio.get_running_loop().time())
                await _failure(partial(self._tell, "a loop died and starts again", name, error))
                await asyncio.sleep(delay_s)
        finally:
            if self._deaths.get(name) is deaths:
                del self._deaths[name]

    async def _tell(self, event: str, name: str, error: BaseException) -> None:
        self._log.error(event, task=name, exc_info=error)


async def _failure(call: Callable[[], Awaitable[None]]) -> BaseException | None:
    """Run to the end, and return what went wrong; a cancellation counts unless it is the task itself that ends."""
    try:
        await call()
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return error
    except Exception as error:  # noqa: BLE001
        return error
    return None


def _note_death(deaths: _Deaths, now_s: float) -> float:
    """Count a death; return how long to wait until the next life."""
    is_in_a_row = now_s < deaths.restart_at_s + _STEADY_S
    deaths.in_a_row = deaths.in_a_row + 1 if is_in_a_row else 1
    delay_s = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(deaths.in_a_row - 1, _MAX_DEATHS))
    deaths.restart_at_s = now_s + delay_s
    return delay_s
