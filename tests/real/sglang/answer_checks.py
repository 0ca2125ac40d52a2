"""What clients must get: the same answer as from both legs by hand, in each API, whole and streamed."""

import asyncio
from typing import Any

from tests.real.sglang.asking import APIS, CHAT, COMPLETIONS, GENERATE, MESSAGES, Answer, Api, Reply
from tests.real.sglang.pair import Found, Pair
from tests.real.sglang.servers import CONTEXT_TOKENS

TOKENS = 8
PROMPT = "The capital of France is"
PROMPTS = ["The capital of France is", "One two three four"]
TOO_LONG = "word " * (CONTEXT_TOKENS + 200)


async def check_answers(pair: Pair) -> None:
    """Check each API, lists, samples, logprobs and errors of the client's own."""
    for api in APIS:
        for is_stream in (False, True):
            await pair.hold(_name(api, is_stream), lambda a=api, s=is_stream: _same(pair, a, PROMPT, is_stream=s))  # type: ignore[misc]
    for api in (COMPLETIONS, GENERATE):
        for is_stream in (False, True):
            name = f"list of prompts, {_name(api, is_stream)}"
            await pair.hold(name, lambda a=api, s=is_stream: _same(pair, a, PROMPTS, is_stream=s))  # type: ignore[misc]
    for api in (CHAT, COMPLETIONS, GENERATE):
        for is_stream in (False, True):
            await pair.hold(f"n = 2, {_name(api, is_stream)}", lambda a=api, s=is_stream: _samples(pair, a, s))  # type: ignore[misc]
    for is_stream in (False, True):
        how = "stream" if is_stream else "whole"
        await pair.hold(f"logprobs, generate, {how}", lambda s=is_stream: _generate_logprobs(pair, s))  # type: ignore[misc]
        await pair.hold(f"logprobs, chat, {how}", lambda s=is_stream: _chat_logprobs(pair, s))  # type: ignore[misc]
        await pair.hold(f"echo and logprobs, {how}", lambda s=is_stream: _echo_logprobs(pair, PROMPT, s))  # type: ignore[misc]
    await pair.hold("echo and logprobs, list", lambda: _echo_logprobs(pair, PROMPTS, is_stream=False))
    blame = _blame(pair)
    for api in APIS:
        for is_stream in (False, True):
            await pair.hold(f"too long, {_name(api, is_stream)}", lambda a=api, s=is_stream: _too_long(pair, a, s))  # type: ignore[misc]
    await pair.hold("too long: nobody is blamed", lambda: _nobody_is_blamed(pair, blame))


def _name(api: Api, is_stream: bool) -> str:
    return f"{api.name}, {'stream' if is_stream else 'whole'}"


async def _same(pair: Pair, api: Api, prompt: Any, *, is_stream: bool) -> Found:
    """Compare with both legs by hand."""
    reply = await pair.client.post(api.path, api.body(prompt, TOKENS, is_stream=is_stream))
    if reply.status != 200:
        return False, str(reply)
    seen = api.read(reply)
    truth = api.read(await pair.by_hand(api, api.body(prompt, TOKENS), 0, 1))
    return _alike(seen, truth, ends=_is_ended(api, reply))


def _alike(seen: Answer, truth: Answer, *, ends: bool) -> Found:
    held = seen == truth and ends and all(seen.texts)
    return held, str(seen) if held else f"{seen} instead of {truth}{'' if ends else ', without an end mark'}"


def _is_ended(api: Api, reply: Reply) -> bool:
    if not reply.is_stream:
        return True
    if api in (CHAT, COMPLETIONS, GENERATE):
        return reply.body.endswith(b"data: [DONE]\n\n")
    last = reply.events[-1]["type"]
    return last == "message_stop" if api is MESSAGES else last in ("response.completed", "response.incomplete")


async def _samples(pair: Pair, api: Api, is_stream: bool) -> Found:
    """Two samples have two indices, each a finish reason, and the usage of both."""
    body = api.body(PROMPT, TOKENS, is_stream=is_stream)
    place = body["sampling_params"] if api is GENERATE else body
    place.update(n=2, temperature=0.9)
    reply = await pair.client.post(api.path, body)
    if reply.status != 200:
        return False, str(reply)
    seen = api.read(reply)
    held = len(seen.texts) == 2 and seen.reasons == ["length"] * 2 and seen.completion_tokens == 2 * TOKENS
    return held and _is_ended(api, reply), str(seen)


async def _generate_logprobs(pair: Pair, is_stream: bool) -> Found:
    more = {"return_logprob": True, "logprob_start_len": 0}
    reply = await pair.client.post(GENERATE.path, GENERATE.body(PROMPT, TOKENS, is_stream=is_stream, **more))
    if reply.status != 200:
        return False, str(reply)
    told = (reply.events[-1] if is_stream else reply.json())["meta_info"]
    counts = [len(told[f"{side}_token_logprobs"]) for side in ("input", "output")]
    return counts == [
        told["prompt_tokens"],
        TOKENS,
    ], f"{counts[0]} of {told['prompt_tokens']} and {counts[1]} of {TOKENS}"


async def _chat_logprobs(pair: Pair, is_stream: bool) -> Found:
    body = CHAT.body(PROMPT, TOKENS, is_stream=is_stream, logprobs=True, top_logprobs=1)
    reply = await pair.client.post(CHAT.path, body)
    if reply.status != 200:
        return False, str(reply)
    choices = [part["choices"][0] for part in (reply.events if is_stream else [reply.json()]) if part["choices"]]
    count = sum(len(found["content"]) for choice in choices if (found := choice.get("logprobs")))
    return count == TOKENS, f"{count} of {TOKENS}"


async def _echo_logprobs(pair: Pair, prompt: Any, is_stream: bool) -> Found:
    """The prompt's logprobs come from the prefill engine, before those of the answer."""
    body = COMPLETIONS.body(prompt, TOKENS, is_stream=is_stream, echo=True, logprobs=1)
    reply = await pair.client.post(COMPLETIONS.path, body)
    if reply.status != 200:
        return False, str(reply)
    seen = COMPLETIONS.read(reply)
    found: dict[int, list[float | None]] = {}
    for part in reply.events if is_stream else [reply.json()]:
        for choice in part["choices"]:
            if choice.get("logprobs"):
                found.setdefault(choice["index"], []).extend(choice["logprobs"]["token_logprobs"])
    counts = [len(logprobs) for logprobs in found.values()]
    held = sum(counts) == seen.prompt_tokens + seen.completion_tokens and len(found) == len(seen.texts)
    held = held and all(logprobs[0] is None for logprobs in found.values())
    return held, f"{counts} logprobs for {seen.prompt_tokens} + {seen.completion_tokens} tokens"


async def _too_long(pair: Pair, api: Api, is_stream: bool) -> Found:
    """The client's own fault is a 400, streamed too: three of the engine's APIs say it inside a 200."""
    reply = await pair.client.post(api.path, api.body(TOO_LONG, TOKENS, is_stream=is_stream))
    told = b"is longer than the model's context length" in reply.body
    return told and reply.status == 400, str(reply)


def _blame(pair: Pair) -> dict[str, float]:
    """Return what the router has counted against engines until now."""
    return {
        "breakers opened": pair.counted("pdrouter_breakers_total", event="opened"),
        "retries made": pair.counted("pdrouter_retries_total", event="made"),
        "failures": pair.counted("pdrouter_failures_total"),
    }


async def _nobody_is_blamed(pair: Pair, before: dict[str, float]) -> Found:
    new = {name: count - before[name] for name, count in _blame(pair).items()}
    return not any(new.values()), ", ".join(f"{count:g} {name}" for name, count in new.items())


async def gather_at_once(pair: Pair, count: int) -> list[tuple[Api, Reply]]:
    """Ask ``count`` fresh questions at once, in each API, whole and streamed."""
    asked = [(APIS[n % len(APIS)], n // len(APIS) % 2 == 1, f"Number {n}. " + PROMPT) for n in range(count)]
    bodies = [(api, api.body(prompt, TOKENS, is_stream=is_stream)) for api, is_stream, prompt in asked]
    replies = await asyncio.gather(*(pair.client.post(api.path, body) for api, body in bodies))
    return [(api, reply) for (api, _), reply in zip(bodies, replies, strict=True)]
