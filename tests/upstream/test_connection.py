"""Framing, flow control and failures of one connection, each over real sockets and for every split of the bytes."""

import asyncio
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator

import pytest

from pdrouter.errors import UpstreamClosed, UpstreamError, UpstreamProtocol, UpstreamRedirect
from pdrouter.upstream.connection import Connection
from pdrouter.upstream.pool import Origin, Pool

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Serve = Callable[[Script], Awaitable[Origin]]
OpenPool = Callable[..., Pool]
SendPieces = Callable[[asyncio.StreamWriter, Iterable[bytes]], Awaitable[None]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]

REQUEST = b"GET / HTTP/1.1\r\nhost: engine\r\n\r\n"
LIMIT_BYTES = 1 << 20

# reply, status, body, whether the connection stays
WHOLE = {
    "length": (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", 200, b"hello", True),
    "empty": (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", 404, b"", True),
    "length, then close": (
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello",
        200,
        b"hello",
        False,
    ),
    "chunked": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhel\r\n2;why=not\r\nlo\r\n0\r\n\r\n",
        200,
        b"hello",
        True,
    ),
    "chunked, trailers": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nx-sum: 7\r\nx-b: 8\r\n\r\n",
        200,
        b"hello",
        True,
    ),
    "chunked, then close": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        200,
        b"hello",
        False,
    ),
    "until close": (b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhello", 200, b"hello", False),
    "until close, empty": (b"HTTP/1.1 200 OK\r\n\r\n", 200, b"", False),
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\n\r\nhello", 200, b"hello", False),
    "HTTP/1.0, kept": (
        b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 5\r\n\r\nhello",
        200,
        b"hello",
        True,
    ),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", True),
    "204, then close": (b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n", 204, b"", False),
    "1xx": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hint\r\nlink: x\r\n\r\nHTTP/1.0 200 OK\r\n\r\nhello",
        200,
        b"hello",
        False,
    ),
    "1xx, kept": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
        200,
        b"hello",
        True,
    ),
}

# reply, whether the engine closes behind it, error
BROKEN: dict[str, tuple[bytes, bool, type[UpstreamError]]] = {
    "not HTTP": (b"SSH-2.0-OpenSSH_9.2\r\n", False, UpstreamProtocol),
    "bad status": (b"HTTP/1.1 2x0 OK\r\n\r\n", False, UpstreamProtocol),
    "bad header": (b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", False, UpstreamProtocol),
    "folded header": (b"HTTP/1.1 200 OK\r\na: b\r\n c: d\r\n\r\n", False, UpstreamProtocol),
    "bad length": (b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n", False, UpstreamProtocol),
    "two lengths": (
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        False,
        UpstreamProtocol,
    ),
    "length and chunked": (
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        False,
        UpstreamProtocol,
    ),
    "bad chunk size": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nhello",
        False,
        UpstreamProtocol,
    ),
    "chunk too long": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhello\r\n",
        False,
        UpstreamProtocol,
    ),
    "upgrade": (
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nhello",
        False,
        UpstreamProtocol,
    ),
    "bare 101": (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", False, UpstreamProtocol),
    "RTSP": (b"RTSP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello", False, UpstreamProtocol),
    "HTTP/2.0": (b"HTTP/2.0 200 OK\r\ncontent-length: 5\r\n\r\nhello", False, UpstreamProtocol),
    "HTTP/0.9": (b"HTTP/0.9 200 OK\r\ncontent-length: 5\r\n\r\nhello", False, UpstreamProtocol),
    "status 000": (b"HTTP/1.1 000 OK\r\ncontent-length: 5\r\n\r\nhello", False, UpstreamProtocol),
    "status 099": (b"HTTP/1.1 099 OK\r\ncontent-length: 5\r\n\r\nhello", False, UpstreamProtocol),
    "status 600": (b"HTTP/1.1 600 OK\r\ncontent-length: 5\r\n\r\nhello", False, UpstreamProtocol),
    "redirect": (b"HTTP/1.1 302 Found\r\nlocation: /\r\ncontent-length: 0\r\n\r\n", False, UpstreamRedirect),
    "not modified": (b"HTTP/1.1 304 Not Modified\r\n\r\n", False, UpstreamRedirect),
    "other coding": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nhello", False, UpstreamProtocol),
    "two codings": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        False,
        UpstreamProtocol,
    ),
    "two lines of codings": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        False,
        UpstreamProtocol,
    ),
    "no reply": (b"", True, UpstreamClosed),
    "half a head": (b"HTTP/1.1 200 OK\r\ncontent-", True, UpstreamClosed),
    "only 1xx": (b"HTTP/1.1 100 Continue\r\n\r\n", True, UpstreamClosed),
    "half a length": (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhell", True, UpstreamClosed),
    "half a length, then close": (
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhell",
        True,
        UpstreamClosed,
    ),
    "no last chunk": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
        True,
        UpstreamClosed,
    ),
    "half a last chunk": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n5\r\nhello\r\n0\r\n",
        True,
        UpstreamClosed,
    ),
}


def splits(reply: bytes) -> Iterator[list[bytes]]:
    """Whole, byte by byte, and every way to cut it in two."""
    yield [reply]
    yield [reply[at : at + 1] for at in range(len(reply))]
    for at in range(1, len(reply)):
        yield [reply[:at], reply[at:]]


async def ask(pool: Pool) -> tuple[int, bytes]:
    """One exchange, read as a relay does."""
    return await ask_with(pool)


async def ask_with(pool: Pool, *sent: bytes) -> tuple[int, bytes]:
    """One exchange whose request has a body."""
    exchange = await pool.send(REQUEST, *sent)
    try:
        status = await exchange.head()
        body = b""
        while piece := await exchange.read():
            body += piece
        assert exchange.is_complete
        return status, body
    finally:
        exchange.close()


@pytest.mark.parametrize(("reply", "status", "body", "stays"), WHOLE.values(), ids=WHOLE)
async def test_whole_replies(
    reply: bytes,
    status: int,
    body: bytes,
    stays: bool,
    serve: Serve,
    open_pool: OpenPool,
    send_pieces: SendPieces,
    until: Until,
) -> None:
    """However the bytes are cut, status and body are the same, and the connection is kept where it can be."""
    cuts = splits(reply)
    count = len(list(splits(reply)))

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readuntil(b"\r\n\r\n"):
            await send_pieces(writer, next(cuts))
            if not stays:
                writer.close()
                return

    pool = open_pool(await serve(script))
    for _ in range(count):
        assert await ask(pool) == (status, body)
    await until(lambda: pool.statistics().active == 0)
    counts = pool.statistics()
    assert (counts.opened, counts.reused) == ((1, count - 1) if stays else (count, 0))
    assert counts.idle == (1 if stays else 0)


@pytest.mark.parametrize(("reply", "closes", "failure"), BROKEN.values(), ids=BROKEN)
async def test_broken_replies(
    reply: bytes,
    closes: bool,
    failure: type[UpstreamError],
    serve: Serve,
    open_pool: OpenPool,
    send_pieces: SendPieces,
) -> None:
    """However the bytes are cut, a lie or an early end fails its own exchange and costs its connection."""
    cuts = splits(reply)
    count = len(list(splits(reply)))

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await send_pieces(writer, next(cuts))
        if not closes:
            await reader.read()

    pool = open_pool(await serve(script))
    for _ in range(count):
        with pytest.raises(failure):
            await ask(pool)
        assert repr(pool).endswith("0 active, 0 idle>")
    counts = pool.statistics()
    assert (counts.opened, counts.reused, counts.repeated) == (count, 0, 0)


@pytest.mark.parametrize("garbage", [b"x", b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"])
async def test_bytes_behind_the_reply(
    garbage: bytes, serve: Serve, open_pool: OpenPool, send_pieces: SendPieces, until: Until
) -> None:
    """Bytes that come with the end of a reply fail it; later ones cost the idle connection; none is reused."""
    reply = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
    scripts = iter([[reply + garbage], [reply[:-1], reply[-1:] + garbage], [reply, garbage]])

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await send_pieces(writer, next(scripts))
        await reader.read()

    pool = open_pool(await serve(script))
    for _ in range(2):
        with pytest.raises(UpstreamProtocol, match="after the end"):
            await ask(pool)
    assert await ask(pool) == (200, b"hello")
    await until(lambda: pool.statistics().idle == 0)
    counts = pool.statistics()
    assert (counts.opened, counts.reused, counts.retired) == (3, 0, 1)


async def test_body_before_a_failure_is_delivered(serve: Serve, open_pool: OpenPool) -> None:
    """What arrived before the engine broke off can be read; then each read raises."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello")
        await writer.drain()

    exchange = await open_pool(await serve(script)).send(REQUEST)
    assert await exchange.head() == 200
    assert await exchange.read() == b"hello"
    for _ in range(2):
        with pytest.raises(UpstreamClosed):
            await exchange.read()
    with pytest.raises(UpstreamClosed):
        exchange.read_nowait()
    assert not exchange.is_complete


async def test_headers(serve: Serve, open_pool: OpenPool) -> None:
    """Headers keep their order and repeats; names are lower-cased, white space around values is cut."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 103 Early Hints\r\nLink: no\r\n\r\nHTTP/1.1 200 OK\r\nX-A:  One \t\r\nSet-Cookie: a\r\n"
            b"set-cookie: b\r\nEmpty:\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nTrailer: no\r\n\r\n"
        )
        await reader.read()

    exchange = await open_pool(await serve(script)).send(REQUEST)
    await exchange.head()
    assert await exchange.read() == b""
    assert exchange.headers == [
        (b"x-a", b"One"),
        (b"set-cookie", b"a"),
        (b"set-cookie", b"b"),
        (b"empty", b""),
        (b"transfer-encoding", b"chunked"),
    ]
    exchange.close()


async def test_reading(serve: Serve, open_pool: OpenPool, send_pieces: SendPieces, until: Until) -> None:
    """Pieces that arrived together come joined, none twice; read_nowait tells nothing yet from the end."""
    go = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await go.wait()
        await send_pieces(writer, [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"1\r\na\r\n"])
        await send_pieces(writer, [b"1\r\nb\r\n1\r\nc\r\n"])
        go.clear()
        await go.wait()
        await send_pieces(writer, [b"1\r\nd\r\n", b"0\r\n\r\n"])
        go.clear()
        await reader.read()

    exchange = await open_pool(await serve(script)).send(REQUEST)
    assert exchange.read_nowait() is None
    go.set()
    assert await exchange.head() == await exchange.head() == 200
    await until(lambda: not go.is_set())
    assert await exchange.read() == b"abc"
    assert exchange.read_nowait() is None
    go.set()
    await until(lambda: not go.is_set())
    assert exchange.is_complete
    assert exchange.read_nowait() == b"d"
    assert exchange.read_nowait() == b""
    assert await exchange.read() == b""
    exchange.close()
    exchange.close()


async def test_reading_in_parts(serve: Serve, open_pool: OpenPool, until: Until) -> None:
    """A listener that reads so much at once is called until it has all, turn by turn, and then the end."""
    text, turn = bytes(range(256)) * 1200, 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(text))
        writer.write(text)
        await reader.read()

    def listener() -> None:
        if piece := exchange.read_nowait(16_384):
            read.append((turn, piece, exchange.is_at_end))

    exchange = await open_pool(await serve(script)).send(REQUEST)
    await exchange.head()
    read: list[tuple[int, bytes, bool]] = []
    await until(lambda: exchange.is_complete or exchange.is_paused)
    exchange.listen(listener)
    listener()
    while not exchange.is_at_end:
        turn += 1
        await asyncio.sleep(0)
    assert b"".join(piece for _, piece, _ in read) == text
    assert [is_at_end for _, _, is_at_end in read] == [False] * (len(read) - 1) + [True]
    assert max(len(piece) for _, piece, _ in read) <= 16_384
    assert max(Counter(turn for turn, _, _ in read).values()) <= 2  # more came, and the rest of what had
    exchange.close()


async def test_read_before_head(serve: Serve, open_pool: OpenPool) -> None:
    """Reading the body waits for the head first."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")

    pool = open_pool(await serve(script))
    assert await (await pool.send(REQUEST)).read() == b"hello"
    assert await (await pool.send(REQUEST)).read_all(LIMIT_BYTES) == b"hello"
    assert pool.statistics().opened == 1


async def test_read_all(serve: Serve, open_pool: OpenPool, send_pieces: SendPieces) -> None:
    """A body of just the limit is read; one byte more fails, and the engine sees the client gone."""
    gone = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for end in (b"0\r\n\r\n", b""):
            await reader.readuntil(b"\r\n\r\n")
            await send_pieces(writer, [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"2\r\nhe\r\n"])
            writer.write(b"3\r\nllo\r\n" + end)
        assert await reader.read() == b""
        gone.set()

    pool = open_pool(await serve(script))
    exchange = await pool.send(REQUEST)
    assert await exchange.read_all(5) == b"hello"
    exchange.close()
    exchange = await pool.send(REQUEST)
    with pytest.raises(UpstreamProtocol, match="exceeds 4 bytes"):
        await exchange.read_all(4)
    assert repr(pool).endswith("0 active, 0 idle>")
    await gone.wait()


async def test_request_bytes(serve: Serve, open_pool: OpenPool) -> None:
    """Head and body parts reach the engine in order and unchanged, with Nagle's algorithm off."""
    seen: list[bytes] = []
    parts = [bytes([n]) * 70_000 for n in b"abc"]

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            seen.append(await reader.readexactly(len(REQUEST) + 210_000))
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")

    pool = open_pool(await serve(script))
    for _ in range(2):
        exchange = await pool.send(REQUEST, *parts)
        assert isinstance(exchange.connection, Connection)
        sock = exchange.connection._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        assert await exchange.head() == 204
        exchange.close()
    assert seen == [REQUEST + b"".join(parts)] * 2


@pytest.mark.invariant("I9")
async def test_slow_reader_holds_the_engine_back(serve: Serve, open_pool: OpenPool, until: Until) -> None:
    """While nobody reads, no more than the buffer and one segment is held; afterwards every byte is there."""
    block, blocks = bytes(range(256)) * 256, 384
    sent = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (len(block) * blocks))
        for _ in range(blocks):
            writer.write(block)
            await writer.drain()
            sent += 1
        await reader.read()

    pool = open_pool(await serve(script))
    exchange = await pool.send(REQUEST)
    await exchange.head()
    await until(lambda: exchange.is_paused)
    held_bytes = exchange.unread_bytes
    for _ in range(200):
        await asyncio.sleep(0)
    assert exchange.unread_bytes == held_bytes <= 65536 + 262144
    assert sum(map(len, exchange.pieces)) <= held_bytes
    assert sent < blocks
    total, pauses = 0, 0
    while piece := await exchange.read():
        assert piece[:256] == (block + block)[total % 256 :][:256][: len(piece)]
        total += len(piece)
        assert exchange.unread_bytes == 0
        pauses += exchange.is_paused
    assert (total, sent, pauses) == (len(block) * blocks, blocks, 0)
    exchange.close()
    assert pool.statistics().idle == 1


@pytest.mark.parametrize("ends", ["caller", "pool"])
async def test_ending_a_paused_exchange(ends: str, serve: Serve, open_pool: OpenPool, until: Until) -> None:
    """Ended while the engine is held back: the engine sees it, what has arrived can be read, nothing is left."""
    gone = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while True:
                writer.write(bytes(65536))
                await writer.drain()
        finally:
            gone.set()

    pool = open_pool(await serve(script))
    exchange = await pool.send(REQUEST)
    await exchange.head()
    await until(lambda: exchange.is_paused)
    if ends == "caller":
        exchange.close()
    else:
        await pool.aclose()
    await gone.wait()
    assert len(await exchange.read()) >= 65536
    with pytest.raises(UpstreamClosed):
        await exchange.read()
    assert repr(pool).endswith("0 active, 0 idle>")


HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.invariant("I9")
@pytest.mark.parametrize(
    ("start", "more"),
    [
        (HEAD, b"a: b\r\n"),
        (HEAD + b"a: ", b"b" * 100),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (CHUNKED + b"5\r\nhello\r\n0\r\n", b"a: b\r\n"),
        (CHUNKED + b"5;x=", b"y" * 100),
    ],
    ids=["headers", "one header", "1xx", "trailers", "chunk extension"],
)
async def test_endless_framing(
    start: bytes, more: bytes, serve: Serve, open_pool: OpenPool, send_pieces: SendPieces
) -> None:
    """A head or a chunk's framing that never ends fails the exchange at the limit."""
    rounds = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal rounds
        await reader.readuntil(b"\r\n\r\n")
        await send_pieces(writer, [start])
        while True:
            rounds += 1
            await send_pieces(writer, [more])

    pool = open_pool(await serve(script), read_buffer_bytes=4096)
    with pytest.raises(UpstreamProtocol):
        await ask(pool)
    assert rounds * len(more) <= 2 * 4096 + len(more)
    assert repr(pool).endswith("0 active, 0 idle>")


@pytest.mark.parametrize("extra", [0, 1])
async def test_large_head_at_once(extra: int, serve: Serve, open_pool: OpenPool) -> None:
    """The limit on the head counts its headers, not the body that arrives with them."""
    size = 4096 - len(b"content-length: 9000\r\n") - len(b"a: \r\n") + extra

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + b"content-length: 9000\r\na: " + b"x" * size + b"\r\n\r\n" + b"y" * 9000)
        await reader.read()

    pool = open_pool(await serve(script), max_header_bytes=4096 + len(HEAD) * (1 - extra))
    if extra:
        with pytest.raises(UpstreamProtocol, match="head of"):
            await ask(pool)
    else:
        assert await ask(pool) == (200, b"y" * 9000)


async def test_reply_before_the_request_is_out(serve: Serve, open_pool: OpenPool) -> None:
    """An engine that refuses a large body unread is heard, and the half-used connection isn't kept."""
    done = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 5\r\n\r\nlarge")
        await done.wait()

    pool = open_pool(await serve(script))
    exchange = await pool.send(REQUEST, bytes(32 << 20))
    assert await exchange.head() == 413
    assert await exchange.read_all(LIMIT_BYTES) == b"large"
    exchange.close()
    assert repr(pool).endswith("0 active, 0 idle>")
    done.set()


async def test_a_good_reply_before_the_request_is_out(serve: Serve, open_pool: OpenPool) -> None:
    """An engine can't have served what it hasn't read: that reply belongs to nothing, or to another request."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    pool = open_pool(await serve(script))
    with pytest.raises(UpstreamProtocol, match="before its request"):
        await ask_with(pool, bytes(32 << 20))
    assert repr(pool).endswith("0 active, 0 idle>")


@pytest.mark.parametrize("wait", ["head", "read"])
async def test_cancelled_waiter(wait: str, serve: Serve, open_pool: OpenPool, until: Until) -> None:
    """A task cancelled in head() or read() leaves nothing behind, and the engine sees the client gone."""
    gone = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if wait == "read":
            writer.write(CHUNKED + b"5\r\nhello\r\n")
        assert await reader.read() == b""
        gone.set()

    pieces: list[bytes] = []
    pool = open_pool(await serve(script))
    waiting = asyncio.Event()

    async def caller() -> None:
        exchange = await pool.send(REQUEST)
        try:
            waiting.set()
            await exchange.head()
            while piece := await exchange.read():
                pieces.append(piece)
        finally:
            exchange.close()

    task = asyncio.create_task(caller())
    await waiting.wait()
    await until(lambda: wait == "head" or bool(pieces))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert repr(pool).endswith("0 active, 0 idle>")
    await gone.wait()


async def test_arrival_after_cancellation(serve: Serve, open_pool: OpenPool, send_pieces: SendPieces) -> None:
    """A wait that was cancelled takes nothing away: the next one gets the bytes."""
    go = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await go.wait()
        await send_pieces(writer, [b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"])
        go.clear()
        await reader.read()

    exchange = await open_pool(await serve(script)).send(REQUEST)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(exchange.head(), 0.001)
    go.set()
    assert await exchange.head() == 200
    assert await exchange.read() == b"hello"
    exchange.close()


async def test_close_wakes_the_reader(serve: Serve, open_pool: OpenPool) -> None:
    """Closing an exchange ends a wait in another task."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    pool = open_pool(await serve(script))
    exchange = await pool.send(REQUEST)
    task = asyncio.create_task(exchange.head())
    await asyncio.sleep(0)
    exchange.close()
    with pytest.raises(UpstreamClosed):
        await task
    with pytest.raises(UpstreamClosed):
        exchange.read_nowait()


async def test_reset(serve: Serve, open_pool: OpenPool) -> None:
    """A reset is told as such, also when the body would have ended with the connection."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nhello")
        await reader.readexactly(1)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    pool = open_pool(await serve(script))
    exchange = await pool.send(REQUEST)
    assert await exchange.read() == b"hello"
    assert isinstance(exchange.connection, Connection)
    exchange.connection._transport.write(b"!")  # asks the script for the reset
    with pytest.raises(UpstreamClosed, match="reset"):
        await exchange.read()
    exchange.close()


async def test_unasked_bytes(serve: Serve, open_pool: OpenPool, until: Until) -> None:
    """An engine that speaks first loses its connection."""
    spoken = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
        spoken.set()
        await reader.read()

    origin = await serve(script)
    pool = open_pool(origin)
    connection = Connection(pool, str(origin), idle_timeout_s=1.0, read_buffer_bytes=1, max_header_bytes=1)
    await connection.loop.create_connection(lambda: connection, origin.host, origin.port)
    await spoken.wait()
    await until(lambda: connection.is_closed)
