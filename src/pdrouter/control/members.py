"""Who belongs to the fleet: endpoints join, are watched, change, are drained and leave, whoever says so.

The settings, a reload of them and the workers API all come through here. Facts go to the core as events.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial

import msgspec
import structlog

from pdrouter.control.discovery import Found
from pdrouter.control.health import NOT_REACHED, HealthOptions, HealthWatch
from pdrouter.control.load_monitor import LoadMonitor, LoadOptions
from pdrouter.control.models import ModelLists, ModelMonitor, ModelOptions
from pdrouter.control.probe import Prober
from pdrouter.control.tasks import Supervisor
from pdrouter.core.events import EndpointJoined, EndpointLeft, ReadinessChanged
from pdrouter.core.fleet import DRAIN
from pdrouter.core.router import Router
from pdrouter.engines.base import Engine
from pdrouter.errors import ConnectFailed

DRAINING = "draining"

_LOOK_S = 0.1
"""Time between two looks whether a draining endpoint has anything left to do; chosen."""


class WatchOptions(msgspec.Struct, frozen=True):
    """How members are watched."""

    health: HealthOptions
    load: LoadOptions
    models: ModelOptions


class _Member(msgspec.Struct):
    found: Found
    health: HealthWatch
    loads: LoadMonitor
    tasks: list["asyncio.Task[None]"]
    parting: "asyncio.Task[None] | None" = None


class Members:
    """The endpoints that are watched, by address.

    ``let_go`` is called with the address of each that has left. ``counts`` are events since the start, by name.
    """

    def __init__(
        self,
        router: Router,
        engines: Mapping[str, Engine],
        prober: Prober,
        supervisor: Supervisor,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        options: WatchOptions,
        let_go: Callable[[str], Awaitable[None]],
    ) -> None:
        self.lists = ModelLists(options.models)
        self.counts: Counter[str] = Counter(joined=0, changed=0, restarted=0, left=0)
        self._router = router
        self._engines = engines
        self._prober = prober
        self._supervisor = supervisor
        self._clock = clock
        self._wall_clock = wall_clock
        self._options = options
        self._let_go = let_go
        self._members: dict[str, _Member] = {}
        self._log = structlog.stdlib.get_logger("pdrouter.members")

    def counters(self) -> Mapping[str, int]:
        """Return the events counted since the start."""
        return self.counts

    def get(self, address: str) -> Found | None:
        """Return what is said of a member."""
        member = self._members.get(address)
        return None if member is None else member.found

    def not_asked(self) -> Sequence[str]:
        """Return the addresses of members that have neither answered nor failed yet."""
        return [address for address, member in self._members.items() if not member.health.is_asked]

    def join(self, found: Found) -> bool:
        """Let an endpoint in and watch it; one that is leaving stays. ``False`` if it is there already."""
        address = found.endpoint.address
        known = self._members.get(address)
        if known is not None:
            if known.parting is None:
                return False
            self.resume(address)
            self.change(found)
            return True
        self._router.observe(EndpointJoined(found.endpoint, NOT_REACHED), self._clock())
        engine = self._engines[found.endpoint.engine]
        health = HealthWatch(
            self._router,
            engine,
            self._prober,
            self._clock,
            self._options.health,
            found,
            partial(self._restarted, address),
            self.lists,
        )
        models = ModelMonitor(self.lists, partial(self._router.fleet.is_ready, address), health.list_models)
        loads = LoadMonitor(
            self._router,
            engine,
            self._prober,
            self._clock,
            self._wall_clock,
            self._options.load,
            address,
            health,
        )
        tasks = [
            self._supervisor.start(f"health {address}", health.run),
            self._supervisor.start(f"load {address}", loads.run),
            self._supervisor.start(f"models {address}", models.run),
        ]
        self._members[address] = _Member(found, health, loads, tasks)
        self._count("joined", address)
        return True

    def change(self, found: Found) -> None:
        """Describe a member anew; of another role or engine it is another endpoint at the same address."""
        address, member = found.endpoint.address, self._members[found.endpoint.address]
        before, after = member.found.endpoint, found.endpoint
        if (before.role, before.engine) != (after.role, after.engine):
            self.leave(address)
            self.join(found)
        elif member.found != found:
            member.found = found
            member.health.change(found)
            self._count("changed", address)

    def drain(self, address: str) -> None:
        """Give a member nothing new; what it has may end."""
        self._router.observe(ReadinessChanged(address, DRAINING, DRAIN), self._clock())

    def resume(self, address: str) -> None:
        """Drain a member no more."""
        member = self._members[address]
        if member.parting is not None:
            member.parting.cancel()
            member.parting = None
        self._router.observe(ReadinessChanged(address, None, DRAIN), self._clock())

    def part(self, address: str, within_s: float) -> None:
        """Drain a member and let it go when its requests have ended, or in ``within_s`` at the latest."""
        member = self._members[address]
        if member.parting is None:
            self.drain(address)
            member.parting = self._supervisor.start(f"parting {address}", partial(self._part, address, within_s))

    def leave(self, address: str) -> None:
        """Let a member go at once; requests that it still has fail."""
        member = self._members.pop(address)
        for task in member.tasks:
            task.cancel()
        if member.parting not in (None, asyncio.current_task()):
            member.parting.cancel()
        self._router.observe(EndpointLeft(address), self._clock())
        self._count("left", address)
        self._supervisor.start(f"letting go of {address}", partial(self._let_go, address))

    def failed(self, address: str, error: ConnectFailed) -> None:
        """The traffic met an endpoint that took no connection."""
        member = self._members.get(address)
        if member is not None:
            member.health.failed(error)

    def set_options(self, options: WatchOptions) -> None:
        """Watch in another way from now on."""
        self._options, self.lists.options = options, options.models
        for member in self._members.values():
            member.health.options, member.loads.options = options.health, options.load

    def update(self, before: Iterable[Found], after: Iterable[Found], within_s: float) -> None:
        """Follow a change of the settings; members that neither names stay as they are."""
        old = {found.endpoint.address: found for found in before}
        new = {found.endpoint.address: found for found in after}
        for address in old.keys() - new.keys():
            if address in self._members:
                self.part(address, within_s)
        for address, found in new.items():
            if found != old.get(address) and not self.join(found):
                self.change(found)

    async def _part(self, address: str, within_s: float) -> None:
        until_s = self._clock() + within_s
        endpoints = self._router.load.endpoints
        while endpoints[address].ledger_requests and self._clock() < until_s:  # noqa: ASYNC110 - plain state
            await asyncio.sleep(_LOOK_S)
        self.leave(address)

    def _restarted(self, address: str) -> None:
        self.counts["restarted"] += 1
        self._members[address].loads.forget_totals()

    def _count(self, event: str, address: str) -> None:
        self.counts[event] += 1
        self._log.info(event, endpoint=address)
