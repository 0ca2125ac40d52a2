"""Comments on streams that wait: they keep the connection alive, and change nothing of what becomes of the request."""

import asyncio
import json
from typing import Any

import pytest

from pdrouter.proxy.client import Client
from pdrouter.proxy.keepalive import keep_alive
from tests.lab import CHAT, GENERATE, Asked, Call, ScriptedEngine, chat, http, make_lab, route_to, until

COMMENT = b": keep-alive\n\n"
QUICK: dict[str, Any] = {"stream_keepalive_secs": 0.05, "prefill_timeout_secs": 30.0}
BODIES: dict[str, dict[str, object]] = {
    CHAT: chat("x", stream=True),
    "/v1/completions": {"prompt": "x", "stream": True},
    GENERATE: {"text": "x", "stream": True},
    "/v1/responses": {"input": "x", "stream": True},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "stream": True},
}
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\ndata: [DONE]\n\n'
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-mine: a\r\ntransfer-encoding: chunked\r\n\r\n"


class Wire:
    """Keeps what is written."""

    is_full = False
    written = b""

    def write(self, data: bytes) -> None:
        """Keep it."""
        self.written += data


class Gate:
    """An engine that answers when it is let."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.go = asyncio.Event()
        self.asked = 0

    async def script(self, _: Asked) -> bytes:
        """Wait, and answer."""
        self.asked += 1
        await self.go.wait()
        return self.answer


async def comments(call: Call, count: int) -> bytes:
    """Read until so many comments have come."""
    seen = b""
    async with asyncio.timeout(5):
        while seen.count(COMMENT) < count:
            seen += await call.some()
    return seen


def stream(body: bytes) -> bytes:
    """Return an engine's stream."""
    return STREAM + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_that_waits_for_its_engine(path: str) -> None:
    """Comments come from the head on, without the decision; then the answer, as it is."""
    gate = Gate(stream(EVENT))
    async with ScriptedEngine(None, {path: gate.script}).listen() as engine, route_to((), (), [engine], **QUICK) as lab:
        async with await lab.start(path, BODIES[path]) as call:
            assert await call.head() == 200
            await comments(call, 2)
            gate.go.set()
            reply = await call.finish()
        assert (reply.is_whole, reply.status) == (True, 200)
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert "x-request-id" in reply.headers
        assert "x-pdrouter-decode" not in reply.headers
        assert reply.body.replace(COMMENT, b"") == EVENT
        assert lab.is_ledger_zero


async def test_a_stream_that_waits_for_its_turn() -> None:
    """In the queue as well."""
    gate = Gate(stream(EVENT))
    flags = QUICK | {"max_concurrent_requests": 1}
    async with (
        ScriptedEngine(None, {CHAT: gate.script}).listen() as engine,
        route_to((), (), [engine], **flags) as lab,
        await lab.start(CHAT, chat("1")),
        await lab.start(CHAT, chat("2", stream=True)) as call,
    ):
        assert await call.head() == 200
        await comments(call, 2)
        assert gate.asked == 1
        gate.go.set()
        assert (await call.finish()).is_whole


@pytest.mark.parametrize("path", BODIES)
async def test_a_failure_behind_comments(path: str) -> None:
    """It is told by an event in the form of the API, and the reply ends."""
    gate = Gate(http(500, {"error": {"message": "broken", "code": 500}}))
    async with ScriptedEngine(None, {path: gate.script}).listen() as engine, route_to((), (), [engine], **QUICK) as lab:
        async with await lab.start(path, BODIES[path]) as call:
            await call.head()
            await comments(call, 1)
            gate.go.set()
            reply = await call.finish()
        event = reply.body.replace(COMMENT, b"")
        assert event.startswith(b"event: error\n" if path in ("/v1/responses", "/v1/messages") else b"data: ")
        told = json.loads(event.partition(b"data: ")[2])
        assert "500" in json.dumps(told)
        await until(lambda: lab.is_ledger_zero)


async def test_a_further_attempt_behind_comments() -> None:
    """No byte of an answer has gone out: another engine may be tried."""
    gates = [Gate(http(500, b"{}")), Gate(http(500, b"{}"))]
    async with (
        ScriptedEngine(None, {CHAT: gates[0].script}).listen() as first,
        ScriptedEngine(None, {CHAT: gates[1].script}).listen() as second,
        route_to((), (), [first, second], disable_retries=False, **QUICK) as lab,
        await lab.start(CHAT, chat("x", stream=True)) as call,
    ):
        await call.head()
        await comments(call, 1)
        asked = next(gate for gate in gates if gate.asked)
        other = next(gate for gate in gates if gate is not asked)
        other.answer = stream(EVENT)
        for gate in gates:
            gate.go.set()
        reply = await call.finish()
        assert reply.is_whole
        assert reply.body.replace(COMMENT, b"") == EVENT
        assert other.asked == 1


async def test_a_wait_that_is_over() -> None:
    """A queue's limit behind a comment is told by an event."""
    gate = Gate(b"")
    flags = QUICK | {"max_concurrent_requests": 1, "queue_timeout_secs": 0.3}
    async with ScriptedEngine(None, {CHAT: gate.script}).listen() as engine, route_to((), (), [engine], **flags) as lab:
        async with await lab.start(CHAT, chat("1")), await lab.start(CHAT, chat("2", stream=True)) as call:
            assert await call.head() == 200
            reply = await call.finish()
        assert b'"code":"queue_timeout"' in reply.body


async def test_a_client_that_leaves_behind_comments() -> None:
    """Nothing is left of it."""
    gate = Gate(b"")
    async with ScriptedEngine(None, {CHAT: gate.script}).listen() as engine, route_to((), (), [engine], **QUICK) as lab:
        async with await lab.start(CHAT, chat("x", stream=True)) as call:
            await call.head()
            await comments(call, 1)
        await until(lambda: lab.is_ledger_zero and not lab.core.live)


@pytest.mark.invariant("I9")
def test_comments_do_not_pile_up() -> None:
    """A client that is behind gets none until it has read."""
    wire: Any = Wire()
    client = Client(wire, b"POST", b"/", [], {}, 100.0, takes_chunks=True, keeps_alive=True)
    due_s = keep_alive(client, "r", 0.0, 15.0, 100.0)
    assert (due_s, wire.written) == (115.0, b"")
    assert keep_alive(client, "r", due_s, 15.0, 115.0) == 130.0
    assert wire.written.count(COMMENT) == 1
    wire.is_full = True
    assert keep_alive(client, "r", 130.0, 15.0, 131.0) == 146.0
    assert wire.written.count(COMMENT) == 1
    wire.is_full = False
    keep_alive(client, "r", 146.0, 15.0, 146.0)
    assert wire.written.count(COMMENT) == 2
    assert wire.written.count(b"HTTP/1.1 200") == 1


async def test_an_answer_that_is_no_stream_behind_comments() -> None:
    """JSON in a stream of events would be no event to its reader: it is a failure, told by one."""
    gate = Gate(http(200, {"choices": []}))
    async with (
        ScriptedEngine(None, {CHAT: gate.script}).listen() as engine,
        route_to((), (), [engine], **QUICK) as lab,
        await lab.start(CHAT, chat("x", stream=True)) as call,
    ):
        await call.head()
        await comments(call, 1)
        gate.go.set()
        reply = await call.finish()
        assert reply.body.replace(COMMENT, b"").startswith(b'data: {"error":')
        assert b"upstream_protocol" in reply.body


@pytest.mark.parametrize(
    ("body", "flags"), [(chat("x"), {}), (chat("x", stream=True), {"stream_keepalive_secs": 0.0})], ids=["whole", "off"]
)
async def test_who_gets_no_comments(body: dict[str, object], flags: dict[str, Any]) -> None:
    """A reply that is no stream, and any where they are off: its status is still open."""
    gate = Gate(http(400, b'{"error":{}}'))
    async with (
        ScriptedEngine(None, {CHAT: gate.script}).listen() as engine,
        route_to((), (), [engine], **QUICK | flags) as lab,
        await lab.start(CHAT, body) as call,
    ):
        await until(lambda: gate.asked == 1)
        await asyncio.sleep(0.2)
        gate.go.set()
        assert (await call.finish()).status == 400


async def test_a_pair_that_is_slow() -> None:
    """A long prefill is what they are for."""
    async with make_lab(engine={"speed": 0.5}, **QUICK) as lab:
        reply = await lab.post(CHAT, chat("x" * 4000, 2, stream=True))
        assert reply.is_whole
        assert COMMENT in reply.body
        await lab.settled()
