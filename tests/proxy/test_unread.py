"""Answers that nobody reads: each connection has a bound, all together have one, and time runs out as it should."""

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pdrouter import server
from pdrouter.proxy import openapi
from pdrouter.proxy.budgets import WriteBudget
from pdrouter.proxy.listener import bind
from tests.front import LIMITS, Front
from tests.lab import CHAT, Call, Lab, connect, make_lab, until

pytestmark = pytest.mark.invariant("I9")

WRITE_BUFFER = 4096
ASKED = 10_000
PAGE = len(openapi.page())
BUDGET = 4 * PAGE


@contextlib.asynccontextmanager
async def small(**flags: Any) -> AsyncIterator[Lab]:
    """Run a router with small buffers, in the kernel as well."""

    def bind_with_small_buffers(host: str, port: int) -> socket.socket:
        sock = bind(host, port)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, WRITE_BUFFER)  # of those that it accepts, too
        return sock

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "bind", bind_with_small_buffers)
        async with asyncio.timeout(15), make_lab(client_write_buffer_bytes=WRITE_BUFFER, **flags) as lab:
            yield lab


def count(lab: Lab, event: str) -> int:
    """Return how often something happened to clients."""
    return lab.router.service.clients.counts[event]


async def flood(call: Call, method: str, path: str, times: int) -> None:
    """Ask and ask, as long as the router reads."""
    with contextlib.suppress(OSError):
        for _ in range(times):
            call.send(method, path, b"", {})
            await call.writer.drain()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/openapi.json", 200),
        ("GET", "/metrics", 200),
        ("GET", "/debug/fleet", 200),
        ("GET", "/debug/story/nothing", 404),
        ("GET", "/nothing", 404),
        ("GET", CHAT, 405),
        ("POST", CHAT, 400),
        ("POST", "/flush_cache", 200),
        ("POST", "/workers", 400),
    ],
)
async def test_own_pages_wait_for_their_reader(method: str, path: str, status: int) -> None:
    """Who asks and doesn't read is served up to a buffer's worth, and parted from; who reads then gets the rest."""
    async with (
        small(client_write_timeout_secs=0.5) as lab,
        await connect(lab.url, receive_bytes=4096) as dead,
        await connect(lab.url, receive_bytes=4096) as slow,
    ):
        unsent, most = lab.router.service.clients.unsent, 0
        flooding = asyncio.create_task(flood(dead, method, path, ASKED))
        asking = asyncio.create_task(flood(slow, method, path, 50))
        replies = 0
        while replies < 50 or not count(lab, "write_timeout"):
            if replies < 50:
                assert (await slow.finish()).status == status
                replies += 1
            else:
                await asyncio.sleep(0.01)
            most = max(most, unsent.held_bytes)
        page = int(slow.headers["content-length"])
        assert most <= 2 * (page + WRITE_BUFFER)
        await flooding
        await asking
        await until(lambda: unsent.held_bytes == 0)


async def test_all_unread_answers_together() -> None:
    """Beyond the budget connections are cut, and no more than must be: others go on."""
    async with small(client_write_budget_bytes=BUDGET) as lab, contextlib.AsyncExitStack() as stack:
        calls = [await stack.enter_async_context(await connect(lab.url, receive_bytes=4096)) for _ in range(8)]
        flooding = asyncio.gather(*(flood(call, "GET", "/openapi.json", ASKED) for call in calls))
        unsent = lab.router.service.clients.unsent
        while not count(lab, "write_budget"):
            assert unsent.held_bytes <= BUDGET + 2 * PAGE
            await asyncio.sleep(0)
        assert (await lab.get("/openapi.json")).status == 200
        assert count(lab, "write_budget") <= 5  # three pages have room
        for call in calls:
            call.writer.transport.abort()
        await flooding


class Reader:
    """A client for whom so much waits."""

    def __init__(self, unsent_bytes: int) -> None:
        self.unsent_bytes = unsent_bytes
        self.is_cut = False

    def measure(self) -> int:
        return self.unsent_bytes

    def abort(self) -> None:
        self.is_cut = True


def test_who_is_cut() -> None:
    """Those with most unread bytes, and no more of them than must be; none if the others have read meanwhile."""
    counts = Counter[str]()
    budget = WriteBudget(800, counts)
    readers = [Reader(size) for size in (100, 300, 200, 190)]
    for reader in readers:
        budget.hold(reader, reader.unsent_bytes)
    readers[3].unsent_bytes, readers[0].unsent_bytes = 0, 111
    budget.hold(readers[0], 111)
    assert budget.held_bytes == 611
    assert not any(reader.is_cut for reader in readers)
    readers[0].unsent_bytes = 301
    budget.hold(readers[0], 301)
    assert [reader.is_cut for reader in readers] == [True, False, False, False]
    assert (budget.held_bytes, counts["write_budget"]) == (500, 1)
    for reader in readers:
        budget.release(reader)
    assert budget.held_bytes == 0


def test_what_is_written_meanwhile_is_no_excuse() -> None:
    """A client that takes less than is written for it still takes something; one that takes nothing is parted from."""
    front = Front()
    transport, connection = front.transport, front.connection
    transport.unsent_bytes = 100
    connection.pause_writing()
    connection.write(b"x" * 50)
    transport.unsent_bytes = 149
    front.loop.now_s = connection.deadline_s
    connection.expire()
    assert not transport.is_closed
    transport.unsent_bytes = 199
    connection.write(b"x" * 50)
    front.loop.now_s = connection.deadline_s
    connection.expire()
    assert transport.is_closed


def test_the_last_reply_of_a_slow_reader() -> None:
    """Who still sends when the last reply is written has the time to read it that others have, then a short one."""
    front = Front(is_slow=True)
    front.connection.data_received(b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 5000\r\n\r\n{")
    front.app.answer()
    assert front.app.refused
    assert front.connection.deadline_s == front.loop.now_s + LIMITS.write_timeout_s
    front.transport.drain()
    assert not front.transport.is_closed
    assert front.connection.deadline_s == front.loop.now_s + 2.0
