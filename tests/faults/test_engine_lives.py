"""Engines that die, come back on the same port, flap, or tell nonsense of their load: others are right throughout."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
import pytest

from pdrouter.sim.emulator import Emulator, start_emulator
from tests.faults.checks import NEIGHBOURS, VLLM, is_right, neighbours, nothing_left
from tests.faults.saboteur import Saboteur
from tests.faults.test_spoilt_answers import spoilt_lab
from tests.lab import CHAT, Asked, Lab, chat, fault, gather, http, make_lab, mend, until

pytestmark = [pytest.mark.invariant("I2"), pytest.mark.invariant("I12")]

FLAPS = 3
QUICK_LOADS: Mapping[str, Any] = {"worker_load_check_interval": 0.02, "load_check_timeout_secs": 0.05}


def born_again(emulator: Emulator) -> contextlib.AbstractAsyncContextManager[Emulator]:
    """Return a new engine, with nothing of the old one's, on the port of one that has died."""
    port = int(emulator.url.rpartition(":")[2])
    return start_emulator(msgspec.structs.replace(emulator.settings, port=port))


def side_of(lab: Lab, side: str) -> list[Emulator]:
    """Return the engines of one role."""
    return lab.prefills if side == "prefill" else lab.decodes


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_an_engine_comes_back(side: str, engine: str) -> None:
    """One of two dies at work and comes back as a new process: only its own requests fail, and then it serves."""
    flags: dict[str, Any] = {"health_failure_threshold": 1, "health_success_threshold": 1, "policy": "round_robin"}
    kind = {"speed": 5.0} | (dict(VLLM) | {"kv_hold_timeout_s": 5.0} if engine == "vllm" else {})
    async with make_lab(2, 2, engine=kind, disaggregation="always", **flags) as lab:
        asked = [asyncio.ensure_future(lab.post(CHAT, chat(f"dying {i}", 80, stream=True))) for i in range(NEIGHBOURS)]
        victim = side_of(lab, side).pop(0)
        await until(lambda: victim.snapshot().requests > 0)
        address = victim.url[7:]
        await victim.stop()
        for number, reply in enumerate(await gather(*asked)):
            is_its = reply.headers.get(f"x-pdrouter-{side}", address).startswith(address)
            assert is_its or is_right(reply, f"dying {number}", 80)
        await until(lambda: not lab.core.fleet.is_ready(address))
        await neighbours(lab)
        async with born_again(victim) as again:
            side_of(lab, side).append(again)
            await until(lambda: lab.core.fleet.is_ready(address))
            await neighbours(lab)
            await neighbours(lab)
            assert again.snapshot().total_requests > 0
            assert not again.snapshot().errors
            await lab.settled(within_s=4.0)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_an_engine_flaps(side: str) -> None:
    """While one of two engines comes and goes, with retries every request is right, and nothing is left."""
    flags: dict[str, Any] = {"disable_retries": False, "health_failure_threshold": 1, "health_success_threshold": 1}
    async with make_lab(2, 2, engine={"speed": 100.0}, **flags) as lab:
        await neighbours(lab)
        victim = side_of(lab, side).pop()
        for _ in range(FLAPS):
            await lab.settled()  # nothing is under way, so that no answer can be cut
            await victim.stop()
            await neighbours(lab)
            async with born_again(victim) as victim:
                await neighbours(lab)
                await until(lambda: lab.core.fleet.is_ready(victim.url[7:]))
                await neighbours(lab)
                await lab.settled()


LOADS: dict[str, Callable[[Saboteur], Awaitable[None]]] = {
    "stops": lambda engine: fault(engine.emulator, "no_load"),
    "hangs": lambda engine: fault(engine.emulator, "no_load", mode="hang"),
    "negative": lambda engine: fault(engine.emulator, "bad_load", mode="negative"),
    "nan": lambda engine: fault(engine.emulator, "bad_load", mode="nan"),
    "fewer ranks": lambda engine: fault(engine.emulator, "bad_load", mode="missing"),
    "old": lambda engine: fault(engine.emulator, "late_load", seconds=0.3),
}


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("what", LOADS)
async def test_loads_that_are_none(what: str, side: str) -> None:
    """Whatever an engine tells of its load, requests are right, and the books hold what is under way and no more."""
    async with spoilt_lab("sglang", **QUICK_LOADS) as (lab, engines), nothing_left(lab):
        spoilt = engines[side == "decode"]
        await LOADS[what](spoilt)
        for _ in range(3):
            await neighbours(lab)
            lab.core.validate()
        await mend(spoilt.emulator)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_loads_that_jump(side: str) -> None:
    """Loads beyond all measure, none, and back again: requests are right, and the books are whole after each."""
    told = itertools.cycle([0, 10**18, 1, -(10**18), 10**9, "many", None, 1e308])
    seen = []

    async def jump(asked: Asked) -> bytes:
        number = next(told)
        seen.append(number)
        loads = [{"dp_rank": rank, "num_total_tokens": number, "num_running_reqs": number} for rank in range(2)]
        return http(200, json.dumps({"loads": loads}).encode(), "content-type: application/json")

    async with spoilt_lab("sglang", **QUICK_LOADS) as (lab, engines), nothing_left(lab):
        engines[side == "decode"].paths["/v1/loads"] = jump
        while len(seen) < 16:
            await neighbours(lab)
            lab.core.validate()
