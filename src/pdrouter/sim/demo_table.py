"""What the demo shows while it runs: a live table of all ranks, or a line now and then.

Knows how things look, not where they come from.
"""

from collections.abc import Sequence
from typing import Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pdrouter.sim.demo_loads import EndpointLoads, RankLoad
from pdrouter.sim.demo_report import RunResult, percentile, shown_s

_LINE_PERIOD_S = 5.0
_REFRESHES_PER_S = 4.0
_BAR_CELLS = 8
_COLUMNS = {"endpoint": 9, "rank": 4, "tokens waiting": 14, "": _BAR_CELLS, "KV in use": 15, "running": 7, "queued": 6}
_NUMBERS = _COLUMNS.keys() - {"endpoint", ""}


class Display(Protocol):
    """Shows a run."""

    def start(self, run: RunResult, seconds: float) -> None:
        """Begin; arrivals take ``seconds``."""
        ...

    def update(self, elapsed_s: float, endpoints: Sequence[EndpointLoads]) -> None:
        """Show how things are now."""
        ...

    def stop(self) -> None:
        """Leave the terminal as it was; may be called twice."""
        ...


def progress_text(run: RunResult) -> str:
    """Answers and time to first token so far."""
    ttfts_s = run.ttfts_s
    return (
        f"{run.answered}/{run.planned} answers, {run.failed} failed, TTFT p50 {shown_s(percentile(ttfts_s, 0.5))} "
        f"p99 {shown_s(percentile(ttfts_s, 0.99))}"
    )


class PlainLines:
    """A line every few seconds, for logs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next_s = _LINE_PERIOD_S

    def start(self, run: RunResult, seconds: float) -> None:
        """Begin; arrivals take ``seconds``."""
        self._run, self._seconds = run, seconds
        self._next_s = _LINE_PERIOD_S

    def update(self, elapsed_s: float, endpoints: Sequence[EndpointLoads]) -> None:
        """Print a line if it is time."""
        if elapsed_s < self._next_s:
            return
        self._next_s = elapsed_s + _LINE_PERIOD_S
        waiting = sum(rank.num_waiting_uncached_tokens for e in endpoints for rank in e.ranks)
        where = f"{elapsed_s:4.0f} s of {self._seconds:g}" if elapsed_s < self._seconds else "last answers"
        text = f"  {where}: {progress_text(self._run)}, {waiting:,} tokens waiting"
        self._console.print(text, soft_wrap=True)

    def stop(self) -> None:
        """Nothing is left behind."""


class LiveTable:
    """A table of endpoints and ranks that is drawn anew four times a second."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None

    def start(self, run: RunResult, seconds: float) -> None:
        """Begin; arrivals take ``seconds``."""
        self._run, self._seconds = run, seconds
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def update(self, elapsed_s: float, endpoints: Sequence[EndpointLoads]) -> None:
        """Draw."""
        bar = ProgressBar(total=self._seconds, completed=min(elapsed_s, self._seconds), width=40)
        done = f" {elapsed_s:.0f} s of {self._seconds:g}" + (", last answers" if elapsed_s > self._seconds else "")
        line = Table.grid()
        line.add_row(bar, done)
        if self._live is not None:
            self._live.update(Group(_rank_table(endpoints), line, Text(progress_text(self._run))), refresh=True)

    def stop(self) -> None:
        """Clear the table."""
        if self._live is not None:
            self._live.stop()


def _rank_table(endpoints: Sequence[EndpointLoads]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name, width in _COLUMNS.items():
        table.add_column(name, width=width, no_wrap=True, justify="right" if name in _NUMBERS else "left")
    most = max([_held(e.role, r) for e in endpoints for r in e.ranks], default=0)
    for endpoint in endpoints:
        for rank in endpoint.ranks:
            table.add_row(
                endpoint.name if rank is endpoint.ranks[0] else "",
                str(rank.dp_rank),
                f"{rank.num_waiting_uncached_tokens:,}" if endpoint.role == "prefill" else "",
                "█" * (round(_BAR_CELLS * _held(endpoint.role, rank) / most) if most else 0),
                f"{rank.num_used_tokens:,} ({rank.num_used_tokens / rank.capacity_tokens:.1%})",
                str(rank.num_running_reqs),
                str(rank.num_waiting_reqs),
            )
    return table


def _held(role: str, rank: RankLoad) -> int:
    """Tokens that the bar shows: what waits for a prefill, or what a decode holds."""
    return rank.num_total_tokens if role == "decode" else rank.num_waiting_uncached_tokens
