"""Who is ready: first contact, then probes with thresholds both ways; what the engine tells of itself is taken in.

What the traffic meets counts as well: a connection that is refused is a failed probe, and the next follows at once. An
engine that has begun anew is described anew, and its cache is forgotten; one that hasn't told everything yet is asked
again (``description.py``). Facts go to the core as events; nothing here decides who serves a request.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import msgspec
import structlog

from pdrouter.control.description import Description, contradictions
from pdrouter.control.discovery import Found
from pdrouter.control.models import ModelLists
from pdrouter.control.probe import Prober
from pdrouter.core.events import EndpointDescribed, EndpointRestarted, ReadinessChanged
from pdrouter.core.fleet import HEALTH, Endpoint, Role
from pdrouter.core.router import Router
from pdrouter.engines.about import MODELS_PATH
from pdrouter.engines.base import Described, Engine, with_traits
from pdrouter.errors import ConnectFailed, PoolExhausted, RouterError

NOT_REACHED = "not reached yet"

REFUSED = (401, 403)
"""What an engine answers to a request without its key. Source: SGLang 0.5.23 (``utils/auth.py``), vLLM 0.32: 401."""

_HURRY_S = 0.05
"""Shortest time between two probes that failures of the traffic ask for; chosen."""

_TOLD = tuple(name for name in Described.__struct_fields__ if name in Endpoint.__struct_fields__)
"""What an engine tells that is kept of its endpoint."""


class HealthOptions(msgspec.Struct, frozen=True):
    """Settings of the probes; ``config.py`` says what they mean."""

    path: str
    interval_s: float
    timeout_s: float
    startup_interval_s: float
    failure_threshold: int
    success_threshold: int
    is_disabled: bool
    may_be_refused: bool


class HealthWatch:
    """Watches one endpoint. What the settings say of it (``fixed``) stands above what it tells.

    ``on_restart`` is called when it has begun anew.
    """

    def __init__(
        self,
        router: Router,
        engine: Engine,
        prober: Prober,
        clock: Callable[[], float],
        options: HealthOptions,
        found: Found,
        on_restart: Callable[[], None],
        lists: ModelLists,
    ) -> None:
        self.options = options
        self.is_asked = False  # once: it answered, or failed to
        self._router = router
        self._engine = engine
        self._prober = prober
        self._clock = clock
        self._endpoint = found.endpoint
        self._fixed = found.fixed
        self._on_restart = on_restart
        self._lists = lists
        self._is_reached = False
        self._is_up = False
        self._failures = 0
        self._is_anew = False  # to be described anew
        self._description = Description(engine.tells)
        self._objection: str | None = None  # why it can't be used though it answers
        self._restart = ""  # why it must have begun anew, once it answers again
        self._hurry = asyncio.Event()
        self._log = structlog.stdlib.get_logger("pdrouter.health").bind(endpoint=found.endpoint.address)

    async def run(self) -> None:
        """Reach the endpoint, then probe it for ever."""
        while (problem := await self._contact()) is not None:
            self._set_ready(self._objection or f"{NOT_REACHED}: {problem}")
            await asyncio.sleep(self.options.startup_interval_s)
        self._is_reached = True
        while True:
            self._set_ready(None)
            await self._until_failing()
            await self._until_recovered()

    def failed(self, error: ConnectFailed) -> None:
        """The endpoint took no connection: a failed probe, but one only until the next has ended."""
        if isinstance(error.__cause__, ConnectionRefusedError):
            self._refused()
        if self._is_up and not self._hurry.is_set():
            self._count(error.message)
            self._hurry.set()

    def restarted(self, why: str) -> None:
        """The endpoint has begun anew; what it is now isn't known yet."""
        self._tell_restart(why)
        self._description.forget()
        self._is_anew = True
        self._hurry.set()

    def reported(self, unknown_rank: int | None) -> None:
        """Its load was reported; ``unknown_rank`` is a rank in the report that it isn't known to have."""
        if self._description.reported(unknown_rank, self._clock()):
            self._hurry.set()

    def key_refused(self) -> None:
        """It refused the key with another request."""
        self._description.ask_again()
        self._hurry.set()

    def change(self, found: Found) -> None:
        """The settings say something else of the endpoint; what it has told stands where they don't."""
        told: dict[str, object] = {name: getattr(self._endpoint, name) for name in _told_names(found.fixed)}
        told["warning"] = self._description.warning
        self._endpoint, self._fixed = msgspec.structs.replace(found.endpoint, **told), found.fixed
        self._endpoint = with_traits(self._engine, self._endpoint)
        self._router.observe(EndpointDescribed(self._endpoint), self._clock())
        self._is_anew = True
        self._hurry.set()

    async def list_models(self) -> None:
        """Ask which ids it lists now; what it listed before stands if it doesn't tell."""
        told = None
        with suppress(RouterError):
            told = await self._ask([(self._endpoint, MODELS_PATH)], [])
        if told is None:
            self._lists.counts["failed"] += 1
        else:
            self._take_in([told])

    async def _until_failing(self) -> None:
        self._is_up, self._failures = True, 0
        while self._is_up and await self._pause():
            problem = await self._check()
            if self._objection is not None:
                self._take_out(self._objection)
            elif problem is None:
                self._failures = 0
            else:
                self._count(problem)

    async def _check(self) -> str | None:
        """Probe an endpoint that is in use, and describe it if that is due; return what is wrong with it."""
        if self._is_anew:
            return await self._contact()
        is_due = self._description.due_s <= self._clock()
        if is_due:
            self._description.begin(self._clock(), self.options.startup_interval_s)
        problem = None if self.options.is_disabled else await self._probe()
        if problem is None and is_due:
            with suppress(RouterError):  # it has told enough to be used
                await self._describe()
        return problem

    def _count(self, problem: str) -> None:
        """Count a failure; at the threshold the endpoint is out."""
        if self.options.is_disabled:
            return
        self._failures += 1
        if self._is_up and self._failures >= self.options.failure_threshold:
            self._take_out(f"{self._failures} health checks failed in a row: {problem}")

    def _take_out(self, reason: str) -> None:
        self._is_up = False
        self._set_ready(reason)

    async def _until_recovered(self) -> None:
        successes = 0
        while successes < self.options.success_threshold:
            await asyncio.sleep(self.options.interval_s)
            problem = await self._contact()
            successes = successes + 1 if problem is None else 0
            if self._objection is not None:
                self._set_ready(self._objection)
        self._hurry.clear()

    async def _pause(self) -> bool:
        """Wait until it is time for a probe, or something asks for one; ``False`` if the endpoint is out by then."""
        interval_s = math.inf if self.options.is_disabled else self.options.interval_s
        wait_s = min(interval_s, self._description.due_s - self._clock())
        with suppress(TimeoutError):
            async with asyncio.timeout(None if wait_s == math.inf else max(0.0, wait_s)):
                await self._hurry.wait()
                await asyncio.sleep(_HURRY_S)
        self._hurry.clear()
        return self._is_up

    async def _contact(self) -> str | None:
        """Probe the endpoint and let it tell of itself; return what is wrong with it."""
        self._objection = None
        self._description.begin(self._clock(), self.options.startup_interval_s)
        try:
            return await self._probe() or await self._describe()
        except RouterError as error:
            return error.message
        finally:
            self.is_asked = True

    async def _probe(self) -> str | None:
        try:
            status, _ = await self._prober.get(self._endpoint, self.options.path, self.options.timeout_s)
        except PoolExhausted:
            return None  # the router's own want, which tells nothing of the endpoint
        except RouterError as error:
            if isinstance(error.__cause__, ConnectionRefusedError):
                self._refused()
            return error.message
        if status in REFUSED:
            return _refusal(self._endpoint, self.options.path, status)
        return None if status < 400 else f"{self.options.path} answered {status}"

    def _refused(self) -> None:
        """Nobody listens at the port: whoever does later is another process."""
        if self._is_reached:
            self._description.forget()
            self._is_anew = True
            self._restart = "it had refused connections"

    async def _describe(self) -> str | None:
        """Let the endpoint tell of itself; return what is wrong with that.

        Raises: RouterError if it doesn't answer.
        """
        endpoint = self._endpoint
        groups = [[(endpoint, path) for path in paths] for paths in self._engine.info_paths]
        bootstrap_path = self._engine.bootstrap_path(endpoint)
        if bootstrap_path is not None and endpoint.bootstrap_port is not None:
            groups.append([(_at_port(endpoint, endpoint.bootstrap_port), bootstrap_path)])
        refusals: list[str] = []
        told = [found for group in groups if (found := await self._ask(group, refusals)) is not None]
        if not told and groups:
            self._log.info("the engine doesn't tell of itself; the settings stand")
        self._objection = self._take_in(told)
        if self._objection is None and refusals and not self.options.may_be_refused:
            self._objection = refusals[0]
        if self._objection is not None:
            return self._objection
        self._described(endpoint, told)
        if bootstrap_path is not None and not self._endpoint.kv_engine_ids:
            return f"{bootstrap_path} at its bootstrap port doesn't name its KV engines"
        self._is_anew = False
        if self._restart:
            self._tell_restart(self._restart)
        return None

    def _described(self, before: Endpoint, told: Sequence[Described]) -> None:
        """Take note of a whole description: what is missing, and what doesn't add up."""
        self._description.take(before, self._endpoint, _values(told).keys())
        contradiction = next((one.contradiction for one in told if one.contradiction is not None), None)
        if self._description.warn(self._endpoint, contradiction):
            self._tell_warning()

    async def _ask(self, group: Sequence[tuple[Endpoint, str]], refusals: list[str]) -> Described | None:
        """Return what the first of these that is understood tells; note in ``refusals`` where our key isn't taken."""
        for place, path in group:
            status, body = await self._prober.get(place, path, self.options.timeout_s)
            if status in REFUSED:
                refusals.append(_refusal(place, path, status))
            is_readable = status == 200 and (path != MODELS_PATH or self._lists.is_readable(body))
            described = self._engine.describe(path, body) if is_readable else None
            if described is not None:
                return described
        return None

    def _take_in(self, told: Iterable[Described]) -> str | None:
        """Change the endpoint to what is told; return where that contradicts the settings."""
        endpoint, values = self._endpoint, _values(told)
        contradiction = "; ".join(contradictions(endpoint, self._fixed, values))
        if contradiction:
            return contradiction
        if endpoint.role is not Role.PREFILL:
            values.pop("bootstrap_port", None)  # what others tell is a default that they don't use
        news = {name: value for name, value in values.items() if name in _TOLD and name not in self._fixed}
        if isinstance(cards := news.get("cards"), tuple):
            news["cards"] = self._lists.take(endpoint.cards, cards)
        described = with_traits(self._engine, msgspec.structs.replace(endpoint, **news))
        if described != endpoint:
            change = self._description.changed(endpoint, described, is_in_use=self._is_up)
            if change is not None and not self._is_anew:
                self._restart = f"it tells another {change}"
            self._endpoint = described
            self._router.observe(EndpointDescribed(described), self._clock())
            about = {"model": described.model, "dp_size": described.dp_size, "version": described.version}
            self._log.info("described", **about, names=len(described.names))
        return None

    def _tell_warning(self) -> None:
        warning = self._description.warning
        self._endpoint = msgspec.structs.replace(self._endpoint, warning=warning)
        self._router.observe(EndpointDescribed(self._endpoint), self._clock())
        if warning is not None:
            self._log.warning("the number of ranks doesn't add up", reason=warning)

    def _tell_restart(self, why: str) -> None:
        self._restart = ""
        self._router.observe(EndpointRestarted(self._endpoint.address), self._clock())
        self._log.warning("restarted", reason=why)
        self._on_restart()

    def _set_ready(self, out: str | None) -> None:
        before = self._router.fleet.why_out(self._endpoint.address, HEALTH)
        if before != out:
            self._router.observe(ReadinessChanged(self._endpoint.address, out), self._clock())
            if out is None:
                self._log.info("ready")
            else:
                self._log.warning("out", reason=out)


def _values(told: Iterable[Described]) -> dict[str, object]:
    """Return what is told, by name; of several the last."""
    return {
        name: value
        for described in told
        for name, value in msgspec.structs.asdict(described).items()
        if value is not None
    }


def _told_names(fixed: frozenset[str]) -> list[str]:
    """Return what an engine may tell of itself, but its role, and the settings don't say."""
    return [name for name in _TOLD if name != "role" and name not in fixed]


def _at_port(endpoint: Endpoint, port: int) -> Endpoint:
    """Return the same host at another port."""
    address = endpoint.address.removesuffix(f":{endpoint.port}")
    return msgspec.structs.replace(endpoint, address=f"{address}:{port}", port=port, api_key=None)


def _refusal(endpoint: Endpoint, path: str, status: int) -> str:
    which = "" if endpoint.api_key else ": none is set (engine_api_key)"
    return f"the engine refused our key{which}; {path} answered {status}"
