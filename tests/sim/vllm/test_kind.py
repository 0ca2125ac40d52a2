"""Pages of an emulated vLLM, its aborts, and its settings."""

from typing import Any

import pytest

from pdrouter.sim.emulator import EmulatorSettings, start_emulator

from .legs import FAST, TEXT_PATH, TEXTS

SLOW = TEXTS | {"max_tokens": 100_000}


async def test_pages(client: Any) -> None:
    """Health, version, models are there; SGLang's pages and an abort endpoint aren't."""
    async with start_emulator(EmulatorSettings(engine="vllm", model="m")) as emulator:
        assert (await client.send(emulator.url, "/health")).status == 200
        assert (await client.send(emulator.url, "/version")).json() == {"version": "0.32.0"}
        card = (await client.send(emulator.url, "/v1/models")).json()["data"][0]
        assert (card["id"], card["owned_by"]) == ("m", "vllm")
        for path in ("/server_info", "/get_load", "/v1/loads"):
            assert (await client.send(emulator.url, path)).status == 404
        for path in ("/abort_request", "/abort_requests", "/generate"):
            assert (await client.send(emulator.url, path, {})).status == 404


@pytest.mark.parametrize(("tracks", "told"), [(True, 1), (False, 0)])
async def test_server_load(client: Any, until: Any, tracks: bool, told: int) -> None:
    """Without its flag it is 0, whatever runs."""
    async with start_emulator(EmulatorSettings(engine="vllm", tracks_server_load=tracks)) as emulator:
        call = await client.start(emulator.url, TEXT_PATH, SLOW)
        await until(lambda: emulator.snapshot().requests == 1)
        assert (await client.send(emulator.url, "/load")).json() == {"server_load": told}
        await call.abandon()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_closed_connection_ends_a_request(client: Any, until: Any, is_stream: bool) -> None:
    """All that it held is free at once."""
    async with start_emulator(EmulatorSettings(engine="vllm", dp_size=2)) as emulator:
        call = await client.start(emulator.url, TEXT_PATH, SLOW | {"stream": is_stream})
        await until(lambda: emulator.snapshot().used_tokens > 0)
        await call.abandon()
        await until(lambda: emulator.snapshot().is_idle)


async def test_aborts_if_switched_on(client: Any, until: Any) -> None:
    """By the id of the answer; others go on, and nonsense is a 400."""
    async with start_emulator(EmulatorSettings(engine="vllm", takes_aborts=True)) as emulator:
        calls = [await client.start(emulator.url, TEXT_PATH, SLOW, {"X-Request-Id": name}) for name in ("a", "b")]
        await until(lambda: emulator.snapshot().requests == 2)
        assert (await client.send(emulator.url, "/abort_requests", {"ids": []})).status == 400
        assert (await client.send(emulator.url, "/abort_requests", {"request_ids": ["cmpl-a"]})).status == 200
        assert (await calls[0].finish()).json()["choices"][0]["finish_reason"] == "abort"
        assert emulator.snapshot().requests == 1
        await calls[1].abandon()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"engine": "sglang", "kv_connector": "nixl"}, "kv_connector is vLLM's"),
        ({"engine": "vllm", "kv_connector": "shared_storage"}, "needs storage_dir"),
        ({"engine": "vllm", "kv_connector": "p2p_nccl"}, "needs a role"),
        ({"engine": "vllm", "dp_start_rank": -1}, "negative"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], problem: str) -> None:
    """At once, not at the first request."""
    with pytest.raises(ValueError, match=problem):
        EmulatorSettings(**settings)


async def test_the_same_model_and_text_as_any_engine(client: Any) -> None:
    """SGLang and vLLM answer a prompt alike, so that a mixed-up stream shows."""
    texts = []
    for settings in (EmulatorSettings(speed=FAST), EmulatorSettings(engine="vllm", speed=FAST)):
        async with start_emulator(settings) as emulator:
            texts.append((await client.send(emulator.url, TEXT_PATH, TEXTS)).json()["choices"][0]["text"])
    assert texts[0] == texts[1]
