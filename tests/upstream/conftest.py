"""Raw engines on 127.0.0.1 that send exactly the given bytes in the given pieces; every test runs on both loops."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack

import pytest
import uvloop

from pdrouter.upstream.connection import Connection
from pdrouter.upstream.pool import Origin, Pool, PoolLimits
from pdrouter.upstream.resolver import Resolver

MakeLoop = Callable[[], asyncio.AbstractEventLoop]
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Serve = Callable[[Script], Awaitable[Origin]]
OpenPool = Callable[..., Pool]
SendPieces = Callable[[asyncio.StreamWriter, Iterable[bytes]], Awaitable[None]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, MakeLoop]:
    """Run every test of this folder on asyncio and on uvloop."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Start an engine that runs the script for each connection; all ends with the test."""
    servers: list[asyncio.Server] = []
    tasks: set[asyncio.Task[None]] = set()

    async def start(script: Script) -> Origin:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            try:
                await script(reader, writer)
            except (ConnectionError, asyncio.CancelledError, asyncio.IncompleteReadError):
                pass  # the client left, or the test is over
            finally:
                writer.transport.abort()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        servers.append(server)
        host, port = server.sockets[0].getsockname()
        return Origin(host, port)

    yield start
    for server in servers:
        server.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)


@pytest.fixture
async def open_pool() -> AsyncIterator[OpenPool]:
    """Make a pool with small limits, any of them given by name; it is closed with the test."""
    async with AsyncExitStack() as stack:

        def make(origin: Origin, **limits: float) -> Pool:
            settings = {
                "connect_timeout_s": 5.0,
                "idle_timeout_s": 60.0,
                "max_idle": 4,
                "max_connections": 8,
                "read_buffer_bytes": 65536,
                "max_header_bytes": 4096,
            }
            pool = Pool(origin, PoolLimits(**(settings | limits)), Resolver(30.0))  # type: ignore[arg-type]
            stack.push_async_callback(pool.aclose)
            return pool

        yield make


@pytest.fixture
def until() -> Until:
    """Let the loop turn until the condition holds; the test's own timeout is the limit."""

    async def wait(is_met: Callable[[], bool]) -> None:
        while not is_met():  # noqa: ASYNC110  conditions on plain state, no event to wait for
            await asyncio.sleep(0)

    return wait


@pytest.fixture
def send_pieces(monkeypatch: pytest.MonkeyPatch) -> SendPieces:
    """Send pieces one by one, each after the client has taken in the one before, so that none are joined."""
    received: defaultdict[object, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(0))
    take_in = Connection.data_received

    def data_received(connection: Connection, data: bytes) -> None:
        client = connection._transport.get_extra_info("sockname")
        take_in(connection, data)
        for _ in data:
            received[client].release()

    async def send(writer: asyncio.StreamWriter, pieces: Iterable[bytes]) -> None:
        client = writer.get_extra_info("peername")
        for piece in pieces:
            writer.write(piece)
            for _ in piece:
                await received[client].acquire()

    monkeypatch.setattr(Connection, "data_received", data_received)
    return send
