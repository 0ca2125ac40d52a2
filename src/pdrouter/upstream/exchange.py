"""One request to an engine and its reply: what has arrived, who waits for it, and how it ended.

It knows the connection that carries it by three methods. Next: ``connection.py``, which fills it.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from pdrouter.errors import RouterError, UpstreamClosed, UpstreamProtocol

Headers = list[tuple[bytes, bytes]]
Request = tuple[bytes | memoryview, ...]

_REPEAT_WITHIN_S = 1.0
"""A connection that the engine had closed already shows within a round trip; chosen with room to spare."""


class Repeater(Protocol):
    """Opens connections for requests that were lost."""

    def repeat(self, exchange: "Exchange", request: Request) -> "asyncio.Task[None]":
        """Send a request that a kept connection has lost once more, over a fresh one."""


class Carrier(Protocol):
    """The connection that carries an exchange."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that runs it."""
        ...

    def resume(self) -> None:
        """Read on: the exchange's buffer has been drained."""

    def abort(self) -> None:
        """Close at once."""


class Exchange:
    """One request and its reply; one task at a time may wait in it, or a listener is called.

    ``status`` and ``headers`` (names in lower case, trailers left out) are valid after ``head()``.
    ``is_complete`` says that the reply has arrived whole, though some of it may not have been read yet.
    The caller ends every exchange with ``close()``.

    A kept connection that ends before any byte of the reply was most likely closed by the engine while the request
    was on its way: the request is sent once more, on a fresh connection. Not if that shows late: then the engine may
    have begun, and what it began must not come to it twice.
    """

    __slots__ = (
        "_began_s",
        "_error",
        "_keeper",
        "_listener",
        "_opening",
        "_request",
        "_waiter",
        "_wakes_soon",
        "connection",
        "is_complete",
        "is_paused",
        "is_sent",
        "pieces",
        "raw_headers",
        "status",
        "unread_bytes",
    )

    def __init__(self, keeper: Repeater, kept_request: Request, now_s: float) -> None:
        """Begin; ``kept_request`` is what may have to be sent again, if a kept connection carries it."""
        self.status = 0
        self.raw_headers: Headers = []
        self.is_sent = False
        self.is_complete = False
        self.connection: Carrier | None = None
        self.pieces: list[bytes] = []
        self.unread_bytes = 0
        self.is_paused = False
        self._keeper = keeper
        self._listener: Callable[[], None] | None = None
        self._opening: asyncio.Task[None] | None = None
        self._request = kept_request
        self._began_s = now_s
        self._waiter: asyncio.Future[None] | None = None
        self._wakes_soon = False
        self._error: RouterError | None = None

    def wait_for(self, opening: "asyncio.Task[None]") -> None:
        """Be sent or failed by a task that opens a connection; ``close()`` ends it."""
        self._opening = opening

    async def sent(self) -> None:
        """Wait until the request has been written.

        Raises: ConnectFailed, ConnectTimeout, PoolExhausted, UpstreamClosed.
        """
        if self._opening is not None:
            await self._opening
            if self._error is not None:
                raise self._error

    @property
    def headers(self) -> Headers:
        """The reply's headers; the parser leaves white space behind the values."""
        return [(name.lower(), value.rstrip()) for name, value in self.raw_headers]

    async def head(self) -> int:
        """Wait for the head of the reply and return its status; 1xx replies are skipped.

        Raises: UpstreamClosed, UpstreamProtocol; ConnectFailed, PoolExhausted from the repeat.
        """
        while not self.status:
            if self._error is not None:
                raise self._error
            await self._arrival()
        return self.status

    async def read(self) -> bytes:
        """Return the body bytes that have come since the last read, waiting for some; b"" at the end.

        Raises: UpstreamClosed, UpstreamProtocol, once what came before the failure has been read.
        """
        while (data := self.read_nowait()) is None:
            await self._arrival()
        return data

    @property
    def is_at_end(self) -> bool:
        """Whether the whole reply has been read."""
        return self.is_complete and not self.pieces

    def read_nowait(self, most_bytes: int | None = None) -> bytes | None:
        """Return what ``read()`` would without waiting, or None if it had to wait.

        With ``most_bytes``, of more than that only so much, and the listener is called again in the next turn of the
        loop: so a reader that looks into what it reads never holds the loop for long.

        Raises: as ``read()``.
        """
        pieces = self.pieces
        if pieces:
            if most_bytes is not None and most_bytes < self.unread_bytes:
                return self._read_some(most_bytes)
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            self.unread_bytes = 0
            if self.is_paused:
                self._resume()
            if self._error is not None and self._listener is not None:
                asyncio.get_running_loop().call_soon(self.wake)  # there is more to tell, and nothing more will come
            return data
        if self.is_complete:
            return b""
        if self._error is not None:
            raise self._error
        return None

    def _read_some(self, most_bytes: int) -> bytes:
        text = b"".join(self.pieces)
        data, rest = text[:most_bytes], text[most_bytes:]
        self.pieces[:] = [rest] if rest else []
        self.unread_bytes = len(rest)
        if not rest and self.is_paused:
            self._resume()
        if not self._wakes_soon:
            self._wakes_soon = True
            asyncio.get_running_loop().call_soon(self._wake_again)
        return data

    def _wake_again(self) -> None:
        self._wakes_soon = False
        self.wake()

    async def read_all(self, limit_bytes: int) -> bytes:
        """Return the rest of the body.

        Raises: as ``read()``; UpstreamProtocol if there are more than ``limit_bytes``.
        """
        pieces: list[bytes] = []
        total_bytes = 0
        while piece := await self.read():
            total_bytes += len(piece)
            if total_bytes > limit_bytes:  # I9
                self.close()
                raise UpstreamProtocol(f"the reply's body exceeds {limit_bytes} bytes")
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def listen(self, call: Callable[[], None] | None) -> None:
        """Have ``call`` called, instead of waking a task, whenever something has arrived or the exchange has ended."""
        self._listener = call

    def close(self) -> None:
        """End the exchange; unless the reply has arrived whole, the connection is aborted at once.

        A whole reply needs nothing: its connection went back to the keeper when the last byte arrived.
        """
        if self.is_complete:
            return
        self._request = ()
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.cancel()
        connection = self.connection
        if connection is not None:
            connection.abort()
        self.fail(UpstreamClosed("the exchange has been closed by its caller"))

    def forget_request(self) -> None:
        """Let go of the request: the engine has begun to answer, so that it can't be sent again."""
        self._request = ()

    def fail(self, error: RouterError) -> None:
        """Take note that the rest of the reply will not come, or send the request again."""
        request, self._request = self._request, ()
        connection, self.connection = self.connection, None
        self.is_complete = False
        if request and connection is not None and connection.loop.time() - self._began_s <= _REPEAT_WITHIN_S:
            self._opening = self._keeper.repeat(self, request)
        else:
            self._error = error
            self.wake()

    def wake(self) -> None:
        """Let whoever waits look: something has arrived, or has ended."""
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)
        elif self._listener is not None:
            self._listener()

    def _arrival(self) -> "asyncio.Future[None]":
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        return waiter

    def _resume(self) -> None:
        self.is_paused = False
        if self.connection is not None:
            self.connection.resume()
