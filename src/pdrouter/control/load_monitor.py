"""Polls an endpoint's load and tells the core, with the moment at which it was true."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import structlog

from pdrouter.control.description import unknown_rank
from pdrouter.control.health import REFUSED
from pdrouter.control.probe import Prober
from pdrouter.core.events import LoadMissing, LoadReported
from pdrouter.core.load import RankReport
from pdrouter.core.router import Router
from pdrouter.engines.base import Engine, LoadReply
from pdrouter.errors import ConnectFailed, RouterError

_MAX_REPORT_BYTES = 1 << 20
"""A longer report isn't read (I9): a thousand ranks of SGLang, or some hundred of vLLM's metrics. Chosen."""

_READY_CHECK_S = 0.25
"""How soon an endpoint that became ready is asked for its load; chosen."""


class LoadOptions(msgspec.Struct, frozen=True):
    """Settings of the poll; ``config.py`` says what they mean."""

    interval_s: float
    timeout_s: float


class Listener(Protocol):
    """Whoever judges the health of the endpoint."""

    def failed(self, error: ConnectFailed) -> None:
        """It took no connection."""

    def key_refused(self) -> None:
        """It refused our key."""

    def restarted(self, why: str) -> None:
        """It has begun anew."""

    def reported(self, unknown_rank: int | None) -> None:
        """It told its load; ``unknown_rank`` is a rank that it isn't known to have, if it names one."""


class LoadMonitor:
    """Polls one endpoint while it is ready. The path that answered last is tried first.

    Whoever is ``listener`` hears of connections that it refuses, and of counters that fell.
    """

    def __init__(
        self,
        router: Router,
        engine: Engine,
        prober: Prober,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        options: LoadOptions,
        address: str,
        listener: Listener,
    ) -> None:
        self.options = options
        self._router = router
        self._engine = engine
        self._prober = prober
        self._clock = clock
        self._wall_clock = wall_clock
        self._address = address
        self._listener = listener
        self._totals: dict[int, float] = {}
        self._totals_unix_s = 0.0
        self._started_unix_s: float | None = None
        self._paths = list(engine.load_paths)
        self._is_silent = False
        self._log = structlog.stdlib.get_logger("pdrouter.load").bind(endpoint=address)

    async def run(self) -> None:
        """Poll for ever, an engine that tells its load."""
        while self._paths:
            if self._router.fleet.is_ready(self._address):
                await self.poll()
                await asyncio.sleep(self.options.interval_s)
            else:
                await asyncio.sleep(min(self.options.interval_s, _READY_CHECK_S))

    async def poll(self) -> None:
        """Ask once, and tell the core what came of it."""
        problem = "no load path answered"
        for path in tuple(self._paths):
            sent_s = self._clock()
            try:
                status, body = await self._get(path)
            except RouterError as error:
                problem = error.code
                if isinstance(error, ConnectFailed):
                    self._listener.failed(error)
                break
            if status == 200 and len(body) > _MAX_REPORT_BYTES:
                problem = f"more than {_MAX_REPORT_BYTES} bytes"
                break
            if status == 200:
                self._paths.remove(path)
                self._paths.insert(0, path)
                reply = self._engine.read_load(body)
                if reply is not None:
                    self._tell(reply, sent_s)
                    return
                problem = "not understood"
                break
            problem = f"status {status}"
            if status in REFUSED:
                self._listener.key_refused()
        self._router.observe(LoadMissing(self._address, problem), self._clock())
        if not self._is_silent:
            self._is_silent = True
            self._log.warning("no load report; the ledger leads", reason=problem)

    async def _get(self, path: str) -> tuple[int, bytes]:
        endpoint = self._router.fleet.get(self._address)
        if endpoint is None:
            return 0, b""
        return await self._prober.get(endpoint, path, self.options.timeout_s)

    def forget_totals(self) -> None:
        """Compare no more with what was told before."""
        self._totals = {}
        self._started_unix_s = None

    def _check_start(self, started_unix_s: float | None) -> None:
        if started_unix_s is None:
            return
        if self._started_unix_s is not None and started_unix_s > self._started_unix_s:
            self._listener.restarted("its process is another")
        self._started_unix_s = started_unix_s

    def _check_totals(self, ranks: Sequence[RankReport], unix_s: float | None) -> None:
        """What an engine counts since its start grows; where it fell, there was another start.

        Unless the report is older than the one before, as its stamp tells.
        """
        if unix_s is not None:
            if unix_s <= self._totals_unix_s:
                return
            self._totals_unix_s = unix_s
        totals = {r.rank: r.prefill_tokens_total for r in ranks if r.prefill_tokens_total is not None}
        if any(total < self._totals.get(rank, 0.0) for rank, total in totals.items()):
            self._listener.restarted("its counters fell")
        self._totals = totals

    def _tell(self, reply: LoadReply, sent_s: float) -> None:
        endpoint = self._router.fleet.get(self._address)
        if endpoint is None:
            return
        self._listener.reported(unknown_rank(endpoint, (report.rank for report in reply.ranks)))
        self._check_start(reply.started_unix_s)
        self._check_totals(reply.ranks, reply.unix_s)
        now_s = self._clock()
        t_report_s = (sent_s + now_s) / 2
        if reply.unix_s is not None:
            stamped_s = now_s - (self._wall_clock() - reply.unix_s)
            if stamped_s <= now_s:  # a stamp from the future is another clock's
                t_report_s = stamped_s
        ranks = _local(reply.ranks, endpoint.rank_base)
        self._router.observe(LoadReported(self._address, ranks, t_report_s), now_s)
        if self._is_silent:
            self._is_silent = False
            self._log.info("load is reported again")


def _local(ranks: Sequence[RankReport], base: int) -> Sequence[RankReport]:
    """Return reports by the endpoint's own numbers of its ranks, of which ``base`` is the first."""
    return [msgspec.structs.replace(report, rank=report.rank - base) for report in ranks] if base else ranks
