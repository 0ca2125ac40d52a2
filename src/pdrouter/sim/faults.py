"""Faults on demand: rules that make an emulated engine misbehave, for tests of those who call it.

``POST /_fault`` takes a list of rules, ``DELETE /_fault`` clears them. A rule hits requests whose path begins
with ``path``, ``times`` times at most (null: always); with a ``rank`` only those that name this rank.
"""

from collections.abc import Collection
from typing import Literal

import msgspec


class FaultRule(msgspec.Struct, kw_only=True):
    """One fault. Units: seconds of real time; chunks are those of ``stream_interval``.

    ``slow`` waits ``seconds`` first; ``hang`` never answers; ``reset`` ends with a TCP reset, at once or after
    ``after_chunks``; ``status`` answers ``status`` and ``body``; ``half_stream`` closes in the middle of the
    event after ``after_chunks``; ``no_load`` answers load requests with 500, or hangs (``mode``);
    ``late_load`` tells loads of ``seconds`` ago, ``bad_load`` tells -1, NaN or too few ranks (``mode``).
    """

    kind: Literal["slow", "hang", "reset", "status", "half_stream", "no_load", "late_load", "bad_load"]
    path: str = "/"
    times: int | None = None
    rank: int | None = None
    seconds: float = 0.0
    after_chunks: int | None = None
    status: int = 500
    body: object = None
    mode: Literal["status", "hang", "negative", "nan", "missing"] = "status"


LOAD_KINDS = frozenset({"no_load", "late_load", "bad_load"})

_decoder = msgspec.json.Decoder(list[FaultRule])


class Faults:
    """The rules in force. ``load_paths``: where the faults of load reports hit."""

    def __init__(self, load_paths: Collection[str]) -> None:
        self._load_paths = load_paths
        self.rules: list[FaultRule] = []

    def add(self, raw: bytes) -> None:
        """Add rules. Raises: ``msgspec.MsgspecError`` if they aren't."""
        self.rules += _decoder.decode(raw)

    def clear(self) -> None:
        """Drop all rules."""
        self.rules.clear()

    def take(self, path: str, ranks: Collection[int | None] = (None,)) -> list[FaultRule]:
        """Rules that hit this request, each counted as used; ``ranks``: those that it names, once it is read."""
        if not self.rules:
            return []
        hit = [rule for rule in self.rules if rule.rank in ranks and self._is_for(rule, path)]
        for rule in hit:
            if rule.times is not None:
                rule.times -= 1
        self.rules = [rule for rule in self.rules if rule.times is None or rule.times > 0]
        return hit

    def load_age_s(self) -> float:
        """How old loads must be kept for."""
        return max([rule.seconds for rule in self.rules if rule.kind == "late_load"], default=0.0)

    def _is_for(self, rule: FaultRule, path: str) -> bool:
        if rule.kind in LOAD_KINDS:
            return path in self._load_paths
        return path.startswith(rule.path) and not path.startswith("/_")
