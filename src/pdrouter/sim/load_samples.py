"""Loads of an emulated engine as they were some time ago, for reports that lag.

How they are told is the affair of each kind of engine.
"""

import asyncio
from collections import deque
from datetime import UTC, datetime
from typing import NamedTuple

from pdrouter.sim.faults import FaultRule
from pdrouter.sim.job import RankLoad
from pdrouter.sim.live_engine import LiveEngine

_SAMPLES_PER_AGE = 20
_SHORTEST_SAMPLE_S = 0.005
_REPLAY_SLACK = 2


class Sample(NamedTuple):
    """Loads of all ranks at one moment."""

    at_s: float
    wall: datetime
    loads: list[RankLoad]


class LoadSamples:
    """Samples of one engine. ``settings.load_delay``: age of what is told, with a truthful time stamp."""

    def __init__(self, engine: LiveEngine) -> None:
        self._engine = engine
        self._delay_s = engine.settings.load_delay
        self._age_s = 0.0
        self._samples: deque[Sample] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self.keep(0.0)

    def keep(self, age_s: float) -> None:
        """Keep samples for reports of this age, and for the age that is set."""
        self._age_s = max(age_s, self._delay_s)
        if self._age_s > 0 and self._timer is None:
            self._sample()

    def told(self, rules: list[FaultRule]) -> Sample:
        """Return what a report tells: now, or as old as set or as a fault has it."""
        age_s = max([rule.seconds for rule in rules if rule.kind == "late_load"], default=self._delay_s)
        if age_s <= 0 or not self._samples:
            return self._now()
        told = self._samples[0]
        for sample in self._samples:
            if sample.at_s > self._loop.time() - age_s:
                break
            told = sample
        return told

    def shut(self) -> None:
        """End the sampling."""
        if self._timer is not None:
            self._timer.cancel()

    def _now(self) -> Sample:
        return Sample(self._loop.time(), datetime.now(UTC), self._engine.loads())

    def _sample(self) -> None:
        now = self._now()
        self._samples.append(now)
        while self._samples and self._samples[0].at_s < now.at_s - _REPLAY_SLACK * self._age_s:
            self._samples.popleft()
        if self._age_s > 0:
            wait_s = max(_SHORTEST_SAMPLE_S, self._age_s / _SAMPLES_PER_AGE)
            self._timer = self._loop.call_later(wait_s, self._sample)
        else:
            self._timer = None
