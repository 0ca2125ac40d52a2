"""From samples to figures: medians and spreads, a table, a JSON file that says where they come from."""

import datetime as dt
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.table import Table

from _cases import CHUNKS, LARGE_BYTES
from _load import Outcome

TITLES = {
    "small": "small request, us/request",
    "large": f"{LARGE_BYTES // 1000} KB body, us/request",
    "stream": f"{CHUNKS}-chunk stream, us/chunk",
}


@dataclass(frozen=True)
class Sample:
    """One run of one case through one router. Units: CPU of its process in microseconds per request."""

    cpu_us: float
    outcome: Outcome

    @property
    def requests(self) -> int:
        """Requests sent."""
        return self.outcome.right + self.outcome.failed


@dataclass(frozen=True)
class Spread:
    """One value for each round."""

    median: float
    min: float
    max: float
    rounds: list[float]

    def __str__(self) -> str:
        """Return the median and, behind it, the extremes."""
        digits = 2 if self.median < 10 else 1
        return f"{self.median:.{digits}f}  ({self.min:.{digits}f}-{self.max:.{digits}f})"


@dataclass(frozen=True)
class Figures:
    """What one case cost one router. Units: `cost_us` per request, per chunk where the case streams."""

    cost_us: Spread
    requests_per_s: float
    reads_per_request: float
    failed: int


@dataclass(frozen=True)
class Row:
    """One case: figures by router, and the ratio of pdrouter to the peer round by round."""

    title: str
    routers: dict[str, Figures]
    ratio: Spread | None


Samples = dict[str, dict[str, list[Sample]]]  # by case and router, in the order of the rounds


def make_rows(samples: Samples) -> dict[str, Row]:
    """Return the rows of the report by case."""
    rows: dict[str, Row] = {}
    for case, by_router in samples.items():
        costs = {name: _costs_us(samples, case, name) for name in by_router}
        figures = {name: _figures(costs[name], runs) for name, runs in by_router.items()}
        ratio = None
        if len(costs) == 2:
            ours, peer = costs.values()
            ratio = _spread([a / b for a, b in zip(ours, peer, strict=True)])
        rows[case] = Row(TITLES[case], figures, ratio)
    return rows


def _costs_us(samples: Samples, case: str, router: str) -> list[float]:
    runs = samples[case][router]
    if case != "stream":
        return [run.cpu_us for run in runs]
    unstreamed = samples["small"][router]
    return [(run.cpu_us - base.cpu_us) / CHUNKS for run, base in zip(runs, unstreamed, strict=True)]


def _figures(costs_us: list[float], runs: list[Sample]) -> Figures:
    return Figures(
        cost_us=_spread(costs_us),
        requests_per_s=round(median(run.requests / run.outcome.seconds for run in runs), 1),
        reads_per_request=round(median(run.outcome.reads / run.requests for run in runs), 1),
        failed=sum(run.outcome.failed for run in runs),
    )


def _spread(values: list[float]) -> Spread:
    rounds = [round(value, 3) for value in values]
    return Spread(round(median(rounds), 3), min(rounds), max(rounds), rounds)


def make_table(rows: dict[str, Row]) -> Table:
    """Return the table: CPU of the router process, median and extremes of the rounds."""
    table = Table(title="CPU of the router process: median (min-max) of the rounds", title_justify="left")
    table.add_column("case")
    names = list(next(iter(rows.values())).routers)
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("ratio", justify="right")
    for name in names:
        table.add_column(f"req/s\n{name}", justify="right")
    for row in rows.values():
        cells = [str(row.routers[name].cost_us) for name in names]
        rates = [f"{row.routers[name].requests_per_s:.0f}" for name in names]
        table.add_row(row.title, *cells, str(row.ratio or "-"), *rates)
    return table


def provenance(root: Path) -> dict[str, str | int]:
    """Return where and how the figures were made."""
    return {
        "time": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 0,
        "system": platform.platform(),
        "python": platform.python_version(),
        "commit": _commit(root),
        "command": shlex.join(["python", *sys.argv]),
    }


def as_json(rows: dict[str, Row], origin: dict[str, str | int]) -> dict[str, object]:
    """Return the whole report."""
    return {**origin, "cases": {case: asdict(row) for case, row in rows.items()}}


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _commit(root: Path) -> str:
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
