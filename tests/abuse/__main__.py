"""``make abuse``: plays every case and prints a table; ends with 0 if each ended as it must.

``--soak SECONDS`` plays the shared cases again and again beside honest traffic instead (``soak.py``).
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import uvloop
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tests.abuse import clients, engines, operator, tenants  # noqa: F401 - they fill CASES
from tests.abuse.case import CASES, Case
from tests.abuse.soak import soak
from tests.abuse.stage import Failed, Stage, Watch, open_stage

MOST_LATE_S = 1.5
"""Longest that an honest request may take meanwhile; alone, it takes some 20 ms. Chosen."""

CASE_S = 90.0
WIDTH = 80


class Result(NamedTuple):
    """What happened in a case; ``late_s``: the slowest honest request meanwhile."""

    item: int
    name: str
    input: str
    limit: str
    happened: str
    is_ok: bool
    grown_mib: float
    late_s: float
    honest: int


async def play(case: Case, stage: Stage) -> Result:
    """Play one case, and look at what else must hold."""
    await stage.report()
    watch = Watch(stage.router)
    watching = asyncio.create_task(watch.run())
    wrong: list[str] = []
    happened = ""
    try:
        async with asyncio.timeout(CASE_S):
            happened = await case.play(stage)
            await stage.router.ledger_is_zero()
    except Failed as error:
        wrong.append(str(error))
    except (TimeoutError, OSError, EOFError) as error:
        wrong.append(f"no answer: {error!r}")
    finally:
        watching.cancel()
    report = await stage.report()
    late_s = max(report.latencies_s, default=0.0)
    wrong += [f"honest: {one}" for one in report.wrong[:1]]
    if late_s > MOST_LATE_S:
        wrong.append(f"honest traffic waited {late_s:.1f} s")
    if watch.grown_mib > case.grows_mib:
        wrong.append(f"grew by {watch.grown_mib:.0f} MB")
    told = "; ".join(wrong) or happened
    honest = len(report.latencies_s)
    return Result(
        case.item, case.name, case.input, case.limit, told, not wrong, round(watch.grown_mib, 1), late_s, honest
    )


def chosen(names: Sequence[str]) -> list[Case]:
    """Return the cases of these names, or all."""
    return sorted((case for case in CASES if not names or case.name in names), key=lambda case: case.item)


async def run(cases: Sequence[Case]) -> list[Result]:
    """Play cases."""
    results: list[Result] = []
    async with open_stage() as stage:
        for number, case in enumerate(cases, 1):
            sys.stderr.write(f"{number}/{len(cases)} {case.name}\n")
            results.append(await play(case, stage))
    return results


def table(results: Sequence[Result]) -> Table:
    """Return the table of all cases."""
    shown = Table(box=SIMPLE_HEAD, width=WIDTH, padding=(0, 1, 0, 0))
    for name, width in (("#", 2), ("input", 26), ("limit", 18), ("what happened", 22), ("ok", 3)):
        shown.add_column(name, min_width=width, max_width=width, overflow="fold")
    for one in results:
        shown.add_row(str(one.item or "-"), one.input, one.limit, one.happened, "yes" if one.is_ok else "NO")
    return shown


def main() -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.abuse", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="one case, by its name; repeatable")
    parser.add_argument("--list", action="store_true", help="print the cases' names and inputs")
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="all shared cases in turn, beside honest traffic")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    console = Console(width=WIDTH, highlight=False)
    if args.list:
        for case in CASES:
            console.print(f"{case.item or '-':>2} {case.name:24} {case.input}", markup=False)
        return 0
    if args.soak is not None:
        return uvloop.run(soak(args.soak, chosen(args.only), console, is_json=args.json))
    results = uvloop.run(run(chosen(args.only)))
    is_ok = bool(results) and all(one.is_ok for one in results)
    if args.json:
        sys.stdout.buffer.write(msgspec.json.encode([one._asdict() for one in results]) + b"\n")
    else:
        console.print(table(results), markup=False)
        failed = sum(not one.is_ok for one in results)
        console.print(f"abuse: {'ok' if is_ok else 'FAILED'} cases={len(results)} failed={failed}")
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(main())
