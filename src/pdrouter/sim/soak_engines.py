"""The engines of a soak: processes that are made to misbehave, killed, and started again on the same port."""

import asyncio
import os
import random
import signal
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from pdrouter.sim.fleet import Process, Processes
from pdrouter.sim.soak_client import HOST, MODEL
from pdrouter.sim.soak_report import SoakResult

PROBE_MODEL = "probed"
"""Served by a pair of engines that have no other traffic, so that it shows when they are free."""

_PAGE_S = 5.0
_INFERENCE = "/v1/c"

_KINDS: Final[Sequence[Mapping[str, object]]] = (
    {"kind": "slow", "seconds": 0.3, "times": 5},
    {"kind": "hang", "times": 2},
    {"kind": "reset", "times": 3},
    {"kind": "reset", "after_chunks": 1, "times": 3},
    {"kind": "half_stream", "after_chunks": 1, "times": 3},
    {"kind": "half_stream", "after_chunks": 0, "times": 3},
    {"kind": "status", "status": 400, "times": 2},
    {"kind": "status", "status": 429, "times": 3},
    {"kind": "status", "status": 500, "times": 3},
    {"kind": "status", "status": 503, "times": 3},
    {"kind": "no_load", "mode": "status", "times": 3},
    {"kind": "no_load", "mode": "hang", "times": 1},
    {"kind": "bad_load", "mode": "negative", "times": 3},
    {"kind": "bad_load", "mode": "nan", "times": 3},
    {"kind": "bad_load", "mode": "missing", "times": 3},
    {"kind": "late_load", "seconds": 2.0, "times": 5},
)


class _Listening(msgspec.Struct):
    url: str


class Snapshot(msgspec.Struct):
    """What an engine holds now."""

    requests: int
    held_requests: int
    is_idle: bool


class ChaosPlan(NamedTuple):
    """Units: s. Times between two faults, between two deaths, and how long the dead stay so, at most."""

    fault_period_s: float = 0.4
    death_period_s: float = 10.0
    dead_s: float = 2.0
    flap_share: float = 0.25


class SoakEngine:
    """One emulated engine, in one process after another."""

    def __init__(self, name: str, role: str, flags: Sequence[str]) -> None:
        self.name = name
        self.role = role
        self.kind = "vllm" if "vllm" in flags else "sglang"
        self.port = 0
        self._flags = flags
        self._process: Process | None = None

    async def start(self, processes: Processes) -> None:
        """Listen, on the same port as before. Raises: ProcessFailed."""
        words = ("--role", self.role, "--port", str(self.port), *self._flags)
        self._process = process = await processes.start(self.name, "pdrouter", "emulate", *words)
        told = msgspec.json.decode(await process.first_line(), type=_Listening)
        self.port = int(told.url.rpartition(":")[2])

    async def die(self) -> None:
        """Be gone at once, with all that was under way."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            await self._process.failure()

    async def snapshot(self) -> Snapshot:
        """Return what it holds. Raises: OSError, TimeoutError."""
        return msgspec.json.decode(await page(self.port, "GET", "/_snapshot"), type=Snapshot)

    async def spoil(self, rule: Mapping[str, object]) -> None:
        """Put a fault in. Raises: OSError, TimeoutError."""
        await page(self.port, "POST", "/_fault", msgspec.json.encode([{"path": _INFERENCE} | dict(rule)]))

    async def mend(self) -> None:
        """Take all faults out. Raises: OSError, TimeoutError."""
        await page(self.port, "DELETE", "/_fault")


def make_engines() -> Sequence[SoakEngine]:
    """Return two pairs of SGLang, one of vLLM, and one of SGLang to be probed."""
    quick = ("--speed", "40", "--dp-size", "2", "--stream-interval", "4")
    serial = ("--engine", "vllm", "--kv-connector", "nixl", "--kv-hold-timeout-s", "80")
    engines = []
    for role in ("prefill", "decode"):
        engines += [SoakEngine(f"{role} {n}", role, (*quick, "--model", MODEL)) for n in (1, 2)]
        engines.append(SoakEngine(f"vllm {role}", role, (*quick, *serial, "--model", MODEL)))
        engines.append(SoakEngine(f"probed {role}", role, ("--speed", "1", "--model", PROBE_MODEL)))
    return engines


class Chaos:
    """Spoils and kills engines until it is cancelled; never more than one is dead."""

    def __init__(
        self, engines: Sequence[SoakEngine], processes: Processes, chance: random.Random, result: SoakResult
    ) -> None:
        self._engines = engines
        self._processes = processes
        self._chance = chance
        self._result = result
        self._restarting: asyncio.Task[None] | None = None

    async def all_alive(self) -> None:
        """Wait for an engine that is on its way back. Raises: ProcessFailed if it doesn't come."""
        if self._restarting is not None:
            await self._restarting

    async def run(self, plan: ChaosPlan) -> None:
        """Go on and on. Raises: ProcessFailed if an engine doesn't come back."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._spoil(plan))
            group.create_task(self._kill(plan))

    async def _spoil(self, plan: ChaosPlan) -> None:
        while True:
            await asyncio.sleep(self._chance.uniform(0, 2 * plan.fault_period_s))
            rule = self._chance.choice(_KINDS)
            try:
                await self._chance.choice(self._engines).spoil(rule)
            except (OSError, TimeoutError):
                continue  # it is dead
            self._result.faults[str(rule["kind"])] += 1

    async def _kill(self, plan: ChaosPlan) -> None:
        while True:
            await asyncio.sleep(self._chance.uniform(0.5, 1.5) * plan.death_period_s)
            engine = self._chance.choice(self._engines)
            for _ in range(2 if self._chance.random() < plan.flap_share else 1):
                restart = self._restart(engine, self._chance.uniform(0, plan.dead_s))
                self._restarting = asyncio.get_running_loop().create_task(restart)
                await asyncio.shield(self._restarting)

    async def _restart(self, engine: SoakEngine, dead_s: float) -> None:
        await engine.die()
        await asyncio.sleep(dead_s)
        await engine.start(self._processes)
        self._result.restarts += 1


async def page(port: int, method: str, path: str, body: bytes = b"") -> bytes:
    """Return a page of a server on this machine. Raises: OSError, TimeoutError."""
    async with asyncio.timeout(_PAGE_S):
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            head = f"{method} {path} HTTP/1.1\r\nhost: soak\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            raw = await reader.read(-1)
        finally:
            writer.transport.abort()
    _, end, told = raw.partition(b"\r\n\r\n")
    if not end:
        raise ConnectionResetError(f"no answer from port {port}")
    return told
