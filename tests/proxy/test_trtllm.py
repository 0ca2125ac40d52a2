"""TensorRT-LLM pairs and plain engines over emulators that enforce the rules: answers, failures, and what is left."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdrouter.sim.emulator import EmulatorSettings, expected_text, render_chat, start_emulator
from tests.lab import (
    CHAT,
    COMPLETIONS,
    Lab,
    ScriptedEngine,
    always,
    chat,
    fault,
    gather,
    http,
    make_lab,
    route_to,
    until,
)

LONG = "Tell me of the sea. " * 80
NOT_FOR_CLIENTS = (b"first_gen_tokens", b"encoded_opaque_state", b"ctx_request_id")


@asynccontextmanager
async def trtllm_lab(**options: Any) -> AsyncIterator[Lab]:
    """Run a router over TensorRT-LLM engines, which always disaggregates if it can."""
    engine = {"engine": "trtllm"} | options.pop("engine", {})
    async with make_lab(engine=engine, **({"disaggregation": "always"} | options)) as lab:
        yield lab


def answer_to(text: str, tokens: int, choice: int = 0, tools: Any = None) -> str:
    """Return the text that any engine writes for a chat."""
    return expected_text(render_chat([{"role": "user", "content": text}], tools), tokens, choice)


def text_of(events: list[Any]) -> str:
    """Return the text of a chat stream."""
    return "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"])


def assert_no_errors(lab: Lab) -> None:
    """Hold that no engine has refused anything."""
    assert [emulator.snapshot().errors for emulator in lab.emulators] == [{}] * len(lab.emulators)


async def test_both_legs_agree() -> None:
    """Whole and streamed, the text is the engine's own; the answer's leg computed nothing of the prompt."""
    async with trtllm_lab() as lab:
        whole = await lab.post(CHAT, chat(LONG, 8))
        stream = await lab.post(CHAT, chat(LONG, 8, stream=True, stream_options={"include_usage": True}))
        assert (whole.status, stream.status) == (200, 200)
        assert whole.json()["choices"][0]["message"]["content"] == answer_to(LONG, 8)
        assert text_of(stream.events) == answer_to(LONG, 8)
        assert stream.events[-1]["usage"]["completion_tokens"] == 8
        assert all("x-pdrouter-prefill" in reply.headers for reply in (whole, stream))
        assert not any(name in reply.body for reply in (whole, stream) for name in NOT_FOR_CLIENTS)
        await lab.settled()
        assert_no_errors(lab)
        snapshots = [emulator.snapshot() for emulator in lab.emulators]
        assert (snapshots[0].held_requests, snapshots[1].recomputed_requests) == (0, 0)


@pytest.mark.parametrize("prompt", [LONG, [5, 6, 7] * 100])
async def test_completions(prompt: Any) -> None:
    """A text, or ids of the client's own."""
    async with trtllm_lab() as lab:
        for is_stream in (False, True):
            body = {"model": "emulated", "prompt": prompt, "max_tokens": 6, "stream": is_stream}
            reply = await lab.post(COMPLETIONS, body)
            events = reply.events if is_stream else [reply.json()]
            assert "".join(event["choices"][0]["text"] for event in events) == expected_text(prompt, 6)
        await lab.settled()
        assert_no_errors(lab)
        assert lab.decodes[0].snapshot().recomputed_requests == 0


async def test_many_at_once() -> None:
    """Thirty-two at once over two routers, each with its own answer: no id is used twice."""
    async with (
        trtllm_lab(prefill=2, decode=2) as lab,
        route_to(lab.prefills, lab.decodes, disaggregation="always") as other,
    ):
        texts = [f"{number}: {LONG}" for number in range(32)]
        calls = (router.post(CHAT, chat(text, 6)) for router in (lab, other) for text in texts)
        replies = await gather(*calls)
        answers = [r.json()["choices"][0]["message"]["content"] for r in replies]
        assert answers == [answer_to(t, 6) for t in texts] * 2
        await lab.settled()
        assert_no_errors(lab)


async def test_several_answers_and_lists_have_one_leg() -> None:
    """The generation engine reads the prompts itself, and each answer is right."""
    async with trtllm_lab() as lab:
        copies = await lab.post(CHAT, chat(LONG, 5, n=2))
        texts = [choice["message"]["content"] for choice in copies.json()["choices"]]
        assert texts == [answer_to(LONG, 5), answer_to(LONG, 5, 1)]
        body = {"model": "emulated", "prompt": [LONG, LONG[::-1]], "max_tokens": 4}
        listed = await lab.post(COMPLETIONS, body)
        assert [c["text"] for c in listed.json()["choices"]] == [expected_text(p, 4) for p in (LONG, LONG[::-1])]
        assert not any("x-pdrouter-prefill" in reply.headers for reply in (copies, listed))
        await lab.settled()
        assert_no_errors(lab)
        assert lab.prefills[0].snapshot().total_requests == 0


async def test_options_of_the_client() -> None:
    """Limits, logprobs, tools, formats and images are the generation leg's; the context leg makes one token."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"big": 12345678901234567890}}}]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    async with trtllm_lab() as lab:
        options = {"min_tokens": 3, "logprobs": True, "tools": tools, "response_format": {"type": "json_object"}}
        reply = await lab.post(CHAT, chat(LONG, 6, **options))
        assert reply.json()["choices"][0]["message"]["content"] == answer_to(LONG, 6, tools=tools)
        assert len(reply.json()["choices"][0]["logprobs"]["content"]) == 6
        body = chat("", 5) | {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}, image]}]}
        seen = await lab.post(CHAT, body)
        assert seen.json()["choices"][0]["message"]["content"] == expected_text(render_chat(body["messages"]), 5)  # type: ignore[arg-type]
        del body["max_tokens"]
        named = await lab.post(CHAT, body | {"max_completion_tokens": 7})
        assert named.json()["usage"]["completion_tokens"] == 7
        assert [received.output_tokens for received in lab.prefills[0].received] == [1, 1, 1]
        await lab.settled()
        assert_no_errors(lab)


async def test_a_client_that_brings_legs_of_its_own() -> None:
    """What isn't the client's to say goes nowhere, however it is spelled."""
    async with trtllm_lab() as lab:
        body = chat(LONG, 4, disaggregated_params={"request_type": "generation_only"}, prompt_token_ids=None)
        raw = http(200, body).partition(b"\r\n\r\n")[2].replace(b"disaggregated_params", rb"disaggregated_p\u0061rams")
        reply = await lab.post(CHAT, raw)
        assert reply.json()["choices"][0]["message"]["content"] == answer_to(LONG, 4)
        await lab.settled()
        assert_no_errors(lab)


@pytest.mark.parametrize("options", [None, {"include_usage": True}])
async def test_an_answer_that_ends_with_its_first_token(options: Any) -> None:
    """It is the context engine's, whole or streamed; no generation engine is asked, and nothing is left."""
    word = answer_to(LONG, 1)
    async with trtllm_lab() as lab:
        whole = await lab.post(CHAT, chat(LONG, 8, stop=word.strip()))
        choice = whole.json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (word, "stop")
        stream = await lab.post(CHAT, chat(LONG, 8, stop=[word.strip()], stream=True, stream_options=options))
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert text_of(stream.events) == word
        assert stream.events[0]["object"] == "chat.completion.chunk"
        assert ("usage" in stream.events[-1]) is (options is not None)
        text = await lab.post(
            COMPLETIONS, {"model": "emulated", "prompt": LONG, "stop": expected_text(LONG, 1).strip()}
        )
        assert text.json()["choices"][0]["text"] == expected_text(LONG, 1)
        for reply in (whole, stream, text):
            assert b"prompt_token_ids" not in reply.body
            assert b"disaggregated_params" not in reply.body
        await lab.settled()
        assert lab.decodes[0].snapshot().total_requests == 0
        assert lab.prefills[0].snapshot().held_requests == 0


async def test_what_was_cached_is_the_context_engine_s_number() -> None:
    """The client is told what it had, whichever engine answers."""
    async with trtllm_lab(engine={"dp_size": 1}) as lab:
        await lab.post(CHAT, chat(LONG, 4))
        reply = await lab.post(CHAT, chat(LONG, 5))
        streamed = await lab.post(CHAT, chat(LONG, 5, stream=True, stream_options={"include_usage": True}))
        for usage in (reply.json()["usage"], streamed.events[-1]["usage"]):
            assert usage["prompt_tokens_details"]["cached_tokens"] > 100


async def test_a_context_engine_that_fails_is_another_s_turn() -> None:
    """With an id of its own; the failed one isn't asked again (I8)."""
    async with trtllm_lab(prefill=2, disable_retries=False) as lab:
        await fault(lab.prefills[0], "status", status=500)
        replies = [await lab.post(CHAT, chat(f"{n} {LONG}", 4)) for n in range(4)]
        assert [reply.status for reply in replies] == [200] * 4
        assert all(lab.prefills[1].url.endswith(r.headers["x-pdrouter-prefill"].split(";")[0]) for r in replies)
        await lab.settled()
        assert_no_errors(lab)


async def test_a_client_that_leaves_between_the_legs() -> None:
    """Nothing can free what the context engine holds: it is counted, and held until its time limit."""
    async with trtllm_lab(engine={"speed": 5.0, "kv_hold_timeout_s": 5.0}) as lab:
        await fault(lab.decodes[0], "hang")
        async with await lab.start(CHAT, chat(LONG, 4)):
            await until(lambda: lab.prefills[0].snapshot().held_requests == 1)
        await until(lambda: lab.is_ledger_zero and lab.is_quiet)
        await lab.settled(3.0)
        assert lab.prefills[0].snapshot().stranded_requests == 1


async def test_a_client_that_leaves_in_mid_stream() -> None:
    """The generation engine stops, and nothing is held anywhere."""
    async with trtllm_lab(engine={"speed": 5.0}) as lab:
        async with await lab.start(CHAT, chat(LONG, 2000, stream=True)) as call:
            await call.head()
            await call.reader.readuntil(b"data:")
        await lab.settled(3.0)


async def test_an_engine_that_doesnt_say_where_its_kv_is() -> None:
    """The generation engine reads the prompt itself; that is counted."""
    choice = {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "length"}
    scripts = {
        CHAT: always(200, {"choices": [choice], "usage": {"prompt_tokens": 3}}),
        "/v1/models": always(200, {"data": [{"id": "emulated"}]}),
    }
    settings = EmulatorSettings(engine="trtllm", role="decode", speed=100.0)
    async with ScriptedEngine(None, scripts).listen() as scripted, start_emulator(settings) as decode:
        prefill: Any = {"url": scripted.url, "engine": "trtllm"}
        async with route_to([], [decode], disaggregation="always", prefill=[prefill]) as lab:
            reply = await lab.post(CHAT, chat(LONG, 4))
            assert reply.json()["choices"][0]["message"]["content"] == answer_to(LONG, 4)
            assert b'pdrouter_handovers_total{event="recomputed"} 1.0' in (await lab.get("/metrics")).body
        assert decode.snapshot().recomputed_requests == 1


async def test_its_load_is_read() -> None:
    """Of the whole engine, whatever ranks it has inside; it is told for the one that the router knows."""
    async with trtllm_lab() as lab:
        await until(lambda: all(r.report for load in lab.core.load.endpoints.values() for r in load.ranks))
        assert {endpoint.version for endpoint in lab.core.fleet} == {"1.2.0"}
        assert {endpoint.dp_size for endpoint in lab.core.fleet} == {1}


@pytest.mark.parametrize("engine", ["trtllm", "openai"])
async def test_one_engine_does_it_all(engine: str) -> None:
    """Whole, streamed, several answers, lists."""
    async with make_lab(prefill=0, decode=0, worker=1, engine={"engine": engine}) as lab:
        whole = await lab.post(CHAT, chat(LONG, 4, n=2))
        texts = [choice["message"]["content"] for choice in whole.json()["choices"]]
        assert texts == [answer_to(LONG, 4), answer_to(LONG, 4, 1)]
        stream = await lab.post(CHAT, chat(LONG, 4, stream=True))
        assert text_of(stream.events) == answer_to(LONG, 4)
        listed = await lab.post(COMPLETIONS, {"model": "emulated", "prompt": ["a", "b"], "max_tokens": 3})
        assert [c["text"] for c in listed.json()["choices"]] == [expected_text("a", 3), expected_text("b", 3)]
        await lab.settled()
        assert_no_errors(lab)


async def test_a_plain_engine_whose_client_leaves() -> None:
    """Its connection is closed, and so the request ends."""
    async with make_lab(prefill=0, decode=0, worker=1, engine={"engine": "openai", "speed": 5.0}) as lab:
        async with await lab.start(CHAT, chat(LONG, 2000, stream=True)) as call:
            await call.head()
            await call.reader.readuntil(b"data:")
        await lab.settled(3.0)
