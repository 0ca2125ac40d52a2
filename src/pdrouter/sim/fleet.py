"""Processes of our own: started, listened to until they tell their address, and ended, whatever happens.

Knows nothing of what they do. Each is a session of its own, so that Ctrl-C reaches only the parent, which ends
them by their own process ids.
"""

import asyncio
import contextlib
import os
import sys
import tempfile
from collections import deque
from types import TracebackType
from typing import IO, Self

from pdrouter.loading import ENV_PREFIX

START_S = 30.0
STOP_S = 5.0
_TAIL_LINES = 12


class ProcessFailed(Exception):
    """A process ended too early or didn't say what it should."""


class Process:
    """One running process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        self.name = name
        self._process = process
        self._errors = errors

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def line(self) -> bytes:
        """Return the next line of its output, empty at the end."""
        assert self._process.stdout is not None  # noqa: S101 (narrows the type)
        return await self._process.stdout.readline()

    async def first_line(self) -> bytes:
        """Return the line with which it says that it listens. Raises: ProcessFailed."""
        try:
            async with asyncio.timeout(START_S):
                line = await self.line()
        except TimeoutError:
            raise ProcessFailed(f"{self.name} doesn't listen after {START_S:g} s") from None
        if not line:
            raise await self.failure()
        return line

    async def send_line(self, line: bytes) -> None:
        """Write a line to its input."""
        assert self._process.stdin is not None  # noqa: S101 (narrows the type)
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(line + b"\n")
            await self._process.stdin.drain()

    async def failure(self) -> ProcessFailed:
        """Wait until it ends, and say that it has."""
        status = await self._process.wait()
        return ProcessFailed(f"{self.name} ended with status {status}")

    def tail(self) -> str:
        """Return the last lines that it wrote to stderr, each indented."""
        self._errors.seek(0)
        lines = deque(self._errors, maxlen=_TAIL_LINES)
        return "".join(f"\n    {line.decode(errors='replace').rstrip()}" for line in lines)

    async def stop(self) -> None:
        """End it: politely, and after ``STOP_S`` by force."""
        for end in (self._process.terminate, self._process.kill):
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    end()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), STOP_S)
        self._errors.close()


class Processes:
    """All processes of a run; leaving the ``with`` block ends them, the newest first asked."""

    def __init__(self) -> None:
        self.started: list[Process] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.gather(*(process.stop() for process in reversed(self.started)))

    async def start(self, name: str, module: str, *arguments: str) -> Process:
        """Run ``python -m module arguments``; the caller's settings in the environment don't reach it."""
        errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env={name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)},
                start_new_session=True,
            )
        except BaseException:
            errors.close()
            raise
        started = Process(name, process, errors)
        self.started.append(started)
        return started
