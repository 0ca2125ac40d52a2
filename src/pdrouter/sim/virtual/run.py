"""What one run has shown: a line for each answer. Knows no percentiles (``figures.py``) and no engines."""

from collections import Counter
from typing import NamedTuple

from pdrouter.sim.job import Role
from pdrouter.sim.virtual.fleet_spec import FleetSpec
from pdrouter.sim.virtual.trace import Trace


class Answer(NamedTuple):
    """One answered request. Units: seconds, tokens.

    ``number`` is its place in the trace; ``*_place`` is a rank's number among all ranks of the fleet.
    """

    number: int
    at_s: float
    ttft_s: float
    end_to_end_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    prefill_place: int
    decode_place: int

    @property
    def token_s(self) -> float:
        """Mean time between tokens; 0 for an answer of one."""
        return (self.end_to_end_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


class Run:
    """One run so far.

    ``*_places`` is how many ranks read prompts and write answers, 0 where that isn't known; ``rejected`` counts who
    wasn't answered, by the error's code, ``preemptions`` how often engines took KV from an answer under way, if that
    is known.
    """

    __slots__ = ("answers", "decode_places", "planned", "preemptions", "prefill_places", "rejected", "span_s")

    def __init__(self, planned: int, span_s: float, prefill_places: int, decode_places: int) -> None:
        self.planned = planned
        self.span_s = span_s
        self.prefill_places = prefill_places
        self.decode_places = decode_places
        self.answers: list[Answer] = []
        self.preemptions: int | None = 0
        self.rejected: Counter[str] = Counter()


def start_run(fleet: FleetSpec, trace: Trace) -> Run:
    """Return a run that has shown nothing yet."""
    readers, writers = (
        sum(spec.endpoints * spec.ranks for spec in fleet if spec.role is not other)
        for other in (Role.DECODE, Role.PREFILL)
    )
    return Run(len(trace.requests), trace.span_s, readers, writers)
