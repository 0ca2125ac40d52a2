"""Supervises the control plane's loops: what fails unexpectedly is told and starts again."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

_RESTART_DELAY_S = 1.0


class Supervisor:
    """Runs loops until it is closed."""

    def __init__(self) -> None:
        self.restarts = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = structlog.stdlib.get_logger("pdrouter.control")

    def start(self, name: str, loop: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Run a loop."""
        task = asyncio.get_running_loop().create_task(self._run(name, loop), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def aclose(self) -> None:
        """End all loops."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await loop()
            except Exception:  # noqa: BLE001
                self.restarts += 1
                self._log.exception("a loop failed and starts again", loop=name)
                await asyncio.sleep(_RESTART_DELAY_S)
            else:
                return
