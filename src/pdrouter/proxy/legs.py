"""The prefill leg of a pair: sent, and its reply read as it comes, by callbacks and without a task of its own."""

import asyncio
from collections.abc import Callable

from pdrouter.core.decision import Placement
from pdrouter.engines.base import Leg
from pdrouter.errors import RouterError, UpstreamError, UpstreamProtocol
from pdrouter.upstream.connection import Exchange
from pdrouter.upstream.pool import Pool

STATUS_OK_BELOW = 400


class EngineReply(UpstreamError):
    """An engine's own error reply, to be passed on as it is."""

    code = "engine_reply"

    def __init__(self, place: Placement, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        super().__init__(f"{place.kind} on {place.label} answered {status}: {body[:512].decode('utf-8', 'replace')}")
        self.reply_status = status
        self.reply_headers = headers
        self.body = body


class PrefillLeg:
    """Reads a prefill reply to its end and calls ``on_done`` once, with what went wrong or ``None``.

    A good reply is dropped unless ``keeps`` asks for it; no more than ``max_bytes`` are held (I9).
    """

    def __init__(
        self, leg: Leg, pool: Pool, on_done: Callable[[RouterError | None], None], *, keeps: bool, max_bytes: int
    ) -> None:
        self.placement = leg.placement
        self.is_begun = False
        self.is_done = False
        self._leg = leg
        self._pool = pool
        self._on_done = on_done
        self._keeps = keeps
        self._max_bytes = max_bytes
        self._exchange: Exchange | None = None
        self._task: asyncio.Task[None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._pieces: list[bytes] = []
        self._held_bytes = 0

    def start(self) -> None:
        """Send the request; over a kept connection at once."""
        exchange = self._pool.start(self._leg.head, *self._leg.body)
        if exchange is None:
            self._task = asyncio.get_running_loop().create_task(self._connect())
        else:
            self._listen(exchange)

    async def reply(self) -> bytes:
        """Wait for the end, and return what was kept."""
        if not self.is_done:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return b"".join(self._pieces)

    def send_no_more(self) -> bool:
        """Only wait for the reply from now on (I3); ``False`` if none is on its way."""
        if self._exchange is None or (self._task is not None and not self._task.done()):
            return False
        self._exchange.forget_request()
        return True

    def close(self) -> None:
        """End the leg where it stands; ``on_done`` isn't called any more."""
        self._finish()
        if self._task is not None:
            self._task.cancel()
        if self._exchange is not None:
            self._exchange.close()

    async def _connect(self) -> None:
        try:
            exchange = await self._pool.send(self._leg.head, *self._leg.body)
        except RouterError as error:
            self._end(error)
        else:
            self._listen(exchange)

    async def _repeat(self, exchange: Exchange) -> None:
        try:
            await exchange.head()
        except RouterError as error:
            self._end(error)
        else:
            self._listen(exchange)
            self._arrived()

    def _listen(self, exchange: Exchange) -> None:
        self.is_begun = True
        self._exchange = exchange
        exchange.listen(self._arrived)

    def _arrived(self) -> None:
        exchange = self._exchange
        if exchange is None or self.is_done:
            return
        if exchange.is_lost:
            exchange.listen(None)
            self._task = asyncio.get_running_loop().create_task(self._repeat(exchange))
            return
        try:
            while piece := exchange.read_nowait():
                self._take(piece, exchange.status)
            if piece is None:
                return
        except RouterError as error:
            self._end(error)
            return
        if exchange.status >= STATUS_OK_BELOW:
            body = b"".join(self._pieces)
            self._end(EngineReply(self.placement, exchange.status, exchange.headers, body))
        else:
            self._end(None)

    def _take(self, piece: bytes, status: int) -> None:
        if not self._keeps and status < STATUS_OK_BELOW:
            return
        self._held_bytes += len(piece)
        if self._held_bytes > self._max_bytes:  # I9
            raise UpstreamProtocol(f"the reply of {self.placement.label} exceeds {self._max_bytes} bytes")
        self._pieces.append(piece)

    def _end(self, error: RouterError | None) -> None:
        if not self.is_done:
            self._finish()
            self._on_done(error)

    def _finish(self) -> None:
        self.is_done = True
        if self._exchange is not None:
            self._exchange.listen(None)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
