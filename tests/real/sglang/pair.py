"""The pair behind a router: ask it, ask its legs by hand, and see what they still hold."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2 as httpx

from tests.real.asking import ledger_left, metric
from tests.real.processes import Server
from tests.real.record import Record
from tests.real.sglang.asking import COMPLETIONS, GENERATE, Api, Body, Client, Reply, room_fields
from tests.real.sglang.servers import Engine

CHECK_S = 150.0
"""Longest time for one check."""

IDLE_S = 20.0
"""Longest time until the ledger is zero and the engines hold nothing, on a busy machine."""

POLL_S = 0.05
FAILURES = (httpx.HTTPError, OSError, TimeoutError, AssertionError, LookupError, ValueError, TypeError)

Found = tuple[bool, str]


class Pair:
    """A router, a prefill and a decode server."""

    def __init__(self, record: Record, router: Server, prefill: Engine, decode: Engine) -> None:
        self.record = record
        self.router = router
        self.prefill = prefill
        self.decode = decode
        self.client = Client(router.url)
        self._legs = {engine.name: Client(engine.url) for engine in (prefill, decode)}

    def leg(self, engine: Engine) -> Client:
        """Return a client of an engine itself."""
        return self._legs[engine.name]

    async def hold(self, promise: str, check: Callable[[], Awaitable[Found]], within_s: float = CHECK_S) -> None:
        """Run a check and take down what it found; whatever goes wrong in it is a finding."""
        try:
            async with asyncio.timeout(within_s):
                held, seen = await check()
        except FAILURES as error:
            held, seen = False, f"{type(error).__name__}: {error}"
        self.record.check(promise, held, seen)

    async def by_hand(self, api: Api, body: Body, prefill_rank: int, decode_rank: int) -> Reply:
        """Send both legs without the router and return the decode's answer."""
        prompt = body.get({COMPLETIONS: "prompt", GENERATE: "text"}.get(api, ""))
        size = len(prompt) if isinstance(prompt, list) else None
        fields = room_fields(size, prefill_rank, decode_rank)
        legs = zip((self.prefill, self.decode), fields, strict=True)
        asked = (self._legs[engine.name].post(api.path, {**body, **leg}) for engine, leg in legs)
        _, answer = await asyncio.gather(*asked)
        return answer

    async def loads(self, engine: Engine) -> list[Any]:
        """Return what an engine says of the load of each rank."""
        page = await self._legs[engine.name].get("/v1/loads?include=core,disagg,queues")
        return sorted(page.json()["loads"], key=lambda load: int(load["dp_rank"]))

    async def held(self, engine: Engine) -> list[str]:
        """Return the ranks of an engine that hold requests, with what they say."""
        return [
            f"{engine.name} {load['dp_rank']}: {told}" for load in await self.loads(engine) if (told := _work(load))
        ]

    async def answers(self, engine: Engine) -> bool:
        """Whether an engine says that it is well."""
        try:
            return (await self._legs[engine.name].get("/health")).status == 200
        except httpx.HTTPError:
            return False

    async def requests(self, engine: Engine) -> int:
        """Return how many requests an engine holds, running or waiting."""
        loads = await self.loads(engine)
        return sum(int(load["num_running_reqs"]) + int(load["num_waiting_reqs"]) for load in loads)

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str, within_s: float = IDLE_S) -> float:
        """Wait for something and return how long it took; raises AssertionError if it takes too long."""
        began_s = time.monotonic()
        while not await condition():
            assert time.monotonic() - began_s < within_s, f"{what}: not within {within_s:g} s"
            await asyncio.sleep(POLL_S)
        return time.monotonic() - began_s

    async def idle(self, within_s: float = IDLE_S) -> Found:
        """Tell whether the engines let go of everything and the ledger comes to zero, and how soon."""
        began_s = time.monotonic()
        while rest := [*ledger_left(self.router.url), *await self.held(self.prefill), *await self.held(self.decode)]:
            if time.monotonic() - began_s > within_s:
                return False, f"after {within_s:g} s still {', '.join(rest)}"
            await asyncio.sleep(POLL_S)
        return True, f"within {time.monotonic() - began_s:.2f} s"

    async def abort(self, engine: Engine, **which: Any) -> None:
        """Have an engine abort a request (``rid``) or all (``abort_all``)."""
        await self._legs[engine.name].post("/abort_request", which)

    def counted(self, name: str, **labels: str) -> float:
        """Return a counter of the router."""
        return metric(self.router.url, name, **labels)


def _work(load: Any) -> str:
    """Return what a rank's load says of requests and tokens that it holds; empty: nothing."""
    queues = {name: count for name, count in load["disaggregation"].items() if name.endswith("_reqs")}
    names = ("num_running_reqs", "num_waiting_reqs", "num_total_tokens")
    counts = {name: load[name] for name in names} | queues
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count)
