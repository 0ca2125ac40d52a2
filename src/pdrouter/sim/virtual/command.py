"""``pdrouter simulate``: runs the sweep or the plan, shows and writes what came of it. Options: ``options.py``."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pdrouter.errors import ConfigError
from pdrouter.sim.virtual.bounds import check_clairvoyant
from pdrouter.sim.virtual.fleet_spec import read_fleet
from pdrouter.sim.virtual.options import MakeOptions, SimulateSettings, cases_of, read_settings
from pdrouter.sim.virtual.page import Report, write_report
from pdrouter.sim.virtual.plan import Plan, Sizes, grid_of, line_of
from pdrouter.sim.virtual.report import rows_of, table_of
from pdrouter.sim.virtual.sweep import BOUNDS, Case, Result, load_trace, run_cases
from pdrouter.sim.virtual.trace import read_entries

FILE_WIDTH = 160
"""Columns of a table that goes to a file."""


def run(flags: dict[str, object], make_options: MakeOptions) -> int:
    """Run the command; return the exit status. Raises: ConfigError."""
    try:
        settings = read_settings(flags)
        fleet = read_fleet(settings.fleet)
        if "clairvoyant" in settings.policy:
            check_clairvoyant(fleet)
        if "recorded" in settings.policy:
            read_entries(settings.trace)
        for load in settings.loads():
            load_trace(load, fleet, 0)  # finds out what is wrong before there are processes
        sizes = Sizes(fleet, settings.gpus) if settings.plan else None
        cases = list(cases_of(settings, settings.loads(), fleet, make_options))
    except ValueError as error:
        raise ConfigError([str(error)]) from None
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    if sizes is not None:
        return _plan(settings, sizes, cases, console)
    results = run_all(cases)
    console.print(table_of(rows_of(results)))
    console.print(_speed_line(results), soft_wrap=True)
    _write(settings, results, None, console)
    return 0


def _plan(settings: SimulateSettings, sizes: Sizes, cases: Sequence[Case], console: Console) -> int:
    plan = Plan(sizes, settings.target)
    results: list[Result] = []
    while pairs := plan.to_try():
        sized = [(pair, case) for pair in pairs for case in sizes.cases(cases, pair)]
        found = run_all([case for _, case in sized])
        plan.tried([pair for pair, _ in sized], found)
        results += found
    console.print(grid_of(plan))
    console.print(line_of(plan), soft_wrap=True)
    _write(settings, results, plan, console)
    return 0 if plan.best is not None else 1


def run_all(cases: Sequence[Case]) -> list[Result]:
    """Run all cases, with a bar on the terminal; results are in the order of the cases."""
    console = Console(stderr=True)
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        found = dict(progress.track(run_cases(cases), total=len(cases)))
    return [found[number] for number in range(len(cases))]


def _write(settings: SimulateSettings, results: Sequence[Result], plan: Plan | None, console: Console) -> None:
    if settings.out is None:
        return
    command = shlex.join(["pdrouter", *sys.argv[1:]])
    report = Report("pdrouter simulate", command, results, plan)
    console.print(write_report(Path(settings.out), report), soft_wrap=True)


def _speed_line(results: Sequence[Result]) -> str:
    requests = sum(result.figures.requests for result in results)
    arrivals = fmean([result.rate_per_s for result in results])
    line = f"{len(results)} runs, {requests:,} requests, {arrivals:.3g} arrivals/s"
    routed = [result for result in results if result.policy not in BOUNDS]
    took_s = sum(result.took_s for result in routed)
    if not took_s:
        return line
    rate = sum(result.figures.requests for result in routed) / took_s
    return f"{line}; simulated {rate:,.0f} requests a second of CPU time and process"
