"""A router's recorded life, lived again: the same decisions (I4)."""

import asyncio
import random
from typing import Any

import pytest
from tests.lab import CHAT, GENERATE, Lab, chat, make_lab
from tests.sim.virtual.builders import PLAIN, make_router, pairs, poisson

from pdrouter import server
from pdrouter.core.events import LoadReported
from pdrouter.core.router import Router, RouterOptions
from pdrouter.options import router_options
from pdrouter.sim.simulator import Simulator, SimulatorSettings
from pdrouter.sim.virtual.recording import Decided, Observed, Offered, RecordedRouter, Settled, replay

LIMIT = 100_000
REQUESTS = 120


class Recorder(RecordedRouter):
    """A recorded router, made as any other."""

    def __init__(self, options: RouterOptions) -> None:
        super().__init__(options, LIMIT)


async def send_all(lab: Lab) -> None:
    """Send a crowd: conversations with shared beginnings, short and long, streamed or not; some clients leave."""
    chance = random.Random(3)

    async def send(number: int) -> None:
        await asyncio.sleep(number * 0.004)
        text = f"family {number % 5} " * chance.randrange(20, 600) + str(number)
        body = chat(text, tokens=chance.randrange(1, 80), stream=bool(number % 3))
        call = await lab.start(CHAT, body)
        async with call:
            if number % 10 == 0:
                await call.head()
                return
            assert (await call.finish()).status == 200

    await asyncio.gather(*(send(number) for number in range(REQUESTS)))
    assert (await lab.post(GENERATE, {"text": "x", "routed_dp_rank": 99})).status == 400


@pytest.mark.invariant("I4")
@pytest.mark.parametrize(
    "flags",
    [
        {"policy": "least_work", "admission": False},
        {"policy": "power_of_two"},
        {"policy": "least_work", "max_concurrent_requests": 2},
    ],
    ids=["least_work", "power_of_two", "queue"],
)
async def test_live_traffic_replayed_gives_the_same_decisions(
    flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run over real sockets, with load reports, learned speeds, clients that leave and an error, decided anew."""
    monkeypatch.setattr(server, "Router", Recorder)
    async with make_lab(2, 2, seed=5, **flags) as lab:
        await send_all(lab)
        await lab.settled(5.0)
        recorded = lab.core
        assert isinstance(recorded, Recorder)
        calls = list(recorded.calls)
        settings = lab.router.service.settings
    assert not recorded.missed
    kinds = [type(call) for call in calls]
    assert kinds.count(Decided) >= REQUESTS + 1
    assert kinds.count(Settled) <= REQUESTS
    assert kinds.count(Offered) == sum(isinstance(call, Decided) and call.outcome == "waits" for call in calls)
    assert bool(kinds.count(Offered)) == ("max_concurrent_requests" in flags)
    assert kinds.count(Observed) > 2 * REQUESTS
    reports = [call.event for call in calls if isinstance(call, Observed) and isinstance(call.event, LoadReported)]
    assert {report.address for report in reports} == {endpoint.address for endpoint in recorded.fleet}
    outcomes = list(replay(calls, Router(router_options(settings))))
    assert [now for _, now in outcomes] == [then for then, _ in outcomes]
    assert len({then for then, _ in outcomes}) > 8  # all pairs of ranks, and different prefixes


@pytest.mark.invariant("I4")
def test_a_simulated_life_replayed_gives_the_same_decisions() -> None:
    """The simulator's calls make any router with the same options decide as its own did."""
    trace = poisson(300, 2.0, lambda chance: 100 * chance.randrange(1, 30), seed=1, output=20)
    router = make_router(trace, router=Recorder, chance=random.Random(1))
    assert isinstance(router, Recorder)
    Simulator(router, pairs(3, ranks=2), PLAIN, trace, SimulatorSettings()).simulate()
    outcomes = list(replay(router.calls, make_router(trace, chance=random.Random(1))))
    assert len(outcomes) == 300
    assert [now for _, now in outcomes] == [then for then, _ in outcomes]


def test_a_replay_shows_what_differs() -> None:
    """Other settings, other decisions: the comparison can fail."""
    trace = poisson(100, 2.0, lambda chance: 100 * chance.randrange(1, 30), seed=1)
    router = make_router(trace, router=Recorder)
    assert isinstance(router, Recorder)
    Simulator(router, pairs(3), PLAIN, trace, SimulatorSettings()).simulate()
    outcomes = list(replay(router.calls, make_router(trace, policy="random", prefill_policy="random")))
    assert [now for _, now in outcomes] != [then for then, _ in outcomes]


def test_a_recording_is_bounded() -> None:
    """Calls beyond the limit are counted, not kept, and the router goes on."""
    trace = poisson(10, 2.0, lambda chance: 100, seed=1)

    class Short(RecordedRouter):
        def __init__(self, options: RouterOptions) -> None:
            super().__init__(options, 7)

    router = make_router(trace, router=Short)
    assert isinstance(router, Short)
    run = Simulator(router, pairs(1), PLAIN, trace, SimulatorSettings(report_interval_s=0)).simulate()
    assert (len(router.calls), len(run.answers)) == (7, 10)
    assert router.missed > 0
