"""An engine that begins anew loses what was known of its cache and its load, however that shows."""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import pytest

from pdrouter.errors import ConnectFailed
from pdrouter.sim.emulator import EmulatorSettings, start_emulator
from tests.lab import CHAT, Lab, ScriptedEngine, always, chat, make_lab, route_to, until

SELDOM: dict[str, Any] = {"health_check_interval_secs": 60, "worker_load_check_interval": 60}
"""Nothing is noticed but what the traffic meets."""

TEXT = "word " * 2000


def restarts(lab: Lab) -> int:
    """Return how many were noticed."""
    return lab.router.service.members.counts["restarted"]


def loads(computed_tokens: float) -> object:
    """Return a load reply of an engine that has read so many prompt tokens since it began."""
    rank = {
        "dp_rank": 0,
        "num_running_reqs": 0,
        "num_waiting_reqs": 0,
        "num_total_tokens": 0,
        "total_prefill_uncached_tokens": computed_tokens,
    }
    return {"timestamp": None, "loads": [rank]}


def engine(info: Mapping[str, object] | None = None) -> ScriptedEngine:
    """Return a regular engine that answers everything."""
    return ScriptedEngine(None, {CHAT: always(200, {})}, info)


async def polled(worker: ScriptedEngine, path: str) -> None:
    """Wait until what it tells now was read."""
    polls = len(worker.asked_for(path))
    await until(lambda: len(worker.asked_for(path)) > polls + 2)


async def test_a_refused_connection_tells_of_a_restart() -> None:
    """A new process on the old port is found out by one refused load poll, though it was never out."""
    flags: dict[str, Any] = {"health_check_interval_secs": 60, "worker_load_check_interval": 0.05}
    async with make_lab(0, 0, 1, **flags) as lab:
        (worker,) = lab.workers
        assert (await lab.post(CHAT, chat(TEXT))).status == 200
        assert lab.core.prefixes.entries > 0
        health = lab.router.service.members._members[worker.url[7:]].health
        await worker.stop()
        await until(lambda: bool(health._restart))
        async with start_emulator(EmulatorSettings(dp_size=2, speed=100.0, port=int(worker.url.rpartition(":")[2]))):
            await until(lambda: restarts(lab) == 1)
            assert lab.core.prefixes.entries == 0
            await lab.ready()
            assert (await lab.post(CHAT, chat(TEXT))).status == 200
            assert lab.core.prefixes.entries > 0
            assert (restarts(lab), lab.is_ledger_zero) == (1, True)


async def test_counters_that_fall_tell_of_a_restart() -> None:
    """It is described anew, and its reports count from then on; counters that grow or stay tell nothing."""
    async with engine().listen() as worker:
        worker.scripts["/v1/loads"] = always(200, loads(5000))
        flags: dict[str, Any] = {"health_check_interval_secs": 60, "worker_load_check_interval": 0.02}
        async with route_to((), (), [worker], **flags) as lab:
            assert (await lab.post(CHAT, chat(TEXT))).status == 200
            worker.scripts["/v1/loads"] = always(200, loads(6000))
            await polled(worker, "/v1/loads")
            assert restarts(lab) == 0
            worker.info["version"] = "0.5.99"
            worker.scripts["/v1/loads"] = always(200, loads(10))
            await until(lambda: restarts(lab) == 1)
            assert lab.core.prefixes.entries == 0
            await until(lambda: [e.version for e in lab.core.fleet] == ["0.5.99"])
            await until(lambda: all(rank.report for rank in lab.core.load.endpoints[worker.url[7:]].ranks))
            assert (restarts(lab), lab.core.fleet.is_ready(worker.url[7:])) == (1, True)


def page(started_unix_s: float | None, running: int = 0) -> bytes:
    """Return the metrics of an engine whose process began at that moment, if it tells."""
    started = f"process_start_time_seconds {started_unix_s}\n" if started_unix_s else ""
    return f'{started}vllm:num_requests_running{{engine="0",model_name="m"}} {running}\n'.encode()


async def test_a_process_that_began_later_is_another() -> None:
    """The same start, or none told, is no restart; a later one is, once, though no connection was refused."""
    async with ScriptedEngine(None, {"/metrics": always(200, page(1e9)), CHAT: always(200, {})}).listen() as worker:
        flags: dict[str, Any] = {"health_check_interval_secs": 60, "worker_load_check_interval": 0.02}
        async with route_to((), (), [worker], engine="vllm", **flags) as lab:
            assert (await lab.post(CHAT, chat(TEXT))).status == 200
            for told in (page(1e9, 1), page(None), page(1e9)):
                worker.scripts["/metrics"] = always(200, told)
                await polled(worker, "/metrics")
            assert (restarts(lab), lab.core.prefixes.entries > 0) == (0, True)
            worker.scripts["/metrics"] = always(200, page(1e9 + 60))
            await until(lambda: restarts(lab) == 1)
            assert lab.core.prefixes.entries == 0
            await polled(worker, "/metrics")
            assert restarts(lab) == 1


@pytest.mark.parametrize("change", [{"version": "2"}, {"max_total_num_tokens": 9}, {"dp_size": 2}])
async def test_an_engine_that_comes_back_as_another(change: dict[str, object]) -> None:
    """Out for a while and then of another version or capacity, it is another process."""
    flags: dict[str, Any] = {"health_check_interval_secs": 0.02, "health_failure_threshold": 1}
    async with (
        engine({"version": "1", "max_total_num_tokens": 100_000}).listen() as worker,
        route_to((), (), [worker], **flags) as lab,
    ):
        assert (await lab.post(CHAT, chat(TEXT))).status == 200
        worker.scripts["/health"] = always(500, b"")
        await until(lambda: not lab.core.fleet.is_ready(worker.url[7:]))
        worker.info |= change
        worker.scripts["/health"] = always(200, b"")
        await until(lambda: lab.core.fleet.is_ready(worker.url[7:]))
        assert (restarts(lab), lab.core.prefixes.entries) == (1, 0)


async def test_an_engine_that_was_only_ill() -> None:
    """Out for a while and the same as before, it keeps what is known of its cache."""
    flags: dict[str, Any] = {"health_check_interval_secs": 0.02, "health_failure_threshold": 1}
    async with engine({"version": "1"}).listen() as worker, route_to((), (), [worker], **flags) as lab:
        assert (await lab.post(CHAT, chat(TEXT))).status == 200
        known = lab.core.prefixes.entries
        worker.scripts["/health"] = always(500, b"")
        await until(lambda: not lab.core.fleet.is_ready(worker.url[7:]))
        worker.scripts["/health"] = always(200, b"")
        await until(lambda: lab.core.fleet.is_ready(worker.url[7:]))
        assert (restarts(lab), lab.core.prefixes.entries) == (0, known)


async def test_the_traffic_takes_an_engine_out() -> None:
    """Connections that are refused count as failed probes, though the next probe would be a minute away."""
    async with contextlib.AsyncExitStack() as stack:
        worker = engine()
        listening = await stack.enter_async_context(contextlib.AsyncExitStack())
        await listening.enter_async_context(worker.listen())
        lab = await stack.enter_async_context(
            route_to((), (), [worker], disable_circuit_breaker=True, health_failure_threshold=4, **SELDOM)
        )
        address = worker.url[7:]
        assert (await lab.post(CHAT, chat("x"))).status == 200
        await listening.aclose()
        async with asyncio.timeout(5.0):
            while lab.core.fleet.is_ready(address):
                assert (await lab.post(CHAT, chat("x"))).status in (502, 503)
        assert "4 health checks failed in a row" in (lab.core.fleet.why_out(address) or "")
        reply = await lab.post(CHAT, chat("x"))
        assert reply.error["code"] == "no_ready_pair"
        assert "took no connection" in reply.error["message"]


async def test_one_refused_connection_doesnt() -> None:
    """A failure of the traffic and a good probe right behind it leave an engine in, and it is described anew."""
    async with engine().listen() as worker, route_to((), (), [worker], **SELDOM) as lab:
        address = worker.url[7:]
        asked = len(worker.asked_for("/server_info"))
        error = ConnectFailed("refused")
        error.__cause__ = ConnectionRefusedError()
        lab.router.service.members.failed(address, error)
        await until(lambda: restarts(lab) == 1)
        assert len(worker.asked_for("/server_info")) == asked + 1
        assert lab.core.fleet.is_ready(address)


async def test_a_failure_counts_at_once() -> None:
    """Nothing is placed between the failure that reaches the threshold and the next probe."""
    async with (
        engine().listen() as worker,
        route_to((), (), [worker], health_failure_threshold=1, **SELDOM) as lab,
    ):
        address = worker.url[7:]
        lab.router.service.members.failed(address, ConnectFailed("no route"))
        assert "1 health checks failed in a row: no route" in (lab.core.fleet.why_out(address) or "")
        assert restarts(lab) == 0


async def test_the_first_contact() -> None:
    """Is made at once at the start, and every engine is in use within a second."""
    async with asyncio.timeout(1.0), make_lab(2, 2, worker_startup_check_interval=60):
        pass
