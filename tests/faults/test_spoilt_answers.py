"""Engines that break HTTP, break off, lie or stall: the client is told, others are right, and nothing is left."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from pdrouter.sim.emulator import EmulatorSettings, start_emulator
from tests.faults.checks import VLLM, is_right, neighbours, nothing_left, objects
from tests.faults.saboteur import Saboteur, ends_after
from tests.faults.spoilt import FAULTS, LEFT, STALLS, Fault, outcome
from tests.lab import CHAT, DEADLINE_S, Asked, Lab, Reply, Script, chat, http, route_to

pytestmark = [pytest.mark.invariant("I2"), pytest.mark.invariant("I12")]

ENGINES = ("sglang", "vllm")
SIDES = ("prefill", "decode")
RETRIED = ("resets", "no_http", "endless_head", "late_500")
SERIAL_DECODE = ("resets", "late_500", "more_than_said", "less_than_said", "bad_later_chunk", "no_sse")
"""Where a decode engine that runs after its prefill could make a difference."""

CASES = [
    (name, side, engine)
    for name in FAULTS
    for side in SIDES
    for engine in ENGINES
    if (side, engine) != ("decode", "vllm") or name in SERIAL_DECODE
]
LEAVES_AFTER_S = 0.2


@contextlib.asynccontextmanager
async def spoilt_lab(engine: str, count: int = 1, **flags: Any) -> AsyncIterator[tuple[Lab, Sequence[Saboteur]]]:
    """Run a router over engines whose answers can be spoilt: ``count`` prefills, then as many decodes."""
    settings: dict[str, Any] = {"dp_size": 2, "speed": 100.0, "handshake_timeout_s": 1e6}
    if engine == "vllm":
        settings |= VLLM
        flags = {"engine": "vllm", "disaggregation": "always"} | flags
    async with contextlib.AsyncExitStack() as stack:
        saboteurs = []
        for role in ("prefill",) * count + ("decode",) * count:
            emulator = await stack.enter_async_context(
                start_emulator(EmulatorSettings(role=role, **settings))  # type: ignore[arg-type]
            )
            saboteurs.append(await stack.enter_async_context(Saboteur(emulator).listen()))
        lab = await stack.enter_async_context(route_to(saboteurs[:count], saboteurs[count:], **flags))
        lab.prefills = [saboteur.emulator for saboteur in saboteurs[:count]]
        lab.decodes = [saboteur.emulator for saboteur in saboteurs[count:]]
        lab.router.service.dispatcher.late_prefills.limit_s = LEAVES_AFTER_S
        yield lab, saboteurs


def expected(fault: Fault, engine: str, side: str, *, is_stream: bool) -> Sequence[str]:
    """Return what the client may see."""
    if side == "prefill":
        return fault.serial_prefill if engine == "vllm" else fault.prefill
    return fault.stream if is_stream else fault.plain


async def ask(lab: Lab, text: str, seen: Sequence[str], *, is_stream: bool) -> Reply | None:
    """Ask, and leave after a while if there may be no end."""
    async with await lab.start(CHAT, chat(text, 20, stream=is_stream)) as call:
        try:
            async with asyncio.timeout(LEAVES_AFTER_S if LEFT in seen else None):
                return await call.finish()
        except TimeoutError:
            if LEFT in seen:
                return None
            raise


@pytest.mark.parametrize(("name", "side", "engine"), CASES)
async def test_a_spoilt_answer(name: str, side: str, engine: str) -> None:
    """Of two requests, one streamed, the engine spoils the answers; their clients are told, eight others are right."""
    fault = FAULTS[name]
    async with spoilt_lab(engine) as (lab, saboteurs), nothing_left(lab):
        saboteurs[side == "decode"].scripts[b"spoil me"] = fault.script
        asked = [ask(lab, "spoil me", expected(fault, engine, side, is_stream=s), is_stream=s) for s in (False, True)]
        replies, _ = await asyncio.gather(asyncio.gather(*asked), neighbours(lab))
        for reply, is_stream in zip(replies, (False, True), strict=True):
            seen = LEFT if reply is None else outcome(reply)
            assert seen in expected(fault, engine, side, is_stream=is_stream)
            if reply is not None and seen == "200 whole" and name != "more_than_said":
                assert reply.body == fault.passes


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("side", SIDES)
async def test_stalled_answers(side: str, engine: str) -> None:
    """An engine that says no more, wherever it stops, is told of when the time is up, and both legs end."""
    async with spoilt_lab(engine, request_timeout_secs=1.0) as (lab, saboteurs), nothing_left(lab):
        asked = []
        for name, fault in STALLS.items():
            saboteurs[side == "decode"].scripts[name.encode()] = fault.script
            asked += [(name, is_stream) for is_stream in (False, True)]
        replies = await asyncio.gather(*(ask(lab, name, (), is_stream=s) for name, s in asked))
        for reply, (name, is_stream) in zip(replies, asked, strict=True):
            assert reply is not None
            assert outcome(reply) in expected(STALLS[name], engine, side, is_stream=is_stream), name
        await lab.settled(within_s=4.0)
        await neighbours(lab)


async def test_a_decode_engine_dies_with_the_kv_unfetched() -> None:
    """Its prefill may hold the KV until its own time limit, which is counted; the client is told."""
    async with spoilt_lab("vllm") as (lab, (_, decode)):
        decode.scripts[b"unfetched"] = ends_after(b"", resets=True)
        reply = await lab.post(CHAT, chat("unfetched"))
        assert (reply.status, reply.error["code"]) == (502, "upstream_closed")
        assert lab.router.service.dispatcher.hand_overs.stranded == 1
        assert (await lab.post(CHAT, chat("fetched"))).status == 200
        assert lab.router.service.dispatcher.hand_overs.stranded == 1


async def test_a_short_stream_is_not_made_whole() -> None:
    """Where the engine told a length, our error event doesn't fill up what is missing of it: the end stays improper."""
    async with spoilt_lab("sglang") as (lab, (_, decode)):
        decode.scripts[b"spoil me"] = ends_after(http(200, b"x" * 100)[:-50])
        reply = await lab.post(CHAT, chat("spoil me", 20, stream=True))
        assert (reply.status, reply.is_whole) == (200, False)
        assert reply.body.startswith(b"x" * 50 + b"\n\ndata: ")
        assert b'"upstream_closed"' in reply.body


@pytest.mark.invariant("I8")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", RETRIED)
async def test_a_spoilt_answer_is_tried_elsewhere(name: str, side: str, engine: str) -> None:
    """With another engine at hand and nothing told yet, the client gets its answer, and one engine alone has failed."""
    async with spoilt_lab(engine, 2, disable_retries=False) as (lab, saboteurs), nothing_left(lab):
        first, second = saboteurs[:2] if side == "prefill" else saboteurs[2:]
        first.scripts[b"spoil me"] = _alone(FAULTS[name].script, second)
        second.scripts[b"spoil me"] = _alone(FAULTS[name].script, first)
        reply, _ = await asyncio.gather(ask(lab, "spoil me", (), is_stream=True), neighbours(lab))
        assert reply is not None
        assert is_right(reply, "spoil me", 20), reply.body
        assert bool(first.spoilt) != bool(second.spoilt)


def _alone(script: Script, other: Saboteur) -> Script:
    """Return a script that only the first of two engines to be asked will follow."""

    async def alone(asked: Asked) -> bytes | None:
        other.scripts.clear()
        return await script(asked)

    return alone


SPARE = 5
"""Objects that may be left by a timeout under load; a cycle in each failed request would leave twenty and more."""


async def test_nothing_waits_for_the_collector() -> None:
    """What a failed request was made of goes with it: a router under faults would fill up with cycles."""
    no_probes = {"health_check_interval_secs": 60, "worker_load_check_interval": 60}
    async with spoilt_lab("sglang", disable_circuit_breaker=True, **no_probes) as (lab, saboteurs):
        await neighbours(lab)
        await lab.settled()
        gc.collect()
        before = objects()
        gc.disable()
        try:
            for name in ("closes", "resets", "half_an_event", "no_http", "late_500"):
                for saboteur in saboteurs:
                    saboteur.scripts = {b"spoil me": FAULTS[name].script}
                    for is_stream in (False, True):
                        await ask(lab, "spoil me", (), is_stream=is_stream)
            await lab.settled()
            async with asyncio.timeout(DEADLINE_S):
                while objects() > before + SPARE:  # noqa: ASYNC110 - memory tells no events
                    await asyncio.sleep(0.02)
        finally:
            gc.enable()
