"""One request as its client sees it: what was asked, and the reply: start, write with flow control, end, gone.

Dispatch and relay know no more of HTTP than this. Read next: ``connection.py``, which makes one for each request.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from http import HTTPStatus
from typing import Protocol

from pdrouter.errors import RouterError

Headers = Sequence[tuple[bytes, bytes]]


class Listener(Protocol):
    """Whoever writes the reply, and must know how its client does."""

    def client_drained(self) -> None:
        """A client that was full takes more."""

    def client_gone(self) -> None:
        """The client has closed its connection."""


class Wire(Protocol):
    """What carries the reply: ``connection.py``."""

    @property
    def is_local(self) -> bool:
        """Whether the client is on this machine."""
        ...

    @property
    def write(self) -> Callable[[bytes], None]:
        """Sends bytes, unless the connection is closing."""
        ...

    @property
    def is_full(self) -> bool:
        """Whether nothing more should be written now."""
        ...

    def replied(self, client: "Client") -> None:
        """Go on behind a reply that is whole."""

    def close(self) -> None:
        """Close behind what was written."""

    def abort(self) -> None:
        """Close at once."""


class Client:
    """Whoever waits for the reply. After each ``write``, a writer waits while ``is_full`` (I9).

    ``path`` is without ``query``, header names are in lower case; ``headers`` are those that may go further,
    ``header`` has all; ``error`` says why the request can't be served as it came. ``lines`` are header lines of any
    reply to it; ``asked_s`` is the moment at which it was handed to a thread, once its body was there, else 0.
    """

    __slots__ = (
        "_body",
        "_head",
        "_is_chunked",
        "_takes_chunks",
        "_wire",
        "asked_s",
        "began_s",
        "body_bytes",
        "error",
        "header",
        "headers",
        "is_expectant",
        "is_started",
        "is_whole",
        "keeps_alive",
        "lines",
        "listener",
        "method",
        "path",
        "query",
        "status",
        "takes_body",
    )

    def __init__(
        self,
        wire: Wire,
        method: bytes,
        path: bytes,
        headers: list[tuple[bytes, bytes]],
        header: Mapping[bytes, bytes],
        began_s: float,
        *,
        takes_chunks: bool,
        keeps_alive: bool,
    ) -> None:
        self._wire = wire
        self._takes_chunks = takes_chunks
        self._body: bytes | bytearray = b""
        self._head = b""
        self._is_chunked = False
        self.method = method
        self.path = path
        self.query = b""
        self.lines = b""
        self.headers = headers
        self.header = header
        self.began_s = began_s
        self.asked_s = 0.0
        self.body_bytes = 0
        self.is_expectant = False
        self.is_whole = False
        self.takes_body = False
        self.keeps_alive = keeps_alive
        self.error: RouterError | None = None
        self.listener: Listener | None = None
        self.is_started = False
        self.status = 0

    def take(self, piece: bytes) -> None:
        """Add to the request's body, if anybody takes it."""
        self.body_bytes += len(piece)
        if not self.takes_body:
            return
        if not self._body:
            self._body = piece
        else:
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)  # grows in place, however small the pieces are
            self._body += piece

    def body(self) -> bytes:
        """Return the request's body, and let go of it."""
        body, self._body = self._body, b""
        return bytes(body)

    def drop_body(self) -> None:
        """Let go of the request's body."""
        self._body = b""

    def start(self, status: int, headers: Headers, lines: bytes = b"") -> None:
        """Begin the reply; from here on nothing is tried again (I7). The head goes out with the first piece.

        ``lines`` are more headers, each with its line end.
        """
        self.is_started = True
        self.status = status
        names = dict(headers)
        head = b"".join([_status_line(status), *[b"%b: %b\r\n" % pair for pair in headers], self.lines, lines])
        if b"content-length" not in names and status not in (204, 304):
            self._is_chunked = self._takes_chunks and self.method != b"HEAD"
            if self._is_chunked:
                head += b"transfer-encoding: chunked\r\n"
            else:
                self.keeps_alive = False  # the body ends where the connection does
        self._head = head + (b"\r\n" if self.keeps_alive else b"connection: close\r\n\r\n")

    def write(self, piece: bytes) -> None:
        """Send a piece of the body."""
        if self._is_chunked and piece:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        if self._head:
            piece, self._head = self._head + piece, b""
        if piece:
            self._wire.write(piece)

    def end(self, piece: bytes = b"") -> None:
        """Send the last piece."""
        if self._is_chunked:
            piece = b"%x\r\n%b\r\n0\r\n\r\n" % (len(piece), piece) if piece else b"0\r\n\r\n"
        elif self.method == b"HEAD":
            piece = b""
        self._wire.write(self._head + piece)
        self._head = b""
        self._wire.replied(self)

    def reply(self, status: int, headers: Headers, body: bytes, lines: bytes = b"") -> None:
        """Send a whole reply."""
        self.start(status, [*headers, (b"content-length", b"%d" % len(body))], lines)
        self.end(body)

    @property
    def is_local(self) -> bool:
        """Whether the client is on this machine."""
        return self._wire.is_local

    @property
    def is_full(self) -> bool:
        """Whether the client is behind, so that nothing more should be written now."""
        return self._wire.is_full

    def cut(self) -> None:
        """Close the connection behind what was written, so that the reply has no proper end."""
        self._wire.close()

    def abort(self) -> None:
        """Close the connection at once; what the client hasn't taken is dropped."""
        self._wire.abort()


@lru_cache(maxsize=128)
def _status_line(status: int) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()
