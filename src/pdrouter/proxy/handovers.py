"""[5] Counts what became of prompts' KV where that isn't as planned: read again by the decode engine, or stranded.

An engine that gets no KV reads the prompt itself and says nothing: the pair works, and the prefill was in vain.
"""

from collections.abc import Callable

import structlog

from pdrouter.core.decision import Placement

_WARN_EVERY_S = 60.0
_MAX_PAIRS = 65_536
"""Pairs of which it is known when they were last warned of (I9)."""


class HandOvers:
    """Counts, and a warning for each pair of endpoints at most once a minute."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.recomputed = 0
        self.stranded = 0
        self.fell_back = 0
        self._clock = clock
        self._warned_s: dict[tuple[str, str], float] = {}
        self._log = structlog.stdlib.get_logger("pdrouter.handovers")

    def counters(self) -> dict[str, int]:
        """Return what became of KV."""
        return {"recomputed": self.recomputed, "stranded": self.stranded, "fell_back": self.fell_back}

    def recompute(self, prefill: Placement, decode: Placement, reason: str) -> None:
        """Count an answer whose prompt was read twice."""
        self.recomputed += 1
        pair = (prefill.endpoint.address, decode.endpoint.address)
        now_s = self._clock()
        warned_s = self._warned_s.get(pair)
        if warned_s is None or now_s - warned_s >= _WARN_EVERY_S:
            if len(self._warned_s) >= _MAX_PAIRS:  # I9
                self._warned_s.clear()
            self._warned_s[pair] = now_s
            self._log.warning(
                "the decode engine reads the prompt again", prefill=pair[0], decode=pair[1], reason=reason
            )

    def strand(self) -> None:
        """Count KV that a prefill holds and nobody will fetch, until the engine's own time limit."""
        self.stranded += 1

    def fall_back(self, decode: Placement, reason: str) -> None:
        """Count a request that a decode endpoint serves alone because no prefill could."""
        self.fell_back += 1
        self._log.warning("no prefill; the decode endpoint serves alone", decode=decode.label, reason=reason)
