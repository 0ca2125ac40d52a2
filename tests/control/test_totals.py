"""Endpoints of one profile and different speed are told apart by the totals that they report."""

import asyncio
import itertools
from math import log

import pytest

from pdrouter.core.speed import Speed
from pdrouter.sim.emulator import Emulator, EmulatorSettings, start_emulator
from tests.lab import CHAT, Lab, chat, post, route_to, until


def factors_of(lab: Lab, engines: list[Emulator]) -> list[float]:
    """Return what was learned of each engine's prefills."""
    sites = lab.core.work.sites
    return [sites[engine.url.removeprefix("http://")].speed.prefill_factor for engine in engines]


async def test_a_slow_engine_is_found_out_by_its_totals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are always busy, so that no single prefill tells anything; the slow one gets less to do."""
    monkeypatch.setattr(Speed, "saw_prefill", lambda *_: None)
    numbers, is_over = itertools.count(), asyncio.Event()
    async with (
        start_emulator(EmulatorSettings(role="prefill", speed=2.0)) as slow,
        start_emulator(EmulatorSettings(role="prefill", speed=6.0)) as fast,
        start_emulator(EmulatorSettings(role="decode", speed=100.0)) as decode,
        route_to([slow, fast], [decode], worker_load_check_interval=0.05) as lab,
    ):

        async def talk() -> None:
            while not is_over.is_set():
                await post(lab.url, CHAT, chat(f"{next(numbers)} {'word ' * 3000}", tokens=1))

        async with asyncio.TaskGroup() as talks:
            for _ in range(16):
                talks.create_task(talk())
            await until(lambda: abs(log(factors_of(lab, [slow])[0] / factors_of(lab, [fast])[0] / 3)) < 0.25, 15.0)
            is_over.set()
        read = [sum(load.prefill_uncached_tokens for load in engine.engine.loads()) for engine in (slow, fast)]
        assert read[0] < read[1] / 1.5
