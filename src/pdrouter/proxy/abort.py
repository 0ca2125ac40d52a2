"""Ends requests at the engines (I12), by ``POST /abort_request``.

An abort that arrives before the engine has registered the request is lost, so it is sent once more a little later.
"""

import asyncio
from collections.abc import Coroutine, Sequence

from pdrouter.core.fleet import Endpoint
from pdrouter.errors import RouterError
from pdrouter.upstream.pools import Pools

MAX_PENDING = 4096
"""Aborts under way at once (I9); beyond that the closed connection alone must do."""

_REPLY_BYTES = 65536
_REPLY_TIMEOUT_S = 5.0


class Aborter:
    """Sends aborts in the background; counts what it sent, what failed and what was dropped."""

    def __init__(self, pools: Pools, retry_delay_s: float) -> None:
        self.sent = 0
        self.failed = 0
        self.dropped = 0
        self._pools = pools
        self._retry_delay_s = retry_delay_s
        self._tasks: set[asyncio.Task[None]] = set()

    def abort(self, endpoint: Endpoint, requests: Sequence[bytes]) -> None:
        """Send the aborts of one request, now and once more after the delay."""
        self._start(self._abort_twice(endpoint, requests))

    def send(self, endpoint: Endpoint, request: bytes) -> None:
        """Send once what frees something at an engine."""
        self._start(self._abort(endpoint, [request]))

    def _start(self, sending: Coroutine[None, None, None]) -> None:
        if len(self._tasks) >= MAX_PENDING:  # I9
            self.dropped += 1
            sending.close()
            return
        task = asyncio.get_running_loop().create_task(sending)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def counters(self) -> dict[str, int]:
        """Return what became of the aborts."""
        return {"sent": self.sent, "failed": self.failed, "dropped": self.dropped}

    async def aclose(self) -> None:
        """Give up what is under way."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _abort_twice(self, endpoint: Endpoint, requests: Sequence[bytes]) -> None:
        await self._abort(endpoint, requests)
        await asyncio.sleep(self._retry_delay_s)
        await self._abort(endpoint, requests)

    async def _abort(self, endpoint: Endpoint, requests: Sequence[bytes]) -> None:
        """Send one after the other; an endpoint that fails one isn't sent the rest."""
        try:
            for request in requests:
                self.sent += 1
                async with asyncio.timeout(_REPLY_TIMEOUT_S):
                    exchange = await self._pools.get(endpoint).send(request)
                    try:
                        await exchange.read_all(_REPLY_BYTES)
                    finally:
                        exchange.close()
        except (RouterError, TimeoutError):
            self.failed += 1
