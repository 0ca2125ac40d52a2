"""Processes of the demo: what they say, how they end."""

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pdrouter.sim import fleet
from pdrouter.sim.fleet import Processes, ProcessFailed


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """Write the module ``child``."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return (tmp_path / "child.py").write_text


async def test_failure_shows_stderr(write: Callable[[str], int]) -> None:
    """A process that ends instead of listening is named with its status, and its last words are kept."""
    write("import sys; sys.exit('no such thing')")
    async with Processes() as processes:
        child = await processes.start("child", "child")
        with pytest.raises(ProcessFailed, match="child ended with status 1"):
            await child.first_line()
        assert child.tail() == "\n    no such thing"


async def test_all_end(write: Callable[[str], int]) -> None:
    """Leaving the block ends processes that want to go on."""
    write("print('up', flush=True); import time; time.sleep(60)")
    async with Processes() as processes:
        children = [await processes.start("child", "child") for _ in range(3)]
        assert [await child.first_line() for child in children] == [b"up\n"] * 3
        assert len(psutil.Process().children()) >= 3
        pids = [child.pid for child in children]
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_stubborn_process(write: Callable[[str], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ignores SIGTERM is killed."""
    monkeypatch.setattr(fleet, "STOP_S", 0.2)
    write("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)")
    async with Processes() as processes:
        child = await processes.start("child", "child")
        await child.first_line()
    assert not psutil.pid_exists(child.pid)


async def test_silent_process(write: Callable[[str], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that never says that it listens is given up."""
    monkeypatch.setattr(fleet, "START_S", 0.2)
    write("import time; time.sleep(60)")
    async with Processes() as processes:
        child = await processes.start("child", "child")
        with pytest.raises(ProcessFailed, match="child doesn't listen"):
            await child.first_line()
