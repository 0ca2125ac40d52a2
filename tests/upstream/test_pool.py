"""Keeping, reusing, retiring and limiting connections, over real sockets."""

import asyncio
import contextlib
import errno
import resource
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import pytest

from pdrouter.errors import (
    ConnectFailed,
    ConnectTimeout,
    NameNotResolved,
    PoolExhausted,
    UpstreamClosed,
    UpstreamProtocol,
)
from pdrouter.upstream.connection import Connection
from pdrouter.upstream.exchange import Exchange
from pdrouter.upstream.pool import Origin, Pool

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Serve = Callable[[Script], Awaitable[Origin]]
OpenPool = Callable[..., Pool]
Until = Callable[[Callable[[], bool]], Awaitable[None]]

REQUEST = b"GET / HTTP/1.1\r\nhost: engine\r\n\r\n"
REPLY = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
EMPTY = "0 active, 0 idle>"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Behave as an engine should."""
    while True:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(REPLY)


async def ask(pool: Pool) -> bytes:
    """One exchange."""
    exchange = await pool.send(REQUEST)
    try:
        assert await exchange.head() == 200
        return await exchange.read_all(1024)
    finally:
        exchange.close()


@pytest.fixture
def deaf_origin() -> Iterator[Origin]:
    """Listen on a port where connecting neither succeeds nor fails: its queue of connections is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = listener.getsockname()
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(address)
        yield Origin(*address)


async def test_reuse(serve: Serve, open_pool: OpenPool) -> None:
    """One connection serves one exchange after the other."""
    pool = open_pool(await serve(answer))
    for _ in range(5):
        assert await ask(pool) == b"hello"
    counts = pool.statistics()
    assert (counts.active, counts.idle, counts.opened, counts.reused) == (0, 1, 1, 4)
    assert repr(pool) == f"<Pool 127.0.0.1:{pool.origin.port}: 0 active, 1 idle>"


async def test_kept_connection_is_written_at_once(serve: Serve, open_pool: OpenPool) -> None:
    """With an idle connection, send() gives the bytes to the transport without a turn of the loop."""
    pool = open_pool(await serve(answer))
    await ask(pool)
    with pytest.raises(StopIteration) as done:
        pool.send(REQUEST).send(None)
    exchange = done.value.value
    assert isinstance(exchange, Exchange)
    assert await exchange.head() == 200
    exchange.close()


async def test_last_used_is_reused_first(serve: Serve, open_pool: OpenPool) -> None:
    """Of the idle connections, the one that became idle last is taken first."""
    gates = [asyncio.Event() for _ in range(3)]

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            gate = gates[int((await reader.readuntil(b"#"))[:1])]
            await gate.wait()
            writer.write(REPLY)

    pool = open_pool(await serve(script))
    exchanges = [await pool.send(b"%d#" % n) for n in range(3)]
    connections = [exchange.connection for exchange in exchanges]
    for turn in (1, 2, 0):
        gates[turn].set()
        assert await exchanges[turn].read_all(1024) == b"hello"
        gates[turn].clear()
    assert [(await pool.send(b"0#")).connection for _ in range(3)] == [connections[n] for n in (0, 2, 1)]
    assert pool.statistics().reused == 3


async def test_surplus_is_retired(serve: Serve, open_pool: OpenPool) -> None:
    """No more than max_idle connections are kept."""
    pool = open_pool(await serve(answer), max_idle=2)
    assert await asyncio.gather(*(ask(pool) for _ in range(4))) == [b"hello"] * 4
    counts = pool.statistics()
    assert (counts.active, counts.idle, counts.opened, counts.retired) == (0, 2, 4, 2)


@pytest.mark.invariant("I9")
async def test_connection_limit(serve: Serve, open_pool: OpenPool) -> None:
    """At max_connections a request fails at once; a connection that ends, or is idle, makes room."""
    go = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readuntil(b"\r\n\r\n"):
            await go.wait()
            writer.write(REPLY)

    pool = open_pool(await serve(script), max_connections=2)
    first, second = await pool.send(REQUEST), await pool.send(REQUEST)
    with pytest.raises(PoolExhausted):
        pool.send(REQUEST).send(None)
    assert pool.statistics().exhausted == 1
    first.close()
    go.set()
    assert await ask(pool) == b"hello"
    assert await ask(pool) == b"hello"
    assert await second.read_all(1024) == b"hello"
    counts = pool.statistics()
    assert (counts.active, counts.idle, counts.opened) == (0, 2, 3)


async def test_expired_are_retired_by_the_timer(serve: Serve, open_pool: OpenPool, until: Until) -> None:
    """Connections that are idle for too long go by themselves, oldest first; one timer serves all."""
    pool = open_pool(await serve(answer), idle_timeout_s=0.02)
    await asyncio.gather(*(ask(pool) for _ in range(3)))
    assert pool.statistics().idle == 3
    await until(lambda: pool.statistics().idle == 0)
    assert pool.statistics().retired == 3
    assert pool._timer is None
    assert await ask(pool) == b"hello"
    assert pool._timer is not None


@pytest.mark.parametrize("is_lasting", [False, True])
async def test_no_open_file_is_left(
    serve: Serve, open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch, is_lasting: bool
) -> None:
    """Idle connections make room for one that is needed; where that doesn't help, it is the router's own fault."""
    pool, loop = open_pool(await serve(answer)), asyncio.get_running_loop()
    kept, other = await pool.send(REQUEST), await pool.send(REQUEST)
    for exchange in (kept, other):
        await exchange.read_all(1024)
    assert pool.statistics().idle == 2
    create, refusals = type(loop).create_connection, [True] * (2 if is_lasting else 1)

    async def scarce(*args: Any, **options: Any) -> Any:
        if refusals:
            refusals.pop()
            raise OSError(errno.EMFILE, "Too many open files")
        return await create(*args, **options)

    monkeypatch.setattr(type(loop), "create_connection", scarce, raising=False)
    opening = pool._open()
    if is_lasting:
        with pytest.raises(PoolExhausted, match="Too many open files"):
            await opening
    else:
        (await opening).abort()
    assert pool.statistics().idle == 0
    assert not refusals


async def test_expired_are_not_taken(serve: Serve, open_pool: OpenPool) -> None:
    """An old connection isn't used, even if the timer is late."""
    pool = open_pool(await serve(answer), idle_timeout_s=0.0)
    exchange = await pool.send(REQUEST)
    pool._timer = asyncio.get_running_loop().call_later(60, int)
    await exchange.read_all(1024)
    assert pool.statistics().idle == 1
    assert await ask(pool) == b"hello"
    counts = pool.statistics()
    assert (counts.opened, counts.reused, counts.retired) == (2, 0, 1)


async def test_closed_by_the_engine_while_idle(serve: Serve, open_pool: OpenPool, until: Until) -> None:
    """A connection that the engine ends between two exchanges is dropped at once and costs no repeat."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(REPLY)
        writer.close()

    pool = open_pool(await serve(script))
    for _ in range(3):
        assert await ask(pool) == b"hello"
        await until(lambda: pool.statistics().idle == 0)
    counts = pool.statistics()
    assert (counts.active, counts.opened, counts.retired, counts.repeated) == (0, 3, 3, 0)


class Fickle:
    """An engine that answers each connection's first request and treats the next as told."""

    def __init__(self, last_words: bytes, *, resets: bool, then_dies: bool) -> None:
        self.last_words = last_words
        self.resets = resets
        self.then_dies = then_dies
        self.requests: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not (self.then_dies and self.requests):
            self.requests.append(await reader.readuntil(b"#"))
            writer.write(REPLY)
        self.requests.append(await reader.readuntil(b"#"))
        if self.resets:
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.write(self.last_words)
        if not self.resets:
            writer.write_eof()
            await reader.read()


@pytest.mark.parametrize("resets", [False, True], ids=["closed", "reset"])
async def test_lost_race_is_repeated(resets: bool, serve: Serve, open_pool: OpenPool) -> None:
    """A kept connection that ends before any byte of the reply: the same bytes go out once more, afresh."""
    engine = Fickle(b"", resets=resets, then_dies=False)
    pool = open_pool(await serve(engine), max_connections=1)
    assert await (await pool.send(REQUEST, b"body", b"1#")).read_all(1024) == b"hello"
    exchange = await pool.send(REQUEST, b"body", b"2#")
    assert await exchange.head() == 200
    assert await exchange.read_all(1024) == b"hello"
    exchange.close()
    assert engine.requests == [REQUEST + b"body1#", REQUEST + b"body2#", REQUEST + b"body2#"]
    counts = pool.statistics()
    assert (counts.opened, counts.reused, counts.repeated, counts.active, counts.idle) == (2, 1, 1, 0, 1)


async def test_repeat_is_not_repeated(serve: Serve, open_pool: OpenPool) -> None:
    """A fresh connection that ends without a reply is a failure, also for a request that was lost before."""
    engine = Fickle(b"", resets=False, then_dies=True)
    pool = open_pool(await serve(engine))
    await (await pool.send(REQUEST, b"#")).read_all(1024)
    exchange = await pool.send(REQUEST, b"#")
    for _ in range(2):
        with pytest.raises(UpstreamClosed):
            await exchange.head()
    assert len(engine.requests) == 3
    assert pool.statistics().repeated == 1
    assert repr(pool).endswith(EMPTY)


@pytest.mark.parametrize("last_words", [b"H", b"\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"])
async def test_no_repeat_after_a_byte(last_words: bytes, serve: Serve, open_pool: OpenPool) -> None:
    """One byte of the reply, whatever it is, and the request is not sent again."""
    engine = Fickle(last_words, resets=False, then_dies=False)
    pool = open_pool(await serve(engine))
    await (await pool.send(REQUEST, b"#")).read_all(1024)
    exchange = await pool.send(REQUEST, b"#")
    with pytest.raises((UpstreamClosed, UpstreamProtocol)):
        await exchange.head()
    assert len(engine.requests) == 2
    assert pool.statistics().repeated == 0


async def test_closed_before_the_repeat(serve: Serve, open_pool: OpenPool, until: Until) -> None:
    """A caller that closes its exchange as soon as its connection is lost causes no repeat."""
    engine = Fickle(b"", resets=False, then_dies=False)
    pool = open_pool(await serve(engine))
    await (await pool.send(REQUEST, b"#")).read_all(1024)
    exchange = await pool.send(REQUEST, b"#")
    assert isinstance(exchange.connection, Connection)
    exchange.connection.fail(UpstreamClosed("lost"))
    assert exchange.read_nowait() is None
    exchange.close()
    with pytest.raises(UpstreamClosed):
        await exchange.head()
    await until(lambda: pool.statistics().active == 0)
    assert len(engine.requests) == 1


async def test_closed_during_the_repeat(serve: Serve, open_pool: OpenPool, until: Until) -> None:
    """A caller that closes its exchange while the repeat connects gets its connection closed again."""
    engine = Fickle(b"", resets=False, then_dies=False)
    pool = open_pool(await serve(engine))
    await (await pool.send(REQUEST, b"#")).read_all(1024)
    exchange = await pool.send(REQUEST, b"#")
    task = asyncio.create_task(exchange.head())
    await until(lambda: pool.statistics().repeated == 1)
    exchange.close()
    with pytest.raises(UpstreamClosed, match="by its caller"):
        await task
    assert repr(pool).endswith(EMPTY)
    assert len(engine.requests) == 2


async def test_refused_repeat(serve: Serve, open_pool: OpenPool, until: Until) -> None:
    """An engine that is gone for good fails the repeat, and every later wait as well."""
    engine = Fickle(b"", resets=False, then_dies=False)
    origin = await serve(engine)
    pool = open_pool(origin)
    await (await pool.send(REQUEST, b"#")).read_all(1024)
    exchange = await pool.send(REQUEST, b"#")
    pool.limits = msgspec.structs.replace(pool.limits, max_connections=0)
    for _ in range(2):
        with pytest.raises(PoolExhausted):
            await exchange.head()


async def test_refused(open_pool: OpenPool) -> None:
    """A port that nobody listens on is ConnectFailed, and nothing is left."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        origin = Origin(*listener.getsockname())
    pool = open_pool(origin)
    with pytest.raises(ConnectFailed, match=str(origin.port)):
        await pool.send(REQUEST)
    assert repr(pool).endswith(EMPTY)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "x" * 70])
async def test_unknown_host(host: str, open_pool: OpenPool) -> None:
    """A name that can't be resolved is no failure of the engine."""
    pool = open_pool(Origin(host, 80))
    with pytest.raises(NameNotResolved):
        await pool.send(REQUEST)
    assert repr(pool).endswith(EMPTY)


async def test_no_file_is_left(serve: Serve, open_pool: OpenPool) -> None:
    """Where the router has no file for a connection that is its own fault, and counted; with one it goes on."""
    pool = open_pool(await serve(answer))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    taken: list[socket.socket] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(socket.socket())
        with pytest.raises(PoolExhausted, match="the router itself can't open a connection") as caught:
            await pool.send(REQUEST)
    finally:
        for sock in taken:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert not caught.value.counts_against_health
    assert repr(pool).endswith(EMPTY)
    assert await ask(pool) == b"hello"


async def test_connect_timeout(deaf_origin: Origin, open_pool: OpenPool) -> None:
    """A port that doesn't answer is ConnectTimeout, and nothing is left."""
    pool = open_pool(deaf_origin, connect_timeout_s=0.05)
    with pytest.raises(ConnectTimeout, match=r"within 0\.05 s"):
        await pool.send(REQUEST)
    assert repr(pool).endswith(EMPTY)


async def test_cancelled_connect(deaf_origin: Origin, open_pool: OpenPool, until: Until) -> None:
    """A task cancelled while connecting leaves nothing; until then it counts as active."""
    pool = open_pool(deaf_origin)
    task = asyncio.create_task(pool.send(REQUEST))
    await until(lambda: pool.statistics().active == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert repr(pool).endswith(EMPTY)


async def test_cancelled_at_every_turn(serve: Serve, open_pool: OpenPool, until: Until) -> None:
    """Cancelled after any number of loop turns, a request leaves no connection behind but a kept one."""
    served = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        served += 1
        try:
            await answer(reader, writer)
        finally:
            served -= 1

    origin = await serve(script)
    for turns in range(40):
        pool = open_pool(origin)
        task = asyncio.create_task(ask(pool))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert pool.statistics().active == 0
        await pool.aclose()
        assert repr(pool).endswith(EMPTY)
    await until(lambda: served == 0)


async def test_aclose(serve: Serve, open_pool: OpenPool, until: Until) -> None:
    """Closing ends idle connections and running exchanges; later requests fail."""
    served = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        served += 1
        await reader.readuntil(b"\r\n\r\n")
        if served == 1:
            writer.write(REPLY)
        await reader.read()
        served -= 1

    pool = open_pool(await serve(script))
    await ask(pool)
    kept = pool._idle[0]
    pool._idle.clear()  # so that a second connection is opened
    exchange = await pool.send(REQUEST)
    pool._idle.append(kept)
    await until(lambda: served == 2)
    waiter = asyncio.create_task(exchange.head())
    await asyncio.sleep(0)
    await pool.aclose()
    with pytest.raises(UpstreamClosed, match="have been closed"):
        await waiter
    with pytest.raises(ConnectFailed):
        await pool.send(REQUEST)
    assert repr(pool).endswith(EMPTY)
    await until(lambda: served == 0)
    await pool.aclose()


async def test_aclose_while_connecting(serve: Serve, open_pool: OpenPool) -> None:
    """A connection that comes up after the pool was closed is closed again, and its request fails."""
    pool = open_pool(await serve(answer))
    task = asyncio.create_task(pool.send(REQUEST))
    for _ in range(2):
        await asyncio.sleep(0)
    await pool.aclose()
    with pytest.raises(UpstreamClosed):
        await task
    assert repr(pool).endswith(EMPTY)


async def test_aclose_while_connecting_in_vain(deaf_origin: Origin, open_pool: OpenPool, until: Until) -> None:
    """Closing the pool leaves nothing of a connection that never comes up, either."""
    pool = open_pool(deaf_origin, connect_timeout_s=0.05)
    task = asyncio.create_task(pool.send(REQUEST))
    await until(lambda: pool.statistics().active == 1)
    await pool.aclose()
    assert repr(pool).endswith(EMPTY)
    with pytest.raises(ConnectTimeout):
        await task


async def test_ipv6(open_pool: OpenPool) -> None:
    """An IPv6 literal is connected to, and written with brackets."""
    try:
        server = await asyncio.start_server(answer_once, "::1", 0)
    except OSError:
        pytest.skip("no IPv6 on this machine")
    async with server:
        pool = open_pool(Origin("::1", server.sockets[0].getsockname()[1]))
        assert repr(pool).startswith("<Pool [::1]:")
        assert await ask(pool) == b"hello"
        await pool.aclose()


async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Close after the reply."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(REPLY)
    writer.close()
    await writer.wait_closed()
