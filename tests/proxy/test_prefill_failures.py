"""A prefill leg that fails when its decode leg has begun to answer: decode had the KV, and the answer goes on."""

import asyncio

import pytest

from pdrouter.proxy.workers import story_page
from tests.lab import CHAT, Asked, ScriptedEngine, chat, http, route_to, start, until

pytestmark = [pytest.mark.invariant("I7"), pytest.mark.invariant("I2")]

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
END = b"data: [DONE]\n\n"

BROKEN = http(200, b"x" * 100)[:-50]
REFUSED = http(500, {"error": "KV"})
FAILED = http(200, {"object": "error", "message": "KV", "type": "500", "param": None, "code": 500})


def chunk(data: bytes) -> bytes:
    """Return a chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.mark.parametrize("reply", [BROKEN, REFUSED, FAILED], ids=["broken off", "an error", "an error inside a 200"])
async def test_it_fails_after_the_first_token(reply: bytes) -> None:
    """A stream that has its KV outlives its prefill engine, as seen on SGLang 0.5.23; its story tells of it."""
    fail, go_on = asyncio.Event(), asyncio.Event()

    async def prefill(asked: Asked) -> bytes:
        await fail.wait()
        asked.writer.write(reply)
        await asked.writer.drain()
        raise asyncio.IncompleteReadError(b"", None)

    async def decode(asked: Asked) -> bytes:
        asked.writer.write(HEAD + chunk(EVENT))
        await go_on.wait()
        return chunk(EVENT) + chunk(END) + b"0\r\n\r\n"

    async with (
        ScriptedEngine("prefill", {CHAT: prefill}).listen() as first,
        ScriptedEngine("decode", {CHAT: decode}).listen() as second,
        route_to([first], [second]) as lab,
        asyncio.timeout(10.0),
    ):
        async with await start(lab.url, CHAT, chat("x", stream=True), {"x-request-id": "r"}) as call:
            assert await call.head() == 200  # sent with the first token
            fail.set()
            await until(lambda: b"prefill leg failed" in story_page(lab.core, b"r", 0.0))
            go_on.set()
            answer = await call.finish()
        assert (answer.is_whole, answer.body) == (True, EVENT + EVENT + END)
        await until(lambda: lab.is_ledger_zero and lab.is_quiet)
        assert not second.asked_for("/abort_request")
        assert len(first.asked_for(CHAT)) == len(second.asked_for(CHAT)) == 1
