"""Settings that are read again: what can change does, under load; a bad file changes nothing."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from structlog.testing import capture_logs

from pdrouter.config import Settings
from pdrouter.control.reload import Source
from pdrouter.loading import load_settings
from pdrouter.options import LIVE
from pdrouter.server import Running, running
from pdrouter.sim.emulator import EmulatorSettings, start_emulator
from tests.lab import CHAT, Lab, ScriptedEngine, always, chat, until

QUICK: dict[str, Any] = {
    "port": 0,
    "config_check_interval_secs": 0.05,
    "worker_startup_check_interval": 0.05,
    "health_check_interval_secs": 0.05,
    "shutdown_grace_period_secs": 0,
    "disable_retries": True,
}


class File:
    """A settings file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, **settings: object) -> None:
        """Replace it as a whole."""
        new = self.path.with_suffix(".new")
        new.write_text(yaml.safe_dump(QUICK | settings))
        new.replace(self.path)

    def read(self) -> Settings:
        """Return what it says."""
        return load_settings(self.path, {}, {})


@pytest.fixture
def file(tmp_path: Path) -> File:
    """Return a file that isn't there yet."""
    return File(tmp_path / "router.yaml")


@contextlib.asynccontextmanager
async def router_of(file: File) -> AsyncIterator[Lab]:
    """Run a router by a file."""
    async with running(file.read(), Source(file.path, file.read)) as router:
        yield Lab(router, [], [], [])


def reloads(router: Running) -> tuple[int, int]:
    """Return how many were applied and refused."""
    text = router.service.metrics.render().decode()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("pdrouter_reloads_total"))
    applied, refused = (lines[f'pdrouter_reloads_total{{event="{event}"}}'] for event in ("applied", "refused"))
    return int(float(applied)), int(float(refused))


async def test_endpoints_come_go_and_change(file: File) -> None:
    """An endpoint that is no more named leaves when its stream has ended; the others keep load, ranks and streams."""
    async with (
        start_emulator(EmulatorSettings(speed=4.0, dp_size=2)) as first,
        start_emulator(EmulatorSettings(speed=4.0, dp_size=2)) as second,
        start_emulator(EmulatorSettings(speed=4.0)) as third,
    ):
        file.write(worker=[first.url, second.url], policy="round_robin", shutdown_grace_period_secs=60)
        async with router_of(file) as lab:
            await lab.ready()
            calls = [await lab.start(CHAT, chat(f"{n}", 300, stream=True)) for n in range(2)]
            for call in calls:
                await call.head()
            assert (first.snapshot().total_requests, second.snapshot().total_requests) == (1, 1)
            changed = {"url": second.url, "group": "g"}
            file.write(worker=[changed, third.url], policy="round_robin", shutdown_grace_period_secs=60)
            await until(lambda: lab.core.fleet.get(third.url[7:]) is not None)
            assert lab.core.fleet.why_out(first.url[7:]) == "draining"
            endpoint = lab.core.fleet.get(second.url[7:])
            assert endpoint is not None
            assert (endpoint.group, endpoint.dp_size) == ("g", 2)
            assert [lab.core.load.endpoints[e.url[7:]].ledger_requests for e in (first, second)] == [1, 1]
            for call in calls:
                assert (await call.finish()).is_whole
                await call.leave()
            await until(lambda: lab.core.fleet.get(first.url[7:]) is None)
            assert lab.is_ledger_zero
            assert reloads(lab.router) == (1, 0)


async def test_what_the_api_added_stays(file: File) -> None:
    """A reload follows the difference between two files, not between the file and the fleet."""
    async with ScriptedEngine(None, {CHAT: always(200, {})}).listen() as added:
        file.write()
        async with router_of(file) as lab:
            reply = await lab.post("/workers", {"url": added.url})
            assert reply.status == 202
            file.write(request_timeout_secs=5)
            await until(lambda: reloads(lab.router) == (1, 0))
            assert [endpoint.url for endpoint in lab.core.fleet] == [added.url]


@pytest.mark.parametrize(
    "bad",
    [
        {"request_timeout_secs": -1},
        {"no_such": 1, "request_timeout_secs": 7},
        {"request_timeout_secs": 7, "worker": [{"url": "http://127.0.0.1:9", "kv_transport": "nixl"}]},
    ],
)
async def test_a_bad_file_is_refused_whole(file: File, bad: dict[str, object]) -> None:
    """Nothing of it counts, the log says what is wrong, and the next good one is taken."""
    async with ScriptedEngine(None, {CHAT: always(200, {})}).listen() as engine:
        file.write(worker=[engine.url], request_timeout_secs=5)
        async with router_of(file) as lab:
            await lab.ready()
            before = lab.router.service.settings
            with capture_logs() as told:
                file.write(**({"worker": [engine.url]} | bad))
                await until(lambda: reloads(lab.router) == (0, 1))
            assert lab.router.service.settings is before
            assert lab.router.service.dispatcher.options.limits.request_s == 5
            assert (await lab.post(CHAT, chat("x"))).status == 200
            assert [line["problems"] for line in told if line["log_level"] == "error"]
            file.write(worker=[engine.url], request_timeout_secs=6)
            await until(lambda: reloads(lab.router) == (1, 1))
            assert lab.router.service.dispatcher.options.limits.request_s == 6


async def test_a_file_that_is_gone_or_written_again(file: File) -> None:
    """Is no change: while it isn't there nothing happens, but when it is asked for it is missed."""
    file.write()
    async with router_of(file) as lab:
        file.path.unlink()
        lab.router.service.reload()
        await until(lambda: reloads(lab.router) == (0, 1))
        file.write()
        await until(lambda: reloads(lab.router) == (1, 1))


async def test_limits_of_a_running_router(file: File) -> None:
    """Limits of clients, retries and the queue change under load; a stream that is under way goes on."""
    async with start_emulator(EmulatorSettings(speed=4.0)) as worker:
        file.write(worker=[worker.url], max_concurrent_requests=1)
        async with router_of(file) as lab:
            await lab.ready()
            service, entrance = lab.router.service, lab.core.entrance
            assert entrance is not None
            async with await lab.start(CHAT, chat("first", 300, stream=True)) as first:
                await first.head()
                async with await lab.start(CHAT, chat("second", 4, stream=True)) as second:
                    await until(lambda: len(entrance.admission) == 1)
                    file.write(
                        worker=[worker.url],
                        max_concurrent_requests=2,
                        queue_size=0,
                        client_idle_timeout_secs=7,
                        retry_max_backoff_ms=77,
                    )
                    await until(lambda: reloads(lab.router) == (1, 0))
                    assert (await second.finish()).is_whole
                    async with await lab.start(CHAT, chat("third", 300, stream=True)) as third:
                        await third.head()
                        assert (await lab.post(CHAT, chat("fourth"))).error["code"] == "queue_full"
                assert (await first.finish()).is_whole
            assert service.clients.limits.idle_timeout_s == 7
            assert service.dispatcher.retries._options.max_backoff_s == 0.077


async def test_a_queue_that_was_not_built(file: File) -> None:
    """Without one the number of requests can't be limited but by a new start, and that is said."""
    file.write(admission=False)
    async with router_of(file) as lab:
        with capture_logs() as told:
            file.write(admission=False, max_concurrent_requests=3)
            await until(lambda: reloads(lab.router) == (1, 0))
        assert [line["settings"] for line in told if line["log_level"] == "warning"] == [["max_concurrent_requests"]]
        assert lab.router.service.settings.max_concurrent_requests == -1


async def test_what_has_to_wait_is_named(file: File) -> None:
    """Settings that can't change in a running router are named, the others count."""
    file.write()
    async with router_of(file) as lab:
        with capture_logs() as told:
            file.write(policy="random", prefill_timeout_secs=7, health_failure_threshold=9)
            await until(lambda: reloads(lab.router) == (1, 0))
        service = lab.router.service
        assert (service.settings.policy, service.settings.prefill_timeout_secs) == ("least_work", 7)
        assert service.dispatcher.options.limits.prefill_s == 7
        assert [line["settings"] for line in told if line["log_level"] == "warning"] == [["policy"]]


def test_what_can_change_are_settings() -> None:
    """Each name is one."""
    assert set(Settings.__struct_fields__) >= LIVE
