"""Settings that are read again: what can change does, under load; a bad file changes nothing."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from structlog.testing import capture_logs

from pdrouter.config import Settings
from pdrouter.control.reload import Reload, Source
from pdrouter.loading import load_settings
from pdrouter.options import LIVE
from pdrouter.server import Running, running
from pdrouter.sim.emulator import EmulatorSettings, start_emulator
from tests.lab import CHAT, Lab, ScriptedEngine, always, chat, make_settings, until

QUICK: dict[str, Any] = {
    "port": 0,
    "config_check_interval_secs": 0.05,
    "worker_startup_check_interval": 0.05,
    "health_check_interval_secs": 0.05,
    "shutdown_grace_period_secs": 0,
    "disable_retries": True,
    "allowed_hosts": ["lab"],
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


async def test_a_file_cut_off_drains_nobody(file: File) -> None:
    """Cut off before its endpoints, or between prefill and decode, or emptied: refused, and all go on serving."""
    async with (
        start_emulator(EmulatorSettings(role="prefill", speed=100.0)) as prefill,
        start_emulator(EmulatorSettings(role="decode", speed=100.0)) as decode,
    ):
        file.write(prefill=[prefill.url], decode=[decode.url])
        whole = file.path.read_text()
        async with router_of(file) as lab:
            await lab.ready()
            lists = {
                name: {"prefill": [prefill.url], "decode": [decode.url]} | {name: []} for name in ("prefill", "decode")
            }
            texts = [
                "",
                "\n# nothing\n",
                yaml.safe_dump(QUICK),
                *(yaml.safe_dump(QUICK | some) for some in lists.values()),
            ]
            for number, text in enumerate(texts, 1):
                with capture_logs() as told:
                    file.path.write_text(text)
                    await until(lambda number=number: reloads(lab.router) == (0, number))  # type: ignore[misc]
                assert [line["log_level"] for line in told] == ["error"]
                assert all(lab.core.fleet.why_out(endpoint.address) is None for endpoint in lab.core.fleet)
                assert (await lab.post(CHAT, chat("x"))).status == 200
            file.path.write_text(whole)
            await until(lambda: reloads(lab.router)[0] == 1)


async def test_a_fleet_may_become_another(file: File) -> None:
    """Pairs may give way to regular engines: the lists that were emptied have others in their place."""
    async with (
        ScriptedEngine("prefill", {}).listen() as prefill,
        ScriptedEngine("decode", {}).listen() as decode,
        ScriptedEngine(None, {CHAT: always(200, {})}).listen() as worker,
    ):
        file.write(prefill=[prefill.url], decode=[decode.url])
        async with router_of(file) as lab:
            file.write(worker=[worker.url])
            await until(lambda: [endpoint.url for endpoint in lab.core.fleet] == [worker.url])
            assert reloads(lab.router) == (1, 0)


async def test_what_is_no_file_is_told_and_ignored(file: File) -> None:
    """A pipe that nobody writes to, a folder, a link to itself, a text nested too deep: nothing waits or ends."""
    async with ScriptedEngine(None, {CHAT: always(200, {})}).listen() as engine:
        file.write(worker=[engine.url])
        whole = file.path.read_text()
        async with router_of(file) as lab:
            await lab.ready()

            def cut() -> None:
                file.path.write_text("worker: " + "[" * 100_000)

            def link() -> None:
                file.path.symlink_to(file.path)

            def pipe() -> None:
                os.mkfifo(file.path)

            ways: tuple[Callable[[], None], ...] = (pipe, file.path.mkdir, cut, link)
            for way in ways:
                refused = reloads(lab.router)[1]
                file.path.unlink()
                with capture_logs() as told:
                    way()
                    lab.router.service.reload()
                    await until(lambda refused=refused: reloads(lab.router)[1] > refused)  # type: ignore[misc]
                (line, *_) = [line for line in told if line["log_level"] == "error"]
                assert str(file.path) in line["problems"][0]
                assert (await lab.post(CHAT, chat("x"))).status == 200
                if file.path.is_dir():
                    file.path.rmdir()
                    file.path.touch()
            file.path.unlink()
            file.path.write_text(whole)
            await until(lambda: reloads(lab.router)[0] == 1)
            assert lab.router.service.supervisor.counts.total() == 0


async def test_a_file_that_is_being_written_is_read_when_it_rests(tmp_path: Path) -> None:
    """What was read isn't what is there now: it counts for nothing, and the file is read again."""
    path, applied = tmp_path / "x.yaml", []

    def load() -> Settings:
        lines = path.read_text().splitlines()
        if len(lines) < 4:
            path.write_text(path.read_text() + "more\n")
        return make_settings({"port": len(lines)})

    def apply(settings: Settings) -> list[str]:
        applied.append(settings.port)
        return []

    path.write_text("")
    reload = Reload(Source(path, load), apply, 0.005)
    path.write_text("first\n")
    task = asyncio.create_task(reload.run())
    await until(lambda: bool(applied))
    task.cancel()
    assert (applied, reload.counters()) == ([4], {"applied": 1, "refused": 0})


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
