"""Do clients that send their requests a byte at a time slow the others? Latency with and without them, in turn.

A process of its own plays the slow ones: each sends a byte of a request head every few seconds and comes again when the
router parts from it. Exit status 1: the p99 of normal requests with them is beyond twice that without, or an answer
was wrong. See README.md.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import uvloop

from _cases import make_cases
from _load import Case
from _routers import pdrouter, worker

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nx-slow: " + b"x" * 4000
WORST_RATIO = 2.0
START_S = 30.0
TIMEOUT_S = 30.0
SPARE_FILES = 200
HOST = "127.0.0.1"


@dataclass
class Round:
    """Latencies of one round, in seconds from when a request was due."""

    latencies_s: list[float] = field(default_factory=list)
    failed: int = 0

    def at_ms(self, share: float) -> float:
        """Return a quantile in milliseconds."""
        ranked = sorted(self.latencies_s)
        return 1e3 * ranked[min(len(ranked) - 1, math.ceil(share * len(ranked)) - 1)] if ranked else math.inf


class Normal:
    """Requests at a steady rate over kept connections, whatever becomes of those before."""

    def __init__(self, port: int, case: Case) -> None:
        self.port = port
        self.case = case
        self.kept: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def run(self, rate_per_s: float, seconds: float) -> Round:
        """Send for so long."""
        round_, asking = Round(), set()
        loop = asyncio.get_running_loop()
        began_s = time.perf_counter()
        for number in range(int(rate_per_s * seconds)):
            due_s = began_s + number / rate_per_s
            await asyncio.sleep(due_s - time.perf_counter())
            asking.add(loop.create_task(self._ask(number, due_s, round_)))
        await asyncio.wait(asking)
        return round_

    def close(self) -> None:
        """Close the kept connections."""
        for _, writer in self.kept:
            writer.close()

    async def _ask(self, number: int, due_s: float, round_: Round) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                connection = self.kept.pop() if self.kept else await asyncio.open_connection(HOST, self.port)
                is_right = await self._exchange(*connection, self.case.requests[number % len(self.case.requests)])
        except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError):
            is_right = False
        if not is_right:
            round_.failed += 1
            return
        round_.latencies_s.append(time.perf_counter() - due_s)
        self.kept.append(connection)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> bool:
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        body = await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))
        return head.startswith(b"http/1.1 200") and len(body) == self.case.answer_bytes


class SlowSender(asyncio.Protocol):
    """One slow client, over as many connections as it takes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, port: int, every_s: float, told: dict[str, int]) -> None:
        self.loop = loop
        self.port = port
        self.every_s = every_s
        self.told = told
        self.sent = 0
        self.timer: asyncio.TimerHandle | None = None
        self.transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self.told["connected"] += 1
        self.transport = cast("asyncio.WriteTransport", transport)
        self.sent = 0
        self.timer = self.loop.call_later(random.uniform(0, self.every_s), self.send)

    def send(self) -> None:
        """Send the next byte, and so on."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(HEAD[self.sent : self.sent + 1])
            self.sent += 1
            self.told["bytes"] += 1
            self.timer = self.loop.call_later(self.every_s, self.send)

    def data_received(self, data: bytes) -> None:
        """Count what the router says."""
        status = data[9:12].decode("latin-1")
        self.told[status] = self.told.get(status, 0) + 1

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Come again."""
        self.told["parted"] += 1
        if self.timer is not None:
            self.timer.cancel()
        self.loop.create_task(self.come())

    async def come(self) -> None:
        """Connect, sooner or later."""
        while True:
            try:
                await self.loop.create_connection(lambda: self, HOST, self.port)
            except OSError:
                await asyncio.sleep(self.every_s)
            else:
                return


async def play_slow(port: int, count: int, every_s: float) -> None:
    """Be the slow clients until standard input ends; then print what they saw."""
    loop = asyncio.get_running_loop()
    told = {"connected": 0, "parted": 0, "bytes": 0}
    for _ in range(count):
        await SlowSender(loop, port, every_s, told).come()
    print(flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    print(json.dumps(told), flush=True)
    os._exit(0)  # all its connections end with it


@contextlib.contextmanager
def slow_senders(port: int, count: int, every_s: float) -> Iterator[dict[str, int]]:
    """Run slow clients; what they saw is there at the end."""
    told: dict[str, int] = {}
    command = [sys.executable, __file__, "--play-slow", str(port), "--slow", str(count), "--every-s", str(every_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            process.stdout.readline()
            yield told
        finally:
            process.stdin.close()
            told.update(json.loads(process.stdout.read()))


def measure(options: argparse.Namespace, port: int) -> bool:
    """Print the figures; return whether they are good."""
    case = make_cases()["small"]
    rounds: dict[str, list[Round]] = {"without": [], "with": []}
    print(f"{options.rate:g} requests/s for {options.seconds:g} s a round; {options.slow} slow senders")
    print(f"{'round':<12}{'p50 ms':>9}{'p99 ms':>9}{'max ms':>9}{'failed':>8}  slow senders saw")

    async def run() -> Round:
        normal = Normal(port, case)
        await normal.run(options.rate, 1.0)
        try:
            return await normal.run(options.rate, options.seconds)
        finally:
            normal.close()

    for _ in range(options.rounds):
        for name, count in (("without", 0), ("with", options.slow)):
            with slow_senders(port, count, options.every_s) as told:
                round_ = uvloop.run(run())
            rounds[name].append(round_)
            figures = "".join(f"{round_.at_ms(share):9.2f}" for share in (0.5, 0.99, 1.0))
            print(f"{name:<12}{figures}{round_.failed:8}  {told if count else ''}", flush=True)
            time.sleep(1)
    ratio = statistics.median(
        slow.at_ms(0.99) / quick.at_ms(0.99) for quick, slow in zip(rounds["without"], rounds["with"], strict=True)
    )
    failed = sum(round_.failed for both in rounds.values() for round_ in both)
    print(f"p99 with / without, median of rounds: {ratio:.2f} (at most {WORST_RATIO:g}); failed: {failed}")
    return ratio <= WORST_RATIO and not failed


def main() -> int:
    """Measure; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--slow", type=int, default=2000, help="slow senders (%(default)s)")
    parser.add_argument("--every-s", type=float, default=3.0, help="seconds between two bytes of one (%(default)s)")
    parser.add_argument("--rate", type=float, default=200.0, help="normal requests per second (%(default)s)")
    parser.add_argument("--seconds", type=float, default=15.0, help="length of a round (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each kind (%(default)s)")
    parser.add_argument("--play-slow", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the router inherits it
    if 0 <= hard < options.slow + SPARE_FILES:
        options.slow = max(0, hard - SPARE_FILES)
        print(f"only {hard} files may be open: {options.slow} slow senders", file=sys.stderr)
    if options.play_slow is not None:
        uvloop.run(play_slow(options.play_slow, options.slow, options.every_s))
        return 0
    with (
        tempfile.TemporaryDirectory() as scratch,
        worker() as ports,
        pdrouter([sys.executable, "-m", "pdrouter", "serve"], ports, Path(scratch), START_S) as router,
    ):
        return 0 if measure(options, router.port) else 1


if __name__ == "__main__":
    sys.exit(main())
