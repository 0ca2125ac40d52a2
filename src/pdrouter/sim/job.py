"""Words of the engine model: a job, the phases of its life, the events it causes, the load of a rank.

Units: tokens; seconds of the engine's own clock, which the driver may run faster than real time.
"""

from collections.abc import Sequence
from enum import StrEnum, auto

import msgspec


class Role(StrEnum):
    """What an engine does for a request: reads the prompt, writes the answer, or both."""

    PREFILL = auto()
    DECODE = auto()
    REGULAR = auto()


class Phase(StrEnum):
    """Where a job is. Prefill: bootstrap to inflight; decode: prealloc to running; regular: waiting on."""

    NEW = auto()
    BOOTSTRAP = auto()
    WAITING = auto()
    PREFILLING = auto()
    INFLIGHT = auto()
    PREALLOC = auto()
    TRANSFER = auto()
    READY = auto()
    RUNNING = auto()
    DONE = auto()


_NEW, _DONE = Phase.NEW, Phase.DONE  # read as members they would cost a tenth of a microsecond each time


class EventKind(StrEnum):
    """What happened to a job."""

    RESERVED = auto()
    """Decode: slot and KV are held; the KV may be sent."""
    TRANSFERRED = auto()
    """Decode: the KV has arrived; the prefill side may let go of it."""
    PREFILLED = auto()
    """Prefill: the KV of the whole prompt is there."""
    PROGRESS = auto()
    """Tokens were generated that a stream should show."""
    FINISHED = auto()
    """The last token was generated and all is freed."""


class Job:
    """One prompt on one rank. ``interval`` is tokens per streamed chunk, 0 if only the end matters.

    ``blocks`` are the chained hashes of the prompt's full blocks (``text.Prompt``). ``role``: what the engine does
    for it; None: the engine's own role.
    """

    __slots__ = (
        "blocks",
        "cached_tokens",
        "done_tokens",
        "due_step",
        "interval",
        "joined_step",
        "output_tokens",
        "phase",
        "pinned_blocks",
        "preemptions",
        "private_tokens",
        "prompt_tokens",
        "rank",
        "read_tokens",
        "reserved_tokens",
        "role",
        "waiting_tokens",
    )

    def __init__(self, rank: int, prompt_tokens: int, output_tokens: int, blocks: Sequence[int], interval: int) -> None:
        self.rank = rank
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.blocks = blocks
        self.interval = interval
        self.role: Role | None = None
        self.phase = _NEW
        self.read_tokens = prompt_tokens  # what it needs KV of to run: once preempted, also what it has answered
        self.preemptions = 0
        self.cached_tokens = 0
        self.done_tokens = 0  # of those to read, cached ones included
        self.waiting_tokens = 0  # uncached, as seen when it was queued
        self.pinned_blocks = 0  # leading blocks held in the rank's prefix cache
        self.private_tokens = 0  # of the prompt, held outside the cache
        self.reserved_tokens = 0  # private tokens and room for the answer
        self.joined_step = 0
        self.due_step = 0  # when there is something to tell of it, 0 while it doesn't run

    @property
    def is_live(self) -> bool:
        """Whether it is queued or holds anything."""
        return self.phase is not _NEW and self.phase is not _DONE

    @property
    def left_tokens(self) -> int:
        """Tokens of its answer that are to come once it has been read."""
        return self.prompt_tokens + self.output_tokens - self.read_tokens


class Event(msgspec.Struct, frozen=True, gc=False):
    """Something that happened at ``at_s``; ``tokens`` are those generated so far."""

    kind: EventKind
    job: Job
    at_s: float
    tokens: int


class RankLoad(msgspec.Struct, frozen=True, gc=False):
    """Load of one rank, as counts of requests and tokens.

    ``used_tokens``: KV held by live requests, shared blocks once. ``total_tokens``: those and the prompts of
    waiting requests. ``waiting_uncached_tokens``: prompt tokens still to be computed that are queued.
    ``retracted``: preempted requests whose KV is to come back. ``preemptions``: so many there were.
    """

    rank: int
    running: int
    waiting: int
    bootstrap: int
    inflight: int
    prealloc: int
    retracted: int
    transfer: int
    used_tokens: int
    reserved_tokens: int
    total_tokens: int
    waiting_uncached_tokens: int
    cached_idle_tokens: int
    capacity_tokens: int
    max_running: int
    gen_tokens_per_s: float
    cache_hit_rate: float
    prefill_uncached_tokens: int
    prefill_busy_s: float
    generated_tokens: int
    preemptions: int

    @property
    def is_idle(self) -> bool:
        """No request lives here and no KV is held."""
        queued = self.waiting + self.bootstrap + self.prealloc + self.retracted
        return self.running + queued + self.inflight + self.transfer + self.used_tokens + self.reserved_tokens == 0
