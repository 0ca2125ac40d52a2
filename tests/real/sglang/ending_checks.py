"""What must hold when something ends early: clients leave, KV fails inside a 200, a prefill engine dies."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from tests.real.sglang.answer_checks import PROMPT, PROMPTS, TOKENS
from tests.real.sglang.asking import APIS, CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, Api, Reply, unique
from tests.real.sglang.pair import POLL_S, Found, Pair
from tests.real.sglang.rank_checks import AT_ONCE, all_are_chosen, told_of
from tests.real.sglang.servers import START_S, count_in_log

ENDLESS_TOKENS = 1500
FREE_S = 1.0
"""Longest time from a client's leaving until the engines are free."""

ABORT_AGAIN_S = 0.5
"""The router's delay between an abort and the same once more, for an engine that hadn't heard of the request yet."""

KILLED_S = 30.0
"""Longest time until a client knows that its prefill engine has died. Source: SGLang's decode gives up after 14 s."""

_LEAVE: Mapping[str, tuple[Api, bool, dict[str, Any], int, int]] = {
    "chat, stream": (CHAT, True, {}, 1, 1),
    "chat, whole": (CHAT, False, {}, 1, 1),
    "chat, n = 2, whole": (CHAT, False, {"n": 2}, 2, 2),
    "completions, list": (COMPLETIONS, False, {}, 2, 2),
    "completions, list, stream": (COMPLETIONS, True, {}, 2, 2),
    "generate, list": (GENERATE, False, {}, 2, 2),
    "generate, list, its rids": (GENERATE, False, {"rid": ["mine-a", "mine-b"]}, 2, 2),
    "messages, stream": (MESSAGES, True, {}, 1, 0),
    "responses, stream": (RESPONSES, True, {}, 1, 1),
}
"""Who leaves: API, streamed or not, more fields, how many requests the engine makes of it, and how many of them have an
id that an abort can name (a message has none)."""


async def check_leaving(pair: Pair) -> None:
    """Check that engines are free soon after a client has left."""
    by_hand_s = max([await _free_by_hand(pair) for _ in range(3)])
    pair.record.tell(f"engines are free {by_hand_s:.2f} s after an abort by hand")
    for name, (api, is_stream, more, *counts) in _LEAVE.items():
        prompt = PROMPTS if "list" in name else PROMPT
        body = api.body(prompt, ENDLESS_TOKENS, is_stream=is_stream, **more)
        await pair.hold(f"left: {name}", lambda a=api, b=body, c=counts: _left(pair, a, b, *c))  # type: ignore[misc]
    waiting_s = max([await _free_waiting_by_hand(pair) for _ in range(3)])
    pair.record.tell(f"decode that waits for KV is free {waiting_s:.2f} s after an abort by hand")
    await pair.hold("left: while decode waits for KV", lambda: _left_waiting(pair, waiting_s))


async def check_failures(pair: Pair) -> None:
    """Check that what fails inside a 200 is a failure, and another attempt answers."""
    for api in APIS:
        for is_stream in (True, False):
            name = f"KV fails: {api.name}, {'stream' if is_stream else 'whole'}"
            await pair.hold(name, lambda a=api, s=is_stream: _kv_fails(pair, a, s))  # type: ignore[misc]
    await pair.hold("nothing is left", pair.idle)
    await pair.hold("the prefill engine is killed", lambda: _killed(pair))
    await pair.hold("... and starts again", lambda: _started_again(pair), 2 * START_S)


async def _free_by_hand(pair: Pair) -> float:
    """Return how long the engines need after an abort that nobody passes on."""
    body = CHAT.body(PROMPT, ENDLESS_TOKENS, rid=f"by-hand-{time.monotonic_ns()}")
    asking = asyncio.create_task(pair.by_hand(CHAT, body, 0, 1))
    await pair.until(lambda: _decodes(pair, 1), "it runs")
    began_s = time.monotonic()
    await pair.abort(pair.decode, rid=body["rid"])
    await asking
    await pair.idle()
    return time.monotonic() - began_s


async def _left(pair: Pair, api: Api, body: dict[str, Any], parts: int, named: int) -> Found:
    """Leave while the answer is written; each part that has an id is ended by it, which the engine does at once."""
    await _aborts_are_over()
    aborts = _aborts(pair)
    asking = asyncio.create_task(pair.client.post(api.path, body))
    try:
        await pair.until(lambda: _decodes(pair, parts), "it runs")
    finally:
        asking.cancel()
        left_s = time.monotonic()
        await asyncio.gather(asking, return_exceptions=True)
    await pair.until(lambda: _is_free(pair), "decode is free")
    took_s = time.monotonic() - left_s
    held, seen = await pair.idle()
    await _aborts_are_over()
    sent = _aborts(pair) - aborts
    told = f"decode free {took_s:.2f} s after it left, {sent} aborts for {named} ids, nothing is left {seen}"
    return held and took_s < FREE_S and sent == 2 * named, told


def _aborts(pair: Pair) -> int:
    """Return how many aborts the decode engine has got."""
    return count_in_log(pair.decode, "POST /abort_request")


async def _aborts_are_over() -> None:
    """Wait until the router has sent its last abort a second time, and the engine has written it down."""
    await asyncio.sleep(3 * ABORT_AGAIN_S)


async def _free_waiting_by_hand(pair: Pair) -> float:
    """Return how long an idle decode engine needs to hear of an abort: ranks in step sleep up to a second each."""
    body = CHAT.body(unique(PROMPT), TOKENS, rid=f"by-hand-{time.monotonic_ns()}")
    with pair.prefill.paused():
        asking = asyncio.create_task(pair.by_hand(CHAT, body, 0, 1))
        await pair.until(lambda: _waits(pair), "decode waits for KV")
        began_s = time.monotonic()
        await pair.abort(pair.decode, rid=body["rid"])
        await pair.until(lambda: _is_free(pair), "decode is free")
        took_s = time.monotonic() - began_s
    await asking
    await pair.idle()
    return took_s


async def _left_waiting(pair: Pair, by_hand_s: float) -> Found:
    """Leave while the prefill engine doesn't move and decode waits for its KV, whose place it keeps until then."""
    await pair.until(lambda: _is_ready(pair), "the router is ready")
    with pair.prefill.paused():
        asking = asyncio.create_task(pair.client.post(CHAT.path, CHAT.body(unique(PROMPT), TOKENS, is_stream=True)))
        await pair.until(lambda: _waits(pair), "decode waits for KV")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        took_s = await pair.until(lambda: _is_free(pair), "decode is free")
    held, seen = await pair.idle()
    return held and took_s < FREE_S + by_hand_s, f"decode free after {took_s:.2f} s, nothing is left {seen}"


async def _kv_fails(pair: Pair, api: Api, is_stream: bool) -> Found:
    """Decode gives up waiting for KV and says so inside a 200; another attempt gives the client its answer."""
    made = pair.counted("pdrouter_retries_total", event="made")
    prompt = unique(PROMPT)
    await pair.until(lambda: _is_ready(pair), "the router is ready")
    with pair.prefill.paused():
        asking = asyncio.create_task(pair.client.post(api.path, api.body(prompt, TOKENS, is_stream=is_stream)))
        await pair.until(lambda: _waits(pair), "decode waits for KV")
        await pair.abort(pair.decode, abort_all=True)
        await pair.until(lambda: _retried(pair, made), "another attempt")
    reply = await asking
    if reply.status != 200:
        return False, str(reply)
    seen, truth = api.read(reply), api.read(await pair.by_hand(api, api.body(prompt, TOKENS), 0, 1))
    told = f"{pair.counted('pdrouter_retries_total', event='made') - made:g} retries, {seen}"
    return seen == truth and all(seen.texts), told if seen == truth else f"{told} instead of {truth}"


async def _killed(pair: Pair) -> Found:
    """What waits for KV and what comes anew gets a proper error in bounded time; streams that have their KV go on."""
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
    ended = await asyncio.gather(*under_way)
    tokens = [CHAT.read(reply).completion_tokens if _ended_well(reply) else 0 for reply in ended]
    refused = all(reply.status in (500, 502, 503, 504) and "error" in reply.json() for reply in (waited, fresh))
    held = refused and took_s < KILLED_S and tokens == [ENDLESS_TOKENS] * len(streams)
    return held, f"{waited.status} and {fresh.status} after {took_s:.1f} s; streams that had KV got {tokens} tokens"


def _ended_well(reply: Reply) -> bool:
    return reply.status == 200 and not reply.is_cut and not any("error" in event for event in reply.events)


async def _started_again(pair: Pair) -> Found:
    """The same address serves again, on all ranks, and the router chooses each pair of them."""
    pair.prefill.kill()
    began_s = time.monotonic()
    pair.prefill.start_again()
    up_s = await pair.until(lambda: pair.answers(pair.prefill), "the prefill engine is up", START_S)
    await pair.until(lambda: _is_ready(pair), "the router is ready")
    ready_s = time.monotonic() - began_s - up_s
    bodies = [GENERATE.body(unique(f"{n} {PROMPT}"), TOKENS) for n in range(AT_ONCE)]
    replies = await asyncio.gather(*(pair.client.post(GENERATE.path, body) for body in bodies))
    good = [reply for reply in replies if reply.status == 200]
    ranks = Counter(reply.ranks for reply in good)
    bad = [str(reply) for reply in replies if reply.status != 200]
    seen = f"ready {ready_s:.1f} s after it was up; {len(good)} of {len(replies)} answered, by ranks {told_of(ranks)}"
    if bad:
        return False, f"{seen}; {bad[0]}"
    held, told = await all_are_chosen(pair)
    return held, f"{seen}; then {told}"


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
