"""Figures of the demo: what a run has shown so far, two runs side by side, the last line.

Pure: values in, rich tables and text out.
"""

from collections import Counter
from collections.abc import Sequence
from math import ceil

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table

from pdrouter.sim.demo_client import Answer

_PROBLEMS_SHOWN = 5


class RunResult:
    """What one run has shown so far. Units: seconds; ``ledger`` None: not known."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.planned = 0
        self.ttfts_s: list[float] = []
        self.tokens_s: list[float] = []
        self.problems: Counter[str] = Counter()
        self.answered = 0
        self.imbalance: dict[str, float | None] = {}
        self.ledger: float | None = None
        self.lag_s = 0.0
        self.took_s = 0.0
        self.cpu_share = 0.0

    def add(self, answer: Answer) -> None:
        """Take in an answer."""
        self.answered += 1
        if answer.problem:
            self.problems[answer.problem] += 1
            return
        if answer.ttft_s is not None:
            self.ttfts_s.append(answer.ttft_s)
        if answer.token_s is not None:
            self.tokens_s.append(answer.token_s)

    def give_up(self, reason: str) -> None:
        """Count every answer that never came as failed, and one failure at least."""
        self.problems[reason] += max(1, self.planned - self.answered)

    @property
    def failed(self) -> int:
        """Answers that weren't right."""
        return self.problems.total()

    @property
    def is_ok(self) -> bool:
        """All answers right, nothing left in the ledger."""
        return self.planned > 0 and self.answered == self.planned and not self.failed and self.ledger == 0


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the value that ``share`` of all values don't exceed (nearest rank)."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)] if values else None


def shown_s(seconds: float | None) -> str:
    """Text of a time: seconds from 1 s on, else milliseconds."""
    if seconds is None:
        return "-"
    return (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{seconds * 1000:.1f} ms"
        if seconds < 0.1
        else f"{seconds * 1000:.0f} ms"
    )


class _Line(msgspec.Struct, frozen=True):
    name: str
    values: list[float | None]
    is_time: bool


def side_by_side(runs: Sequence[RunResult]) -> Table:
    """Table of all figures, a column for each run and one for how many times better the first is."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("")
    for run in runs:
        table.add_column(run.title, justify="right")
    if len(runs) > 1:
        table.add_column("times", justify="right")
    for line in _lines(runs):
        cells = [shown_s(v) if line.is_time else "-" if v is None else f"{v:.2f}" for v in line.values]
        if len(runs) > 1:
            first, second = line.values[:2]
            cells.append(f"{second / first:.2f}" if first and second else "-")
        table.add_row(line.name, *cells)
    table.add_section()
    for name in ("requests", "failed"):
        counts = [run.answered if name == "requests" else run.failed for run in runs]
        table.add_row(name, *map(str, counts))
    return table


def _lines(runs: Sequence[RunResult]) -> list[_Line]:
    lines = []
    for share in (0.5, 0.9, 0.99):
        values = [percentile(run.ttfts_s, share) for run in runs]
        lines.append(_Line(f"TTFT p{share * 100:.0f}", values, is_time=True))
    for share in (0.5, 0.9, 0.99):
        values = [percentile(run.tokens_s, share) for run in runs]
        lines.append(_Line(f"time per token p{share * 100:.0f}", values, is_time=True))
    for name in runs[0].imbalance:
        values = [run.imbalance.get(name) for run in runs]
        lines.append(_Line(f"tokens {name}, max/mean", values, is_time=False))
    return lines


def run_line(run: RunResult) -> str:
    """Say in a line how a run went, and whether this machine was fast enough to measure it."""
    return (
        f"{run.title}: {run.answered} answers in {run.took_s:.1f} s, {run.failed} failed; "
        f"CPU {run.cpu_share:.0%} of this machine, the client's loop late by {shown_s(run.lag_s)} (p99)"
    )


def problem_lines(run: RunResult) -> list[str]:
    """Most frequent failures of a run."""
    return [f"  {count} x {problem}" for problem, count in run.problems.most_common(_PROBLEMS_SHOWN)]


def last_line(runs: Sequence[RunResult]) -> str:
    """Return the verdict over all runs."""
    verdict = "ok" if runs and all(run.is_ok for run in runs) else "FAILED"
    ledgers = [run.ledger for run in runs]
    known = [ledger for ledger in ledgers if ledger is not None]
    ledger = str(ceil(sum(known))) if ledgers and len(known) == len(ledgers) else "unknown"
    requests = sum(run.planned for run in runs)
    return f"demo: {verdict} requests={requests} failed={sum(run.failed for run in runs)} ledger={ledger}"
