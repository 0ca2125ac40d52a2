"""The supervisor: loops that fail start again, loops that are ended stay ended."""

import asyncio
import itertools

from pdrouter.control.tasks import Supervisor


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
    assert supervisor.restarts == 1
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
    assert (next(runs), supervisor.restarts) == (1, 0)
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
