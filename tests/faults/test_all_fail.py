"""When every engine fails, some are tried on: one request can't close a role for all others."""

from typing import Any

import pytest

from tests.faults.checks import NEIGHBOURS, neighbours, nothing_left
from tests.lab import CHAT, chat, fault, make_lab, mend

EAGER: dict[str, Any] = {"cb_failure_threshold": 2, "cb_timeout_duration_secs": 600.0}


@pytest.mark.parametrize(("prefills", "decodes", "workers"), [(1, 1, 0), (2, 3, 0), (0, 0, 1), (0, 0, 4)])
async def test_others_are_served_at_once_when_it_is_over(prefills: int, decodes: int, workers: int) -> None:
    """Nobody waits for breakers, though all of them are open."""
    engine = {"dp_size": 1, "speed": 200.0}
    async with make_lab(prefills, decodes, workers, engine=engine, **EAGER) as lab, nothing_left(lab):
        failing = lab.decodes or lab.workers
        for emulator in failing:
            await fault(emulator, "status", status=500)
        for number in range(4 * len(failing)):
            assert (await lab.post(CHAT, chat(f"failing {number}"))).status == 500
        assert lab.core.outcomes.breakers.counts["opened"] >= len(failing) // 2
        for emulator in failing:
            await mend(emulator)
        assert NEIGHBOURS
        await neighbours(lab)
        page = (await lab.get("/metrics")).body.decode()
        if len(failing) == 1:
            assert 'pdrouter_breakers_total{event="panic"} 1.0' in page


async def test_a_share_of_those_that_fail_is_out() -> None:
    """So that those that are well get most of the traffic."""
    async with make_lab(0, 0, 4, engine={"dp_size": 1, "speed": 200.0}, **EAGER) as lab, nothing_left(lab):
        for emulator in lab.workers[:3]:
            await fault(emulator, "status", status=500)
        for number in range(40):
            await lab.post(CHAT, chat(f"failing {number}"))
        out = [emulator.url[7:] for emulator in lab.workers if not lab.core.fleet.is_ready(emulator.url[7:])]
        assert len(out) == 2
        assert lab.workers[3].url[7:] not in out
        assert lab.core.ejections.counts == {"overflow": 1, "panic": 0}
