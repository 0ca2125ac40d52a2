"""How the requests of a router's journal really went, as a run that stands beside simulated ones."""

import msgspec

from pdrouter.sim.virtual.figures import Figures
from pdrouter.sim.virtual.run import Answer, Run
from pdrouter.sim.virtual.trace import read_entries
from pdrouter.telemetry.journal_file import ANSWERED


def recorded(name: str) -> Run:
    """Return a journal's run; who wasn't answered counts as rejected, by the outcome.

    Raises: ValueError if the trace is no journal.
    """
    entries = read_entries(name)
    first_s = entries[0].at_s
    run = Run(len(entries), entries[-1].at_s - first_s or 1.0, 0, 0)
    run.preemptions = None
    for number, entry in enumerate(entries):
        if entry.outcome != ANSWERED:
            run.rejected[entry.outcome] += 1
            continue
        ttft_s = entry.took_s if entry.ttft_s is None else entry.ttft_s
        at_s, output_tokens = entry.at_s - first_s, entry.output_tokens or 1
        run.answers.append(Answer(number, at_s, ttft_s, entry.took_s, entry.prompt_tokens, output_tokens, 0, 0, 0))
    return run


def without_hits(figures: Figures) -> Figures:
    """Return figures of a run in which nobody told what was cached."""
    return msgspec.structs.replace(figures, hit_rate=None)
