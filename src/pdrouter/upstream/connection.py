"""One HTTP/1.1 connection to an engine, which carries one exchange at a time (``exchange.py``).

Bytes in and out, framing, flow control and the state of the connection; foreign exceptions become
``pdrouter.errors`` here. It must not know about endpoints, limits on their number, deadlines or what the
bytes mean. Next: ``pool.py``, which keeps connections between exchanges.
"""

import asyncio
from enum import Enum
from typing import Protocol, cast

from httptools import HttpParserError, HttpResponseParser

from pdrouter.errors import UpstreamClosed, UpstreamError, UpstreamProtocol, UpstreamRedirect
from pdrouter.upstream.exchange import Exchange, Headers, Repeater, Request

_FIRST_BYTE = ord("H")
"""How a reply begins; the parser would take RTSP as well."""

_VERSIONS = frozenset({"1.1", "1.0"})
_CODING_CHARS = len(b"transfer-encoding")

_JOIN_BELOW_BYTES = 16_384
"""Size of a body below which one copy is cheaper than a vectored write; chosen, see benchmarks/proxy.py."""

_ARRIVALS = memoryview(bytearray(65_536))
"""Where bytes arrive, of whichever connection: one loop runs them all, and parses what has come before it reads on.

Its size is the most by which a connection goes beyond its limit; chosen, see benchmarks/slow_readers.py.
"""


class State(Enum):
    """Where a connection is in its life."""

    NEW = "new"
    ACTIVE = "active"
    IDLE = "idle"
    CLOSED = "closed"


# Read as members of the enum they would cost a tenth of a microsecond each time.
_NEW, _ACTIVE, _IDLE, _CLOSED = State.NEW, State.ACTIVE, State.IDLE, State.CLOSED


class Keeper(Repeater, Protocol):
    """Opens connections and keeps them between exchanges."""

    def keep(self, connection: "Connection") -> bool:
        """Take a connection whose exchange is over; False if there is no room for it."""

    def forget(self, connection: "Connection") -> None:
        """Drop a connection that is about to be CLOSED; it still has its last state."""


class Connection(asyncio.BufferedProtocol):
    """One connection: NEW while connecting, ACTIVE for one exchange at a time, IDLE between them, CLOSED."""

    __slots__ = (
        "_can_stay",
        "_ends_at_close",
        "_exchange",
        "_feed",
        "_headers",
        "_idle_timeout_s",
        "_keeper",
        "_limit_bytes",
        "_max_header_bytes",
        "_parser",
        "_peer",
        "_read_buffer_bytes",
        "_transport",
        "expires_at_s",
        "loop",
        "state",
    )
    _transport: asyncio.Transport  # there in every state but NEW

    def __init__(
        self,
        keeper: Keeper,
        peer: str,
        *,
        idle_timeout_s: float,
        read_buffer_bytes: int,
        max_header_bytes: int,
    ) -> None:
        # For the life of the connection.
        self.loop = asyncio.get_running_loop()
        self.state = _NEW
        self.expires_at_s = 0.0
        self._keeper = keeper
        self._peer = peer
        self._idle_timeout_s = idle_timeout_s
        self._read_buffer_bytes = read_buffer_bytes
        self._max_header_bytes = max_header_bytes
        # For one exchange.
        self._exchange: Exchange | None = None
        self._headers: Headers = []
        self._limit_bytes = max_header_bytes
        self._can_stay = False
        self._ends_at_close = False

    @property
    def is_idle(self) -> bool:
        """Open, and carrying nothing."""
        return self.state is _IDLE

    @property
    def is_closed(self) -> bool:
        """Of no use any more."""
        return self.state is _CLOSED

    def has_expired(self, now_s: float) -> bool:
        """Idle for so long that the engine may be about to close it."""
        return now_s >= self.expires_at_s

    def start(self, exchange: Exchange, request: Request) -> None:
        """Write the request; its reply goes to the exchange."""
        self.state = _ACTIVE
        self._exchange = exchange
        exchange.connection = self
        exchange.is_sent = True
        self._limit_bytes = self._max_header_bytes
        if len(request[-1]) < _JOIN_BELOW_BYTES:
            self._transport.write(b"".join(request))
        else:
            self._transport.writelines(request)

    def resume(self) -> None:
        """Read on: the exchange's buffer has been drained."""
        self._transport.resume_reading()

    def abort(self) -> None:
        """Close at once, so that the engine sees the client gone; unsent bytes are dropped."""
        if self.state is _CLOSED:
            return
        self._keeper.forget(self)
        has_transport = self.state is not _NEW
        self.state = _CLOSED
        self._exchange = None
        if has_transport:
            self._transport.abort()
            del self._transport, self._parser, self._feed  # no cycle is left for the collector

    def fail(self, error: UpstreamError) -> None:
        """Close at once and tell the exchange why."""
        exchange = self._exchange
        self.abort()
        if exchange is not None:
            exchange.fail(error)

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport, on behalf of an exchange that is about to start."""
        if self.state is _CLOSED:  # given up while connecting
            transport.close()
            return
        self._transport = cast("asyncio.Transport", transport)
        self._parser = HttpResponseParser(self)
        self._feed = self._parser.feed_data
        self.state = _ACTIVE

    def get_buffer(self, _sizehint: int) -> memoryview:
        """Return where to put what comes next."""
        return _ARRIVALS

    def buffer_updated(self, nbytes: int) -> None:
        """Take what has come."""
        self.data_received(_ARRIVALS[:nbytes])

    def data_received(self, data: bytes | memoryview) -> None:
        """Parse, hand over, and hold the engine back if the reader is slow."""
        exchange = self._exchange
        if exchange is None:  # nobody has asked for anything
            self.abort()
            return
        if not exchange.status:
            exchange.forget_request()
            if not exchange.unread_bytes and data[0] != _FIRST_BYTE:
                self.fail(UpstreamProtocol(f"{self._peer} sent bytes that are not an HTTP/1.1 reply"))
                return
        exchange.unread_bytes += len(data)
        failure: UpstreamError | None = None
        try:
            self._feed(data)
        except HttpParserError as error:
            failure = self._failure(error)
        if failure is not None:  # behind the except clause, whose error would stay with whatever is raised inside
            self.fail(failure)
            return
        if exchange.is_complete:
            self._finish(exchange)
        elif exchange.unread_bytes > self._limit_bytes:
            self._limit(exchange)
        exchange.wake()

    def eof_received(self) -> None:
        """End the exchange: the engine closed its side, which ends some bodies and cuts all others."""
        exchange = self._exchange
        if exchange is not None and self._ends_at_close:
            exchange.is_complete = True
            self._finish(exchange)
            exchange.wake()
        else:
            self.fail(UpstreamClosed(f"{self._peer} closed the connection before its reply was whole"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the exchange, unless we closed the connection ourselves."""
        if self.state is not _CLOSED:
            self.fail(UpstreamClosed(f"{self._peer} reset the connection: {exc}"))

    # Called by the parser, inside ``data_received``.

    def on_message_begin(self) -> None:
        """Refuse a second reply; a 1xx and the reply after it begin separately."""
        if self._exchange is None or self._exchange.is_complete:
            raise UpstreamProtocol(f"{self._peer} sent bytes after the end of its reply")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header or, after the head, a trailer."""
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Take the head, and find out where the body ends."""
        exchange, headers, parser = self._exchange, self._headers, self._parser
        status = parser.get_status_code()
        if exchange is None or status == 101:
            raise UpstreamProtocol(f"{self._peer} wants to switch protocols")
        self._headers = []
        if parser.get_http_version() not in _VERSIONS or not 100 <= status <= 599:
            raise UpstreamProtocol(f"{self._peer} sent a reply that isn't HTTP/1.1, or a status that is none")
        if status < 200:
            return
        if 300 <= status <= 399:
            raise UpstreamRedirect(f"{self._peer} answered with a redirect ({status}), which isn't followed")
        if any(len(name) == _CODING_CHARS and _is_foreign_coding(name, value) for name, value in headers):
            raise UpstreamProtocol(f"{self._peer} sent a reply with a transfer coding other than chunked")
        if status < 300 and self._transport.get_write_buffer_size():
            raise UpstreamProtocol(f"{self._peer} sent a good reply before its request was out")
        if exchange.unread_bytes > self._max_header_bytes and _size_bytes(headers) > self._max_header_bytes:
            raise self._head_too_large()
        exchange.status = status
        exchange.raw_headers = headers
        self._limit_bytes = self._read_buffer_bytes
        self._can_stay = parser.should_keep_alive()
        self._ends_at_close = not self._can_stay and not _is_framed(status, exchange.headers)

    def on_body(self, data: bytes) -> None:
        """Take a piece of the body, without its chunk framing."""
        self._exchange.pieces.append(data)  # type: ignore[union-attr]  # the parser runs for an exchange only

    def on_message_complete(self) -> None:
        """Note the end of a reply; that of a 1xx means nothing."""
        exchange = self._exchange
        if exchange is not None and exchange.status:
            exchange.is_complete = True

    def _finish(self, exchange: Exchange) -> None:
        """Part from a whole reply; keep the connection if both sides can go on with it."""
        self._exchange = None
        exchange.connection = None
        self._headers.clear()
        if self._can_stay and not self._transport.get_write_buffer_size():
            self.expires_at_s = self.loop.time() + self._idle_timeout_s
            if self._keeper.keep(self):
                self.state = _IDLE
                return
        self.abort()

    def _limit(self, exchange: Exchange) -> None:
        """I9: stop reading; what can't be drained (an endless head or framing) ends the exchange."""
        if not exchange.status:
            self.fail(self._head_too_large())
        elif exchange.pieces:
            exchange.is_paused = True
            self._transport.pause_reading()
        elif exchange.unread_bytes > 2 * self._max_header_bytes:  # twice: the head is counted in
            self.fail(UpstreamProtocol(f"{self._peer} sends framing without a body"))

    def _head_too_large(self) -> UpstreamProtocol:
        return UpstreamProtocol(f"the head of {self._peer}'s reply exceeds {self._max_header_bytes} bytes")

    def _failure(self, error: HttpParserError) -> UpstreamError:
        cause = error.__context__
        if isinstance(cause, UpstreamError):
            return cause.with_traceback(None)  # it would hold the exchange, which is to hold the error
        failure = UpstreamProtocol(f"{self._peer} sent bytes that are not a valid HTTP/1.1 reply: {error}")
        failure.__cause__ = error.with_traceback(None)
        return failure


def _is_foreign_coding(name: bytes, value: bytes) -> bool:
    """Whether a header says that the body is coded in a way that isn't undone here."""
    return name.lower() == b"transfer-encoding" and value.strip().lower() != b"chunked"


def _size_bytes(headers: Headers) -> int:
    return sum(len(name) + len(value) + len(b": \r\n") for name, value in headers)


def _is_framed(status: int, headers: Headers) -> bool:
    """Whether the body's end is told by the head and not by the end of the connection.

    Source: RFC 9112, section 6.3.
    """
    if status == 204:
        return True
    for name, value in headers:
        if name == b"transfer-encoding":
            return value.lower().endswith(b"chunked")
        if name == b"content-length":
            return True
    return False
