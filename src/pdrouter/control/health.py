"""Who is ready: first contact, then probes with thresholds both ways; what the engine tells of itself is taken in.

Facts go to the core as events; nothing here decides who serves a request.
"""

import asyncio
from collections.abc import Callable

import msgspec
import structlog

from pdrouter.control.probe import Prober
from pdrouter.core.events import EndpointDescribed, ReadinessChanged
from pdrouter.core.fleet import Endpoint
from pdrouter.core.router import Router
from pdrouter.engines.base import Described, Engine
from pdrouter.errors import RouterError

NOT_REACHED = "not reached yet"


class HealthOptions(msgspec.Struct, frozen=True):
    """Settings of the probes; ``config.py`` says what they mean."""

    path: str
    interval_s: float
    timeout_s: float
    startup_interval_s: float
    failure_threshold: int
    success_threshold: int
    is_disabled: bool


class HealthWatch:
    """Watches one endpoint. What the settings say of it (``fixed``) stands above what it tells."""

    def __init__(
        self,
        router: Router,
        engine: Engine,
        prober: Prober,
        clock: Callable[[], float],
        options: HealthOptions,
        endpoint: Endpoint,
        fixed: frozenset[str],
    ) -> None:
        self._router = router
        self._engine = engine
        self._prober = prober
        self._clock = clock
        self._options = options
        self._endpoint = endpoint
        self._fixed = fixed
        self._log = structlog.stdlib.get_logger("pdrouter.health").bind(endpoint=endpoint.address)

    async def run(self) -> None:
        """Reach the endpoint, then probe it for ever."""
        while (problem := await self._contact()) is not None:
            self._set_ready(f"{NOT_REACHED}: {problem}")
            await asyncio.sleep(self._options.startup_interval_s)
        self._set_ready(None)
        while not self._options.is_disabled:
            await self._until_failing()
            await self._until_recovered()

    async def _until_failing(self) -> None:
        failures = 0
        while failures < self._options.failure_threshold:
            await asyncio.sleep(self._options.interval_s)
            problem = await self._probe()
            failures = 0 if problem is None else failures + 1
        self._set_ready(f"{failures} health checks failed in a row: {problem}")

    async def _until_recovered(self) -> None:
        successes = 0
        while successes < self._options.success_threshold:
            await asyncio.sleep(self._options.interval_s)
            problem = await self._contact()
            successes = successes + 1 if problem is None else 0
        self._set_ready(None)

    async def _contact(self) -> str | None:
        """Probe the endpoint and let it tell of itself; return what is wrong with it."""
        return await self._probe() or await self._describe()

    async def _probe(self) -> str | None:
        try:
            status, _ = await self._prober.get(self._endpoint, self._options.path, self._options.timeout_s)
        except RouterError as error:
            return error.message
        return None if status < 400 else f"{self._options.path} answered {status}"

    async def _describe(self) -> str | None:
        for path in self._engine.info_paths:
            try:
                status, body = await self._prober.get(self._endpoint, path, self._options.timeout_s)
            except RouterError as error:
                return error.message
            described = self._engine.describe(body) if status == 200 else None
            if described is not None:
                return self._take_in(described)
        self._log.info("the engine doesn't tell of itself; the settings stand")
        return None

    def _take_in(self, told: Described) -> str | None:
        endpoint = self._endpoint
        if told.role is not None and told.role is not endpoint.role:
            return f"configured as {endpoint.role}, but the engine says that it is {told.role}"
        news = {
            name: value
            for name in ("model", "dp_size", "bootstrap_port", "version")
            if name not in self._fixed and (value := getattr(told, name)) is not None
        }
        described = msgspec.structs.replace(endpoint, **news)
        if described != endpoint:
            self._endpoint = described
            self._router.observe(EndpointDescribed(described), self._clock())
            self._log.info("described", model=described.model, dp_size=described.dp_size, version=described.version)
        return None

    def _set_ready(self, out: str | None) -> None:
        before = self._router.fleet.why_out(self._endpoint.address)
        if before != out:
            self._router.observe(ReadinessChanged(self._endpoint.address, out), self._clock())
            if out is None:
                self._log.info("ready")
            else:
                self._log.warning("out", reason=out)
