"""``pdrouter replay``: sends a trace to a live endpoint, shows and writes what its client saw. Options: ``options.py``.

Ctrl-C ends it with what was measured so far.
"""

import asyncio
import importlib.util
import secrets
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

import msgspec
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pdrouter.errors import ConfigError
from pdrouter.sim.replay.caller import Ask, Caller, CannotAsk
from pdrouter.sim.replay.figures import Measure, Places, notes_of, result_of, write_requests
from pdrouter.sim.replay.options import ReplaySettings, read_settings
from pdrouter.sim.replay.player import Played, Player, Sent
from pdrouter.sim.replay.prompts import IDS, Density, Prompts, density_of, probes
from pdrouter.sim.virtual.command import FILE_WIDTH
from pdrouter.sim.virtual.page import Report, write_report
from pdrouter.sim.virtual.report import rows_of, table_of
from pdrouter.sim.virtual.sweep import Result, load_trace
from pdrouter.sim.virtual.trace import Request, Trace

_MISSING = "pdrouter replay needs the openai package: pip install 'pdrouter[demo]'"
_PAGE_TIMEOUT_S = 5.0
_INTERRUPTED = 130


class _Rank(msgspec.Struct):
    rank: int


class _Endpoint(msgspec.Struct):
    address: str
    role: str
    ranks: Sequence[_Rank]


class _Fleet(msgspec.Struct):
    endpoints: Sequence[_Endpoint]


class _Beside(msgspec.Struct):
    runs: Sequence[Result]


class Replayed(NamedTuple):
    """What came of a replay, and over which ranks."""

    played: Played
    places: Places
    is_stopped: bool


def run(flags: dict[str, object]) -> int:
    """Run the command; return the exit status: 1 if requests failed, 130 if it was stopped. Raises: ConfigError."""
    if importlib.util.find_spec("openai") is None:
        raise ConfigError([_MISSING])
    try:
        settings = read_settings(flags)
        trace = load_trace(settings.load, (), settings.seed or 0)
        beside = _read_beside(settings)
    except ValueError as error:
        raise ConfigError([str(error)]) from None
    try:
        replayed = uvloop.run(_Replay(settings, trace).run())
    except CannotAsk as error:
        raise ConfigError([f"{settings.root}: {error}"]) from None
    return _tell(settings, trace, replayed, beside)


def _key(settings: ReplaySettings) -> tuple[str, str, int]:
    """Return what tells its run from others in a table."""
    return settings.load.label, settings.name, settings.seed or 0


def _read_beside(settings: ReplaySettings) -> Sequence[Result]:
    """Return the runs to show as well. Raises: ValueError."""
    results = [result for directory in settings.beside for result in _read_results(Path(directory))]
    if _key(settings) in [(result.title, result.policy, result.seed) for result in results]:
        raise ValueError(f"--beside: there is {settings.name!r} with this rate and seed; give another --name or --seed")
    return results


def _read_results(directory: Path) -> Sequence[Result]:
    path = directory / "results.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Beside).runs
    except OSError as error:
        raise ValueError(f"--beside: {path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ValueError(f"--beside: {path}: {error}") from None


def _tell(settings: ReplaySettings, trace: Trace, replayed: Replayed, beside: Sequence[Result]) -> int:
    played = replayed.played
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    if not played.sent:
        console.print("stopped before any request had ended")
        return _INTERRUPTED
    measure = Measure(*_key(settings), settings.speed, settings.objective)
    result = result_of(played, trace, replayed.places, measure)
    if any((other.title, other.policy) == (result.title, result.policy) for other in beside):
        result = msgspec.structs.replace(result, curves=None)  # pictures show the first seed
    results = [*beside, result]
    notes = notes_of(played, len(trace.requests))
    console.print(table_of(rows_of(results)))
    for note in notes:
        console.print(note, soft_wrap=True, highlight=False, markup=False)
    if settings.out is not None:
        report = Report("pdrouter replay", _command(), results, notes=notes)
        console.print(write_report(Path(settings.out), report), soft_wrap=True)
        write_requests(Path(settings.out) / "requests.csv", played, settings.speed)
    if replayed.is_stopped:
        return _INTERRUPTED
    has_failed = any(sent.seen.problem for sent in played.sent)
    return 1 if has_failed and not settings.allow_failures else 0


class _Replay:
    """One replay: finds out what it must know of the endpoint, then plays."""

    def __init__(self, settings: ReplaySettings, trace: Trace) -> None:
        self._settings = settings
        self._trace = trace
        self._salt = secrets.token_hex(8) if settings.seed is None else str(settings.seed)
        self._caller = Caller(settings.root, settings.key, settings.max_in_flight, settings.timeout)
        self._extra = {"ignore_eos": True} if settings.ignore_eos else {}

    async def run(self) -> Replayed:
        """Play. Raises: CannotAsk."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def stopped() -> None:
            stop.set()
            loop.remove_signal_handler(signal.SIGINT)  # a second one ends it at once

        loop.add_signal_handler(signal.SIGINT, stopped)
        try:
            models = await self._models()
            density = IDS if self._settings.token_ids else await self._density(models[0])
            places = await asyncio.to_thread(_places, self._settings.root)
            player = Player(
                self._caller,
                self._trace.requests,
                self._maker(models, density),
                self._settings.max_in_flight,
                self._settings.speed,
            )
            with _bar(len(self._trace.requests)) as ended:
                played = await player.play(stop, ended)
        finally:
            await self._caller.aclose()
        return Replayed(played, places, stop.is_set())

    async def _models(self) -> Sequence[str]:
        """Return the models that may be asked for, the usual one first."""
        if self._settings.model is not None:
            return [self._settings.model]
        models = await self._caller.models()
        if not models:
            raise CannotAsk("it serves no model yet; --model NAME asks for one all the same")
        return models

    async def _density(self, model: str) -> Density:
        counts = []
        for prompt in probes(self._salt):
            seen = await self._caller.ask(Ask(model=model, prompt=prompt, output_tokens=1))
            if seen.prompt_tokens is None:
                raise CannotAsk(seen.problem or "it doesn't count the tokens of a prompt; try --token-ids")
            counts.append(seen.prompt_tokens)
        return density_of(*counts)

    def _maker(self, models: Sequence[str], density: Density) -> Callable[[int, Request], Ask]:
        prompts = Prompts(self._trace.block_tokens, density, self._salt)
        make = prompts.ids if self._settings.token_ids else prompts.text

        def ask(number: int, request: Request) -> Ask:
            return Ask(
                model=request.model if request.model is not None and request.model in models else models[0],
                prompt=make(number, request),
                output_tokens=request.output_tokens,
                extra=self._extra,
            )

        return ask


def _places(root: str) -> Places:
    """Ask a router for its ranks; whatever else answers there has none to tell."""
    try:
        with urlopen(f"{root}/debug/fleet", timeout=_PAGE_TIMEOUT_S) as reply:  # noqa: S310 - http or https
            fleet = msgspec.json.decode(reply.read(), type=_Fleet)
    except (OSError, HTTPException, msgspec.MsgspecError):
        return Places()
    named = [(e.role, f"{e.address}; rank={rank.rank}") for e in fleet.endpoints for rank in e.ranks]
    readers, writers = ([name for role, name in named if role != other] for other in ("decode", "prefill"))
    return Places(readers, writers)


@contextmanager
def _bar(count: int) -> Iterator[Callable[[Sent], None]]:
    """Show on the terminal how many have ended, and how many of them failed."""
    console = Console(stderr=True)
    columns = (
        TextColumn("replaying"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=count, failed=0)
        failed = 0

        def ended(sent: Sent) -> None:
            nonlocal failed
            failed += bool(sent.seen.problem)
            progress.update(task, advance=1, failed=failed)

        yield ended


def _command() -> str:
    """Return the command as it was typed, but for its key."""
    words = ["pdrouter", *sys.argv[1:]]
    for index, word in enumerate(words):
        if word.startswith("--api-key="):
            words[index] = "--api-key=..."
        elif words[index - 1] == "--api-key":
            words[index] = "..."
    return shlex.join(words)
