"""Readiness: first contact, thresholds both ways, what engines tell of themselves."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from pdrouter.sim.emulator import EmulatorSettings, start_emulator
from tests.lab import CHAT, Asked, Lab, ScriptedEngine, always, chat, hang, http, make_lab, route_to, until

THRESHOLDS: dict[str, Any] = {
    "health_failure_threshold": 3,
    "health_success_threshold": 2,
    "health_check_interval_secs": 0.02,
}


def free_port() -> int:
    """Return a port where nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def out(lab: Lab, url: str) -> str | None:
    """Return why an engine is out."""
    return lab.core.fleet.why_out(url[7:])


class Pulse:
    """A health script: answers the statuses in turn, then 200; ``seen`` tells what the fleet was at each probe."""

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self.statuses: list[int] = []
        self.seen: list[bool] = []
        self._is_ready = is_ready

    async def __call__(self, asked: Asked) -> bytes:
        """Answer a probe."""
        self.seen.append(self._is_ready())
        return http(self.statuses.pop(0) if self.statuses else 200, b"")


async def play(lab: Lab, engine: ScriptedEngine, statuses: list[int]) -> list[bool]:
    """Let probes get these statuses and five good ones; return what the fleet was at each."""
    pulse = Pulse(lambda: out(lab, engine.url) is None)
    pulse.statuses = list(statuses)
    engine.scripts["/health"] = pulse
    await until(lambda: len(pulse.seen) >= len(statuses) + 5)
    return pulse.seen[: len(statuses) + 5]


async def test_failures_take_an_engine_out_at_their_threshold() -> None:
    """Two failures don't, three in a row do, and two successes bring it back."""
    async with ScriptedEngine(None, {}).listen() as engine, route_to((), (), [engine], **THRESHOLDS) as lab:
        assert await play(lab, engine, [500, 500, 200, 500, 500]) == [True] * 10
        seen = await play(lab, engine, [500, 500, 500])
        assert seen == [True, True, True, False, False, True, True, True]


async def test_a_flapping_engine_stays_out() -> None:
    """Out, an engine that answers every other probe doesn't come back."""
    async with ScriptedEngine(None, {}).listen() as engine, route_to((), (), [engine], **THRESHOLDS) as lab:
        seen = await play(lab, engine, [500, 500, 500, 200, 500, 200, 500])
        assert seen[3:9] == [False] * 6
        assert seen[-1]


async def test_never_ready_while_unreachable() -> None:
    """An engine that can't be reached is known, and out, with the reason; it joins as soon as it is there."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with route_to(worker=[url], waits=False) as lab:
        await until(lambda: "took no connection" in (out(lab, url) or ""))
        assert (await lab.get("/readiness")).status == 503
        assert (await lab.post(CHAT, chat("x"))).status == 503
        async with ScriptedEngine(None, {CHAT: always(200, {})}).listen(port):
            await lab.ready()
            assert (await lab.post(CHAT, chat("x"))).status == 200


async def test_a_restart_with_other_ranks() -> None:
    """An engine that comes back on its port with other ranks is described anew, and its new ranks are used."""
    flags: dict[str, Any] = {"health_failure_threshold": 1, "health_success_threshold": 1, "rank_policy": "round_robin"}
    async with make_lab(0, 0, 1, engine={"dp_size": 4}, **flags) as lab:
        (worker,) = lab.workers
        for _ in range(4):
            assert (await lab.post(CHAT, chat("x"))).status == 200
        await worker.stop()
        await until(lambda: out(lab, worker.url) is not None)
        settings = EmulatorSettings(dp_size=2, speed=100.0, port=int(worker.url.rpartition(":")[2]))
        async with start_emulator(settings) as again:
            await lab.ready()
            assert [(await lab.post(CHAT, chat("x"))).status for _ in range(4)] == [200] * 4
            assert again.snapshot().requests_by_rank == [2, 2]
            assert len(lab.core.load.endpoints[worker.url[7:]].ranks) == 2
        assert lab.is_ledger_zero


async def test_a_restart_under_way_requests() -> None:
    """Requests that ran when an engine restarted with fewer ranks are settled all the same (I1)."""
    flags: dict[str, Any] = {"health_failure_threshold": 1, "health_success_threshold": 1}
    async with make_lab(1, 1, engine={"dp_size": 4, "speed": 2.0}, **flags) as lab:
        prefill, decode = lab.emulators
        calls = [await lab.start(CHAT, chat(f"x {i}", 10_000, stream=True)) for i in range(4)]
        for call in calls:
            await call.head()
        await decode.stop()
        await until(lambda: out(lab, decode.url) is not None)
        settings = EmulatorSettings(role="decode", dp_size=1, speed=100.0, port=int(decode.url.rpartition(":")[2]))
        async with start_emulator(settings):
            await until(lambda: out(lab, decode.url) is None)
            for call in calls:
                assert not (await call.finish()).is_whole
                await call.leave()
            await until(lambda: lab.is_ledger_zero)
            assert (await lab.post(CHAT, chat("x"))).status == 200
        assert prefill.snapshot().is_idle


@pytest.mark.parametrize(("told", "configured"), [("decode", "prefill"), ("prefill", "decode"), (None, "prefill")])
async def test_an_engine_of_another_role_stays_out(told: str | None, configured: str) -> None:
    """An engine that says it is something else than configured takes no traffic, and the reason says both."""
    async with ScriptedEngine(told, {}).listen() as engine, route_to(**{configured: [engine.url]}, waits=False) as lab:  # type: ignore[arg-type]
        await until(lambda: out(lab, engine.url) == f"configured role {configured}, reports {told or 'regular'}")


async def test_what_the_engine_tells() -> None:
    """Model, ranks, version and bootstrap port come from the engine, but what the settings say stands."""
    info = {"dp_size": 8, "served_model_name": "told", "version": "0.5.5", "disaggregation_bootstrap_port": 777}
    async with ScriptedEngine("prefill", {}, info).listen() as engine:
        async with route_to(prefill=[engine.url], waits=False) as lab:
            await until(lambda: out(lab, engine.url) is None)
            (endpoint,) = lab.core.fleet
            assert (endpoint.model, endpoint.dp_size, endpoint.version) == ("told", 8, "0.5.5")
            assert endpoint.bootstrap_port == 777
        fixed = {"url": engine.url, "dp_size": 8, "model": "mine", "bootstrap_port": None}
        async with route_to(prefill=[fixed], waits=False) as lab:
            await until(lambda: out(lab, engine.url) is None)
            (endpoint,) = lab.core.fleet
            assert (endpoint.model, endpoint.dp_size, endpoint.bootstrap_port) == ("mine", 8, None)


async def test_the_old_info_path() -> None:
    """An engine that knows only /get_server_info is described as well."""
    info = {"dp_size": 3, "disaggregation_mode": "null", "version": "0.5.2"}
    scripts = {"/server_info": always(404, b""), "/get_server_info": always(200, info)}
    async with ScriptedEngine(None, scripts).listen() as engine, route_to((), (), [engine]) as lab:
        assert [(e.dp_size, e.version) for e in lab.core.fleet] == [(3, "0.5.2")]


@pytest.mark.parametrize("info", [b"", b"[]", b"<html>", b'{"dp_size": "many"}', b'{"dp_size": -1}'])
async def test_an_engine_that_tells_nonsense(info: bytes) -> None:
    """What isn't understood leaves the settings as they are, and the engine in use."""
    scripts = {"/server_info": always(200, info), "/get_server_info": always(404, b"")}
    async with ScriptedEngine(None, scripts).listen() as engine, route_to((), (), [engine]) as lab:
        assert [e.dp_size for e in lab.core.fleet] == [1]


async def test_a_probe_that_hangs_has_failed() -> None:
    """A health check without an answer counts as failed after its time limit."""
    flags: dict[str, Any] = THRESHOLDS | {"health_check_timeout_secs": 0.05, "health_failure_threshold": 1}
    async with ScriptedEngine(None, {}).listen() as engine, route_to((), (), [engine], **flags) as lab:
        engine.scripts["/health"] = hang
        await until(lambda: "no answer to /health" in (out(lab, engine.url) or ""))


async def test_an_engine_that_doesnt_tell_of_itself_in_time() -> None:
    """An engine that is healthy but silent about itself isn't ready, for its role and ranks aren't known."""
    scripts = {"/server_info": hang}
    async with (
        ScriptedEngine(None, scripts).listen() as engine,
        route_to((), (), [engine], waits=False, health_check_timeout_secs=0.05) as lab,
    ):
        await until(lambda: "no answer to /server_info" in (out(lab, engine.url) or ""))


async def test_the_probed_path() -> None:
    """The path of the probe is a setting."""
    async with (
        ScriptedEngine(None, {"/health": always(500, b""), "/health_generate": always(200, b"")}).listen() as engine,
        route_to((), (), [engine], health_check_endpoint="/health_generate") as lab,
    ):
        assert out(lab, engine.url) is None


async def test_no_probes() -> None:
    """With the health check off an engine stays in once it was reached."""
    async with (
        ScriptedEngine(None, {}).listen() as engine,
        route_to((), (), [engine], disable_health_check=True, health_check_interval_secs=0.01) as lab,
    ):
        probes = len(engine.asked_for("/health"))
        loads = len(engine.asked_for("/get_load"))
        await until(lambda: len(engine.asked_for("/get_load")) > loads + 1)
        assert len(engine.asked_for("/health")) == probes
        assert out(lab, engine.url) is None


async def test_probes_of_one_engine_dont_wait_for_another() -> None:
    """An engine whose probes hang delays nobody else's."""
    async with (
        ScriptedEngine(None, {"/health": hang}).listen() as mute,
        ScriptedEngine(None, {}).listen() as engine,
        route_to((), (), [mute, engine], waits=False) as lab,
    ):
        async with asyncio.timeout(2.0):
            await until(lambda: out(lab, engine.url) is None)
        assert out(lab, mute.url) == "not reached yet"
