"""Runs of a sweep: each policy with each seed, in as many processes as there are cores. Prints nothing.

A case is all that a run needs, and goes to its process as it is. Next: ``report.py``.
"""

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence

import msgspec

from pdrouter.core.router import Router, RouterOptions
from pdrouter.sim.profiles import load_profiles
from pdrouter.sim.simulator import Simulator, SimulatorSettings
from pdrouter.sim.virtual.bounds import alone, clairvoyant
from pdrouter.sim.virtual.figures import Curves, Figures, Objective, curves_of, figures_of
from pdrouter.sim.virtual.fleet_spec import EngineSpec, utilisation_rate_per_s
from pdrouter.sim.virtual.generators import generate, read_generator
from pdrouter.sim.virtual.recorded import recorded, without_hits
from pdrouter.sim.virtual.run import Run
from pdrouter.sim.virtual.trace import Trace, read_trace

BOUNDS = ("clairvoyant", "alone", "recorded")
"""Names that stand for no policy, but for what policies are measured by; the last: how a journal's requests went."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What comes: a trace by its name, how many requests of it (``None``: all), and how fast.

    ``rate_per_s`` or ``utilisation`` say how fast; as recorded if neither does.
    """

    trace: str
    requests: int | None = None
    rate_per_s: float | None = None
    utilisation: float | None = None

    @property
    def label(self) -> str:
        """How fast, in words."""
        if self.utilisation is not None:
            return f"{100 * self.utilisation:g} %"
        return "as recorded" if self.rate_per_s is None else f"{self.rate_per_s:g}/s"


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One run; ``options`` are those of the router, ``None`` for a bound, ``title`` says what else differs."""

    title: str
    policy: str
    options: RouterOptions | None
    fleet: Sequence[EngineSpec]
    load: Load
    settings: SimulatorSettings
    objective: Objective
    has_curves: bool


class Result(msgspec.Struct, frozen=True):
    """What a case has shown; ``rate_per_s`` are arrivals, ``took_s`` is CPU time of the run itself."""

    title: str
    policy: str
    seed: int
    rate_per_s: float
    took_s: float
    figures: Figures
    curves: Curves | None = None


def load_trace(load: Load, fleet: Sequence[EngineSpec], seed: int) -> Trace:
    """Return the requests that come.

    Raises: ValueError that says what is wrong.
    """
    generator = read_generator(load.trace)
    trace = read_trace(load.trace, seed) if generator is None else generate(generator, seed)
    if load.requests is not None:
        trace = trace.repeated(load.requests)
    rate_per_s = load.rate_per_s
    if load.utilisation is not None:
        prompts_tokens = [request.prompt_tokens for request in trace.requests]
        rate_per_s = utilisation_rate_per_s(fleet, load_profiles(), prompts_tokens, load.utilisation)
    return trace if rate_per_s is None else trace.faster(rate_per_s / trace.rate_per_s)


def run_case(case: Case) -> Result:
    """Run one case. Raises: ValueError."""
    trace = load_trace(case.load, case.fleet, case.settings.seed)
    by_itself = alone(case.fleet, load_profiles(), trace)
    gc.collect()
    gc.disable()  # runs leave no cycles behind
    try:
        start_s = time.process_time()
        run = _run(case, trace)
        took_s = time.process_time() - start_s
    finally:
        gc.enable()
    figures = figures_of(run, [answer.end_to_end_s for answer in by_itself.answers], case.objective)
    if case.policy == "recorded":
        figures = without_hits(figures)
    seed = case.settings.seed
    curves = curves_of(run) if case.has_curves else None
    return Result(case.title, case.policy, seed, trace.rate_per_s, took_s, figures, curves)


def _run(case: Case, trace: Trace) -> Run:
    if case.options is not None:
        options = msgspec.structs.replace(case.options, prefix_block_tokens=trace.block_tokens)
        return Simulator(Router(options), case.fleet, load_profiles(), trace, case.settings).simulate()
    if case.policy == "recorded":
        return recorded(case.load.trace)
    bound = alone if case.policy == "alone" else clairvoyant
    return bound(case.fleet, load_profiles(), trace)


def run_cases(cases: Sequence[Case]) -> Iterator[tuple[int, Result]]:
    """Run all cases; each result comes when it is there, with its case's number."""
    processes = min(len(cases), os.cpu_count() or 1)
    if processes < 2:
        yield from enumerate(map(run_case, cases))
        return
    # Leaving ends the workers at once; Ctrl-C is for the parent alone.
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        yield from pool.imap_unordered(_run_numbered, enumerate(cases))


def _run_numbered(numbered: tuple[int, Case]) -> tuple[int, Result]:
    number, case = numbered
    return number, run_case(case)
