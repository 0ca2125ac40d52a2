"""Shared storage: what a prefill has read, a decode finds by the prompt."""

from pathlib import Path
from typing import Any

import pytest

from pdrouter.sim.emulator import EmulatorSettings, expected_text, start_emulator

from .legs import FAST, TEXT, TEXT_PATH, TEXTS, VllmPair


@pytest.fixture
async def pair(new_vllm_pair: Any, tmp_path: Path) -> Any:
    """Fast pair with a store."""
    async with new_vllm_pair(kv_connector="shared_storage", storage_dir=str(tmp_path)) as pair:
        yield pair


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"prompt": [TEXT, "another"]}], ids=["one", "n", "list"])
async def test_prefill_then_decode(pair: VllmPair, fields: dict[str, Any]) -> None:
    """The legs say nothing of each other, and decode reads nothing again."""
    body = TEXTS | fields
    assert (await pair.prefill_leg(TEXT_PATH, body)).status == 200
    assert pair.is_idle
    reply = await pair.client.send(pair.decode.url, TEXT_PATH, body)
    assert reply.json()["choices"][0]["text"] == expected_text(TEXT, 6)
    usage = reply.json()["usage"]
    prompts = len(body["prompt"]) if isinstance(body["prompt"], list) else 1
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - prompts
    assert pair.is_idle
    assert pair.decode.snapshot().recomputed_requests == 0


async def test_what_is_not_there_is_read_again(pair: VllmPair) -> None:
    """Another prompt, or decode before prefill: counted."""
    await pair.prefill_leg(TEXT_PATH, TEXTS | {"prompt": TEXT + "!"})
    reply = await pair.client.send(pair.decode.url, TEXT_PATH, TEXTS)
    assert reply.json()["choices"][0]["text"] == expected_text(TEXT, 6)
    assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert pair.decode.snapshot().recomputed_requests == 1


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"max_tokens": 2}, "prefill_not_one_token"),
        ({"stream": True}, "prefill_streams"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "unknown_kv_transfer_params"),
    ],
)
async def test_a_wrong_prefill_leg_is_refused(pair: VllmPair, fields: dict[str, object], code: str) -> None:
    """400, counted, and nothing is stored."""
    assert (await pair.prefill_leg(TEXT_PATH, TEXTS, **fields)).status == 400
    assert pair.prefill.snapshot().errors == {code: 1}
    await pair.client.send(pair.decode.url, TEXT_PATH, TEXTS)
    assert pair.decode.snapshot().recomputed_requests == 1


async def test_a_regular_engine_reads_what_is_stored(pair: VllmPair, client: Any, tmp_path: Path) -> None:
    """And reads the prompt itself where nothing is."""
    settings = EmulatorSettings(engine="vllm", kv_connector="shared_storage", storage_dir=str(tmp_path), speed=FAST)
    await pair.prefill_leg(TEXT_PATH, TEXTS)
    async with start_emulator(settings) as emulator:
        for prompt, cached in ((TEXT, 129), ("another prompt", 0)):
            reply = await client.send(emulator.url, TEXT_PATH, TEXTS | {"prompt": prompt})
            assert reply.json()["choices"][0]["text"] == expected_text(prompt, 6)
            assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        assert emulator.snapshot().recomputed_requests == 0
