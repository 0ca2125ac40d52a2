"""How soon a client is told, and how soon engines are free, when a leg fails or a client leaves."""

import asyncio
import sys
import time

import pytest

from pdrouter.proxy.connection import Connection
from pdrouter.sim.emulator import Emulator
from tests.faults.checks import is_right
from tests.faults.saboteur import EVENT, SSE, chunk, stalls_after
from tests.faults.test_spoilt_answers import spoilt_lab
from tests.lab import (
    CHAT,
    DEADLINE_S,
    Asked,
    Lab,
    ScriptedEngine,
    always,
    chat,
    fault,
    make_lab,
    route_to,
    start,
    until,
)

pytestmark = [pytest.mark.invariant("I12")]

LONG_PROMPT = "word" * 30_000
"""30,000 tokens."""

TRIES = 5


@pytest.mark.parametrize("status", [400, 500])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_prefill_fails_late_while_its_decode_hangs(status: int, is_stream: bool) -> None:
    """An error after 50 ms is told in under 200 ms, with the engine's own body; the decode slot is free in a second."""
    told_s, freed_s = [], []
    async with make_lab(engine={"speed": 1.0}) as lab:
        for number in range(TRIES):  # the best of them, as others use the machine, too
            await fault(lab.prefills[0], "slow", seconds=0.05, times=1)
            await fault(lab.prefills[0], "status", status=status, body={"detail": "no memory"}, times=1)
            began_s = time.perf_counter()
            reply = await lab.post(CHAT, chat(f"late {number}", stream=is_stream))
            told_s.append(time.perf_counter() - began_s)
            assert (reply.status, reply.json()) == (status, {"detail": "no memory"})
            await lab.settled(within_s=DEADLINE_S)
            freed_s.append(time.perf_counter() - began_s)
    assert 0.05 <= min(told_s) < 0.2
    assert min(freed_s) < 1.0


async def test_a_prefill_fails_while_its_decode_says_nothing_at_all() -> None:
    """Also where the decode engine is deaf to aborts: its connection is closed at once."""
    async with spoilt_lab("sglang") as (lab, (prefill, decode)):
        decode.scripts[b"deaf"] = stalls_after(b"")
        await fault(prefill.emulator, "status", status=500, body={"told": "so"})
        reply = await lab.post(CHAT, chat("deaf", stream=True))
        assert (reply.status, reply.json()) == (500, {"told": "so"})
        assert decode.spoilt
        await lab.settled(within_s=DEADLINE_S)


def engine_s(emulator: Emulator) -> float:
    """Return the engine's own time."""
    return emulator.engine.now_s()


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
async def test_a_client_leaves_in_the_middle_of_a_long_prefill(engine: str) -> None:
    """The rank is free within a second of the engine's time, and whoever waited behind has it then."""
    kind = {"engine": "vllm", "kv_connector": "nixl"} if engine == "vllm" else {}
    async with make_lab(engine={"dp_size": 1, "speed": 1.0} | kind, disaggregation="always") as lab:
        (prefill,) = lab.prefills
        call = await lab.start(CHAT, chat(LONG_PROMPT, stream=True))
        await until(lambda: any(rank.running for rank in prefill.snapshot().ranks))
        behind = asyncio.ensure_future(lab.post(CHAT, chat("behind", 4, stream=True)))
        await until(lambda: prefill.snapshot().requests == 2)
        full_s = prefill.engine.profile.prefill_ms(30_000, 0) / 1e3
        left_s = engine_s(prefill)
        await call.leave()
        await until(lambda: prefill.snapshot().requests < 2)
        freed_s = engine_s(prefill) - left_s
        assert is_right(await behind, "behind", 4)
        assert freed_s < 1.0
        assert engine_s(prefill) - left_s < full_s
        await lab.settled()


async def endless(asked: Asked) -> bytes:
    """Stream small events for ever, as fast as the caller reads."""
    asked.writer.write(SSE)
    while True:
        asked.writer.write(chunk(EVENT) * 100)
        await asked.writer.drain()


def held_bytes(lab: Lab) -> int:
    """Return what the router's memory holds of answers that weren't taken yet."""
    pools = lab.router.service.pools
    exchanges = [c._exchange for endpoint in lab.core.fleet for c in pools.get(endpoint)._connections if c._exchange]
    unread = sum(sys.getsizeof(piece) for exchange in exchanges for piece in exchange.pieces)
    clients = [client for client in lab.router.service.clients._all if isinstance(client, Connection)]
    return unread + sum(client._transport.get_write_buffer_size() for client in clients)


@pytest.mark.invariant("I9")
async def test_memory_of_a_slow_reader() -> None:
    """What the router holds of a fast stream for a client that hardly reads stays under half a MiB."""
    async with (
        ScriptedEngine("prefill", {CHAT: always(200, {})}).listen() as prefill,
        ScriptedEngine("decode", {CHAT: endless}).listen() as decode,
        route_to([prefill], [decode]) as lab,
        await start(lab.url, CHAT, chat("x", stream=True), receive_bytes=4096) as call,
    ):
        assert await call.head() == 200
        held = [held_bytes(lab)]
        for _ in range(200):
            await call.some()
            held.append(held_bytes(lab))
        assert 50_000 < max(held) < 2**19
