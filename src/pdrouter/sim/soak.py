"""``python -m pdrouter.sim.soak``: a router under mixed faults for minutes; every answer is checked.

The router, each emulated engine and the client (this one) are processes of their own. Prints a table; the last line is
``soak: ok ...`` and the exit status 0 if no answer was wrong, nothing is left and the router's memory came back.
Read next: ``soak_client.py``, ``soak_engines.py``, ``soak_report.py``.
"""

import argparse
import asyncio
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import uvloop
from rich.console import Console

from pdrouter.errors import RouterError
from pdrouter.sim.demo_loads import Site, ledger_total
from pdrouter.sim.fleet import START_S, Process, Processes, ProcessFailed
from pdrouter.sim.soak_client import HOST, Caller, Limits, plan
from pdrouter.sim.soak_engines import PROBE_MODEL, Chaos, ChaosPlan, SoakEngine, make_engines, page
from pdrouter.sim.soak_report import SoakResult, last_line, problem_lines, table

_REQUEST_TIMEOUT_S = 6.0
_GRACE_S = 20.0
_SETTLE_S = 20.0
_POLL_S = 0.01
_PROBE_PERIOD_S = 1.0
_PROBE_PROMPT_WORDS = 20_000
_WARM_SHARE = 0.2
_LEAST_WARM_S = 8.0
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")

_ROUTER_FLAGS = {
    "port": 0,
    "request-timeout-secs": _REQUEST_TIMEOUT_S,
    "health-check-interval-secs": 0.5,
    "health-failure-threshold": 2,
    "worker-startup-check-interval": 0.2,
    "worker-load-check-interval": 0.5,
    "load-check-timeout-secs": 1,
    "abort-retry-delay-secs": 0.5,
    "cb-timeout-duration-secs": 2,
    "disaggregation": "always",
    "shutdown-grace-period-secs": 2,
    # What fills up with time is full when memory is first looked at.
    "journal-decisions": 500,
    "prefix-index-bytes": 1_048_576,
    "ledger-history-events": 512,
    "log-level": "error",
}


class SoakOptions(NamedTuple):
    """What to run. ``most_in_flight`` lets the rate fall where the machine doesn't carry it."""

    seconds: float
    rate_per_s: float
    seed: int
    most_in_flight: int


class Soak:
    """One soak."""

    def __init__(self, options: SoakOptions) -> None:
        self.result = SoakResult()
        self._options = options
        self._chance = random.Random(options.seed)  # noqa: S311 - no secret
        self._processes = Processes()
        self._engines = make_engines()
        self._slots = asyncio.Semaphore(options.most_in_flight)

    async def run(self) -> SoakResult:
        """Run it; what goes wrong is a problem in the result."""
        try:
            with tempfile.TemporaryDirectory() as folder:
                async with self._processes:
                    await self._run(Path(folder) / "engines.yaml")
        except* (ProcessFailed, RouterError, msgspec.MsgspecError, OSError, TimeoutError) as errors:
            self.result.problems += [f"{type(error).__name__}: {error}" for error in errors.exceptions]
        return self.result

    async def _run(self, file: Path) -> None:
        await asyncio.gather(*(engine.start(self._processes) for engine in self._engines))
        file.write_bytes(self._fleet())  # noqa: ASYNC240 - a few lines, before anything runs
        words = [word for name, value in _ROUTER_FLAGS.items() for word in (f"--{name}", str(value))]
        router = await self._processes.start("router", "pdrouter", "serve", "--config", str(file), *words)
        port = int((await router.first_line()).rpartition(b":")[2])
        await self._until_ready(port)
        files = _files(router.pid)
        spoilt = [engine for engine in self._engines if not engine.name.startswith(PROBE_MODEL)]
        chaos = Chaos(spoilt, self._processes, self._chance, self.result)
        spoiling = asyncio.create_task(chaos.run(ChaosPlan()))
        probing = asyncio.create_task(self._probe(port))
        memory = asyncio.create_task(self._watch_memory(router.pid))
        began_s = time.monotonic()
        try:
            await self._traffic(port, [spoiling, probing])
        finally:
            for task in (spoiling, probing, memory):
                task.cancel()
            ended = await asyncio.gather(spoiling, probing, memory, return_exceptions=True)
        self.result.problems += [repr(e) for e in ended if isinstance(e, Exception)]
        await chaos.all_alive()
        self.result.took_s = time.monotonic() - began_s
        await self._check(port, router.pid, files)
        await self._end(router)

    def _fleet(self) -> bytes:
        """Return the router's settings file: JSON is YAML."""
        fleet = {
            role: [
                {"url": f"http://{HOST}:{engine.port}", "engine": engine.kind}
                for engine in self._engines
                if engine.role == role
            ]
            for role in ("prefill", "decode")
        }
        return msgspec.json.encode(fleet)

    async def _until_ready(self, port: int) -> None:
        async with asyncio.timeout(START_S):
            while await _ready_count(port) < len(self._engines):  # noqa: ASYNC110 (a page tells no events)
                await asyncio.sleep(_POLL_S)

    # Traffic.

    async def _traffic(self, port: int, others: Sequence["asyncio.Task[None]"]) -> None:
        """Ask at the given rate, as long as the others run, and wait for all answers."""
        options, began_s = self._options, time.monotonic()
        caller = Caller(port, Limits(_REQUEST_TIMEOUT_S + _GRACE_S))
        async with asyncio.TaskGroup() as asking:
            for number in range(int(options.seconds * options.rate_per_s)):
                due_s = began_s + number / options.rate_per_s
                await asyncio.sleep(due_s - time.monotonic())
                await self._slots.acquire()
                if time.monotonic() - began_s > options.seconds or any(task.done() for task in others):
                    self._slots.release()
                    break
                asking.create_task(self._one(caller, number))
        caller.close()

    async def _one(self, caller: Caller, number: int) -> None:
        try:
            self.result.add(await caller.call(plan(random.Random(f"{self._options.seed} {number}"), number)))  # noqa: S311
        finally:
            self._slots.release()

    async def _probe(self, port: int) -> None:
        """Ask the probed pair, leave in the middle, and see when it is free."""
        probed = [engine for engine in self._engines if engine.name.startswith(PROBE_MODEL)]
        number = 0
        while True:
            number += 1
            is_long = bool(number % 2)
            text = "word " * (_PROBE_PROMPT_WORDS if is_long else 5) + str(number)
            body = {"model": PROBE_MODEL, "messages": [{"role": "user", "content": text}], "stream": True}
            raw = msgspec.json.encode(body | {"max_tokens": 4000})
            _, writer = await asyncio.open_connection(HOST, port)
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: soak\r\ncontent-length: {len(raw)}\r\n\r\n"
            writer.write(head.encode() + raw)
            await _until_idle([probed[not is_long]], is_idle=False)
            writer.transport.abort()
            left_s = time.monotonic()
            await _until_idle(probed, is_idle=True)
            self.result.free_s.append(time.monotonic() - left_s)
            await asyncio.sleep(_PROBE_PERIOD_S)

    async def _watch_memory(self, pid: int) -> None:
        """Look at the router's memory when it is warm, and again and again."""
        await asyncio.sleep(max(_LEAST_WARM_S, _WARM_SHARE * self._options.seconds))
        first = _rss_bytes(pid)
        while first is not None:
            self.result.rss_bytes = (first, _rss_bytes(pid) or first)
            await asyncio.sleep(1.0)

    # The end.

    async def _check(self, port: int, pid: int, files: int) -> None:
        """Wait until nothing is held anywhere; what still is has leaked."""
        for engine in self._engines:
            await engine.mend()
        router = Site(f"http://{HOST}:{port}")
        result = self.result
        try:
            deadline_s = time.monotonic() + _SETTLE_S
            left = await self._left(router, pid, files)
            while any(left.values()) and time.monotonic() < deadline_s:
                await asyncio.sleep(_POLL_S * 10)
                left = await self._left(router, pid, files)
            for what, count in left.items():
                result.leak(count, what)
            metrics = (await page(port, "GET", "/metrics")).decode()
            result.leak(round(_value(metrics, r"pdrouter_requests_in_flight")), "requests in flight")
            result.retried = round(_value(metrics, r'pdrouter_retries_total\{[^}]*"made"\}'))
            result.aborts = round(_value(metrics, r'pdrouter_aborts_total\{[^}]*"sent"\}'))
            if result.rss_bytes is not None:
                result.rss_bytes = (result.rss_bytes[0], _rss_bytes(pid) or result.rss_bytes[1])
        finally:
            await router.aclose()

    async def _left(self, router: Site, pid: int, files: int) -> dict[str, int]:
        """Return what is still held, and where."""
        snapshots = [await engine.snapshot() for engine in self._engines]
        return {
            "load in the router's ledger": round(await ledger_total(router)),
            "engines that aren't idle": sum(bool(s.held_requests) or not s.is_idle for s in snapshots),
            "open files of the router": max(0, _files(pid) - files - 2 * len(self._engines)),
        }

    async def _end(self, router: Process) -> None:
        """Stop the router; it must end well and have nothing to say of itself."""
        os.kill(router.pid, 15)
        failure = await router.failure()
        if not str(failure).endswith("status 0"):
            self.result.problems.append(str(failure))
        if "Traceback" in router.tail():
            self.result.problems.append(f"the router said:{router.tail()}")


async def _until_idle(engines: Sequence[SoakEngine], *, is_idle: bool) -> None:
    """Wait until all have nothing to do, or something. Raises: TimeoutError."""
    async with asyncio.timeout(_SETTLE_S):
        while any([(await engine.snapshot()).is_idle != is_idle for engine in engines]):  # noqa: ASYNC110 (likewise)
            await asyncio.sleep(_POLL_S)


async def _ready_count(port: int) -> int:
    try:
        told = await page(port, "GET", "/readiness")
    except (OSError, TimeoutError):
        return 0
    found = re.search(rb'"healthy_workers":(\d+)', told)
    return int(found[1]) if found else 0


def _value(metrics: str, name: str) -> float:
    found = re.search(rf"^{name} (\S+)", metrics, re.MULTILINE)
    return float(found[1]) if found else 0.0


def _files(pid: int) -> int:
    """Return how many files a process has open; 0 where the system doesn't tell."""
    folder = Path(f"/proc/{pid}/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0


def _rss_bytes(pid: int) -> int | None:
    """Return the memory of a process, ``None`` where the system doesn't tell."""
    file = Path(f"/proc/{pid}/statm")
    return int(file.read_text("ascii").split()[1]) * _PAGE_BYTES if file.exists() else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a soak; return the exit status."""
    parser = argparse.ArgumentParser(prog="pdrouter.sim.soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="length (%(default)s)")
    parser.add_argument("--rate", type=float, default=250.0, help="requests per second (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="makes traffic and faults repeatable (%(default)s)")
    parser.add_argument("--most-in-flight", type=int, default=300, help="requests at once (%(default)s)")
    options = parser.parse_args(arguments)
    soak = SoakOptions(options.seconds, options.rate, options.seed, options.most_in_flight)

    async def run() -> SoakResult:
        return await Soak(soak).run()

    result = uvloop.run(run())
    console = Console(highlight=False, markup=False)
    console.print(table(result))
    for line in problem_lines(result):
        console.print(line, soft_wrap=True)
    console.print(last_line(result), soft_wrap=True)
    return 0 if result.is_ok else 1


if __name__ == "__main__":
    sys.exit(main())
