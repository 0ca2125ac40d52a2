"""Composition root: builds everything from the settings, wires it, starts it, drains it.

The only file that knows all parts. ``running()`` is the whole router inside the caller's event loop.
"""

import asyncio
import gc
import random
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import cast

import msgspec
import uvicorn
import uvloop

from pdrouter.config import Settings, profile_entries
from pdrouter.control.discovery import static_endpoints
from pdrouter.control.health import NOT_REACHED, HealthOptions, HealthWatch
from pdrouter.control.load_monitor import LoadMonitor, LoadOptions
from pdrouter.control.probe import Prober
from pdrouter.control.tasks import Supervisor
from pdrouter.core.chooser import PolicyTable
from pdrouter.core.cost import NEUTRAL, profile_from
from pdrouter.core.events import EndpointJoined
from pdrouter.core.policies import ENGINE, POLICIES, RANK_POLICIES
from pdrouter.core.policies.base import Ancestors
from pdrouter.core.policies.least_work import LeastWork
from pdrouter.core.policies.minimum_tokens import MinimumTokens
from pdrouter.core.router import Router, RouterOptions
from pdrouter.core.shadow import ShadowOptions
from pdrouter.engines.base import Engine
from pdrouter.engines.sglang import RankFields, Sglang
from pdrouter.plugins import load_policies
from pdrouter.proxy.abort import Aborter
from pdrouter.proxy.app import App
from pdrouter.proxy.connection import Connection
from pdrouter.proxy.dispatch import Dispatcher, DispatchOptions
from pdrouter.proxy.ids import Ids
from pdrouter.proxy.intake import Intake, IntakeOptions
from pdrouter.telemetry.logs import DecisionLog, set_up_logs
from pdrouter.telemetry.metrics import Metrics
from pdrouter.upstream.pool import PoolLimits
from pdrouter.upstream.pools import Pools

_MAX_MODELS = 1024
"""Models whose rates are learned (I9)."""

_BACKLOG = 4096

_GC_ALLOCATIONS = 100_000
"""Containers between two looks for cycles; requests leave none behind. Chosen; see benchmarks/proxy.py."""

_PROBE_REPLY_BYTES = 4 * 1024 * 1024


class Service:
    """A built router: core, data plane, control plane."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.router = Router(router_options(settings))
        self.engines: Mapping[str, Engine] = {"sglang": Sglang(RankFields(settings.rank_fields))}
        self.metrics = Metrics(self.router)
        self.ids = Ids(random.Random())  # noqa: S311
        self.pools = Pools(_pool_limits(settings))
        self.probe_pools = Pools(_pool_limits(settings))
        self.aborter = Aborter(self.pools, settings.abort_retry_delay_secs)
        self.supervisor = Supervisor()
        self.app = App(
            self.router,
            Intake(self.router, _intake_options(settings)),
            self._dispatcher(),
            self.metrics,
            self.ids,
            time.monotonic,
            settings.max_payload_size,
        )
        self._add_counters()

    def _dispatcher(self) -> Dispatcher:
        settings = self.settings
        options = DispatchOptions(
            request_timeout_s=settings.request_timeout_secs,
            max_reply_bytes=settings.upstream_max_reply_bytes,
            decision_headers=settings.decision_headers,
        )
        log = DecisionLog(settings.log_level)
        return Dispatcher(
            self.router, self.engines, self.pools, self.aborter, self.metrics, log, self.ids, time.monotonic, options
        )

    def _add_counters(self) -> None:
        self.metrics.add_counters("pdrouter_upstream_connections", "Connections to engines.", self.pools.counters)
        self.metrics.add_counters("pdrouter_aborts", "Aborts sent to engines.", self.aborter.counters)

    def start(self) -> None:
        """Let the endpoints join, and watch them."""
        prober = Prober(self.probe_pools, _PROBE_REPLY_BYTES)
        load_options = LoadOptions(self.settings.worker_load_check_interval, self.settings.load_check_timeout_secs)
        health_options = _health_options(self.settings)
        for found in static_endpoints(self.settings):
            endpoint, engine = found.endpoint, self.engines[found.endpoint.engine]
            self.router.observe(EndpointJoined(endpoint, NOT_REACHED), time.monotonic())
            health = HealthWatch(self.router, engine, prober, time.monotonic, health_options, endpoint, found.fixed)
            loads = LoadMonitor(self.router, engine, prober, time.monotonic, time.time, load_options, endpoint.address)
            self.supervisor.start(f"health {endpoint.address}", health.run)
            self.supervisor.start(f"load {endpoint.address}", loads.run)

    async def aclose(self) -> None:
        """End what runs in the background, and all connections to engines."""
        await self.supervisor.aclose()
        await self.aborter.aclose()
        await self.pools.aclose()
        await self.probe_pools.aclose()


class CannotListen(Exception):
    """The address is taken, or isn't ours."""


class Running(msgspec.Struct, frozen=True):
    """A router that listens; ``serving`` ends when it has stopped."""

    url: str
    service: Service
    serving: "asyncio.Task[None]"


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Running]:
    """Run a router in this event loop: it listens when the context is entered, and is gone when it is left.

    Raises: CannotListen.
    """
    service = Service(settings)
    sock = _listen(settings)
    server = _Server(service, settings)
    serving = asyncio.get_running_loop().create_task(server.serve(sockets=[sock]))
    try:
        await server.is_up.wait()
        service.start()
        yield Running(_url(sock), service, serving)
    finally:
        server.should_exit = True
        await serving
        await service.aclose()
        sock.close()


def serve(settings: Settings) -> int:
    """Run a router until a stop signal; return the exit status."""
    set_up_logs(settings.log_level, settings.log_format)
    early: list[int] = []
    # Signals come here until the server takes them, and once more when it has drained.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: early.append(number))
    try:
        uvloop.run(_serve(settings, early))
    except CannotListen as error:
        print(f"pdrouter: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


async def _serve(settings: Settings, early: list[int]) -> None:
    async with running(settings) as router:
        if early:
            return
        gc.freeze()  # what lives as long as the process needn't be looked at again
        gc.set_threshold(_GC_ALLOCATIONS)
        print(f"pdrouter listens on {router.url}", flush=True)  # noqa: T201
        await router.serving


class _Server(uvicorn.Server):
    """uvicorn with our application, and a sign when it listens."""

    def __init__(self, service: Service, settings: Settings) -> None:
        self.is_up = asyncio.Event()
        super().__init__(
            uvicorn.Config(
                service.app,
                http=Connection,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                log_level="critical",
                server_header=False,
                date_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=round(settings.shutdown_grace_period_secs),
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self.is_up.set()


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((settings.host, settings.port))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise CannotListen(f"can't listen on {settings.host}:{settings.port}: {error.strerror}") from error
    sock.setblocking(False)
    return sock


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def router_options(settings: Settings) -> RouterOptions:
    """Return the settings of the core."""
    profiles = {name: profile_from(entry) for name, entry in profile_entries().items()}
    rank_policy = _rank_policy(settings)
    return RouterOptions(
        policy=settings.policy,
        prefill_policy=settings.prefill_policy or settings.policy,
        decode_policy=settings.decode_policy or settings.policy,
        rank_policy=rank_policy,
        report_max_age_s=settings.report_max_age_secs,
        visible_delay_s=settings.report_visible_delay_secs,
        history_events=settings.ledger_history_events,
        bytes_per_token=settings.bytes_per_token,
        max_models=_MAX_MODELS,
        prefix_bytes=settings.prefix_index_bytes,
        prefix_block_tokens=settings.prefix_block_bytes / settings.bytes_per_token,
        output_tokens=settings.default_output_tokens,
        profile=profiles[settings.profile] if settings.profile else NEUTRAL,
        profiles=profiles,
        chance=random.Random(settings.seed),  # noqa: S311
        load_aware_spread_requests=settings.load_aware_spread_requests,
        load_aware_sigma=settings.load_aware_sigma,
        ancestors=ancestors(settings),
        journal_decisions=settings.journal_decisions,
        shadow=_shadow_options(settings, rank_policy),
        plugins=_plugins(settings),
    )


def _plugins(settings: Settings) -> PolicyTable:
    """Return the policies of other packages, if one is named.

    Raises: ConfigError.
    """
    names = {settings.policy, settings.prefill_policy, settings.decode_policy, settings.shadow_policy} - {None}
    return {} if names <= POLICIES.keys() else cast("PolicyTable", load_policies(POLICIES))


def _rank_policy(settings: Settings) -> str:
    if settings.rank_fields == "none":
        return ENGINE
    if settings.dp_minimum_tokens_scheduler:
        return MinimumTokens.name
    return settings.rank_policy or (LeastWork.name if settings.policy == LeastWork.name else MinimumTokens.name)


def _shadow_options(settings: Settings, rank_policy: str) -> ShadowOptions | None:
    """Return who looks on: the policy named, for ranks as well where it can choose them and the router does."""
    name = settings.shadow_policy
    if name is None:
        return None
    chooses_ranks = name in RANK_POLICIES and rank_policy != ENGINE
    chance = random.Random(settings.seed)  # noqa: S311
    return ShadowOptions(policy=name, rank_policy=name if chooses_ranks else rank_policy, chance=chance)


def ancestors(settings: Settings) -> Ancestors:
    """Return the settings of the policies that come from other routers."""
    return Ancestors(
        load_aware_generation=settings.load_aware_generation,
        minimum_tokens_published=settings.minimum_tokens_published,
        cache_threshold=settings.cache_threshold,
        balance_abs_threshold=settings.balance_abs_threshold,
        balance_rel_threshold=settings.balance_rel_threshold,
        max_idle_s=settings.max_idle_secs,
        assignment_mode=settings.assignment_mode,
        bucket_adjust_interval_s=settings.bucket_adjust_interval_secs,
    )


def _pool_limits(settings: Settings) -> PoolLimits:
    return PoolLimits(
        connect_timeout_s=settings.connect_timeout_secs,
        idle_timeout_s=settings.upstream_idle_timeout_secs,
        max_idle=settings.upstream_max_idle,
        max_connections=settings.upstream_max_connections,
        read_buffer_bytes=settings.upstream_read_buffer_bytes,
        max_header_bytes=settings.upstream_max_header_bytes,
    )


def _intake_options(settings: Settings) -> IntakeOptions:
    return IntakeOptions(
        request_id_headers=tuple(name.lower().encode() for name in settings.request_id_headers),
        prefix_block_bytes=settings.prefix_block_bytes,
        image_tokens=settings.image_tokens,
        owns_ranks=settings.rank_fields != "none",
    )


def _health_options(settings: Settings) -> HealthOptions:
    return HealthOptions(
        path=settings.health_check_endpoint,
        interval_s=settings.health_check_interval_secs,
        timeout_s=settings.health_check_timeout_secs,
        startup_interval_s=settings.worker_startup_check_interval,
        failure_threshold=settings.health_failure_threshold,
        success_threshold=settings.health_success_threshold,
        is_disabled=settings.disable_health_check,
    )
