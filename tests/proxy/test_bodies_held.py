"""Bodies on their way in: what a head is refused for is told before its body, and all bodies share one budget."""

import asyncio
import contextlib
from typing import Any

import pytest

from tests.lab import CHAT, COMPLETIONS, GENERATE, Call, Lab, chat, connect, make_lab, until

pytestmark = pytest.mark.invariant("I9")

KEY = "secret"
WITH_KEY = {"authorization": f"Bearer {KEY}"}
BUDGET = 100_000


def bodies(lab: Lab) -> int:
    """Return how many bytes of bodies are held."""
    return lab.router.service.clients.bodies.held_bytes


async def send_head(call: Call, method: str, path: str, **headers: str) -> None:
    """Send a head of a request with a long body."""
    fields = {"content-length": "100000000"} | {name.replace("_", "-"): value for name, value in headers.items()}
    call.send(method, path, b"", fields, framing=False)
    await call.writer.drain()


@pytest.mark.parametrize("expect", [{}, {"expect": "100-continue"}])
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", CHAT), ("POST", "/v1/audio/transcriptions"), ("POST", "/workers"), ("PUT", "/workers/127.0.0.1:1")],
)
async def test_no_key(method: str, path: str, expect: dict[str, str]) -> None:
    """A request without the key is 401 at its head: no invitation, nothing kept, and the connection is closed."""
    async with make_lab(api_key=KEY) as lab, await connect(lab.url) as call:
        await send_head(call, method, path, authorization="Bearer other", **expect)
        with contextlib.suppress(OSError):
            call.writer.write(b"x" * 1_000_000)
            await call.writer.drain()
        reply = await call.finish()
        assert (reply.status, reply.headers["connection"]) == (401, "close")
        assert bodies(lab) == 0
        assert b"pdrouter_requests_in_flight 0.0" in (await lab.get("/metrics")).body


async def test_the_key_at_the_head() -> None:
    """With the key a body is invited and read, on a path of the API and on one of the fleet's."""
    async with make_lab(api_key=KEY) as lab, await connect(lab.url) as call:
        body = b'{"text":"x","sampling_params":{"max_new_tokens":2}}'
        for path, status in ((GENERATE, 200), ("/workers", 400)):
            fields = {"content-length": str(len(body)), "expect": "100-continue", **WITH_KEY}
            call.send("POST", path, b"", fields, framing=False)
            assert await call.head() == 100
            call.status = 0
            call.writer.write(body)
            assert (await call.finish()).status == status


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", CHAT, 405), ("POST", "/nothing", 404), ("POST", "/health", 405), ("DELETE", "/workers/x:1", 404)],
)
async def test_bodies_that_nobody_reads(method: str, path: str, status: int) -> None:
    """To a client that waits for an invitation the answer comes instead of it; without, the body is dropped."""
    async with make_lab() as lab:
        async with await connect(lab.url) as call:
            await send_head(call, method, path, expect="100-continue")
            assert (await call.finish()).status == status
        async with await connect(lab.url) as call:
            call.send(method, path, b"x" * 200_000, {})
            assert (await call.finish()).status == status
            assert bodies(lab) == 0


async def test_all_bodies_together() -> None:
    """Beyond the budget the largest body that is coming in is 503, and small ones are served."""
    async with (
        make_lab(client_body_budget_bytes=BUDGET) as lab,
        await connect(lab.url) as largest,
        await connect(lab.url) as large,
    ):
        for call, size in ((largest, 60_000), (large, 30_000)):
            await send_head(call, "POST", CHAT)
            call.writer.write(b"x" * size)
            await call.writer.drain()
        await until(lambda: bodies(lab) == 90_000)
        assert b'pdrouter_clients_bytes{of="bodies"} 90000.0' in (await lab.get("/metrics")).body
        assert (await lab.post(CHAT, chat("x" * 20_000))).status == 200
        reply = await largest.finish()
        assert (reply.status, reply.error["code"], reply.headers["connection"]) == (503, "body_budget", "close")
        assert reply.headers["retry-after"] == "1"
        assert bodies(lab) == 30_000
        async with await connect(lab.url) as call:
            await send_head(call, "POST", CHAT)
            call.writer.write(b"x" * (BUDGET - 20_000))
            assert (await call.finish()).error["code"] == "body_budget"
        await large.leave()
        await until(lambda: bodies(lab) == 0)
        assert lab.router.service.clients.counts["body_budget"] == 2


async def test_bodies_of_what_is_served() -> None:
    """A body counts until its request is answered, or its client has left."""
    async with make_lab(engine={"speed": 1.0}, client_body_budget_bytes=BUDGET) as lab:
        async with await lab.start(COMPLETIONS, {"prompt": "x" * 70_000, "max_tokens": 10_000, "stream": True}) as call:
            await call.head()
            assert bodies(lab) > 70_000
            reply = await lab.post(CHAT, chat("x" * 70_000))
            assert (reply.status, reply.error["code"]) == (503, "body_budget")
        await lab.settled(5.0)
        assert bodies(lab) == 0


async def test_pipelined_requests_count_as_well() -> None:
    """What waits unparsed behind a request that is being served has a limit as well, and is given back."""
    async with make_lab(engine={"speed": 1.0}, client_body_budget_bytes=BUDGET) as lab:
        async with contextlib.AsyncExitStack() as stack:
            calls = [
                await stack.enter_async_context(
                    await lab.start(COMPLETIONS, {"prompt": "x", "max_tokens": 10_000, "stream": True})
                )
                for _ in range(4)
            ]
            for call in calls:
                assert await call.head() == 200
                call.writer.write(b"GET /health HTTP/1.1\r\nhost: lab\r\n\r\n" * 1500)
            await until(lambda: lab.router.service.clients.counts["body_budget"] > 0)
            assert bodies(lab) <= BUDGET
        await lab.settled(5.0)
        await until(lambda: bodies(lab) == 0)


async def test_a_body_that_pauses() -> None:
    """However much has come, a body that pauses for long is 408: what it holds is given back."""
    limits: dict[str, Any] = {"client_body_timeout_secs": 0.2, "client_body_bytes_per_s": 1}
    async with make_lab(**limits) as lab, await connect(lab.url) as call:
        await send_head(call, "POST", CHAT)
        for _ in range(10):
            call.writer.write(b"x" * 10_000)
            await call.writer.drain()
            await asyncio.sleep(0.02)  # as senders do
        assert (await call.finish()).error["code"] == "request_timeout"
        assert bodies(lab) == 0
