"""``pdrouter demo``: the same recorded traffic through a router that looks at load, and through one that doesn't.

Says what is run, and what came of it; one run is ``demo_run.py``, its figures ``demo_report.py``, what is shown
meanwhile ``demo_table.py``.
"""

import asyncio
import importlib.util
import signal
import sys

import msgspec
from rich.console import Console

from pdrouter.sim import demo_run
from pdrouter.sim.demo_report import RunResult, last_line, problem_lines, run_line, side_by_side
from pdrouter.sim.demo_run import DemoRun, Plan
from pdrouter.sim.demo_table import Display, LiveTable, PlainLines
from pdrouter.sim.workload import TRACE_TICK_S, Scale

LENGTH_DIVISOR = 2
ARRIVAL_FACTOR = 7.0
"""Both chosen so that eight prefill ranks are busy four fifths of the time and a small machine isn't."""

_COMPARED = ("round_robin", ["--policy", "round_robin", "--rank-policy", "engine"])
_LIMIT_FACTOR = 3.0
_LEAST_DRAIN_S = 15.0
_MISSING = "pdrouter demo needs the openai package: pip install 'pdrouter[demo]'\n"


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. ``seconds``: length of each run; ``compare``: a second run without looking at load."""

    seconds: float
    speed: float
    policy: str
    compare: bool
    plain: bool


def run(options: DemoOptions) -> int:
    """Run the demo; return 0 if all answers were right, 1 if not, 2 if it can't run, 128 + signal if stopped."""
    if importlib.util.find_spec("openai") is None:
        sys.stderr.write(_MISSING)
        return 2
    return asyncio.run(_until_signal(options))


async def _until_signal(options: DemoOptions) -> int:
    """Run the demo; the first signal ends it and its processes, further ones change nothing."""
    task, caught = asyncio.create_task(_Demo(options).run()), list[int]()

    def stop(number: int) -> None:
        if not caught:
            task.cancel()
        caught.append(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not caught:
            raise
        return 128 + caught[0]


class _Demo:
    """All runs."""

    def __init__(self, options: DemoOptions) -> None:
        self._options = options
        self._console = Console(highlight=False, markup=False)
        self._display: Display = (PlainLines if options.plain else LiveTable)(self._console)
        self._plan = Plan(
            seconds=options.seconds,
            speed=options.speed,
            scale=Scale(lengths=LENGTH_DIVISOR, arrivals=ARRIVAL_FACTOR * options.speed),
            limit_s=max(_LIMIT_FACTOR * options.seconds, options.seconds + _LEAST_DRAIN_S),
        )

    async def run(self) -> int:
        """Return the exit status."""
        policy = self._options.policy
        styles = [(policy, ["--policy", policy])]
        if self._options.compare:
            styles.append(_COMPARED)
        self._say(self._header())
        results: list[RunResult] = []
        for number, (title, flags) in enumerate(styles, 1):
            self._say(f"\nrun {number} of {len(styles)}: pdrouter serve {' '.join(flags)} ...")
            results.append(await self._one(RunResult(title), flags))
        self._say("")
        self._console.print(side_by_side(results))
        self._say(last_line(results))
        return 0 if all(result.is_ok for result in results) else 1

    async def _one(self, result: RunResult, flags: list[str]) -> RunResult:
        try:
            await DemoRun(self._plan, result, self._display, self._say).play(flags)
        finally:
            self._display.stop()
        for line in (run_line(result), *problem_lines(result)):
            self._say(line)
        return result

    def _header(self) -> str:
        plan = self._plan
        count = demo_run.ENDPOINTS_PER_ROLE
        return (
            f"pdrouter demo: {count} prefill and {count} decode endpoints of {demo_run.RANKS} ranks, emulated: "
            f"{demo_run.PROFILE}, speed x{plan.speed:g}\n"
            f"traffic: {plan.seconds:g} s of the Mooncake conversation trace, lengths /{plan.scale.lengths}, arrivals "
            f"x{plan.scale.arrivals:g}, spread evenly over the trace's {TRACE_TICK_S:g} s ticks\n"
            f"client: openai, streaming, {demo_run.STREAM_INTERVAL_TOKENS} tokens a chunk; every answer is checked"
        )

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)
