"""Shows figures: a table for people, CSV and JSON for everybody else. Knows no runs."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table

from pdrouter.sim.virtual.figures import Estimate, Figures, estimates
from pdrouter.sim.virtual.sweep import Result

_UNKNOWN = "-"


class Column(NamedTuple):
    """How a figure is shown: its title, its unit, and how it is scaled and formatted."""

    title: str
    unit: str
    scale: float
    form: str


COLUMNS: Mapping[str, Column] = {
    "ttft_p50_s": Column("TTFT\np50", "s", 1, ".2f"),
    "ttft_p90_s": Column("TTFT\np90", "s", 1, ".2f"),
    "ttft_p99_s": Column("TTFT\np99", "s", 1, ".2f"),
    "token_p50_s": Column("token\np50", "ms", 1000, ".1f"),
    "token_p99_s": Column("token\np99", "ms", 1000, ".1f"),
    "end_to_end_p50_s": Column("whole\np50", "s", 1, ".1f"),
    "slowdown_p90": Column("slowdown\np90", "times", 1, ".2f"),
    "attainment": Column("in\nSLO", "%", 100, ".1f"),
    "goodput_per_s": Column("good", "1/s", 1, ".2f"),
    "hit_rate": Column("prefix\nhits", "%", 100, ".1f"),
    "prefill_imbalance": Column("P max/\nmean", "times", 1, ".2f"),
    "decode_imbalance": Column("D max/\nmean", "times", 1, ".2f"),
    "preemptions": Column("pre-\nempted", "", 1, ".0f"),
    "rejected": Column("rejected", "", 1, ".0f"),
}


class Row(msgspec.Struct, frozen=True):
    """A policy under a load, or with a fleet, over all its seeds; ``title`` says which."""

    title: str
    policy: str
    figures: Mapping[str, Estimate]


def rows_of(results: Sequence[Result]) -> list[Row]:
    """Return a row for each title and policy, in the order of the results."""
    runs: dict[tuple[str, str], list[Figures]] = {}
    for result in results:
        runs.setdefault((result.title, result.policy), []).append(result.figures)
    return [Row(title, policy, estimates(figures)) for (title, policy), figures in runs.items()]


def table_of(rows: Sequence[Row]) -> Table:
    """Return the table; under a mean is half the width of its 95 % confidence interval."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("")
    table.add_column("policy", overflow="fold", min_width=12)
    for column in COLUMNS.values():
        table.add_column(f"{column.title}\n{column.unit}", justify="right", no_wrap=True)
    title = ""
    for row in rows:
        if row.title != title:
            table.add_section()
        cells = [_shown(*cell_of(column, row.figures.get(name))) for name, column in COLUMNS.items()]
        table.add_row(row.title if row.title != title else "", row.policy, *cells)
        title = row.title
    return table


def cell_of(column: Column, value: Estimate | None) -> tuple[str, str]:
    """Return a mean, and half the width of its interval if there is one, as they are shown."""
    if value is None:
        return _UNKNOWN, ""
    half = value.half_width
    return f"{value.mean * column.scale:{column.form}}", f"±{half * column.scale:{column.form}}" if half else ""


def _shown(mean: str, half: str) -> str:
    return f"{mean}\n[dim]{half}[/dim]" if half else mean


def write_files(directory: Path, command: str, rows: Sequence[Row], results: Sequence[Result]) -> None:
    """Write ``runs.csv``, a line for each run, and ``results.json``, with the command that made them."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "runs.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["title", "policy", "seed", "rate_per_s", *Figures.__struct_fields__])
        for result in results:
            figures = msgspec.structs.astuple(result.figures)
            writer.writerow([result.title, result.policy, result.seed, result.rate_per_s, *figures])
    document = {"command": command, "policies": rows, "runs": results}
    (directory / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
