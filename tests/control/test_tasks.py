"""The supervisor: loops that fail start again, loops that are ended stay ended."""

import asyncio
import itertools

import pytest

from pdrouter.control import tasks
from pdrouter.control.tasks import Supervisor
from tests.lab import make_lab, until


@pytest.fixture
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let loops start again at once."""
    monkeypatch.setattr(tasks, "_FIRST_DELAY_S", 0.001)


class Hostile(Exception):
    """An error that can't even be told."""

    def __str__(self) -> str:
        raise ValueError("no words")


async def test_a_failing_loop_starts_again() -> None:
    """A loop that fails is counted and started again; another one isn't disturbed."""
    supervisor = Supervisor()
    runs, ticks = itertools.count(1), itertools.count()
    is_running = asyncio.Event()

    async def failing() -> None:
        if next(runs) == 1:
            raise ValueError("once")
        is_running.set()
        await asyncio.Event().wait()

    async def steady() -> None:
        while True:
            next(ticks)
            await asyncio.sleep(0.01)

    supervisor.start("failing", failing)
    steady_task = supervisor.start("steady", steady)
    await asyncio.wait_for(is_running.wait(), 5.0)
    assert supervisor.counts == {"restarted": 1, "failed": 0}
    assert not steady_task.done()
    assert next(ticks) > 1
    await supervisor.aclose()
    assert steady_task.cancelled()


async def test_a_loop_that_returns_is_over() -> None:
    """A loop that comes to its end isn't started again."""
    supervisor = Supervisor()
    runs = itertools.count()

    async def once() -> None:
        next(runs)

    await supervisor.start("once", once)
    assert (next(runs), supervisor.counts.total()) == (1, 0)
    await supervisor.aclose()


async def test_closing_ends_a_loop_that_is_about_to_start_again() -> None:
    """A loop between failure and restart is ended at once."""
    supervisor = Supervisor()

    async def failing() -> None:
        raise ValueError("always")

    task = supervisor.start("failing", failing)
    await asyncio.sleep(0)
    await asyncio.wait_for(supervisor.aclose(), 0.5)
    assert task.done()


@pytest.mark.usefixtures("_hasty")
@pytest.mark.parametrize(
    "death", [ValueError, MemoryError, RecursionError, Hostile, asyncio.CancelledError, SyntaxError]
)
async def test_however_it_dies(death: type[BaseException]) -> None:
    """Any death is counted and followed by another life, also if something it waited for was cancelled."""
    supervisor, lives, is_steady = Supervisor(), itertools.count(), asyncio.Event()

    async def dying() -> None:
        if next(lives) < 2:
            raise death
        is_steady.set()
        await asyncio.Event().wait()

    task = supervisor.start("dying", dying)
    await until(is_steady.is_set)
    assert supervisor.counts["restarted"] == 2
    assert not supervisor.dying()
    await supervisor.aclose()
    assert task.cancelled()


@pytest.mark.usefixtures("_hasty")
async def test_a_loop_that_cant_be_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router isn't alive while a loop dies again and again; once it runs steadily, or is ended, it is."""
    monkeypatch.setattr(tasks, "_STEADY_S", 0.3)
    async with make_lab(0, 0, 1) as lab:
        supervisor, is_well = lab.router.service.supervisor, asyncio.Event()
        assert (await lab.get("/liveness")).status == 200

        async def failing() -> None:
            if not is_well.is_set():
                raise ValueError("again")
            await asyncio.Event().wait()

        task = supervisor.start("failing", failing)
        await until(lambda: supervisor.counts["restarted"] >= 5)
        reply = await lab.get("/liveness")
        assert (reply.status, reply.body) == (503, b"these loops die again and again: failing")
        is_well.set()
        await until(lambda: not supervisor.dying())
        assert (await lab.get("/liveness")).status == 200
        assert b'pdrouter_background_total{event="restarted"}' in (await lab.get("/metrics")).body
        task.cancel()
        await until(task.done)
        assert "failing" not in supervisor._deaths


async def test_a_task_that_fails() -> None:
    """It isn't started again, and whoever waits for it is told."""
    supervisor, told, runs = Supervisor(), asyncio.Event(), itertools.count()

    async def failing() -> None:
        next(runs)
        raise ValueError("no")

    await supervisor.once("failing", failing, told.set)
    assert (supervisor.counts["failed"], next(runs), told.is_set()) == (1, 1, True)


async def test_a_client_learns_that_its_task_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of our own behind a page that waits for engines is 500, and no engine's matter."""
    async with make_lab(0, 0, 1) as lab:
        monkeypatch.setattr(lab.router.service.app._fleet_api, "_flush_one", None)
        async with asyncio.timeout(5):
            reply = await lab.post("/flush_cache", {})
        assert (reply.status, reply.json()["code"]) == (500, "INVARIANT_VIOLATION")
