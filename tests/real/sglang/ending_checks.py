"""What must hold when something ends early: clients leave, KV fails inside a 200, a prefill engine dies."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from tests.real.sglang.answer_checks import PROMPT, PROMPTS, TOKENS
from tests.real.sglang.asking import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, Api, Reply, unique
from tests.real.sglang.pair import POLL_S, Found, Pair
from tests.real.sglang.servers import START_S, count_in_log

ENDLESS_TOKENS = 1500
FREE_S = 1.0
"""Longest time from a client's leaving until the engines are free."""

_LEAVE: Mapping[str, tuple[Api, bool, dict[str, Any], int]] = {
    "chat, stream": (CHAT, True, {}, 1),
    "chat, whole": (CHAT, False, {}, 1),
    "chat, n = 2, whole": (CHAT, False, {"n": 2}, 2),
    "completions, list": (COMPLETIONS, False, {}, 2),
    "completions, list, stream": (COMPLETIONS, True, {}, 2),
    "generate, list": (GENERATE, False, {}, 2),
    "generate, list, its rids": (GENERATE, False, {"rid": ["mine-a", "mine-b"]}, 2),
    "messages, stream": (MESSAGES, True, {}, 1),
    "responses, stream": (RESPONSES, True, {}, 1),
}
"""Who leaves: API, streamed or not, more fields, and how many requests the engine makes of it."""


async def check_leaving(pair: Pair) -> None:
    """Check that engines are free soon after a client has left."""
    for name, (api, is_stream, more, parts) in _LEAVE.items():
        prompt = PROMPTS if "list" in name else PROMPT
        body = api.body(prompt, ENDLESS_TOKENS, is_stream=is_stream, **more)
        await pair.hold(f"left: {name}", lambda a=api, b=body, p=parts: _left(pair, a, b, p))  # type: ignore[misc]
    await pair.hold("left: while decode waits for KV", lambda: _left_waiting(pair))


async def check_failures(pair: Pair) -> None:
    """Check that what fails inside a 200 is a failure, and another attempt answers."""
    for api in (GENERATE, CHAT, COMPLETIONS):
        for is_stream in (True, False):
            name = f"KV fails: {api.name}, {'stream' if is_stream else 'whole'}"
            await pair.hold(name, lambda a=api, s=is_stream: _kv_fails(pair, a, s))  # type: ignore[misc]
    await pair.hold("nothing is left", pair.idle)
    await pair.hold("the prefill engine is killed", lambda: _killed(pair))
    await pair.hold("... and starts again", lambda: _started_again(pair), START_S)


async def _left(pair: Pair, api: Api, body: dict[str, Any], parts: int) -> Found:
    """Leave while the answer is written."""
    aborts = count_in_log(pair.decode, "POST /abort_request")
    asking = asyncio.create_task(pair.client.post(api.path, body))
    try:
        await pair.until(lambda: _decodes(pair, parts), "it runs")
    finally:
        asking.cancel()
        left_s = time.monotonic()
        await asyncio.gather(asking, return_exceptions=True)
    held, seen = await pair.idle()
    took_s = time.monotonic() - left_s
    sent = count_in_log(pair.decode, "POST /abort_request") - aborts
    return held and took_s < FREE_S, f"free {seen}, {took_s:.2f} s after it left, {sent} aborts"


async def _left_waiting(pair: Pair) -> Found:
    """Leave while the prefill engine doesn't move and decode waits for its KV, whose place it keeps until then."""
    await pair.until(lambda: _is_ready(pair), "the router is ready")
    with pair.prefill.paused():
        asking = asyncio.create_task(pair.client.post(CHAT.path, CHAT.body(unique(PROMPT), TOKENS, is_stream=True)))
        await pair.until(lambda: _waits(pair), "decode waits for KV")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        took_s = await pair.until(lambda: _is_free(pair), "decode is free")
    held, seen = await pair.idle()
    return held and took_s < FREE_S, f"decode free after {took_s:.2f} s, nothing is left {seen}"


async def _kv_fails(pair: Pair, api: Api, is_stream: bool) -> Found:
    """Decode gives up waiting for KV and says so inside a 200; another attempt gives the client its answer."""
    made = pair.counted("pdrouter_retries_total", event="made")
    prompt = unique(PROMPT)
    await pair.until(lambda: _is_ready(pair), "the router is ready")
    with pair.prefill.paused():
        asking = asyncio.create_task(pair.client.post(api.path, api.body(prompt, TOKENS, is_stream=is_stream)))
        await pair.until(lambda: _waits(pair), "decode waits for KV")
        await pair.abort_all(pair.decode)
        await pair.until(lambda: _retried(pair, made), "another attempt")
    reply = await asking
    if reply.status != 200:
        return False, str(reply)
    return _is_whole(api, reply), f"{pair.counted('pdrouter_retries_total', event='made') - made:g} retries, {reply}"


def _is_whole(api: Api, reply: Reply) -> bool:
    answer = api.read(reply)
    return answer.completion_tokens == TOKENS and answer.reasons == ["length"]


async def _killed(pair: Pair) -> Found:
    """Requests under way end, and new ones are refused, in bounded time and by a proper error."""
    streams = [CHAT.body(f"{n} {PROMPT}", ENDLESS_TOKENS, is_stream=True) for n in range(2)]
    under_way = [asyncio.create_task(pair.client.post(CHAT.path, body)) for body in streams]
    await pair.until(lambda: _decodes(pair, len(streams)), "it runs")
    with pair.prefill.paused():
        waiting = asyncio.create_task(pair.client.post(CHAT.path, CHAT.body(unique(PROMPT), TOKENS, is_stream=True)))
        await pair.until(lambda: _waits(pair), "decode waits for KV")
        pair.prefill.kill()
    began_s = time.monotonic()
    waited = await waiting
    fresh = await pair.client.post(CHAT.path, CHAT.body(unique(PROMPT), TOKENS))
    took_s = time.monotonic() - began_s
    decoding = await asyncio.gather(*under_way)
    held = waited.status in (502, 503, 504) and fresh.status in (502, 503, 504)
    whole = sum(reply.status == 200 and reply.body.endswith(b"[DONE]\n\n") for reply in decoding)
    return held, f"{waited.status} and {fresh.status} after {took_s:.1f} s; {whole} of 2 streams that had KV went on"


async def _started_again(pair: Pair) -> Found:
    """The same address serves again, on all ranks."""
    pair.prefill.kill()
    began_s = time.monotonic()
    pair.prefill.start_again()
    await asyncio.to_thread(pair.prefill.wait_until_answers, "/health", START_S)
    up_s = time.monotonic() - began_s
    await pair.until(lambda: _is_ready(pair), "the router is ready")
    ready_s = time.monotonic() - began_s - up_s
    bodies = [GENERATE.body(unique(PROMPT), TOKENS) for _ in range(16)]
    replies = await asyncio.gather(*(pair.client.post(GENERATE.path, body) for body in bodies))
    good = [reply for reply in replies if reply.status == 200]
    ranks = {reply.ranks for reply in good}
    bad = [str(reply) for reply in replies if reply.status != 200]
    seen = f"{len(good)} of {len(replies)} answered by {len(ranks)} pairs of ranks, {ready_s:.1f} s after it was up"
    return len(good) == len(replies), "; ".join([seen, *bad[:1]])


async def _decodes(pair: Pair, count: int) -> bool:
    return sum(int(load["num_running_reqs"]) for load in await pair.loads(pair.decode)) >= count


async def _waits(pair: Pair) -> bool:
    return any(load["num_waiting_reqs"] for load in await pair.loads(pair.decode))


async def _is_free(pair: Pair) -> bool:
    return not await pair.requests(pair.decode)


async def _retried(pair: Pair, made: float) -> bool:
    await asyncio.sleep(POLL_S)
    return pair.counted("pdrouter_retries_total", event="made") > made


async def _is_ready(pair: Pair) -> bool:
    return (await pair.client.get("/readiness")).status == 200
