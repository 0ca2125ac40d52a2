"""Each API over an emulated SGLang pair: the answer, the ranks, failures inside a 200, and clients that leave."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from pdrouter.sim.emulator import expected_text, render_chat
from tests.lab import CHAT, COMPLETIONS, GENERATE, Reply, fault, make_lab, post, until

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TEXT = "once upon a time"
TURN = [{"role": "user", "content": TEXT}]
TOKENS = 6
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "emulated", "messages": TURN, "max_tokens": TOKENS},
    COMPLETIONS: {"model": "emulated", "prompt": TEXT, "max_tokens": TOKENS},
    GENERATE: {"text": TEXT, "sampling_params": {"max_new_tokens": TOKENS}},
    RESPONSES: {"model": "emulated", "input": TEXT, "max_output_tokens": TOKENS},
    MESSAGES: {"model": "emulated", "messages": TURN, "max_tokens": TOKENS},
}


_WHOLE: dict[str, Callable[[Any], object]] = {
    CHAT: lambda told: told["choices"][0]["message"]["content"],
    COMPLETIONS: lambda told: told["choices"][0]["text"],
    GENERATE: lambda told: told["text"],
    RESPONSES: lambda told: told["output"][0]["content"][0]["text"],
    MESSAGES: lambda told: told["content"][0]["text"],
}


def text_of(path: str, reply: Reply, *, is_stream: bool) -> str:
    """Return the text of an answer, whole or streamed."""
    if not is_stream:
        return str(_WHOLE[path](reply.json()))
    lines = [line[6:] for line in reply.body.decode().splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    if path == GENERATE:
        return str(events[-1]["text"])
    if path in (CHAT, COMPLETIONS):
        parts = [choice["delta"].get("content") if path == CHAT else choice["text"] for choice in choices_of(events)]
    else:
        deltas = [event["delta"] for event in events if event["type"].endswith("_delta") or "delta" in event]
        parts = [delta if isinstance(delta, str) else delta.get("text") for delta in deltas]
    return "".join(part or "" for part in parts)


def choices_of(events: list[Any]) -> list[Any]:
    """Return the choices of all chunks."""
    return [choice for event in events for choice in event["choices"]]


def answer_to(path: str) -> str:
    """Return the text that any engine writes."""
    return expected_text(TEXT if path in (COMPLETIONS, GENERATE) else render_chat(TURN), TOKENS)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_both_legs_agree(path: str, is_stream: bool) -> None:
    """The text is the engine's own, and each leg runs on the rank that was chosen."""
    async with make_lab(engine={"dp_size": 2, "dp_attention": True}) as lab:
        for _ in range(4):
            reply = await lab.post(path, BODIES[path] | {"stream": is_stream})
            assert reply.status == 200, reply.body
            assert text_of(path, reply, is_stream=is_stream) == answer_to(path)
            legs = (("prefill", lab.prefills), ("decode", lab.decodes))
            for side, (engine,) in legs:
                assert reply.headers[f"x-pdrouter-{side}"].endswith(f"rank={engine.received[-1].rank}")
        await lab.settled()
        assert [emulator.snapshot().errors for emulator in lab.emulators] == [{}, {}]


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_versions_that_cannot_pair(path: str) -> None:
    """A pair of an older version never serves it, and says so."""
    async with make_lab(engine={"server_version": "0.5.19"}) as lab:
        reply = await lab.post(path, BODIES[path])
        assert (reply.status, reply.headers.get("retry-after")) == (501, None)
        assert not lab.decodes[0].received


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_kv_that_is_lost_is_another_attempt(path: str, is_stream: bool) -> None:
    """A decode engine that gives up waiting says so inside a 200; the client gets its answer all the same."""
    async with make_lab(disable_retries=False, retry_max_retries=3, retry_initial_backoff_ms=1) as lab:
        decode = lab.decodes[0]
        await fault(lab.prefills[0], "hang", path, times=1)
        async with await lab.start(path, BODIES[path] | {"stream": is_stream}) as call:
            await until(lambda: decode.snapshot().requests == 1)
            assert (await post(decode.url, "/abort_request", {"abort_all": True})).status == 200
            reply = await call.finish()
        assert reply.status == 200, reply.body
        assert text_of(path, reply, is_stream=is_stream) == answer_to(path)
        assert decode.snapshot().total_requests == 2
        await lab.settled()


@pytest.mark.parametrize("path", BODIES)
async def test_a_client_that_leaves(path: str) -> None:
    """Both engines are free, whether an abort can name the request or not."""
    long = {"max_tokens": 2000} if path != RESPONSES else {"max_output_tokens": 2000}
    if path == GENERATE:
        long = {"sampling_params": {"max_new_tokens": 2000}}  # type: ignore[dict-item]
    async with make_lab(engine={"speed": 10.0}) as lab:
        async with await lab.start(path, BODIES[path] | long | {"stream": True}) as call:
            await call.head()
            await until(lambda: lab.decodes[0].snapshot().requests == 1)
        await lab.settled(3.0)


async def test_a_router_waits_for_engines_that_start() -> None:
    """No request goes to an engine that isn't ready."""
    async with make_lab(engine={"start_s": 20.0, "speed": 100.0}) as lab:
        assert all(emulator.engine.now_s() >= 20.0 for emulator in lab.emulators)
        assert (await lab.post(GENERATE, BODIES[GENERATE])).status == 200
