"""Formats of vLLM's answers, whole and streamed."""

import json
from typing import Any

import pytest

from pdrouter.sim.emulator import Emulator, EmulatorSettings, expected_text, render_chat, start_emulator
from pdrouter.sim.emulator_settings import EngineError

from .legs import CHAT, CHAT_PATH, FAST, PREFILL_PARAMS, TEXT, TEXT_PATH, TEXTS, VllmPair

ANSWER = expected_text(render_chat(CHAT["messages"]), 6)
INPUT = {"input": CHAT["messages"], "max_output_tokens": 6}


@pytest.fixture
async def emulator() -> Any:
    """Fast regular engine."""
    async with start_emulator(EmulatorSettings(engine="vllm", speed=FAST)) as emulator:
        yield emulator


def named_events(reply: Any) -> list[tuple[str, dict[str, Any]]]:
    """Events with names, each told again in its data."""
    events = []
    for block in reply.body.decode().split("\n\n"):
        if block.startswith("event: "):
            name, data = block.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            events.append((event["type"], event))
    return events


async def test_whole_chat(client: Any, emulator: Emulator) -> None:
    """The keys of vLLM 0.32."""
    reply = (await client.send(emulator.url, CHAT_PATH, CHAT)).json()
    keys = "id object created model choices usage service_tier system_fingerprint prompt_logprobs kv_transfer_params"
    assert set(keys.split()) == set(reply)
    choice = reply["choices"][0]
    assert choice["message"]["content"] == ANSWER
    assert choice | {"message": None} == {
        "index": 0,
        "message": None,
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": None,
    }
    tokens = reply["usage"]["prompt_tokens"]
    assert reply["usage"] == {
        "prompt_tokens": tokens,
        "completion_tokens": 6,
        "total_tokens": tokens + 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_streamed_chat(client: Any, emulator: Emulator) -> None:
    """A role first; no usage in the chunks; the finish reason comes with the last text; usage at the end if asked."""
    body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    first, *chunks, last = (await client.send(emulator.url, CHAT_PATH, body)).events()
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == ANSWER
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["length"]
    assert all("usage" not in chunk for chunk in [first, *chunks])
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 6)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_completions_with_logprobs(client: Any, emulator: Emulator, is_stream: bool) -> None:
    """Samples have their own texts; every token has its logprob."""
    body = TEXTS | {"n": 2, "logprobs": 1, "stream": is_stream}
    reply = await client.send(emulator.url, TEXT_PATH, body)
    texts, counts = ["", ""], [0, 0]
    for event in reply.events() if is_stream else [reply.json()]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            counts[choice["index"]] += len(choice["logprobs"]["tokens"])
    assert texts == [expected_text(TEXT, 6, choice) for choice in (0, 1)]
    assert counts == [6, 6]


async def test_cached_tokens_are_told_if_switched_on(client: Any) -> None:
    """Else the details are null."""
    async with start_emulator(EmulatorSettings(engine="vllm", tells_cached_tokens=False, speed=FAST)) as emulator:
        reply = await client.send(emulator.url, TEXT_PATH, TEXTS)
        assert reply.json()["usage"]["prompt_tokens_details"] is None


async def test_responses(client: Any, emulator: Emulator) -> None:
    """Whole, and as events in their order with the same response at the end."""
    whole = (await client.send(emulator.url, "/v1/responses", INPUT)).json()
    assert (whole["object"], whole["status"]) == ("response", "incomplete")
    assert whole["output"][0]["content"][0]["text"] == ANSWER
    assert (whole["usage"]["output_tokens"], whole["usage"]["input_tokens_details"]) == (6, {"cached_tokens": 0})
    events = named_events(await client.send(emulator.url, "/v1/responses", INPUT | {"stream": True}))
    opening = ["created", "in_progress", "output_item.added", "content_part.added"]
    closing = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    names = [*opening, *["output_text.delta"] * 6, *closing]
    assert [name for name, _ in events] == [f"response.{name}" for name in names]
    assert "".join(event["delta"] for _, event in events if "delta" in event) == ANSWER
    assert events[-1][1]["response"]["output"][0]["content"] == whole["output"][0]["content"]


async def test_messages(client: Any, emulator: Emulator) -> None:
    """Whole, and as events in their order."""
    whole = (await client.send(emulator.url, "/v1/messages", CHAT)).json()
    assert (whole["type"], whole["stop_reason"]) == ("message", "max_tokens")
    assert whole["content"] == [{"type": "text", "text": ANSWER}]
    assert whole["usage"]["output_tokens"] == 6
    events = named_events(await client.send(emulator.url, "/v1/messages", CHAT | {"stream": True}))
    names = ["message_start", "content_block_start", *["content_block_delta"] * 6]
    assert [name for name, _ in events] == [*names, "content_block_stop", "message_delta", "message_stop"]
    assert "".join(event["delta"]["text"] for name, event in events if name == "content_block_delta") == ANSWER


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", CHAT_PATH])
async def test_every_endpoint_hands_over(new_vllm_pair: Any, until: Any, path: str) -> None:
    """A NIXL pair works for all of them."""
    is_input = path == "/v1/responses"
    body = INPUT if is_input else CHAT
    async with new_vllm_pair() as pair:
        assert isinstance(pair, VllmPair)
        limit = {"max_output_tokens": 1} if is_input else {}
        first = await pair.prefill_leg(path, body, kv_transfer_params=PREFILL_PARAMS, **limit)
        params = first.json()["kv_transfer_params"]
        reply = await pair.client.send(pair.decode.url, path, body | {"kv_transfer_params": params})
        assert ANSWER in reply.body.decode()
        await until(lambda: pair.is_idle)
        assert pair.decode.snapshot().recomputed_requests == 0


async def test_an_error_in_a_stream_is_an_event(new_vllm_pair: Any, until: Any) -> None:
    """Before the first byte an error is a whole answer."""
    async with new_vllm_pair() as pair:
        first = await pair.prefill_leg(TEXT_PATH, TEXTS, kv_transfer_params=PREFILL_PARAMS)
        params = first.json()["kv_transfer_params"] | {"remote_request_id": "another"}
        body = TEXTS | {"stream": True, "kv_transfer_params": params}
        reply = await pair.client.send(pair.decode.url, TEXT_PATH, body)
        assert (reply.status, reply.json()["error"]["type"]) == (500, "InternalServerError")
        assert pair.decode.kind.error_event(EngineError(500, "c", "m")) == (
            b'data: {"error":{"message":"m","type":"InternalServerError","param":null,"code":500}}\n\ndata: [DONE]\n\n'
        )
