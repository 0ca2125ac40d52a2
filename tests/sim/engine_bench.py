"""A bench for the engine model: jobs by name, time event by event, and what has happened."""

from math import inf
from typing import Any

from pdrouter.sim.engine_model import EngineModel, ModelSettings
from pdrouter.sim.full_kv import WhenFull
from pdrouter.sim.job import EventKind, Job, RankLoad, Role
from pdrouter.sim.profiles import Profile

BLOCK = 64


class Bench:
    """A model, its jobs by name, and what has happened as (name, kind, ms, tokens)."""

    def __init__(self, profile: Profile, role: Role, dp_size: int = 1, **settings: Any) -> None:
        fields: dict[str, Any] = {
            "profile": profile,
            "role": role,
            "dp_size": dp_size,
            "kv_capacity_tokens": profile.kv_capacity_tokens,
            "block_tokens": BLOCK,
            "when_full": WhenFull.KEEP,
        }
        self.model = EngineModel(ModelSettings(**(fields | settings)))
        self.names: dict[Job, str] = {}
        self.log: list[tuple[str, EventKind, float, int]] = []
        self.now_s = 0.0

    def submit(
        self,
        name: str,
        at_ms: float,
        prompt: int,
        output: int = 1,
        *,
        rank: int = 0,
        interval: int = 0,
        blocks: list[int] | None = None,
    ) -> Job:
        self.run(at_ms)
        job = Job(rank, prompt, output, blocks or [], interval)
        self.names[job] = name
        self.model.submit(job, at_ms / 1000)
        return job

    def run(self, until_ms: float = inf) -> None:
        """Let time pass event by event, as a simulator does."""
        while (next_s := self.model.next_event_s) * 1000 <= until_ms and next_s < inf:
            self._note(next_s)
        if until_ms < inf:
            self._note(until_ms / 1000)

    def _note(self, now_s: float) -> None:
        self.now_s = max(now_s, self.now_s)
        for event in self.model.advance(self.now_s):
            at_ms = round(event.at_s * 1000, 6)
            self.log.append((self.names[event.job], event.kind, at_ms, event.tokens))

    def loads(self) -> list[RankLoad]:
        return self.model.loads(self.now_s)

    def times(self, kind: EventKind) -> dict[str, float]:
        return {name: at_ms for name, what, at_ms, _ in self.log if what is kind}

    @property
    def is_idle(self) -> bool:
        return all(load.is_idle for load in self.loads())
