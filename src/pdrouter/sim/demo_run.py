"""One run of the demo: an emulated fleet, a router and a client, each in processes of its own, for one replay.

Everything is bounded in time, and every process is gone when ``play`` returns or raises.
"""

import asyncio
import os
import resource
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack

import msgspec

from pdrouter.errors import RouterError
from pdrouter.sim.demo_client import Answer, End, Message, Orders, Warm
from pdrouter.sim.demo_loads import EndpointLoads, Imbalance, Site, Watched, ledger_total, prefilled_imbalance
from pdrouter.sim.demo_report import RunResult
from pdrouter.sim.demo_table import Display
from pdrouter.sim.fleet import START_S, Process, Processes, ProcessFailed
from pdrouter.sim.profiles import DEFAULT_PROFILE
from pdrouter.sim.workload import Scale

PROFILE = DEFAULT_PROFILE
ENDPOINTS_PER_ROLE = 2
RANKS = 4
STREAM_INTERVAL_TOKENS = 8

_MODEL = "emulated"
_MOST_IN_FLIGHT = 512
_SAMPLE_PERIOD_S = 0.25
_POLL_PERIOD_S = 0.05
_LEDGER_WAIT_S = 5.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to replay. ``seconds``: in which requests arrive; ``limit_s``: by when all answers must be here."""

    seconds: float
    speed: float
    scale: Scale
    limit_s: float


class _Listening(msgspec.Struct, frozen=True):
    url: str
    bootstrap_port: int | None = None


class DemoRun:
    """One run; what it finds goes into the result."""

    def __init__(self, plan: Plan, result: RunResult, display: Display, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._result = result
        self._display = display
        self._say = say
        self._processes = Processes()
        self._servers: list[Process] = []
        self._engines: list[Watched] = []
        self._imbalance = Imbalance()
        self._seen: Sequence[EndpointLoads] = ()

    async def play(self, flags: Sequence[str]) -> None:
        """Run with these flags of the router; what goes wrong is a failure in the result."""
        result, start_s, start_cpu_s = self._result, time.monotonic(), _cpu_s()
        async with self._processes:
            try:
                await self._play(flags)
            except (ProcessFailed, RouterError, msgspec.MsgspecError) as error:
                result.give_up(str(error))
            except TimeoutError:
                result.give_up(f"not over after {self._plan.limit_s:g} s")
            if result.failed:
                self._tell_errors()
        result.imbalance = {
            "prefilled by rank": prefilled_imbalance(self._seen),
            "on prefill ranks": self._imbalance.of("prefill"),
            "on decode ranks": self._imbalance.of("decode"),
        }
        result.took_s = time.monotonic() - start_s
        result.cpu_share = (_cpu_s() - start_cpu_s) / result.took_s / (os.cpu_count() or 1)

    async def _play(self, flags: Sequence[str]) -> None:
        client = await self._processes.start("client", "pdrouter.sim.demo_client")
        engine_flags = await self._start_engines()
        async with AsyncExitStack() as stack:
            for engine in self._engines:
                stack.push_async_callback(engine.site.aclose)
            url = await self._start_router([*flags, *engine_flags])
            router = Site(url)
            stack.push_async_callback(router.aclose)
            await self._until_ready(router)
            self._say(f"try: {_curl(url)}")
            await self._unless_a_server_ends(self._replay(client, url))
            self._result.ledger = await _settled(router)

    async def _start_engines(self) -> list[str]:
        roles = [role for role in ("prefill", "decode") for _ in range(ENDPOINTS_PER_ROLE)]
        names = [f"{role} {1 + i % ENDPOINTS_PER_ROLE}" for i, role in enumerate(roles)]
        options = {
            "engine": "sglang",
            "dp-size": RANKS,
            "profile": PROFILE,
            "speed": self._plan.speed,
            "stream-interval": STREAM_INTERVAL_TOKENS,
            "model": _MODEL,
            "port": 0,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        processes = [
            await self._processes.start(name, "pdrouter", "emulate", "--role", role, *words)
            for name, role in zip(names, roles, strict=True)
        ]
        self._servers += processes
        flags = []
        for process, role in zip(processes, roles, strict=True):
            told = msgspec.json.decode(await process.first_line(), type=_Listening)
            self._engines.append(Watched(process.name, role, told.url))
            flags += [f"--{role}", told.url]
            if told.bootstrap_port is not None:
                flags.append(str(told.bootstrap_port))
        return flags

    async def _start_router(self, flags: Sequence[str]) -> str:
        """Return its address."""
        quick = ("--port", "0", "--worker-startup-check-interval", "0.1", "--shutdown-grace-period-secs", "1")
        router = await self._processes.start("router", "pdrouter", "serve", *quick, *flags)
        self._servers.append(router)
        line = await router.first_line()
        return line.decode().split()[-1]

    async def _until_ready(self, router: Site) -> None:
        """Wait until the router has reached every engine. Raises: ProcessFailed."""
        try:
            async with asyncio.timeout(START_S):
                while await _healthy_count(router) < len(self._engines):  # noqa: ASYNC110 (a page tells no events)
                    await asyncio.sleep(_POLL_PERIOD_S)
        except TimeoutError:
            raise ProcessFailed(f"the router isn't ready after {START_S:g} s") from None

    async def _unless_a_server_ends(self, work: Coroutine[None, None, None]) -> None:
        """Do the work. Raises: ProcessFailed as soon as an engine or the router ends."""
        working = asyncio.create_task(work)
        ends = [asyncio.create_task(server.failure()) for server in self._servers]
        try:
            await asyncio.wait([working, *ends], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise next(end for end in ends if end.done()).result()
            await working
        finally:
            for task in (working, *ends):
                task.cancel()

    async def _replay(self, client: Process, url: str) -> None:
        """Let the client do its work, and watch the ranks meanwhile."""
        plan = self._plan
        orders = Orders(
            url=url,
            model=_MODEL,
            seconds=plan.seconds,
            scale=plan.scale,
            timeout_s=plan.limit_s,
            most_in_flight=_MOST_IN_FLIGHT,
        )
        await client.send_line(msgspec.json.encode(orders))
        async with asyncio.timeout(START_S):
            await self._listen(client, Warm)
        watching = asyncio.create_task(self._watch())
        try:
            async with asyncio.timeout(plan.limit_s):
                await self._listen(client, End)
        finally:
            watching.cancel()

    async def _listen(self, client: Process, last: type[Warm | End]) -> None:
        """Take in what the client tells, up to a message of type ``last``."""
        result = self._result
        message: Message | None = None
        while not isinstance(message, last):
            line = await client.line()
            if not line:
                raise await client.failure()
            message = _decode(line)
            if isinstance(message, Warm):
                result.planned = message.requests
            elif isinstance(message, Answer):
                result.add(message)
            else:
                result.lag_s = message.lag_s

    async def _watch(self) -> None:
        """Sample the ranks and show them until cancelled."""
        start_s = time.monotonic()
        self._display.start(self._result, self._plan.seconds)
        while True:
            self._seen = endpoints = await asyncio.gather(*(engine.loads() for engine in self._engines))
            elapsed_s = time.monotonic() - start_s
            if elapsed_s <= self._plan.seconds:
                self._imbalance.add(endpoints)
            self._display.update(elapsed_s, endpoints)
            await asyncio.sleep(_SAMPLE_PERIOD_S)

    def _tell_errors(self) -> None:
        for process in self._processes.started:
            if tail := process.tail():
                self._say(f"{process.name} said:{tail}")


class _Readiness(msgspec.Struct, frozen=True):
    healthy_workers: int = 0


_decode = msgspec.json.Decoder(Message).decode


async def _healthy_count(router: Site) -> int:
    _, body = await router.get("/readiness")
    return msgspec.json.decode(body, type=_Readiness).healthy_workers


async def _settled(router: Site) -> float:
    """Return what the ledger holds; waits a little for it to be nothing."""
    deadline_s = time.monotonic() + _LEDGER_WAIT_S
    while (total := await ledger_total(router)) and time.monotonic() < deadline_s:  # noqa: ASYNC110 (likewise)
        await asyncio.sleep(_POLL_PERIOD_S)
    return total


def _cpu_s() -> float:
    """CPU time of this process and of all that it started and that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _curl(url: str) -> str:
    body = (
        f'{{"model":"{_MODEL}","stream":true,"max_tokens":40,"messages":[{{"role":"user","content":"Who are you?"}}]}}'
    )
    return f"curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"
