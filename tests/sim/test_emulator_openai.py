"""A plain engine: it answers as any other, and tells nothing of itself but its model."""

from typing import Any

import pytest

from pdrouter.sim.emulator import Emulator, EmulatorSettings, expected_text, render_chat, start_emulator
from pdrouter.sim.emulator_settings import EngineError

from .trtllm_legs import CHAT, CHAT_PATH, FAST, TEXT, TEXT_PATH, TEXTS


@pytest.fixture
async def emulator() -> Any:
    """Fast plain engine."""
    async with start_emulator(EmulatorSettings(engine="openai", dp_size=2, speed=FAST)) as emulator:
        yield emulator


async def test_chat(client: Any, emulator: Emulator) -> None:
    """Whole and streamed, with OpenAI's fields and no more."""
    whole = (await client.send(emulator.url, CHAT_PATH, CHAT)).json()
    text = expected_text(render_chat(CHAT["messages"]), 6)
    assert whole.keys() == {"id", "object", "created", "model", "choices", "usage"}
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "logprobs": None}
    assert whole["choices"] == [choice | {"finish_reason": "length"}]
    body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    events = (await client.send(emulator.url, CHAT_PATH, body)).events()
    assert "".join(c["delta"].get("content", "") for e in events for c in e["choices"]) == text
    assert events[-1]["usage"] == whole["usage"]


async def test_completions(client: Any, emulator: Emulator) -> None:
    """Several answers to several prompts."""
    reply = await client.send(emulator.url, TEXT_PATH, TEXTS | {"prompt": [TEXT, "b"], "n": 2})
    texts = [choice["text"] for choice in reply.json()["choices"]]
    assert texts == [expected_text(prompt, 6, choice) for prompt in (TEXT, "b") for choice in (0, 1)]


async def test_it_tells_only_its_model(client: Any, emulator: Emulator) -> None:
    """No load, no version, no legs; ranks are its own business."""
    assert (await client.send(emulator.url, "/health")).status == 200
    assert (await client.send(emulator.url, "/v1/models")).json()["data"][0]["id"] == "emulated"
    for path in ("/metrics", "/version", "/server_info", "/v1/loads", "/load"):
        assert (await client.send(emulator.url, path)).status == 404
    for rank in ("1", "9"):
        assert (await client.send(emulator.url, TEXT_PATH, TEXTS, {"X-data-parallel-rank": rank})).status == 200
    assert emulator.snapshot().requests_by_rank == [1, 1]


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"max_tokens": 0}, 400, "bad_request"),
        ({"model": "other"}, 404, "unknown_model"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, 400, "unknown_kv_transfer_params"),
    ],
)
async def test_errors(client: Any, emulator: Emulator, fields: dict[str, Any], status: int, code: str) -> None:
    """In OpenAI's shape."""
    reply = await client.send(emulator.url, TEXT_PATH, TEXTS | fields)
    assert (reply.status, reply.json()["error"]["code"]) == (status, code)
    assert reply.json()["error"].keys() == {"message", "type", "param", "code"}
    assert emulator.kind.error_event(EngineError(500, "c", "m")) == (
        b'data: {"error":{"message":"m","type":"server_error","param":null,"code":"c"}}\n\ndata: [DONE]\n\n'
    )


def test_it_has_no_legs() -> None:
    """So it can't be one side of a pair."""
    with pytest.raises(ValueError, match="regular"):
        EmulatorSettings(engine="openai", role="prefill")
