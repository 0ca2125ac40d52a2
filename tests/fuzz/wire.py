"""An engine's connection: any bytes are one reply, in whatever pieces, as another parser reads them; or a failure."""

from collections.abc import Iterator
from typing import NamedTuple

import h11

from pdrouter.errors import UpstreamClosed, UpstreamProtocol, UpstreamRedirect
from tests.back import Heard, heard
from tests.fuzz.source import Source

MOST_BYTES = 1000
FAILURES = (UpstreamClosed.code, UpstreamProtocol.code, UpstreamRedirect.code)

_LINES = (
    b"HTTP/1.1 200 OK",
    b"HTTP/1.1 200 OK",
    b"HTTP/1.0 200 OK",
    b"HTTP/1.1 100 Continue",
    b"HTTP/1.1 103 Early Hints",
    b"HTTP/1.1 101 Switching Protocols",
    b"HTTP/1.1 204 No Content",
    b"HTTP/1.1 304 Not Modified",
    b"HTTP/1.1 503 Busy",
    b"HTTP/1.1 200",
    b"HTTP/1.1 999 \xff",
    b"HTTP/2 200 OK",
    b"HTTP/2.0 200 OK",
    b"RTSP/1.0 200 OK",
    b"HTTP/1.1 302 Found",
    b"HTTP/1.1 099 X",
)
_HEADERS = (
    b"content-length: 5",
    b"transfer-encoding: chunked",
    b"Content-Type: text/event-stream",
    b"connection: close",
    b"connection: keep-alive",
    b"content-length: 0",
    b"Content-Length:5 ",
    b"content-length: 5, 5",
    b"content-length: 18446744073709551616",
    b"content-length: +5",
    b"transfer-encoding: gzip, chunked",
    b"transfer-encoding: identity",
    b"Transfer-Encoding : chunked",
    b"upgrade: h2c",
    b"connection: upgrade",
    b"x: " + b"y" * 400,
    b"x:\r\n folded",
    b": nameless",
    b"set-cookie: a=\xff",
)
_BODIES = (
    b"hello",
    b"5\r\nhello\r\n0\r\n\r\n",
    b"3;a=b\r\nhel\r\n2\r\nlo\r\n0\r\nx-sum: 1\r\n\r\n",
    b"5\r\nhello\r\n",
    b"0\r\n\r\n",
    b"",
    b"ffffffffffffffff\r\n",
    b"hello" * 300,
    b"5dc\r\n" + b"hello" * 300 + b"\r\n0\r\n\r\n",
    b"1\r\nx\r\n" * 40 + b"0\r\n\r\n",
    b"5\nhello\n0\n\n",
)


_GOOD = (
    (b"HTTP/1.1 %d OK\r\ncontent-length: 5\r\n%b\r\n", b"hello"),
    (b"HTTP/1.1 %d OK\r\nTransfer-Encoding: chunked\r\n%b\r\n", b"3;a=b\r\nhel\r\n2\r\nlo\r\n0\r\nx-sum: 1\r\n\r\n"),
    (b"HTTP/1.1 %d OK\r\n%b\r\n", b"hello"),
    (b"HTTP/1.0 %d OK\r\n%b\r\n", b"hello"),
)
_GOOD_HEADERS = (b"", b"x: y\r\n", b"connection: close\r\n", b"content-type: text/event-stream \r\nx:\r\n")


class Reading(NamedTuple):
    """A reply as it is to be read."""

    status: int
    body: bytes


def one_input(raw: bytes) -> None:
    """Hold what is heard to another reading, and that it is the same in pieces."""
    source = Source(raw)
    keeps = source.once_in(2)
    expected = None
    if source.once_in(3):
        said, expected = good(source)
    else:
        said = source.rest() if source.once_in(4) else source.spoilt(b"".join(replies(source)))
    whole = heard([said] if said else [], MOST_BYTES, keeps=keeps)
    hold(whole, expected or other_reading(said), keeps=keeps)
    assert expected is None or whole.is_whole
    cut = heard(source.pieces(said), MOST_BYTES, keeps=keeps)
    hold(cut, expected or other_reading(said), keeps=keeps)
    if whole.is_whole and len(said) < MOST_BYTES:  # what comes too late for its connection is no part of the reply
        assert cut._replace(is_kept=whole.is_kept) == whole


def good(source: Source) -> tuple[bytes, Reading]:
    """Write a reply that nobody could take in two ways, and say how it is to be read."""
    before = source.pick((b"", b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Hints\r\nlink: x\r\n\r\n"))
    status = source.pick((200, 201, 299, 400, 503, 599))
    head, body = source.pick(_GOOD)
    return before + head % (status, source.pick(_GOOD_HEADERS)) + body, Reading(status, b"hello")


def replies(source: Source) -> Iterator[bytes]:
    """Yield a few replies of any lines."""
    for _ in range(source.below(3) + 1):
        lines = [source.pick(_LINES), *(source.pick(_HEADERS) for _ in range(source.below(5)))]
        yield b"".join(line + b"\r\n" for line in lines) + b"\r\n" + source.pick(_BODIES)


def hold(told: Heard, other: Reading | None, *, keeps: bool) -> None:
    """Hold that a reply is whole or has failed, and that a whole one is read as by the other, if that takes it."""
    assert told.is_whole or told.code in FAILURES
    assert not (told.is_kept and not (keeps and told.is_whole))
    if told.is_whole:
        assert 200 <= told.status <= 599
        assert other is None or told[:2] == other


def other_reading(said: bytes) -> Reading | None:
    """Return the reply as h11 reads it, ``None`` where it doesn't take it."""
    reader = h11.Connection(h11.CLIENT)
    reader.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    reader.send(h11.EndOfMessage())
    try:
        reader.receive_data(said)
        reader.receive_data(b"")
        while isinstance(head := reader.next_event(), h11.InformationalResponse):
            pass
        if not isinstance(head, h11.Response):
            return None
        body = b""
        while isinstance(event := reader.next_event(), h11.Data):
            body += event.data
    except h11.RemoteProtocolError:
        return None
    return Reading(head.status_code, body) if isinstance(event, h11.EndOfMessage) else None
