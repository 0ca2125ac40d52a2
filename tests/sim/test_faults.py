"""Faults on demand do what they say, to whom they say, as often as they say."""

import asyncio
import json
import math
import time
from typing import Any

import pytest

from pdrouter.sim.emulator import Emulator, EmulatorSettings, start_emulator

GENERATE = {"text": "hello", "sampling_params": {"max_new_tokens": 4}, "stream": True}


@pytest.fixture
async def emulator() -> Any:
    """Fast engine of two ranks."""
    async with start_emulator(EmulatorSettings(dp_size=2, speed=200.0, load_api="both")) as emulator:
        yield emulator


async def set_fault(client: Any, emulator: Emulator, **rule: object) -> None:
    """Add one rule."""
    assert (await client.send(emulator.url, "/_fault", [rule])).status == 200


async def test_a_status_hits_its_path_a_number_of_times(client: Any, emulator: Emulator) -> None:
    """Then all is well again; DELETE clears at once."""
    await set_fault(client, emulator, kind="status", status=429, body={"error": "busy"}, times=2, path="/generate")
    assert (await client.send(emulator.url, "/health")).status == 200
    for _ in range(2):
        reply = await client.send(emulator.url, "/generate", GENERATE)
        assert (reply.status, reply.json()) == (429, {"error": "busy"})
    assert (await client.send(emulator.url, "/generate", GENERATE)).status == 200
    await set_fault(client, emulator, kind="status", status=503)
    assert (await client.send(emulator.url, "/health")).status == 503
    assert (await client.send(emulator.url, "/_fault", method="DELETE")).status == 200
    assert (await client.send(emulator.url, "/health")).status == 200


async def test_one_rank_alone(client: Any, emulator: Emulator) -> None:
    """Only requests that name it are hit; those that leave the rank to the engine aren't."""
    await set_fault(client, emulator, kind="status", status=500, path="/generate", rank=1, times=2)
    for rank, status in ((0, 200), (1, 500), (None, 200), (1, 500), (1, 200)):
        assert (await client.send(emulator.url, "/generate", GENERATE | {"routed_dp_rank": rank})).status == status
    assert emulator.snapshot().requests_by_rank == [2, 1]


async def test_slow(client: Any, emulator: Emulator) -> None:
    """Waits before anything else."""
    await set_fault(client, emulator, kind="slow", seconds=0.05)
    start = time.monotonic()
    assert (await client.send(emulator.url, "/health")).status == 200
    assert time.monotonic() - start >= 0.05


async def test_hang_ends_with_the_caller(client: Any, emulator: Emulator) -> None:
    """Nothing is answered."""
    await set_fault(client, emulator, kind="hang", path="/generate", times=1)
    call = await client.start(emulator.url, "/generate", GENERATE)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(call.reader.read(1), 0.05)
    await call.abandon()
    assert emulator.snapshot().total_requests == 0


async def test_reset_at_once(client: Any, emulator: Emulator) -> None:
    """A TCP reset, no byte of a reply."""
    await set_fault(client, emulator, kind="reset", times=1)
    call = await client.start(emulator.url, "/generate", GENERATE)
    with pytest.raises(ConnectionResetError):
        await call.reader.read()
    await call.abandon()


async def test_reset_after_chunks(client: Any, emulator: Emulator, until: Any) -> None:
    """So many chunks, then the reset; the engine lets go of the request."""
    await set_fault(client, emulator, kind="reset", after_chunks=2)
    call = await client.start(emulator.url, "/generate", GENERATE)
    with pytest.raises(ConnectionResetError):
        await call.reader.read()
    await call.abandon()
    await until(lambda: emulator.snapshot().is_idle)


async def test_half_a_stream(client: Any, emulator: Emulator, until: Any) -> None:
    """Closes in the middle of an event, with no end of the chunked body."""
    await set_fault(client, emulator, kind="half_stream", after_chunks=2)
    reply = await client.send(emulator.url, "/generate", GENERATE)
    assert (reply.status, reply.is_whole) == (200, False)
    pieces = reply.body.decode().split("\n\n")
    assert len(pieces) == 3
    for piece in pieces[:2]:
        json.loads(piece.removeprefix("data: "))
    with pytest.raises(json.JSONDecodeError):
        json.loads(pieces[2].removeprefix("data: "))
    await until(lambda: emulator.snapshot().is_idle)


@pytest.mark.parametrize("path", ["/v1/loads", "/get_load"])
async def test_bad_loads(client: Any, emulator: Emulator, path: str) -> None:
    """No report, -1, NaN, missing ranks; requests go on."""

    async def loads(**rule: object) -> Any:
        await set_fault(client, emulator, times=1, **rule)
        reply = await client.send(emulator.url, path)
        assert reply.status == 200
        return reply.json()["loads"] if path == "/v1/loads" else reply.json()

    await set_fault(client, emulator, kind="no_load", times=1)
    assert (await client.send(emulator.url, "/generate", GENERATE)).status == 200
    assert (await client.send(emulator.url, path)).status == 500
    name = "num_used_tokens" if path == "/v1/loads" else "num_tokens"
    assert [load[name] for load in await loads(kind="bad_load", mode="negative")] == [-1, -1]
    assert all(math.isnan(load[name]) for load in await loads(kind="bad_load", mode="nan"))
    assert len(await loads(kind="bad_load", mode="missing")) == 1
    assert [load[name] for load in (await loads(kind="bad_load", mode="missing", path="/x"))] == [0]


async def test_late_loads_tell_the_past_and_say_so(client: Any, until: Any) -> None:
    """Numbers and time stamp are those of ``seconds`` ago; ``load_delay`` does it for all reports."""
    settings = EmulatorSettings(load_delay=0.15, dp_size=1)
    async with start_emulator(settings) as emulator:
        call = await client.start(emulator.url, "/generate", GENERATE | {"stream": False})
        await until(lambda: emulator.snapshot().requests == 1)
        report = (await client.send(emulator.url, "/v1/loads")).json()
        assert report["loads"][0]["num_total_tokens"] == 0
        await call.abandon()
    async with start_emulator(EmulatorSettings(dp_size=1)) as emulator:
        await set_fault(client, emulator, kind="late_load", seconds=30)
        call = await client.start(emulator.url, "/generate", GENERATE)
        await until(lambda: emulator.snapshot().requests == 1)
        first = (await client.send(emulator.url, "/v1/loads")).json()
        assert first["loads"][0]["num_total_tokens"] == 0
        assert (await client.send(emulator.url, "/v1/loads")).json()["timestamp"] == first["timestamp"]
        await client.send(emulator.url, "/_fault", method="DELETE")
        assert (await client.send(emulator.url, "/v1/loads")).json()["timestamp"] > first["timestamp"]
        await call.abandon()


async def test_nonsense_is_refused_and_faults_can_be_switched_off(client: Any, emulator: Emulator) -> None:
    """An unknown kind is a 400; without ``faults_enabled`` the path isn't there."""
    assert (await client.send(emulator.url, "/_fault", [{"kind": "melt"}])).status == 400
    async with start_emulator(EmulatorSettings(faults_enabled=False)) as other:
        assert (await client.send(other.url, "/_fault", [])).status == 404
