"""Composition root: builds everything from the settings, wires it, starts it, drains it.

The only file that knows all parts. ``running()`` is the whole router inside the caller's event loop.
"""

import asyncio
import gc
import math
import os
import random
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import structlog
import uvloop

from pdrouter.config import Settings
from pdrouter.control.changes import Changes
from pdrouter.control.members import Members
from pdrouter.control.probe import Prober
from pdrouter.control.reload import Reload, Source
from pdrouter.control.startup import first_round
from pdrouter.control.tasks import Supervisor
from pdrouter.core.router import Router
from pdrouter.engines.base import Engine
from pdrouter.engines.openai import OpenAi
from pdrouter.engines.sglang import Sglang
from pdrouter.engines.sglang_ranks import RankFields
from pdrouter.engines.trtllm import Trtllm
from pdrouter.engines.vllm import Vllm
from pdrouter.errors import ConfigError
from pdrouter.options import (
    LIVE,
    access,
    client_limits,
    cors,
    dispatch_options,
    drain_options,
    intake_options,
    pool_limits,
    queue_options,
    router_options,
    watch_options,
)
from pdrouter.proxy.abort import Aborter
from pdrouter.proxy.app import App
from pdrouter.proxy.dispatch import Dispatcher
from pdrouter.proxy.fleet_api import Doors, FleetApi
from pdrouter.proxy.ids import Ids
from pdrouter.proxy.intake import Intake
from pdrouter.proxy.limits import Clients, room_for
from pdrouter.proxy.listener import CannotListen, Listener, bind, open_port, url_of
from pdrouter.proxy.rates import RateOptions, Rates
from pdrouter.proxy.tokenizer import Counter, TokenizerOptions
from pdrouter.references import tokenizer_file
from pdrouter.telemetry.journal_file import JournalFile
from pdrouter.telemetry.logs import DecisionLog, set_up_logs
from pdrouter.telemetry.metrics import Metrics
from pdrouter.telemetry.sink import Sink
from pdrouter.upstream.pools import Pools
from pdrouter.upstream.resolver import Resolver

_GC_ALLOCATIONS = 100_000
"""Containers between two looks for cycles; requests leave none behind. Chosen; see benchmarks/proxy.py."""

_BUDGETS = (
    "client_max_connections",
    "client_body_budget_bytes",
    "client_write_budget_bytes",
    "upstream_max_reply_bytes",
    "prefix_index_bytes",
    "journal_decisions",
)

_PROBE_REPLY_BYTES = 4 * 1024 * 1024


class Service:
    """A built router: core, data plane, control plane."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.router = Router(router_options(settings))
        self.engines = make_engines(settings)
        self.metrics = Metrics(self.router, time.monotonic)
        self.ids = Ids(random.Random())  # noqa: S311
        self.resolver = Resolver(settings.dns_refresh_secs)
        self.pools = Pools(pool_limits(settings), self.resolver)
        self.probe_pools = Pools(pool_limits(settings), self.resolver)
        self.aborter = Aborter(self.pools, settings.abort_retry_delay_secs)
        self.supervisor = Supervisor()
        self.clients = Clients(client_limits(settings))
        self.rates = _rates(settings)
        self.dispatcher = self._dispatcher()
        self.journal_file = self.dispatcher.journal_file = _journal_file(settings)
        prober = Prober(self.probe_pools, _PROBE_REPLY_BYTES)
        self.members = Members(
            self.router,
            self.engines,
            prober,
            self.supervisor,
            time.monotonic,
            time.time,
            watch_options(settings),
            self._let_go,
        )
        self.dispatcher.on_unreachable = self.members.failed
        self.changes = Changes(settings, self.engines, self.members)
        self.changes.found_in(settings)  # what is wrong with it stops the start
        self.reload: Callable[[], None] = lambda: None
        self.counter = _counter(self.router, settings)
        self.intake = Intake(self.router, intake_options(settings))
        self.app = App(
            self.intake,
            self.dispatcher,
            self.clients,
            self.rates,
            self.counter,
            FleetApi(
                self.router,
                time.monotonic,
                Doors(self.changes, prober.ask, self.supervisor.once),
                access(settings),
            ),
            cors(settings),
            needs_all_models=settings.readiness == "all",
        )
        self.app.dying = self.supervisor.dying
        self._add_counters()

    def _dispatcher(self) -> Dispatcher:
        settings = self.settings
        log = DecisionLog(settings.log_level)
        return Dispatcher(
            self.router,
            self.engines,
            self.pools,
            self.aborter,
            self.metrics,
            log,
            self.ids,
            time.monotonic,
            dispatch_options(settings),
        )

    def _add_counters(self) -> None:
        self.metrics.add_counters("pdrouter_upstream_connections", "Connections to engines.", self.pools.counters)
        self.metrics.add_counters("pdrouter_clients", "Connections of clients, and limits met.", self.clients.counters)
        self.metrics.add_gauges("pdrouter_clients_bytes", "Memory that clients' bytes take now.", self.clients.held)
        self.metrics.add_counters("pdrouter_name_lookups", "Lookups of host names.", lambda: self.resolver.counts)
        hand_overs = self.dispatcher.hand_overs
        self.metrics.add_counters("pdrouter_handovers", "Prompts' KV that went astray.", hand_overs.counters)
        suspects = self.dispatcher.suspects
        self.metrics.add_counters(
            "pdrouter_suspects", "Requests that failed on two engines, and what was refused.", lambda: suspects.counts
        )
        leftovers = self.dispatcher.leftovers
        self.metrics.add_counters("pdrouter_leftovers", "Ends of replies behind their answers.", leftovers.counters)
        if (waitroom := self.dispatcher.waitroom) is not None:
            self.metrics.add_counters("pdrouter_queue", "Requests that might have to wait.", waitroom.counters)
        self.metrics.add_counters("pdrouter_retries", "Further attempts.", self.dispatcher.retries.counters)
        if (journal_file := self.journal_file) is not None:
            self.metrics.add_counters("pdrouter_journal_file", "Lines of the journal's file.", journal_file.counters)
        if self.rates is not None:
            help_text = "Requests refused for a key's rate, by what there was too much of."
            self.metrics.add_counters("pdrouter_rate_limited", help_text, self.rates.counters)
        self.metrics.add_counters("pdrouter_members", "Endpoints that came, went or began anew.", self.members.counters)
        lists = self.members.lists
        self.metrics.add_counters("pdrouter_model_lists", "Engines' lists of models.", lists.counters)
        help_text = "Loops that died and were started again, and tasks that failed."
        self.metrics.add_counters("pdrouter_background", help_text, self.supervisor.counters)
        self.metrics.add_counters("pdrouter_aborts", "Aborts sent to engines.", self.aborter.counters)
        help_text = "Bodies that were read in threads, or refused as too many were."
        self.metrics.add_counters("pdrouter_long_bodies", help_text, self.intake.counters)
        if (counter := self.counter) is not None:
            self.metrics.add_counters("pdrouter_tokenizer", "Prompts counted, and why not others.", counter.counters)

    def start(self, source: Source | None) -> None:
        """Let the endpoints join, and watch them, and the settings' file if there is one."""
        self.changes.start()
        if self.journal_file is not None:
            self.supervisor.start("journal file", self.journal_file.run)
        if source is not None:
            reload = Reload(source, self.apply, self.settings.config_check_interval_secs)
            self.metrics.add_counters("pdrouter_reloads", "Settings read again.", reload.counters)
            self.supervisor.start("reload", reload.run)
            self.reload = reload.ask

    def apply(self, settings: Settings) -> Sequence[str]:
        """Put settings that were read again into effect; return the names of those that can't change any more.

        Raises: ConfigError; then nothing has changed.
        """
        self.changes.check(settings)
        changed = [n for n in settings.__struct_fields__ if getattr(settings, n) != getattr(self.settings, n)]
        later = [name for name in changed if name not in LIVE]
        entrance = self.router.entrance
        if entrance is None and "max_concurrent_requests" in changed:
            later.append("max_concurrent_requests")  # no queue was built
        live = {name: getattr(settings, name) for name in changed if name not in later}
        settings = msgspec.structs.replace(self.settings, **live)
        found = self.changes.found_in(settings)
        self.settings = settings
        self.dispatcher.set_options(dispatch_options(settings))
        self.clients.set_limits(client_limits(settings))
        if entrance is not None:
            entrance.set_options(queue_options(settings))
        self.members.set_options(watch_options(settings))
        self.changes.follow(settings, found)
        return later

    async def _let_go(self, address: str) -> None:
        await self.pools.forget(address)
        await self.probe_pools.forget(address)

    async def aclose(self) -> None:
        """End what runs in the background, and all connections to engines."""
        self.intake.close()
        if self.counter is not None:
            self.counter.close()
        await self.supervisor.aclose()
        if self.journal_file is not None:
            self.journal_file.close()
        await self.aborter.aclose()
        await self.pools.aclose()
        await self.probe_pools.aclose()


class Running(msgspec.Struct, frozen=True):
    """A router that listens; ``serving`` ends when it has stopped."""

    url: str
    service: Service
    serving: "asyncio.Task[None]"


class StoppedEarly(Exception):
    """A stop was asked for before the port was open."""


@asynccontextmanager
async def running(
    settings: Settings, source: Source | None = None, is_stopped: Callable[[], bool] = lambda: False
) -> AsyncIterator[Running]:
    """Run a router in this event loop: it listens when the context is entered, and is gone when it is left.

    ``is_stopped`` is looked at until it listens. Raises: CannotListen; StoppedEarly.
    """
    service = Service(settings)
    sock = bind(settings.host, settings.port)
    listener = Listener(service.app, service.dispatcher, lambda: drain_options(service.settings))
    serving: asyncio.Task[None] | None = None
    try:
        service.start(source)
        await first_round(service.members, settings.worker_startup_timeout_secs, is_stopped)
        if is_stopped():
            raise StoppedEarly
        open_port(sock)
        serving = asyncio.get_running_loop().create_task(listener.serve(sockets=[sock]))
        await listener.is_up.wait()
        yield Running(url_of(sock), service, serving)
    finally:
        listener.stop()
        if serving is not None:
            await serving
        await service.aclose()
        sock.close()


def serve(settings: Settings, source: Source | None = None) -> int:
    """Run a router until a stop signal; return the exit status."""
    _hold_standard_files()
    before, log = sys.stderr, Sink(2)
    sys.stderr = log
    try:
        set_up_logs(settings.log_level, settings.log_format, log)
        return _serve_until_signal(settings, source, log)
    finally:
        sys.stderr = before
        log.close()


def _hold_standard_files() -> None:
    """Open what is closed of stdin, stdout and stderr: or a connection would get the number, and log lines with it."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)


def _serve_until_signal(settings: Settings, source: Source | None, log: Sink) -> int:
    early: list[int] = []
    # Signals come here until the server takes them, and once more when it has drained.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: early.append(number))
    try:
        uvloop.run(_serve(settings, source, log, early))
    except CannotListen as error:
        print(f"pdrouter: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


async def _serve(settings: Settings, source: Source | None, log: Sink, early: list[int]) -> None:
    loop, reloads = asyncio.get_running_loop(), list[int]()
    if source is not None:
        loop.add_signal_handler(signal.SIGHUP, reloads.append, signal.SIGHUP)
    files = _raise_file_limit()  # the probes need them too
    with suppress(StoppedEarly):
        async with running(settings, source, lambda: bool(early)) as router:
            if early:
                return
            service = router.service
            if source is not None:
                loop.add_signal_handler(signal.SIGHUP, service.reload)
            if reloads:
                service.reload()
            service.metrics.add_counters("pdrouter_log_lines", "Log lines by what became of them.", log.counters)
            service.clients.room = _room(files, settings.client_max_connections)
            _tell_budgets(settings)
            gc.freeze()  # what lives as long as the process needn't be looked at again
            gc.set_threshold(_GC_ALLOCATIONS)
            out = Sink(1)
            out.write(f"pdrouter listens on {router.url}\n")
            await router.serving
            out.close()


def _raise_file_limit() -> float:
    """Take all the open files that the system grants; return how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return math.inf if hard == resource.RLIM_INFINITY else hard


def _room(files: float, clients: int) -> float:
    """Return for how many clients so many open files do, and warn if that is few."""
    room = files if files == math.inf else room_for(int(files))
    if room < clients:
        log = structlog.stdlib.get_logger("pdrouter.server")
        log.warning("few open files; raise the limit (ulimit -Hn)", limit=files, clients=room, wanted=clients)
    return room


def _tell_budgets(settings: Settings) -> None:
    """Log what bounds the router's memory."""
    log = structlog.stdlib.get_logger("pdrouter.server")
    log.info("limits of memory", **{name: getattr(settings, name) for name in _BUDGETS})


def make_engines(settings: Settings) -> Mapping[str, Engine]:
    """Return the kinds of engines by name."""
    return {
        "sglang": Sglang(RankFields(settings.rank_fields)),
        "vllm": Vllm(),
        "trtllm": Trtllm(),
        "openai": OpenAi(),
    }


def _counter(router: Router, settings: Settings) -> Counter | None:
    """Return who counts tokens, if a tokenizer is named.

    Raises: ConfigError.
    """
    if not settings.tokenizer_path:
        return None
    options = TokenizerOptions(
        paths=dict(map(tokenizer_file, settings.tokenizer_path)),
        threads=settings.tokenizer_threads,
        max_waiting=settings.tokenizer_max_waiting,
        max_bytes=settings.tokenizer_max_bytes,
    )
    return Counter(router, options)


def _journal_file(settings: Settings) -> JournalFile | None:
    """Return who writes the journal's file, if one is named.

    Raises: ConfigError.
    """
    if settings.journal_file is None:
        return None
    try:
        return JournalFile(Path(settings.journal_file), settings.journal_file_max_bytes, time.monotonic)
    except OSError as error:
        raise ConfigError([f"journal_file: {settings.journal_file}: {error.strerror}"]) from None


def _rates(settings: Settings) -> Rates | None:
    if settings.rate_limit_requests_per_min is None and settings.rate_limit_tokens_per_min is None:
        return None
    return Rates(
        RateOptions(
            requests_per_min=settings.rate_limit_requests_per_min,
            tokens_per_min=settings.rate_limit_tokens_per_min,
            key_header=settings.rate_limit_key_header.encode(),
            output_tokens=settings.default_output_tokens,
        )
    )
