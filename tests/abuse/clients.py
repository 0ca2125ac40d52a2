"""Hostile clients: answers that they don't read, small things that become large, keys, browsers."""

import asyncio
import contextlib
import json
from collections.abc import Iterable
from typing import Any

from tests.abuse.case import case, must
from tests.abuse.stage import HOSTILE, MIB, SPOILT, Engine, Stage, ready
from tests.lab import Asked, Call, Reply, chat, connect, get, post

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
PART_S = 6.0
"""Time for one part of a case."""


async def flood(call: Call, raw: bytes, times: int) -> int:
    """Send and send, as long as the router reads; return how many bytes it took."""
    taken = 0
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(1.5):
            for _ in range(times):
                call.writer.write(raw)
                await call.writer.drain()
                taken += len(raw)
    call.writer.transport.abort()
    return taken


async def _unread(stage: Stage, *heads: bytes) -> str:
    calls = [await connect(stage.url, receive_bytes=4096) for _ in range(16)]
    taken = await asyncio.gather(*(flood(c, heads[i % len(heads)] * 100, 1500) for i, c in enumerate(calls)))
    return f"{sum(taken) / MIB:.1f} MB of requests read"


@case(1, "16 clients pipeline GET /openapi.json and read nothing", "write budget 24 MB")
async def unread_pages(stage: Stage) -> str:
    return await _unread(stage, b"GET /openapi.json HTTP/1.1\r\nhost: a\r\n\r\n")


@case(1, "the same with 404s, 401s, /debug/fleet, /metrics", "write budget 24 MB")
async def unread_errors(stage: Stage) -> str:
    paths = (b"/nothing", b"/debug/fleet", b"/metrics", b"/debug/story/x", CHAT.encode())
    return await _unread(stage, *(b"GET %b HTTP/1.1\r\nhost: a\r\n\r\n" % path for path in paths))


@case(1, "16 streams of 20,000 tokens that nobody reads", "64 KB a client, write time 2 s")
async def unread_streams(stage: Stage) -> str:
    body = json.dumps(
        {"model": HOSTILE, "prompt": "x", "max_tokens": 20_000, "stream": True, "ignore_eos": True}
    ).encode()
    calls = [await connect(stage.url, receive_bytes=4096) for _ in range(16)]
    for call in calls:
        call.send("POST", COMPLETIONS, body, {"content-type": "application/json"})
    await asyncio.sleep(3.0)  # longer than client_write_timeout_secs
    for call in calls:
        call.writer.transport.abort()
    return "cut, or left after 3 s"


async def _bodies(stage: Stage, path: str, bodies: Iterable[bytes], *statuses: int) -> str:
    """Post bodies one after the other; each must get one of the statuses."""
    seen: list[int] = []
    for body in bodies:
        async with asyncio.timeout(PART_S):
            reply = await post(stage.url, path, body)
        seen.append(reply.status)
        must(reply.status in statuses, f"{reply.status}: {reply.body[:200]!r}")
    return f"status {', '.join(map(str, sorted(set(seen))))}"


@case(2, "chat of 50,000 and 400,000 empty parts ([{},{},...])", "linear in the body")
async def many_parts(stage: Stage) -> str:
    def body(count: int) -> bytes:
        parts = b",".join([b"{}"] * count)
        return b'{"model":"hostile","max_tokens":1,"messages":[{"role":"user","content":[' + parts + b"]}]}"

    return await _bodies(stage, CHAT, (body(50_000), body(400_000)), 200, 400)


@case(2, '1.6 MB of "prompt":[[1],[1],...]', "max_samples, before any work")
async def many_prompts(stage: Stage) -> str:
    body = b'{"model":"hostile","max_tokens":1,"prompt":[' + b",".join([b"[1]"] * 400_000) + b"]}"
    return await _bodies(stage, COMPLETIONS, [body], 400)


@case(2, "200,000 messages; 200,000 tools; n of 10^9; 100,000 fields", "400, or linear")
async def many_of_all(stage: Stage) -> str:
    message, tool = b'{"role":"user","content":""}', b'{"type":"function","function":{"name":"f"}}'
    start = b'{"model":"hostile","max_tokens":1,'
    say = b'"messages":[{"role":"user","content":"x"}]'
    bodies = (
        start + b'"messages":[' + b",".join([message] * 200_000) + b"]}",
        start + say + b',"tools":[' + b",".join([tool] * 200_000) + b"]}",
        start + say + b',"n":1000000000}',
        start + say + b"," + b",".join(b'"f%d":%d' % (i, i) for i in range(100_000)) + b"}",
    )
    return await _bodies(stage, CHAT, bodies, 200, 400, 413)


@case(2, "2 MB of input_embeds; JSON 100,000 levels deep", "400, or linear")
async def deep_and_wide(stage: Stage) -> str:
    embeds = b'{"input_embeds":[' + b",".join([b"[0.1,0.2]"] * 200_000) + b'],"sampling_params":{"max_new_tokens":1}}'
    deep = b'{"model":"hostile","prompt":"x","max_tokens":1,"extra":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    first = await _bodies(stage, GENERATE, [embeds], 200, 400, 500)
    return f"{first}; {await _bodies(stage, COMPLETIONS, [deep], 200, 400)}"


@case(3, 'multipart of name="model" repeated: 64 KB, 1 MB, 8 MB', "linear in the body")
async def multipart(stage: Stage) -> str:
    seen: list[int] = []
    for size in (65_536, MIB, 8 * MIB):
        line = b'name="model"\r\n'
        body = b"--b\r\ncontent-disposition: form-data; " + line * (size // len(line)) + b"\r\n--b--\r\n"
        async with asyncio.timeout(PART_S), await connect(stage.url) as call:
            call.send("POST", "/v1/audio/transcriptions", body, {"content-type": "multipart/form-data; boundary=b"})
            seen.append((await call.finish()).status)
    must(not any(status == 500 for status in seen), f"statuses {seen}")
    return f"status {', '.join(map(str, sorted(set(seen))))}"


@case(3, "heads of 64 KB: spaces, commas, quotes, digits", "431 or 400, linear")
async def odd_heads(stage: Stage) -> str:
    seen: set[int] = set()
    for filler in (b" \t" * 30_000, b"," * 60_000, b'"\\' * 30_000, b"9" * 60_000, b"keep-alive," * 5_000):
        for name in (b"connection", b"accept-encoding", b"x-request-priority", b"expect", b"x-data-parallel-rank"):
            async with asyncio.timeout(PART_S), await connect(stage.url) as call:
                head = b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n%b: %b\r\n\r\n{}"
                call.writer.write(head % (CHAT.encode(), name, filler))
                seen.add((await call.finish()).status)
    must(seen <= {400, 411, 413, 417, 431, 501}, f"statuses {seen}")
    return f"status {', '.join(map(str, sorted(seen)))}"


@case(8, "authorization twice; x-api-key twice", "400")
async def repeated_key(stage: Stage) -> str:
    for name in ("authorization", "x-api-key"):
        async with await connect(stage.url) as call:
            body = b'{"model":"hostile","prompt":"x","max_tokens":1}'
            lines = b"%b: Bearer a\r\n%b: Bearer b\r\n" % (name.encode(), name.encode())
            head = b"POST %b HTTP/1.1\r\nhost: a\r\n%bcontent-length: %d\r\n\r\n"
            call.writer.write(head % (COMPLETIONS.encode(), lines, len(body)) + body)
            reply = await call.finish()
            must(reply.status == 400, f"{name}: {reply.status}")
    return "400"


@case(8, "max_tokens 900, max_completion_tokens 1, 60 times; limit 1,000/min", "429", is_shared=False)
async def small_limit_beside(stage: Stage) -> str:
    async with stage.route("--worker", stage.regular, rate_limit_tokens_per_min=1000) as router:
        statuses: list[int] = []
        for _ in range(60):
            body = {"prompt": "x", "max_tokens": 900, "max_completion_tokens": 1}
            statuses.append((await post(router.url, COMPLETIONS, body)).status)
    passed = sum(status != 429 for status in statuses)
    must(passed <= 2, f"{passed} of 60 passed")
    return f"{passed} of 60 passed"


@case(8, 'max_tokens, n, ranks of -1, 10^400, 1e999, NaN, "9"*400', "400")
async def odd_numbers(stage: Stage) -> str:
    seen: set[int] = set()
    for number in (b"-1", b"1" + b"0" * 400, b"1e999", b"NaN", b'"' + b"9" * 400 + b'"', b"-0.5"):
        for field in (b"max_tokens", b"n", b"max_completion_tokens", b"priority"):
            body = b'{"model":"hostile","messages":[{"role":"user","content":"x"}],"%b":%b}' % (field, number)
            reply = await post(stage.url, CHAT, body)
            seen.add(reply.status)
            must(reply.status in (200, 400), f"{field!r} {number[:9]!r}: {reply.status} {reply.body[:120]!r}")
    return f"status {', '.join(map(str, sorted(seen)))}"


@case(9, "8 wrong keys, Expect: 100-continue, 100 MB each", "401 at the head", grows_mib=20, is_shared=False)
async def before_the_key(stage: Stage) -> str:
    async with stage.route("--worker", stage.regular, api_key="right") as router:
        before = router.rss_bytes()

        async def one() -> int:
            async with asyncio.timeout(PART_S), await connect(router.url) as call:
                fields = {"authorization": "Bearer wrong", "expect": "100-continue", "content-length": "16000000"}
                call.send("POST", CHAT, b"", fields, framing=False)
                with contextlib.suppress(OSError):
                    call.writer.write(b"x" * 4_000_000)
                    await call.writer.drain()
                return await call.head()

        statuses = set(await asyncio.gather(*(one() for _ in range(8))))
        must(statuses == {401}, f"{statuses}")
        grown = (router.rss_bytes() - before) / MIB
        must(grown < 20, f"grew by {grown:.0f} MB")
    return f"401, {max(0.0, grown):.0f} MB"


@case(9, "12 bodies of 15 MB at once that never end", "body budget 48 MB, then 503", grows_mib=90)
async def many_bodies(stage: Stage) -> str:
    async def one() -> int:
        with contextlib.suppress(OSError, EOFError):
            async with asyncio.timeout(PART_S), await connect(stage.url) as call:
                call.send("POST", CHAT, b"", {"content-length": str(15 * MIB)}, framing=False)
                with contextlib.suppress(OSError):
                    call.writer.write(b"x" * (15 * MIB - 1))
                    await call.writer.drain()
                return await call.head()
        return 0

    statuses = sorted(await asyncio.gather(*(one() for _ in range(12))))
    must(503 in statuses and 200 not in statuses, f"{statuses}")
    return f"{statuses.count(503)} of 12 are 503, {statuses.count(408)} are 408"


@case(9, "200 clients that send a byte of a head each half second", "head time 2 s")
async def slow_heads(stage: Stage) -> str:
    async def one() -> bool:
        with contextlib.suppress(OSError, EOFError):
            async with asyncio.timeout(PART_S), await connect(stage.url) as call:
                call.writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nx-more: ")
                reading = asyncio.create_task(call.head())
                try:
                    while not reading.done():
                        call.writer.write(b"y")
                        await asyncio.wait([reading], timeout=0.5)
                    return reading.result() == 408
                finally:
                    reading.cancel()
        return True

    async with asyncio.timeout(PART_S + 2):
        parted = await asyncio.gather(*(one() for _ in range(200)))
    must(all(parted), f"{parted.count(False)} of 200 had another status")
    return "all parted from"


async def _form(stage: Stage, path: str, **headers: str) -> Reply:
    fields = {"content-type": "application/x-www-form-urlencoded"} | headers
    async with await connect(stage.url) as call:
        call.send("POST", path, b"url=http://evil:1", {n.replace("_", "-"): v for n, v in fields.items()})
        return await call.finish()


@case(10, "cross-site forms to /add_worker, /workers, /flush_cache; a rebound Host", "403")
async def browsers(stage: Stage) -> str:
    before = (await get(stage.url, "/workers")).json()
    for path in ("/add_worker?url=http://evil:1", "/workers", "/remove_worker?url=" + stage.engine.url, "/flush_cache"):
        for headers in ({"origin": "http://evil.example"}, {"sec_fetch_site": "cross-site"}):
            reply = await _form(stage, path, **headers)
            must(reply.status == 403, f"{path} {headers}: {reply.status}")
    async with await connect(stage.url) as call:
        call.writer.write(
            b"POST /add_worker?url=http://evil:1 HTTP/1.1\r\nhost: evil.example\r\ncontent-length: 0\r\n\r\n"
        )
        must((await call.finish()).status == 403, "a rebound host name")
    must(len((await get(stage.url, "/workers")).json()["workers"]) == len(before["workers"]), "the fleet has changed")
    return "403, fleet as before"


@case(13, "256 open files, 300 idle clients", "admitted clients are served", is_shared=False)
async def few_files(stage: Stage) -> str:
    limited = ("sh", "-c", 'ulimit -n 256; exec "$0" "$@"')
    async with stage.route("--worker", stage.regular, before=limited) as router, contextlib.AsyncExitStack() as stack:
        idle: list[Any] = []
        for _ in range(300):
            with contextlib.suppress(OSError):
                idle.append(await stack.enter_async_context(await connect(router.url)))
        await asyncio.sleep(0.5)
        bodies = [{"prompt": f"x {i}", "max_tokens": 2} for i in range(20)]
        replies = await asyncio.gather(*(post(router.url, COMPLETIONS, body) for body in bodies))
        good = sum(reply.status == 200 for reply in replies)
        must(good == 20, f"{good} of 20 answered")
    return f"{good} of 20 answered"


@case(13, "SIGTERM at once, and 0.1, 0.2 s after the start", "ends within 5 s", is_shared=False)
async def early_signal(stage: Stage) -> str:
    for pause_s in (0.0, 0.1, 0.2, 0.4):
        async with stage.route(listens=False, shutdown_grace_period_secs=1, drain_notice_secs=0) as router:
            await asyncio.sleep(pause_s)
            status = await router.end(5.0)
            must(status in (0, -15, 143), f"after {pause_s} s: status {status}")
    return "ended"


@case(0, "300 clients that leave at any moment of a stream", "nothing left in the ledger")
async def leavers(stage: Stage) -> str:
    async def one(number: int) -> None:
        body = {"model": HOSTILE, "prompt": f"leave {number}", "max_tokens": 400, "stream": True}
        call = await connect(stage.url)
        call.send("POST", COMPLETIONS, json.dumps(body).encode(), {"content-type": "application/json"})
        with contextlib.suppress(TimeoutError, OSError, EOFError):
            await asyncio.wait_for(call.head(), number % 50 / 100)
        call.writer.transport.abort()

    for start in range(0, 300, 50):
        await asyncio.gather(*(one(start + i) for i in range(50)))
    await stage.router.ledger_is_zero()
    return "ledger zero"


@case(0, "requests for a model that lies, from clients that don't wait", "honest model unharmed")
async def other_model(stage: Stage) -> str:
    async def silent(_: object) -> None:
        return None

    stage.engine.script = silent
    try:
        calls = [await connect(stage.url) for _ in range(100)]
        body = json.dumps({"model": SPOILT, "messages": [{"role": "user", "content": "x"}]}).encode()
        for call in calls:
            call.send("POST", CHAT, body, {"content-type": "application/json"})
        await asyncio.sleep(1.0)
        for call in calls:
            call.writer.transport.abort()
        await stage.router.ledger_is_zero()
    finally:
        stage.engine.script = stage.engine.answers
    return "ledger zero"


@case(
    8,
    "200 requests, each of a new key and of priority 1e9, before one of a listed tenant",
    "it goes at once",
    is_shared=False,
)
async def urgent_strangers(stage: Stage) -> str:
    engine = Engine()

    is_crowded = asyncio.Event()

    async def slow(asked: Asked) -> bytes:
        if len(engine.asked) >= 5:
            is_crowded.set()
        await asyncio.sleep(0.02)
        return await engine.answers(asked)

    engine.script = slow
    await engine.listen()
    flags: dict[str, Any] = {"engine": "openai", "max_concurrent_requests": 1, "tenant_weights": "Bearer honest=1"}
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(engine.close)
        router = await stack.enter_async_context(stage.route("--worker", engine.url, **flags))
        await ready(router.url)
        body = {"messages": [{"role": "user", "content": "x"}], "priority": 10**9}
        headers = [{"authorization": f"Bearer {n}", "x-request-priority": "999999999"} for n in range(200)]
        crowd = [asyncio.create_task(post(router.url, CHAT, body, one)) for one in headers]
        async with asyncio.timeout(10):
            await is_crowded.wait()
            before = len(engine.asked)
            reply = await post(router.url, CHAT, chat("honest"), {"authorization": "Bearer honest"})
        overtook = len(engine.asked) - before
        for task in crowd:
            task.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
    must(reply.status == 200, f"status {reply.status}")
    must(overtook <= 10, f"{overtook} others went first")
    return f"{overtook - 1} went first"
