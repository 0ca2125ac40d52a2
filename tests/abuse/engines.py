"""Engines that lie: prompts in errors, queries of death, replies that are none. They serve a model of their own."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

from tests.abuse.case import case, must
from tests.abuse.stage import MIB, SPOILT, Engine, Router, Stage, ready
from tests.lab import Asked, Reply, get, http, post

CHAT = "/v1/chat/completions"
JSON = "content-type: application/json"
SECRET = "my-password-is-swordfish"
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"

Script = Callable[[Asked], Awaitable[bytes | None]]


def says(raw: bytes, *, ends: bool = False) -> Script:
    """Return a script that says these bytes, and may close the connection then."""

    async def script(asked: Asked) -> bytes:
        if ends:
            asked.writer.write(raw)
            await asked.writer.drain()
            asked.writer.close()
            raise asyncio.IncompleteReadError(b"", None)
        return raw

    return script


@contextlib.contextmanager
def _script(engine: Engine, script: Script) -> Iterator[None]:
    engine.script = script
    try:
        yield
    finally:
        engine.script = engine.answers


async def _ask(url: str, text: str = "x", **fields: object) -> Reply:
    body = {"model": SPOILT, "messages": [{"role": "user", "content": text}], "max_tokens": 4} | fields
    async with asyncio.timeout(8):
        return await post(url, CHAT, body)


@contextlib.asynccontextmanager
async def _fleet(stage: Stage, count: int, **flags: Any) -> AsyncIterator[tuple[Router, Sequence[Engine]]]:
    """Run a router over lying engines of its own."""
    engines = [Engine() for _ in range(count)]
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await engine.listen()
            stack.push_async_callback(engine.close)
        words = [word for engine in engines for word in ("--worker", engine.url)]
        router = await stack.enter_async_context(stage.route(*words, engine="openai", **flags))
        await ready(router.url)
        yield router, engines


@case(5, "an engine's error echoes the prompt: body, status line, header, event", "none is kept", is_shared=False)
async def prompt_in_errors(stage: Stage) -> str:
    secret = SECRET.encode()
    body = json.dumps({"error": {"message": f"bad prompt: {SECRET}", "code": 500}}).encode()
    scripts = (
        says(http(500, body, JSON)),
        says(b"HTTP/1.1 500 " + secret + b"\r\ncontent-length: 0\r\n\r\n"),
        says(b"HTTP/1.1 503 x\r\nx-reason: " + secret + b"\r\ncontent-length: 0\r\n\r\n"),
        says(SSE + b'data: {"error":{"message":"' + secret + b'","code":500}}\n\ndata: [DONE]\n\n', ends=True),
        says(secret + b"\r\n\r\n", ends=True),
        says(http(200, body, JSON)),
        says(http(400, body, JSON)),
    )
    async with _fleet(stage, 1, cb_failure_threshold=3, healthy_panic_threshold=0) as (router, engines):
        for script in scripts:
            for is_stream in (False, True):
                engines[0].script = script
                await _ask(router.url, SECRET, stream=is_stream)
        other = await _ask(router.url, "another client")
        must(secret not in other.body, f"in another client's reply: {other.body[:200]!r}")
        for page in ("/debug/fleet", "/workers", "/readiness", "/metrics", "/get_loads", "/debug/decisions"):
            must(secret not in (await get(router.url, page)).body, f"on {page}")
        fleet = (await get(router.url, "/debug/fleet")).body
        must(secret not in fleet, "on /debug/fleet")
        await router.end()
        must(secret not in router.log.read_bytes(), "in the log")
    return "on no page, in no log line"


@case(6, "a body that every engine answers with 500, 11 times", "breakers stay closed", is_shared=False)
async def query_of_death(stage: Stage) -> str:
    async def dies(asked: Asked) -> bytes:
        return http(500, b'{"error":"x"}', JSON) if b"DEATH" in asked.body else await Engine().answers(asked)

    async with _fleet(stage, 4, cb_failure_threshold=3) as (router, engines):
        for engine in engines:
            engine.script = dies
        statuses = [(await _ask(router.url, "DEATH")).status for _ in range(11)]
        honest = [(await _ask(router.url, f"good {i}")).status for i in range(12)]
        must(set(honest) == {200}, f"honest requests: {honest}")
        out = sum(bool(w["metadata"]["out"]) for w in (await get(router.url, "/workers")).json()["workers"])
        must(out == 0, f"{out} of 4 are out")
    return f"{statuses.count(422)} of 11 are 422, none out"


@case(6, "a body that kills its reader; 4 engines, retries on", "at most 2 are asked", is_shared=False)
async def killer(stage: Stage) -> str:
    async def dies(asked: Asked) -> bytes:
        if b"DEATH" in asked.body:
            asked.writer.transport.abort()
            raise asyncio.IncompleteReadError(b"", None)
        return await Engine().answers(asked)

    async with _fleet(stage, 4) as (router, engines):
        for engine in engines:
            engine.script = dies
        await _ask(router.url, "DEATH")
        killed = sum(any(b"DEATH" in asked.body for asked in engine.asked) for engine in engines)
        must(killed <= 2, f"{killed} of 4 were asked")
        again = await _ask(router.url, "DEATH")
        killed = sum(any(b"DEATH" in asked.body for asked in engine.asked) for engine in engines)
        must(killed <= 2, f"{killed} of 4 were asked after another try")
    return f"{killed} of 4 asked, then {again.status}"


def _odd(raw: bytes, *statuses: int, item_input: str, name: str) -> None:
    async def play(stage: Stage) -> str:
        seen: set[int] = set()
        with _script(stage.engine, says(raw, ends=True)):
            for is_stream in (False, True):
                seen.add((await _ask(stage.url, stream=is_stream)).status)
        must(seen <= set(statuses), f"status {seen}")
        return f"status {', '.join(map(str, sorted(seen)))}"

    play.__name__ = name
    case(12, item_input, " or ".join(map(str, statuses)))(play)


_OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
_odd(b"HTTP/1.1 000 X\r\ncontent-length: 2\r\n\r\n{}", 502, 503, item_input="status 000", name="status_000")
_odd(b"HTTP/1.1 099 X\r\ncontent-length: 2\r\n\r\n{}", 502, 503, item_input="status 099", name="status_099")
_odd(b"HTTP/2.0 200 OK\r\ncontent-length: 2\r\n\r\n{}", 502, 503, item_input="HTTP/2.0", name="http_2_0")
_odd(b"RTSP/1.0 200 OK\r\ncontent-length: 2\r\n\r\n{}", 502, 503, item_input="RTSP/1.0", name="rtsp_1_0")
_odd(
    _OK + b"transfer-encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    *(502, 503),
    item_input="transfer-encoding: gzip, chunked",
    name="gzip_chunked",
)
_odd(
    b"HTTP/1.1 302 X\r\nlocation: http://evil.example/\r\ncontent-length: 0\r\n\r\n",
    *(502, 503),
    item_input="a redirect",
    name="redirect",
)
_odd(_OK + b"x: " + b"y" * 200_000 + b"\r\n\r\n", 502, 503, item_input="a header of 200 KB", name="long_header")


@case(12, "an engine's own x-pdrouter-* headers", "never passed on")
async def own_headers(stage: Stage) -> str:
    lines = (JSON, "x-pdrouter-prefill: evil:1", "X-PDRouter-Admin: yes")

    async def script(asked: Asked) -> bytes:
        answer = await stage.engine.answers(asked)
        return http(200, answer.partition(b"\r\n\r\n")[2], *lines)

    with _script(stage.engine, script):
        reply = await _ask(stage.url)
    must(reply.status == 200, f"status {reply.status}")
    must("evil" not in str(reply.headers) and "x-pdrouter-admin" not in reply.headers, f"{reply.headers}")
    return "dropped"


@case(12, "an unary answer of 64 MB, and one without an end", "max_reply bytes, or flow control")
async def endless_reply(stage: Stage) -> str:
    async def script(asked: Asked) -> None:
        asked.writer.write(_OK + b"transfer-encoding: chunked\r\n\r\n")
        with contextlib.suppress(OSError):
            for _ in range(64):
                asked.writer.write(b"100000\r\n" + b"x" * MIB + b"\r\n")
                await asked.writer.drain()

    with _script(stage.engine, script):
        asking = [asyncio.create_task(_ask(stage.url)) for _ in range(4)]
        await asyncio.wait(asking, timeout=2)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    return "held back"


@case(12, "a stream of 400,000 empty events and comments", "no token, no growth")
async def empty_events(stage: Stage) -> str:
    async def script(asked: Asked) -> bytes:
        asked.writer.write(SSE)
        with contextlib.suppress(OSError):
            for _ in range(400):
                asked.writer.write(b": ping\n\n" * 500 + b"data: {}\n\n" * 500)
                await asked.writer.drain()
        asked.writer.close()
        raise asyncio.IncompleteReadError(b"", None)

    with _script(stage.engine, script):
        status = (await _ask(stage.url, stream=True)).status
    return f"status {status}"
