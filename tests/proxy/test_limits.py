"""What clients may take: connections, time and bytes. Each limit ends one connection, with a reason, and is counted."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pdrouter.errors import RouterError, TooManyConnections
from pdrouter.proxy.limits import NEVER_S, Clients, group_of, room_for
from tests.front import LIMITS, Front
from tests.lab import COMPLETIONS, GENERATE, Call, Lab, connect, make_lab, until

BODY = b'{"text":"x","sampling_params":{"max_new_tokens":2}}'
SHORT_S = 0.2
LONG_S = 60.0

pytestmark = pytest.mark.invariant("I9")


@contextlib.asynccontextmanager
async def hasty(**limits: Any) -> AsyncIterator[Lab]:
    """Run a router whose other time limits are long."""
    names = ("head", "body", "idle", "write")
    others: dict[str, Any] = {f"client_{name}_timeout_secs": LONG_S for name in names}
    async with make_lab(engine={"speed": 20.0}, **others | limits) as lab:
        yield lab


async def ended(call: Call) -> None:
    """Wait until the router has closed the connection, and has said no more."""
    async with asyncio.timeout(8):
        assert await call.reader.read() == b""


def count(lab: Lab, event: str) -> int:
    """Return how often something happened to clients."""
    return lab.router.service.clients.counts[event]


async def trickle(call: Call, data: bytes, pause_s: float) -> None:
    """Send a byte at a time, until nobody listens any more."""
    with contextlib.suppress(OSError):
        for byte in data:
            call.writer.write(bytes([byte]))
            await call.writer.drain()
            await asyncio.sleep(pause_s)


@pytest.mark.parametrize(
    "start", [b"GET /", b"GET /health HTTP/1.1\r\nhost: lab\r\na: ", b"GET /health HTTP/1.1\r\nhost: lab\r\n"]
)
async def test_a_slow_head(start: bytes) -> None:
    """A head that isn't whole in time is 408, however it trickles in; a connection that has said nothing may wait."""
    async with hasty(client_head_timeout_secs=SHORT_S) as lab:
        async with await connect(lab.url) as silent, await connect(lab.url) as call:
            call.writer.write(start)
            began_s = asyncio.get_running_loop().time()
            trickling = asyncio.create_task(trickle(call, b"x" * 500, SHORT_S / 20))
            reply = await call.finish()
            assert (reply.status, reply.error["code"]) == (408, "request_timeout")
            assert SHORT_S <= asyncio.get_running_loop().time() - began_s < 5 * SHORT_S
            await ended(call)
            await trickling
            silent.send("GET", "/health", b"", {})
            assert (await silent.finish()).status == 200
        assert count(lab, "request_timeout") == 1


async def test_a_slow_body() -> None:
    """A body slower than the least rate is 408 when the time beyond it is over; a steady one takes what it needs."""
    async with hasty(client_body_timeout_secs=SHORT_S, client_body_bytes_per_s=100) as lab:
        head = {"content-length": str(len(BODY) + 200)}
        async with await connect(lab.url) as slow, await connect(lab.url) as steady:
            for call in (slow, steady):
                call.send("POST", GENERATE, b"", head, framing=False)
            began_s = asyncio.get_running_loop().time()
            trickling = asyncio.create_task(trickle(slow, BODY, 0.05))
            await trickle(steady, BODY + b" " * 200, 0.0025)
            assert (await steady.finish()).status == 200
            assert asyncio.get_running_loop().time() - began_s > 2 * SHORT_S
            reply = await slow.finish()
            assert (reply.status, reply.error["code"]) == (408, "request_timeout")
            await trickling
        assert (count(lab, "request_timeout"), lab.core.decided) == (1, 1)


async def test_a_body_that_was_not_invited_may_wait() -> None:
    """The time for a body begins when the router has asked for it, not while a request before it is answered."""
    async with hasty(client_body_timeout_secs=SHORT_S) as lab, await connect(lab.url) as call:
        call.send("POST", COMPLETIONS, b'{"prompt":"x","max_tokens":1200,"stream":true}', {})
        call.send("POST", GENERATE, b"", {"expect": "100-continue", "content-length": str(len(BODY))}, framing=False)
        began_s = asyncio.get_running_loop().time()
        await call.finish()
        assert asyncio.get_running_loop().time() - began_s > SHORT_S
        assert await call.head() == 100
        call.status = 0
        call.writer.write(BODY)
        assert (await call.finish()).status == 200


async def test_a_slow_request_behind_another() -> None:
    """A pipelined request that doesn't come is refused behind the answer before it, which isn't touched."""
    async with hasty(client_head_timeout_secs=SHORT_S) as lab, await connect(lab.url) as call:
        call.send("POST", COMPLETIONS, b'{"prompt":"x","max_tokens":400,"stream":true}', {})
        call.writer.write(b"GET /hea")
        assert len((await call.finish()).events) >= 400
        assert (await call.finish()).status == 408
        await ended(call)


async def test_idle_connections() -> None:
    """A connection is closed when it has been idle for long, new or used."""
    async with hasty(client_idle_timeout_secs=SHORT_S) as lab:
        async with await connect(lab.url) as new, await connect(lab.url) as used:
            used.send("GET", "/health", b"", {})
            assert (await used.finish()).status == 200
            await ended(new)
            await ended(used)
        assert count(lab, "idle_timeout") >= 2


async def test_a_client_that_reads_nothing() -> None:
    """A client that takes nothing of its answer is parted from; one that is only slow isn't."""
    many = b'{"prompt":"x","max_tokens":20000,"stream":true}'
    limits: dict[str, Any] = {
        "client_write_timeout_secs": 0.6,
        "client_write_buffer_bytes": 4096,
        "engine": {"speed": 1000.0},
    }
    async with make_lab(**limits) as lab:
        async with (
            await connect(lab.url, receive_bytes=4096) as dead,
            await connect(lab.url, receive_bytes=4096) as slow,
        ):
            for call in (dead, slow):
                call.send("POST", COMPLETIONS, many, {})
            while count(lab, "write_timeout") == 0:
                await slow.some()
                await asyncio.sleep(0.02)  # as slow readers do
            await slow.some()
        assert count(lab, "write_buffer_full") >= 2
        await lab.settled()


def test_however_little_a_client_takes() -> None:
    """As long as less and less waits for a client that is behind, it has more time; then it is parted from."""
    front = Front()
    front.transport.unsent_bytes = 100
    front.connection.pause_writing()
    for unsent_bytes in (99, 40, 39):
        front.transport.unsent_bytes = unsent_bytes
        front.loop.now_s = front.connection.deadline_s
        front.connection.expire()
        assert not front.transport.is_closed
        assert front.connection.deadline_s == front.loop.now_s + LIMITS.write_timeout_s
    front.connection.expire()
    assert front.transport.is_closed
    assert front.app.clients.counts["write_timeout"] == 1


async def test_many_are_late_at_once() -> None:
    """All of them are told, a few in each turn of the loop, and nobody who has been heard of meanwhile."""
    turn, told = 0, Counter[int]()

    class Late:
        deadline_s = 0.0
        incoming_bytes = 0
        is_idle = True

        def close(self) -> None:
            raise AssertionError

        def refuse(self, error: RouterError) -> None:
            raise AssertionError

        def expire(self) -> None:
            self.deadline_s = NEVER_S
            told[turn] += 1
            others[-1].deadline_s = NEVER_S

    clients = Clients(msgspec.structs.replace(LIMITS, max_connections=100, idle_timeout_s=0.01))
    others = [Late() for _ in range(50)]
    for one in others:
        clients.join(one, "")
    async with asyncio.timeout(8):
        while any(one.deadline_s < NEVER_S for one in others):
            turn += 1
            await asyncio.sleep(0)
    for one in others:
        clients.leave(one, "")
    assert 49 <= told.total() <= 50
    assert len(told) > 4
    assert clients.counts == {"opened": 50, "closed": 50}


async def test_connections_in_all() -> None:
    """One connection too many gets 503 and is closed, at once; when another ends there is room again."""
    async with make_lab(client_max_connections=3) as lab:
        await until(lambda: count(lab, "opened") == count(lab, "closed"))
        async with contextlib.AsyncExitStack() as stack:
            calls = [await stack.enter_async_context(await connect(lab.url)) for _ in range(3)]
            await until(lambda: count(lab, "opened") - count(lab, "closed") == 3)
            async with await connect(lab.url) as call:
                call.send("GET", "/health", b"", {})
                reply = await call.finish()
                assert (reply.status, reply.error["code"]) == (503, "too_many_connections")
                assert reply.headers["retry-after"] == "1"
                await ended(call)
            for call in calls:
                call.send("GET", "/health", b"", {})
                assert (await call.finish()).status == 200
        await until(lambda: count(lab, "opened") == count(lab, "closed"))
        assert (await lab.get("/health")).status == 200
        assert count(lab, "too_many_connections") == 1


async def test_connections_of_one_address() -> None:
    """A client with too many connections gets 503, as long as it has them."""
    async with make_lab(client_max_connections_per_address=2) as lab:
        await until(lambda: count(lab, "opened") == count(lab, "closed"))
        async with await connect(lab.url), await connect(lab.url):
            reply = await lab.get("/health")
            assert (reply.status, reply.error["code"]) == (503, "too_many_connections")
        await until(lambda: count(lab, "opened") == count(lab, "closed"))
        assert (await lab.get("/health")).status == 200


def test_room_for_clients() -> None:
    """Each with two legs and some that are told to leave, there are files enough; and room for one in any case."""
    for files in (0, 10, 100, 256, 1024, 65_536, 1_048_576):
        room = room_for(files)
        assert room >= 1
        assert files < 80 or 64 + 3 * room + room // 8 <= files


def test_who_must_make_room() -> None:
    """Those that have been idle longest, a part of all at once; nobody who asks, nor the newcomer."""

    class One:
        incoming_bytes = 0
        is_closed = False

        def __init__(self, deadline_s: float, *, is_idle: bool) -> None:
            self.deadline_s = deadline_s
            self.is_idle = is_idle

        def close(self) -> None:
            self.is_closed = True

        def refuse(self, error: RouterError) -> None:
            raise AssertionError

        expire = close

    clients = Clients(msgspec.structs.replace(LIMITS, max_connections=1000))
    clients._timer = asyncio.TimerHandle(0, print, (), SimpleNamespace(get_debug=bool))  # type: ignore[arg-type]
    clients.room = 64
    busy = [One(NEVER_S, is_idle=False) for _ in range(60)]
    idle = [One(deadline_s, is_idle=True) for deadline_s in (4.0, 1.0, 3.0, 2.0)]
    for one in [*busy, *idle]:
        clients.join(one, "")
    clients.join(newcomer := One(NEVER_S, is_idle=True), "")
    assert [one.is_closed for one in idle] == [False, True, True, True]
    assert not newcomer.is_closed
    for one in (*idle, newcomer):
        one.is_idle = False
    with pytest.raises(TooManyConnections, match="open files allow 64 connections"):
        clients.join(One(NEVER_S, is_idle=True), "")
    assert clients.counts["idle_closed"] == 3
    assert not any(one.is_closed for one in busy)


def test_who_counts_as_one_client() -> None:
    """An IPv4 address, a /64 network of IPv6, and everybody on a socket without addresses."""
    assert group_of(("10.0.0.1", 5)) == "10.0.0.1"
    assert group_of(("::ffff:10.0.0.1", 5, 0, 0)) == "10.0.0.1"
    assert group_of(("2001:db8::1", 5, 0, 0)) == group_of(("2001:db8::ffff:0:2%eth0", 6, 0, 2)) == "2001:db8::/64"
    assert group_of(("2001:db8:0:1::1", 5, 0, 0)) != "2001:db8::/64"
    assert group_of("") == group_of(None) == ""
