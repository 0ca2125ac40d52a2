"""The client's side of a request, as dispatch and relay see it: start, write with flow control, end, gone.

Requests come in by ASGI; replies are written to uvicorn's transport directly, head and first piece in one call, for
ASGI's messages cost more than all the rest of a streamed chunk (``benchmarks/proxy.py``). What is used of uvicorn for
that is its cycle: transport, flow control, keep-alive and the marks of a reply's progress. Nothing else knows it.
"""

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from functools import lru_cache
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from pdrouter.proxy.connection import SCOPE_KEY, Connection

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]


class Client:
    """Whoever waits for the reply. After each ``write``, a writer waits while ``is_full`` (I9)."""

    __slots__ = (
        "_connection",
        "_cycle",
        "_head",
        "_is_bodyless",
        "_is_chunked",
        "_takes_chunks",
        "is_started",
        "status",
    )

    def __init__(self, scope: Scope, send: Send) -> None:
        self._connection: Connection = scope["extensions"][SCOPE_KEY]
        self._cycle = cast("RequestResponseCycle", getattr(send, "__self__"))  # noqa: B009
        self._is_bodyless = scope["method"] == "HEAD"
        self._takes_chunks = scope["http_version"] == "1.1"
        self._is_chunked = False
        self._head = b""
        self.is_started = False
        self.status = 0

    def start(self, status: int, headers: Headers) -> None:
        """Begin the reply; from here on nothing is tried again (I7). The head goes out with the first piece."""
        cycle = self._cycle
        self.is_started = cycle.response_started = True
        cycle.waiting_for_100_continue = False
        self.status = status
        names = dict(headers)
        is_sized = b"content-length" in names or status in (204, 304)
        lines = [_status_line(status), *[b"%b: %b\r\n" % pair for pair in headers]]
        self._is_chunked = not is_sized and self._takes_chunks and not self._is_bodyless
        if self._is_chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        elif not is_sized:
            cycle.keep_alive = False  # the body ends where the connection does
        if b"connection" in names:
            cycle.keep_alive = False  # the only thing that we ever say in it
        elif not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        self._head = b"".join(lines)

    def write(self, piece: bytes) -> None:
        """Send a piece of the body."""
        head, self._head = self._head, b""
        if not self._cycle.transport.is_closing() and (head or piece):
            self._cycle.transport.write(head + self._framed(piece))

    def end(self, piece: bytes = b"") -> None:
        """Send the last piece."""
        cycle = self._cycle
        head, self._head = self._head, b""
        if not cycle.transport.is_closing():
            last = b"0\r\n\r\n" if self._is_chunked else b""
            cycle.transport.write(b"%b%b%b" % (head, self._framed(piece), last))
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()

    def _framed(self, piece: bytes) -> bytes:
        if self._is_chunked:
            return b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b""
        return b"" if self._is_bodyless else piece

    def reply(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole reply."""
        self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        self.end(body)

    @property
    def is_full(self) -> bool:
        """Whether the client is behind, so that nothing more should be written now."""
        return self._cycle.flow.write_paused

    async def drained(self) -> None:
        """Wait until the client can take more, or is gone."""
        await self._cycle.flow.drain()

    def abort(self) -> None:
        """Close the connection at once; what the client hasn't taken is dropped."""
        self._cycle.transport.abort()

    def on_gone(self, call: Callable[[], None] | None) -> None:
        """Have ``call`` called, in the event loop, when the client closes its connection; ``None`` forgets it."""
        self._connection.on_gone = call


@lru_cache(maxsize=128)
def _status_line(status: int) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()
