"""Bytes from engine to client: unchanged, in order, held back for slow readers; what they teach the router."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pdrouter.engines.usage import PromptCount
from pdrouter.proxy.relay import Observer
from pdrouter.telemetry.metrics import Metrics
from tests.core.builders import decide, facts, make_router, regular
from tests.lab import (
    CHAT,
    GENERATE,
    Asked,
    Lab,
    Script,
    ScriptedEngine,
    always,
    chat,
    connect,
    http,
    make_lab,
    route_to,
    start,
    until,
)

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """Return a chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


@contextlib.asynccontextmanager
async def scripted(decode: Script, prefill: Script | None = None, **flags: Any) -> AsyncIterator[Lab]:
    """Run a router over a pair whose decode engine follows a script."""
    async with (
        ScriptedEngine("prefill", dict.fromkeys((CHAT, GENERATE), prefill or always(200, {}))).listen() as first,
        ScriptedEngine("decode", dict.fromkeys((CHAT, GENERATE), decode)).listen() as second,
        route_to([first], [second], **flags) as lab,
    ):
        yield lab


@pytest.mark.invariant("I10")
async def test_a_stream_passes_as_it_is() -> None:
    """Events of any shape and cut pass byte for byte: comments, CRLF, binary, events cut in the middle."""
    pieces = [b": ping\n\n", b"data: {", b'"a": 1}\r\n\r\n', bytes(range(256)), b"\n\ndata: 1e400\n\n", b"data: [DONE]"]

    async def decode(asked: Asked) -> bytes:
        asked.writer.write(HEAD)
        for piece in pieces:
            asked.writer.write(chunk(piece))
            await asked.writer.drain()
            await asyncio.sleep(0.01)
        return b"0\r\n\r\n"

    async with scripted(decode) as lab:
        for _ in range(2):
            reply = await lab.post(CHAT, chat("x", stream=True))
            assert (reply.status, reply.body, reply.is_whole) == (200, b"".join(pieces), True)
        await until(lambda: lab.is_ledger_zero)


@pytest.mark.invariant("I10")
async def test_a_plain_reply_passes_as_it_is() -> None:
    """A plain reply keeps its bytes, status, headers and declared length."""
    body = b""
    lines = ("Content-Type: odd/thing", "X-Worker-Id: 7", "Set-Cookie: a=1", "Set-Cookie: b=2")

    async def decode(asked: Asked) -> bytes:
        return http(207, body, *lines)

    async with scripted(decode) as lab:
        for body in (b"", b"x", b"x" * 1_000_000, b'{"big": 18446744073709551617, "f": 1.0e+2}'):
            reply = await lab.post(CHAT, chat("x"))
            assert (reply.status, reply.body) == (207, body)
            assert reply.headers["content-type"] == "odd/thing"
            assert reply.headers["x-worker-id"] == "7"
            assert reply.headers["content-length"] == str(len(body))
            await until(lambda: lab.is_ledger_zero)


async def test_headers_of_one_hop_stay_there() -> None:
    """Headers of the engine's connection and its request id don't reach the client."""
    lines = ("Keep-Alive: timeout=5", "Proxy-Authenticate: no", "X-Request-Id: the-engines", "Upgrade: h2")
    async with scripted(always(200, {}, *lines)) as lab:
        headers = (await lab.post(CHAT, chat("x"), {"x-request-id": "the-clients"})).headers
        assert headers["x-request-id"] == "the-clients"
        assert not headers.keys() & {"keep-alive", "proxy-authenticate", "upgrade"}


@pytest.mark.invariant("I10")
async def test_the_body_reaches_the_engine_spliced() -> None:
    """The engine gets the client's own bytes behind the router's fields."""
    inside = b'"messages" : [ {"role":"user","content":"\\u00e9\\ud83d\\ude42"} ], "x": 12345678901234567890 , "x": 1.0'
    async with (
        ScriptedEngine("prefill", {CHAT: always(200, {})}).listen() as prefill,
        ScriptedEngine("decode", {CHAT: always(200, {})}).listen() as decode,
        route_to([prefill], [decode]) as lab,
    ):
        sent = {"cookie": "secret=1", "authorization": "Bearer t", "x-prefiller-host-port": "evil:1", "te": "trailers"}
        assert (await lab.post(CHAT, b" { " + inside + b" } ", sent)).status == 200
        for engine in (prefill, decode):
            (asked,) = engine.asked_for(CHAT)
            assert asked.body.endswith(inside + b" } ")
            assert b"authorization: Bearer t\r\n" in asked.head
            assert not [w for w in (b"cookie", b"prefiller", b"trailers") if w in asked.head]


async def test_headers_that_are_allowed() -> None:
    """What the settings name goes on to both legs, unless the client's own Connection header keeps it back."""
    async with (
        ScriptedEngine("prefill", {CHAT: always(200, {})}).listen() as prefill,
        ScriptedEngine("decode", {CHAT: always(200, {})}).listen() as decode,
        route_to([prefill], [decode], forward_headers=["X-Lane", "x-override-rid"]) as lab,
    ):
        sent = {"x-lane": "7", "x-lane-too": "8", "x-override-rid": "r", "connection": "keep-alive, x-override-rid"}
        assert (await lab.post(CHAT, chat("x"), sent)).status == 200
        for engine in (prefill, decode):
            (asked,) = engine.asked_for(CHAT)
            assert b"\r\nx-lane: 7\r\n" in asked.head
            assert b"x-lane-too" not in asked.head
            assert b"x-override-rid" not in asked.head


async def test_a_reply_that_ends_with_its_connection() -> None:
    """A reply without length or chunks is whole when the engine closes; the client gets a proper end."""

    async def decode(asked: Asked) -> bytes:
        asked.writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nall of it")
        await asked.writer.drain()
        raise asyncio.IncompleteReadError(b"", None)

    async with scripted(decode) as lab:
        reply = await lab.post(CHAT, chat("x"))
        assert (reply.status, reply.body, reply.is_whole) == (200, b"all of it", True)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 1000])
def test_what_is_learned_of_a_stream_in_pieces(size: int) -> None:
    """However small the pieces, its events, its usage and whether an event is open are seen."""
    usage = b'{"prompt_tokens":9,"completion_tokens":2}'
    stream = b'data: {"text":"data and a"}\n\ndata: ' + usage + b"\n\ndata: [DONE]\n\n"
    router = make_router([regular("r")])
    decision = decide(router, facts(), 0.0)
    observer = Observer(router, Metrics(router, lambda: 0.0), decision, lambda: 1.0, CHAT, is_stream=True)
    for at in range(0, len(stream), size):
        observer.piece(stream[at : at + size])
    assert observer.event_end() == b""
    observer.finished()
    assert decision.usage is not None
    assert (decision.usage.prompt_tokens, decision.usage.completion_tokens) == (9, 2)
    assert decision.decode.reservation.tokens == 100 + 2
    observer.first_piece()
    observer.piece(b"data: {")
    assert observer.event_end() == b"\n\n"


@pytest.mark.parametrize("tokens", [-1, 10**400])
def test_a_count_that_none_can_be(tokens: int) -> None:
    """The core isn't told of it; that the prompt was read, it is."""
    router = make_router([regular("r")])
    decision = decide(router, facts(), 0.0)
    Observer(router, Metrics(router, lambda: 0.0), decision, lambda: 1.0, CHAT, is_stream=True).prefill_done(
        PromptCount(tokens, tokens)
    )
    assert decision.prefill_usage is None
    assert decision.first_token_at_s == 1.0


NO_REPLIES = (
    b"not http at all\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: nonsense\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"HTTP/1.1 200 OK\r\nx: " + b"x" * 100_000,
    b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\n\r\n",
)


async def test_replies_that_are_no_replies() -> None:
    """What isn't HTTP, or breaks a limit, is a 502 with a code of its own."""
    raw = b""

    async def decode(asked: Asked) -> bytes | None:
        asked.writer.write(raw)
        await asked.writer.drain()
        return None

    async with scripted(decode) as lab:
        for raw in NO_REPLIES:
            reply = await lab.post(CHAT, chat("x"))
            assert (reply.status, reply.error["code"]) == (502, "upstream_protocol"), raw[:60]
            await until(lambda: lab.is_ledger_zero and lab.is_quiet, 1.0)


async def slam(asked: Asked) -> bytes | None:
    """Close the connection without a byte."""
    raise asyncio.IncompleteReadError(b"", None)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_kept_connection_that_turns_out_closed(side: str) -> None:
    """A request that meets a connection just closed by its engine is sent again once, unseen by the client."""
    async with (
        ScriptedEngine("prefill", {CHAT: always(200, {})}).listen() as prefill,
        ScriptedEngine("decode", {CHAT: always(200, {})}).listen() as decode,
        route_to([prefill], [decode]) as lab,
    ):
        engine = prefill if side == "prefill" else decode
        slams, is_served = 0, asyncio.Event()

        async def slam_times(asked: Asked) -> bytes | None:
            nonlocal slams
            slams -= 1
            if slams >= 0:
                return await slam(asked)
            is_served.set()
            return http(200, {})

        async def once_served(asked: Asked) -> bytes:
            await is_served.wait()
            return http(200, {})

        decode.scripts[CHAT] = once_served
        engine.scripts[CHAT] = slam_times
        for fails, status in ((0, 200), (1, 200), (2, 502)):
            slams = fails
            is_served.clear()
            assert (await lab.post(CHAT, chat("x"))).status == status
            await until(lambda: lab.is_ledger_zero and lab.is_quiet, 1.0)
        assert lab.router.service.pools.counters()["repeated"] == 2
        assert len(engine.asked_for(CHAT)) == 5


async def test_a_status_without_a_name() -> None:
    """A status that HTTP has no phrase for passes."""
    async with scripted(always(299, {})) as lab:
        assert (await lab.post(CHAT, chat("x"))).status == 299


@pytest.mark.invariant("I9")
async def test_a_slow_reader_holds_its_engine_back() -> None:
    """However long the stream, the router holds no more of it than its limits; all of it arrives in the end."""
    total, piece = 64, b"x" * 500_000
    written = 0

    async def decode(asked: Asked) -> bytes:
        nonlocal written
        asked.writer.write(HEAD)
        for _ in range(total):
            asked.writer.write(chunk(piece))
            await asked.writer.drain()
            written += 1
        return b"0\r\n\r\n"

    async with scripted(decode) as lab:
        async with await start(lab.url, CHAT, chat("x", stream=True), receive_bytes=4096) as call:
            assert await call.head() == 200
            pool = lab.router.service.pools.get(next(e for e in lab.core.fleet if e.role == "decode"))
            await until(lambda: any(c._exchange and c._exchange.is_paused for c in pool._connections))
            seen = -1
            while seen != written:
                seen = written
                await asyncio.sleep(0.1)
            assert written < total / 2
            reply = await call.finish()
        assert (len(reply.body), reply.is_whole) == (total * len(piece), True)
        await until(lambda: lab.is_ledger_zero and lab.is_quiet, 1.0)


async def test_http_1_0_clients() -> None:
    """A client that knows no chunks gets the plain bytes, ended by the connection."""
    async with make_lab() as lab, await connect(lab.url) as call:
        body = b'{"text":"x","sampling_params":{"max_new_tokens":3},"stream":true}'
        call.writer.write(b"POST /generate HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        reply = await call.finish()
        assert reply.status == 200
        assert "transfer-encoding" not in reply.headers
        assert len(reply.events) == 3
        await lab.settled()


async def test_a_client_that_wants_to_close() -> None:
    """``Connection: close`` is honoured, for whole replies and for streams."""
    async with make_lab() as lab:
        for is_stream in (False, True):
            async with await lab.start(CHAT, chat("x", stream=is_stream), headers={"connection": "close"}) as call:
                assert (await call.finish()).is_whole
                assert call.headers["connection"] == "close"
                assert await call.reader.read() == b""


async def test_expect_100() -> None:
    """A client that waits for 100 Continue gets it, then its reply."""
    async with make_lab() as lab, await connect(lab.url) as call:
        body = b'{"text":"x","sampling_params":{"max_new_tokens":3}}'
        head = {"expect": "100-continue", "content-length": str(len(body))}
        call.send("POST", GENERATE, b"", head, framing=False)
        assert await call.head() == 100
        call.writer.write(body)
        call.status = 0
        assert (await call.finish()).status == 200


async def test_the_ledger_follows_a_stream() -> None:
    """Prefill's load goes with the first token; decode's grows with the tokens, and goes with the end."""
    go_on = asyncio.Event()

    async def decode(asked: Asked) -> bytes:
        asked.writer.write(HEAD + chunk(b"data: {}\n\n"))
        await go_on.wait()
        asked.writer.write(chunk(b"data: {}\n\n" * 40))
        await go_on.wait()
        return b""

    async with scripted(decode, lambda asked: asyncio.sleep(60, None)) as lab:
        async with await lab.start(CHAT, chat("x" * 400, stream=True)) as call:
            await call.head()
            first, second = (load.ranks[0].account for load in lab.core.load.endpoints.values())
            await until(lambda: (first.tokens, first.requests) == (0, 0))
            before = second.tokens
            assert before >= 100
            go_on.set()
            await until(lambda: second.tokens >= before + 32)
        await until(lambda: lab.is_ledger_zero)


async def test_usage_teaches_the_tokens_of_a_text() -> None:
    """The engine's own count corrects what a byte of this model's text costs."""

    async def decode(asked: Asked) -> bytes:
        return http(200, {"usage": {"prompt_tokens": 4000, "completion_tokens": 2}})

    async with scripted(decode) as lab:
        before = lab.core.tokens.estimate("emulated", 4000)
        for _ in range(20):
            assert (await lab.post(CHAT, chat("x" * 4000))).status == 200
        assert lab.core.tokens.estimate("emulated", 4000) > 2 * before


@pytest.mark.invariant("I9")
@pytest.mark.parametrize("size_bytes", [900, 1100])
async def test_an_error_that_comes_whole_has_the_limit_of_others(size_bytes: int) -> None:
    """However a reply is cut, what must be held is held up to the limit and no further."""
    async with (
        ScriptedEngine("prefill", {CHAT: always(200, {})}).listen() as prefill,
        ScriptedEngine("decode", {CHAT: always(400, {"x": "y" * size_bytes})}).listen() as decode,
        route_to([prefill], [decode], upstream_max_reply_bytes=1024) as lab,
    ):
        reply = await lab.post(CHAT, chat("x"))
        if size_bytes < 1024:
            assert (reply.status, reply.json()) == (400, {"x": "y" * size_bytes})
        else:
            assert (reply.status, reply.error["code"]) == (502, "upstream_protocol")
