"""Host names: kept for a while, used on while a nameserver is silent, and never in each other's way."""

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from pdrouter.errors import ConnectFailed, NameNotResolved
from pdrouter.upstream.pool import Origin, Pool, PoolLimits
from pdrouter.upstream.resolver import Resolver, is_address
from tests.lab import until

LIMITS = PoolLimits(
    connect_timeout_s=0.2,
    idle_timeout_s=5.0,
    max_idle=1,
    max_connections=4,
    read_buffer_bytes=4096,
    max_header_bytes=4096,
)
REQUEST = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"


class Nameserver:
    """Answers what it is told; names that are ``silent`` wait for ``go``."""

    def __init__(self) -> None:
        self.known: dict[str, list[str]] = {}
        self.silent: set[str] = set()
        self.asked: Counter[str] = Counter()
        self.go = threading.Event()

    def getaddrinfo(self, host: str, *_: object, **__: object) -> list[Any]:
        """Stand where the C library's does."""
        self.asked[host] += 1
        if host in self.silent:
            self.go.wait(10)
        if host not in self.known:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in self.known[host]]


@pytest.fixture
def nameserver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nameserver]:
    """Give a nameserver instead of the machine's."""
    server = Nameserver()
    monkeypatch.setattr(socket, "getaddrinfo", server.getaddrinfo)
    yield server
    server.go.set()


class Clock:
    """A clock that stands."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


async def test_addresses_are_kept(nameserver: Nameserver) -> None:
    """They are asked for again after their time; an address needs no question."""
    clock = Clock()
    resolver = Resolver(30.0, clock)
    nameserver.known["a"] = ["10.0.0.1", "10.0.0.2", "10.0.0.1"]
    assert await resolver.addresses("a") == await resolver.addresses("a") == ("10.0.0.1", "10.0.0.2")
    assert await resolver.addresses("127.0.0.1") == ("127.0.0.1",)
    assert await resolver.addresses("::1") == ("::1",)
    assert nameserver.asked == {"a": 1}
    nameserver.known["a"] = ["10.0.0.3"]
    clock.now_s += 31
    assert await resolver.addresses("a") == ("10.0.0.1", "10.0.0.2")
    await until(lambda: nameserver.asked["a"] == 2 and not resolver.lookups)
    assert await resolver.addresses("a") == ("10.0.0.3",)
    assert resolver.counts["stale"] == 1


async def test_old_addresses_outlive_a_silent_or_failing_nameserver(nameserver: Nameserver) -> None:
    """They are used while a lookup hangs, and when it has failed; there is one lookup at a time."""
    clock = Clock()
    resolver = Resolver(30.0, clock)
    nameserver.known["a"] = ["10.0.0.1"]
    await resolver.addresses("a")
    nameserver.silent.add("a")
    del nameserver.known["a"]
    clock.now_s += 31
    assert [await resolver.addresses("a") for _ in range(5)] == [("10.0.0.1",)] * 5
    await until(lambda: nameserver.asked["a"] == 2)
    nameserver.go.set()
    await until(lambda: resolver.counts["failed"] == 1)
    assert await resolver.addresses("a") == ("10.0.0.1",)
    assert nameserver.asked["a"] == 2


async def test_a_silent_name_is_alone(nameserver: Nameserver) -> None:
    """However many names hang, others are resolved at once."""
    resolver = Resolver(30.0)
    nameserver.silent |= {f"w{n}" for n in range(64)}
    hanging = [asyncio.create_task(resolver.addresses(name)) for name in nameserver.silent]
    await until(lambda: len(nameserver.asked) == 64)
    nameserver.known["a"] = ["10.0.0.1"]
    assert await resolver.addresses("a") == ("10.0.0.1",)
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)


@pytest.mark.invariant("I9")
async def test_lookups_have_a_bound(nameserver: Nameserver) -> None:
    """One too many is refused, and asked when there is room."""
    resolver = Resolver(30.0)
    nameserver.silent |= {f"w{n}" for n in range(256)}
    hanging = [asyncio.create_task(resolver.addresses(name)) for name in nameserver.silent]
    await until(lambda: len(nameserver.asked) == 256)
    nameserver.known["a"] = ["10.0.0.1"]
    with pytest.raises(NameNotResolved, match="256 names"):
        await resolver.addresses("a")
    nameserver.go.set()
    await asyncio.gather(*hanging, return_exceptions=True)
    assert await resolver.addresses("a") == ("10.0.0.1",)


async def test_no_thread_is_left(nameserver: Nameserver, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told, and the name is looked up when there is one."""
    resolver = Resolver(30.0)
    nameserver.known["a"] = ["10.0.0.1"]

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(NameNotResolved, match="can't start new thread"):
            await resolver.addresses("a")
    assert await resolver.addresses("a") == ("10.0.0.1",)


async def test_a_name_that_is_none(nameserver: Nameserver) -> None:
    """It is told, and not asked for again within a second."""
    clock = Clock()
    resolver = Resolver(30.0, clock)
    for _ in range(3):
        with pytest.raises(NameNotResolved, match=r"a isn't resolved: .*not known"):
            await resolver.addresses("a")
    assert nameserver.asked["a"] == 1
    nameserver.known["a"] = ["10.0.0.1"]
    clock.now_s += 1.1
    assert await resolver.addresses("a") == ("10.0.0.1",)


async def test_a_name_that_is_forgotten(nameserver: Nameserver) -> None:
    """What was known of it goes with the endpoint; a lookup that is under way is left to end."""
    resolver = Resolver(30.0)
    nameserver.known["a"] = ["10.0.0.1"]
    await resolver.addresses("a")
    resolver.forget("a")
    resolver.forget("b")
    assert await resolver.addresses("a") == ("10.0.0.1",)
    assert nameserver.asked["a"] == 2


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Run a server that answers nothing."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_a_pool_tries_each_address(nameserver: Nameserver, port: int) -> None:
    """The first that takes a connection is used; where none does, the name is asked for again."""
    resolver = Resolver(30.0)
    pool = Pool(Origin("engine", port), LIMITS, resolver)
    nameserver.known["engine"] = ["127.0.0.2", "127.0.0.1"]
    exchange = await pool.send(REQUEST)
    exchange.close()
    nameserver.known["engine"] = ["127.0.0.3"]
    resolver.forget("engine")
    with pytest.raises(ConnectFailed):
        await pool.send(REQUEST)
    nameserver.known["engine"] = ["127.0.0.1"]
    with pytest.raises(ConnectFailed):
        await pool.send(REQUEST)
    await until(lambda: not resolver.lookups)
    (await pool.send(REQUEST)).close()
    await pool.aclose()


async def test_a_pool_whose_nameserver_is_silent(nameserver: Nameserver) -> None:
    """It is the name that fails, not the engine."""
    nameserver.silent.add("engine")
    pool = Pool(Origin("engine", 1), LIMITS, Resolver(30.0))
    with pytest.raises(NameNotResolved, match="engine isn't resolved within") as caught:
        await pool.send(REQUEST)
    assert not caught.value.counts_against_health
    assert caught.value.is_retryable
    await pool.aclose()


def test_what_is_an_address() -> None:
    """Both families; a name never is, though it may look alike."""
    assert [is_address(text) for text in ("127.0.0.1", "::1", "fe80::1%1", "localhost", "1.2.3", "")] == [
        *[True] * 3,
        *[False] * 3,
    ]
