"""Honest traffic alone, then beside a hostile client that plays the shared cases in turn; both are compared."""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence

import msgspec
from rich.console import Console

from tests.abuse.case import Case
from tests.abuse.honest import Report
from tests.abuse.stage import BUDGETS_MIB, MIB, Failed, Stage, Watch, open_stage

MOST_SLOWER = 1.5
"""Honest p99 beside the hostile client over that without, at most."""

ALONE_SHARE = 0.25
MOST_LEFT = 1.25
"""Memory at the end over that after the first round of all cases, at most."""


class Soaked(msgspec.Struct):
    """What a soak found. Units: s, MiB."""

    rounds: int
    played: int
    alone: Report
    beside: Report
    before_mib: float
    most_mib: float
    after_first_mib: float
    end_mib: float
    problems: list[str]
    worst_s: dict[str, float]

    @property
    def slower(self) -> float:
        """Honest p99 beside over alone."""
        return self.beside.percentile_s(0.99) / max(1e-9, self.alone.percentile_s(0.99))


async def soak(seconds: float, cases: Sequence[Case], console: Console, *, is_json: bool) -> int:
    """Run it, print what was found; return the exit status."""
    async with open_stage() as stage:
        found = await _soak(stage, seconds, [case for case in cases if case.is_shared])
    wrong = found.alone.wrong + found.beside.wrong
    found.problems += [f"honest: {one} ({count} times)" for one, count in Counter(wrong).most_common(5)]
    if found.slower > MOST_SLOWER:
        found.problems.append(f"honest p99 is {found.slower:.2f} times that without")
    if found.most_mib > found.before_mib + BUDGETS_MIB:
        found.problems.append(f"{found.most_mib:.0f} MB; the budgets allow {found.before_mib + BUDGETS_MIB:.0f}")
    if found.end_mib > MOST_LEFT * found.after_first_mib:
        found.problems.append(f"{found.end_mib:.0f} MB at the end, {found.after_first_mib:.0f} after the first round")
    if is_json:
        sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
    for line in found.problems:
        console.print(line, markup=False)
    ms = [1000 * report.percentile_s(share) for report in (found.alone, found.beside) for share in (0.5, 0.99)]
    console.print(f"honest alone   p50 {ms[0]:7.1f} ms  p99 {ms[1]:7.1f} ms  requests {len(found.alone.latencies_s)}")
    console.print(f"honest beside  p50 {ms[2]:7.1f} ms  p99 {ms[3]:7.1f} ms  requests {len(found.beside.latencies_s)}")
    console.print(
        f"memory {found.before_mib:.0f} MB at start, {found.most_mib:.0f} at most "
        f"(budgets allow {found.before_mib + BUDGETS_MIB:.0f}), {found.end_mib:.0f} at the end"
    )
    worst = sorted(found.worst_s.items(), key=lambda pair: -pair[1])[:5]
    console.print("slowest honest request: " + ", ".join(f"{1000 * s:.0f} ms in {name}" for name, s in worst))
    verdict = "FAILED" if found.problems else "ok"
    console.print(f"abuse-soak: {verdict} rounds={found.rounds} cases={found.played} slower={found.slower:.2f}")
    return 1 if found.problems else 0


async def _soak(stage: Stage, seconds: float, cases: Sequence[Case]) -> Soaked:
    stage.give_way()
    await asyncio.sleep(2.0)  # the first requests pay for imports
    await stage.report()
    await asyncio.sleep(ALONE_SHARE * seconds)
    alone = await stage.report()
    watch = Watch(stage.router)
    watching = asyncio.create_task(watch.run())
    found = Soaked(0, 0, alone, Report([], []), watch.before_bytes / MIB, 0.0, 0.0, 0.0, [], {})
    end_s = time.monotonic() + (1 - ALONE_SHARE) * seconds
    while time.monotonic() < end_s:
        for case in cases:
            if time.monotonic() >= end_s:
                break
            await _play(case, stage, found)
            await _collect(stage, found, case.name)
        found.rounds += 1
        if found.rounds == 1:
            found.after_first_mib = stage.router.rss_bytes() / MIB
        sys.stderr.write(f"round {found.rounds}, {found.played} cases, {len(found.problems)} problems\n")
    watching.cancel()
    await asyncio.sleep(1.0)
    await _collect(stage, found, "after the last")
    found.most_mib, found.end_mib = watch.most_bytes / MIB, stage.router.rss_bytes() / MIB
    return found


async def _collect(stage: Stage, found: Soaked, name: str) -> None:
    """Take in what became of honest traffic while a case played."""
    report = await stage.report()
    found.beside.latencies_s += report.latencies_s
    found.beside.wrong += report.wrong
    found.worst_s[name] = max([found.worst_s.get(name, 0.0), *report.latencies_s])


async def _play(case: Case, stage: Stage, found: Soaked) -> None:
    found.played += 1
    try:
        async with asyncio.timeout(60):
            await case.play(stage)
            await stage.router.ledger_is_zero()
    except (Failed, TimeoutError, OSError, EOFError) as error:
        if len(found.problems) < 20:
            found.problems.append(f"{case.name}: {error!r}"[:200])
