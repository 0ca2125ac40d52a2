"""Log lines by structlog: each decision at debug, each imbalance, fallback and failure at info or above.

A line never decides anything: what can't be put into words or written is lost, and whoever logs goes on (``sink.py``).
"""

import logging
from collections.abc import MutableMapping
from typing import Protocol

import structlog

from pdrouter.core.decision import Decision, Placement
from pdrouter.core.request import RequestFacts
from pdrouter.errors import FOREIGN_FAULTS, RouterError

_TRACE = "exception"
"""The one field with line ends of our own."""

_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error")}


_TALKATIVE = ("python_multipart",)
"""Loggers of libraries that warn of each malformed request: clients could fill the log by them."""


class Stream(Protocol):
    """Where lines are written."""

    def write(self, text: str, /) -> int:
        """Take a line; never wait, never fail."""
        ...

    def flush(self) -> None:
        """Take note that a line has ended."""

    def isatty(self) -> bool:
        """Whether people watch."""
        ...


def set_up_logs(level: str, log_format: str, stream: Stream) -> None:
    """Configure structlog: lines for people on a terminal, JSON elsewhere, unless ``log_format`` says which."""
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    is_console = log_format == "console" or (log_format == "auto" and stream.isatty())
    renderer = structlog.dev.ConsoleRenderer() if is_console else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            *([_escape] if is_console else []),  # JSON escapes by itself
            renderer,
        ],
        wrapper_class=_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(stream),  # type: ignore[arg-type]  # it only writes and flushes
        cache_logger_on_first_use=True,
    )


def _bound_logger(level: int) -> type[structlog.typing.FilteringBoundLogger]:
    filtering = structlog.make_filtering_bound_logger(level)

    class NeverFailing(filtering):  # type: ignore[valid-type, misc]
        """Loses a line rather than the work of whoever logs."""

        def _proxy_to_logger(self, *args: object, **fields: object) -> None:
            try:
                super()._proxy_to_logger(*args, **fields)
            except FOREIGN_FAULTS:
                return

    return NeverFailing


def _escape(_logger: object, _method: str, fields: MutableMapping[str, object]) -> MutableMapping[str, object]:
    """Escape what could move a terminal's cursor or forge a line: C0 and C1 controls, and what turns text around."""
    for name, value in fields.items():
        if isinstance(value, str) and not value.isprintable():
            kept = "\n\t" if name == _TRACE else ""
            fields[name] = "".join([c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in value])
    return fields


class DecisionLog:
    """Tells what was decided and why. Nothing is put into words below the level that is shown."""

    def __init__(self, level: str) -> None:
        self._log = structlog.stdlib.get_logger("pdrouter.decisions")
        self._level = _LEVELS[level]

    def decided(self, decision: Decision) -> None:
        """Tell of a decision: all of it at debug; an imbalance or a fallback at info."""
        if self._level <= logging.DEBUG:
            self._log.debug("decided", **_told(decision))
        if self._level <= logging.INFO:
            if decision.prefill is not None:
                self._tell_notable(decision, decision.prefill)
            self._tell_notable(decision, decision.decode)

    def _tell_notable(self, decision: Decision, place: Placement) -> None:
        if not place.endpoint_why.is_notable and not place.rank_why.is_notable:
            return
        for why in (place.endpoint_why, place.rank_why):
            if why.is_notable:
                self._log.info(
                    why.rule,
                    request_id=decision.facts.request_id,
                    leg=place.kind.value,
                    chosen=place.label,
                    reason=why.sentence(),
                )

    def rejected(self, facts: RequestFacts, error: RouterError) -> None:
        """Tell why a request can't be placed."""
        self._log.warning("rejected", request_id=facts.request_id, code=error.code, reason=error.message)

    def failed(self, decision: Decision, error: RouterError) -> None:
        """Tell why a placed request failed; a client that left is no failure of anybody.

        What the engine said may have the prompt in it: it is told at debug level only.
        """
        is_fault = error.counts_against_health or error.status >= 500
        level = logging.WARNING if is_fault else logging.INFO
        if self._level <= level:
            said = {"engine_said": error.detail} if error.detail and self._level <= logging.DEBUG else {}
            self._log.log(level, "failed", code=error.code, reason=error.message, **said, **_told(decision))


def _told(decision: Decision) -> dict[str, object]:
    told: dict[str, object] = {
        "request_id": decision.facts.request_id,
        "prompt_tokens": decision.facts.prompt_tokens,
        "prefix_tokens": decision.prefix_tokens,
    }
    for place in decision.placements:
        told[place.kind.value] = place.label
        told[f"{place.kind.value}_why"] = _why(place)
    return told


def _why(place: Placement) -> str:
    age = "no report" if place.report_age_s is None else f"report {place.report_age_s:.1f} s old"
    return f"{place.endpoint_why.sentence()}; {place.rank_why.sentence()}; {age}"
