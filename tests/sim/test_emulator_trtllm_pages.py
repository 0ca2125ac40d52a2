"""Pages of an emulated TensorRT-LLM, its load, and the formats of its answers."""

import json
from typing import Any

import pytest

from pdrouter.engines.trtllm import Trtllm
from pdrouter.sim.emulator import Emulator, EmulatorSettings, expected_text, start_emulator
from pdrouter.sim.emulator_settings import EngineError

from .trtllm_legs import CHAT, CHAT_PATH, FAST, TEXT, TEXT_PATH, TEXTS, make_trtllm_pair

SLOW = TEXTS | {"prompt": "hi", "max_tokens": 100_000}


def settings(**fields: Any) -> EmulatorSettings:
    """Settings of a regular engine."""
    return EmulatorSettings(engine="trtllm", **fields)


async def iterations(client: Any, emulator: Emulator) -> Any:
    """What ``/metrics`` tells."""
    return (await client.send(emulator.url, "/metrics")).json()


async def gauges(client: Any, emulator: Emulator) -> Any:
    """What ``/prometheus/metrics`` tells, as the router reads it."""
    reply = Trtllm().read_load((await client.send(emulator.url, "/prometheus/metrics")).body)
    return None if reply is None else reply.ranks[0]


async def test_pages(client: Any) -> None:
    """Health, version, models and where KV is; pages of other engines aren't there."""
    async with start_emulator(settings(model="m")) as emulator:
        assert (await client.send(emulator.url, "/health")).status == 200
        assert (await client.send(emulator.url, "/version")).json() == {"version": "1.2.0"}
        card = (await client.send(emulator.url, "/v1/models")).json()["data"][0]
        assert (card["id"], card["owned_by"]) == ("m", "tensorrt_llm")
        info = (await client.send(emulator.url, "/server_info")).json()["disaggregated_params"]
        assert info == {"ctx_dp_rank": 0, "ctx_info_endpoint": [f"tcp://127.0.0.1:{emulator.bootstrap_port}"]}
        for path in ("/get_load", "/v1/loads", "/load"):
            assert (await client.send(emulator.url, path)).status == 404
        for path in ("/generate", "/abort_request"):
            assert (await client.send(emulator.url, path, {})).status == 404


async def test_load_of_all_ranks_together(client: Any, until: Any) -> None:
    """In both places the same; an idle engine has had no iteration."""
    async with start_emulator(settings(dp_size=2, speed=0.001, kv_capacity_tokens=128_000)) as emulator:
        assert await iterations(client, emulator) == []
        assert (await gauges(client, emulator)).requests == 0
        calls = [await client.start(emulator.url, TEXT_PATH, SLOW) for _ in range(6)]
        await until(lambda: emulator.snapshot().requests == 6)
        told = await gauges(client, emulator)
        assert (told.rank, told.requests, told.waiting_requests) == (0, 6, 4)
        assert told.kv_use == emulator.snapshot().used_tokens / 256_000 > 0
        (stats,) = await iterations(client, emulator)
        assert (stats["numActiveRequests"], stats["numQueuedRequests"]) == (2, 4)
        assert stats["kvCacheStats"]["maxNumBlocks"] == 4000
        for call in calls:
            await call.abandon()
        await until(lambda: emulator.snapshot().is_idle)


async def test_held_kv_is_in_use_though_nothing_runs(client: Any) -> None:
    """So stranded KV shows."""
    async with make_trtllm_pair(client) as pair:
        await pair.context_answer(TEXT_PATH, TEXTS)
        told = await gauges(client, pair.context)
        assert (told.requests, told.kv_use > 0) == (0, True)


async def test_gauges_lag(client: Any, until: Any) -> None:
    """Requests are there long before the gauges say so."""
    async with start_emulator(settings(load_delay=30.0, speed=0.001)) as emulator:
        call = await client.start(emulator.url, TEXT_PATH, SLOW)
        await until(lambda: emulator.snapshot().requests == 1)
        assert (await gauges(client, emulator)).requests == 0
        await call.abandon()


@pytest.mark.parametrize("mode", ["negative", "nan", "missing"])
async def test_bad_loads_on_demand(client: Any, mode: str) -> None:
    """-1, not a number, or nothing; and no answer."""
    async with start_emulator(settings()) as emulator:
        await client.send(emulator.url, "/_fault", [{"kind": "bad_load", "mode": mode, "times": 1}])
        told = await gauges(client, emulator)
        if mode == "missing":
            assert told is None
        elif mode == "nan":
            assert told.requests != told.requests
        else:
            assert told.requests == -2
        await client.send(emulator.url, "/_fault", [{"kind": "no_load", "times": 1}])
        assert (await client.send(emulator.url, "/prometheus/metrics")).status == 500
        assert (await client.send(emulator.url, "/health")).status == 200


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_closed_connection_ends_a_request(client: Any, until: Any, is_stream: bool) -> None:
    """All that it held is free at once."""
    async with start_emulator(settings()) as emulator:
        call = await client.start(emulator.url, TEXT_PATH, SLOW | {"stream": is_stream})
        await until(lambda: emulator.snapshot().used_tokens > 0)
        await call.abandon()
        await until(lambda: emulator.snapshot().is_idle)


@pytest.mark.parametrize(("options", "is_told"), [(None, False), ({}, True), ({"include_usage": False}, False)])
async def test_a_stream(client: Any, options: Any, is_told: bool) -> None:
    """Usage at its end, if options are given and don't say otherwise."""
    async with start_emulator(settings(speed=FAST)) as emulator:
        body = CHAT | {"stream": True, "stream_options": options}
        events = (await client.send(emulator.url, CHAT_PATH, body)).events()
        assert ("usage" in events[-1]) is is_told
        assert all("usage" not in event for event in events[:-1])


async def test_what_ends_an_answer(client: Any) -> None:
    """Its limit, by either name; without one it stops by itself. Ids are a prompt, too."""
    async with start_emulator(settings(speed=FAST)) as emulator:

        async def choice(body: dict[str, Any], path: str = CHAT_PATH) -> Any:
            return (await client.send(emulator.url, path, body)).json()["choices"][0]

        assert (await choice(CHAT))["finish_reason"] == "length"
        plain = {"model": "emulated", "messages": CHAT["messages"]}
        assert len((await choice(plain | {"max_completion_tokens": 3}))["message"]["content"].split()) == 3
        assert (await choice(plain))["finish_reason"] == "stop"
        assert (await choice(TEXTS | {"prompt": [1, 2]}, TEXT_PATH))["text"] == expected_text([1, 2], 6)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"model":"m"}', b'{"model":"m","messages":[]}', b'{"model":"m","messages":5}', b"\xff"],
)
async def test_nonsense_is_refused(client: Any, body: bytes) -> None:
    """400, and the engine goes on."""
    async with start_emulator(settings()) as emulator:
        assert (await client.send(emulator.url, CHAT_PATH, body)).status == 400
        assert (await client.send(emulator.url, TEXT_PATH, body)).status == 400
        assert (await client.send(emulator.url, TEXT_PATH, TEXTS | {"prompt": ""})).status == 400
        assert (await client.send(emulator.url, TEXT_PATH, TEXTS | {"max_tokens": 0})).status == 400
        assert sum(emulator.snapshot().errors.values()) == 4
        assert (await client.send(emulator.url, TEXT_PATH, TEXTS | {"prompt": [1]})).status == 200


async def test_an_error_in_a_stream_is_an_event(client: Any) -> None:
    """In the same shape as a whole one."""
    async with start_emulator(settings()) as emulator:
        told = emulator.kind.error_event(EngineError(500, "c", "m")).removesuffix(b"\n\ndata: [DONE]\n\n")
        error = {"object": "error", "message": "m", "type": "InternalServerError", "param": None, "code": 500}
        assert json.loads(told.removeprefix(b"data: ")) == error


async def test_the_same_text_as_any_engine(client: Any) -> None:
    """So that a mixed-up stream shows."""
    async with start_emulator(settings(speed=FAST)) as emulator:
        reply = await client.send(emulator.url, TEXT_PATH, TEXTS)
        assert reply.json()["choices"][0]["text"] == expected_text(TEXT, 6)
