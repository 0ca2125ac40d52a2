"""What emulated engines refuse beside wrong pairs of legs: nonsense in single fields, and peers that hang up."""

import asyncio
from typing import Any

import pytest

from pdrouter.sim.emulator import EmulatorSettings, start_emulator

from .trtllm_legs import TEXT_PATH, TEXTS, make_trtllm_pair
from .vllm.legs import make_pair

GENERATE = {"text": "hello", "sampling_params": {"max_new_tokens": 2}}
VLLM = {"prompt": "hello", "max_tokens": 2}
LEG = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 7}


@pytest.mark.parametrize(
    ("fields", "headers", "code"),
    [
        ({"bootstrap_port": 0}, {}, "bad_bootstrap_port"),
        ({"bootstrap_port": 65536}, {}, "bad_bootstrap_port"),
        ({"bootstrap_port": "8998"}, {}, "bad_bootstrap_port"),
        ({}, {"x-override-bootstrap-room": "seven"}, "bad_header"),
        ({}, {"x-override-routed-dp-rank": "1.0"}, "bad_header"),
        ({"routed_dp_rank": "1"}, {}, "bad_rank"),
        ({"disagg_prefill_dp_rank": [0]}, {}, "bad_rank"),
        ({"routed_dp_rank": 2}, {}, "rank_out_of_range"),
    ],
)
async def test_a_bad_field_or_header_is_refused(
    client: Any, fields: dict[str, object], headers: dict[str, str], code: str
) -> None:
    """With a 400, and the cause is counted."""
    settings = EmulatorSettings(role="decode", dp_size=2, takes_overrides=True)
    async with start_emulator(settings) as emulator:
        reply = await client.send(emulator.url, "/generate", GENERATE | LEG | fields, headers)
        assert reply.status == 400
        assert emulator.snapshot().errors == {code: 1}
        assert emulator.snapshot().is_idle


@pytest.mark.parametrize("role", ["regular", "prefill", "decode"])
async def test_a_prompt_that_is_too_long_is_refused(client: Any, role: Any) -> None:
    """Whatever the engine does with it."""
    settings = EmulatorSettings(role=role, kv_capacity_tokens=64)
    async with start_emulator(settings) as emulator:
        reply = await client.send(emulator.url, "/generate", GENERATE | LEG | {"input_ids": [1] * 65, "text": None})
        assert reply.status == 400
        assert emulator.snapshot().errors == {"too_long": 1}


@pytest.mark.parametrize(
    ("version", "has_sums", "unknown"),
    [
        ("0.5.8", True, ["num_total_tokens", "num_waiting_uncached_tokens", "num_active_tokens"]),
        ("0.5.12", True, ["num_waiting_uncached_tokens", "total_prefill_uncached_tokens"]),
        ("0.5.13", True, ["num_active_tokens", "total_prefill_busy_us"]),
        ("0.5.14", False, ["num_active_tokens"]),
        ("0.5.23", False, []),
    ],
)
async def test_loads_by_version(client: Any, version: str, has_sums: bool, unknown: list[str]) -> None:
    """What a version doesn't tell isn't there."""
    async with start_emulator(EmulatorSettings(dp_size=2, server_version=version)) as emulator:
        report = (await client.send(emulator.url, "/v1/loads")).json()
        assert {"dp_rank_count", "aggregate"} & set(report) == ({"dp_rank_count", "aggregate"} if has_sums else set())
        for load in report["loads"]:
            assert "num_used_tokens" in load
            assert not set(unknown) & set(load)


async def test_a_peer_that_hangs_up(client: Any) -> None:
    """A decode leg fails if the side that has its KV takes the connection and closes it."""

    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, make_pair(client, kv_connector="nixl") as pair:
        _, reply = await pair.nixl("/v1/completions", VLLM, remote_port=port)
        assert reply.status == 500
        assert pair.decode.snapshot().errors == {"prefill_lost": 1}
    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    place = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, make_trtllm_pair(client) as trtllm:
        first = await trtllm.context_answer(TEXT_PATH, TEXTS)
        assert (await trtllm.generation_leg(TEXT_PATH, TEXTS, first, ctx_info_endpoint=place)).status == 500
        assert trtllm.generation.snapshot().errors == {"context_lost": 1}
