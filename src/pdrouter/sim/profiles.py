"""Timing profiles of engines: how long a prefill, a decode step and a KV transfer take.

The numbers are shipped in ``data/profiles.json``, each profile with its source. This module knows formulas
only: no queues, no clock. Next: ``engine_model.py``.
"""

from functools import cache
from importlib import resources

import msgspec

DEFAULT_PROFILE = "llama31-70b-h100-tp4-sglang-fp8"


class PrefillCurve(msgspec.Struct, frozen=True):
    """Coefficients of ``a0 + a1*n + a2*n*(p + n/2)``. Units: ms, tokens."""

    a0: float
    a1: float
    a2: float

    def chunk_ms(self, new_tokens: int, past_tokens: int) -> float:
        """Time of one chunk without the fixed part ``a0``, which a batch pays once."""
        return self.a1 * new_tokens + self.a2 * new_tokens * (past_tokens + new_tokens / 2)


class DecodeCurve(msgspec.Struct, frozen=True):
    """Coefficients of ``b0 + b1*requests + b2*KV tokens``. Units: ms, tokens."""

    b0: float
    b1: float
    b2: float

    def step_ms(self, requests: int, kv_tokens: int) -> float:
        """Time of one decode step of a batch."""
        return self.b0 + self.b1 * requests + self.b2 * kv_tokens


class PrefillExperts(msgspec.Struct, frozen=True):
    """Experts' part of a prefill step over all ranks: ``g0 + g1*tokens``."""

    g0: float
    g1: float

    def step_ms(self, tokens: int) -> float:
        """Time for the new tokens of all ranks together."""
        return self.g0 + self.g1 * tokens


class DecodeExperts(msgspec.Struct, frozen=True):
    """Experts' part of a decode step over all ranks: ``g0 + g1*min(B, knee) + g2*max(B - knee, 0)``."""

    g0: float
    g1: float
    g2: float
    knee: float

    def step_ms(self, requests: int) -> float:
        """Time for the requests of all ranks together."""
        return self.g0 + self.g1 * min(requests, self.knee) + self.g2 * max(requests - self.knee, 0)


class DpSplit(msgspec.Struct, frozen=True):
    """DP attention with expert parallelism: a step is the slowest rank's local part + the experts' part."""

    prefill_local: PrefillCurve
    prefill_moe: PrefillExperts
    decode_local: DecodeCurve
    decode_moe: DecodeExperts


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One model on one kind of GPU under one engine; capacities are those of one DP rank.

    Units: ms, tokens. ``dp`` is the number of ranks that the profile was made for; any number may be run.
    """

    source: str
    use: str
    engine: str
    gpu: str
    model: str
    tp: int
    dp: int
    units: str
    prefill: PrefillCurve
    decode: DecodeCurve
    kv_capacity_tokens: int
    kv_bytes_per_token: int
    kv_transfer_us_per_token: float
    max_batch: int
    prefill_chunk_tokens: int
    dp_split: DpSplit | None = None

    def prefill_ms(self, new_tokens: int, past_tokens: int) -> float:
        """Time to prefill ``new_tokens`` behind ``past_tokens``, as one chunk on one rank."""
        return self.prefill.a0 + self.prefill.chunk_ms(new_tokens, past_tokens)

    def transfer_ms(self, tokens: int) -> float:
        """Time to move the KV of ``tokens`` from a prefill rank to a decode rank."""
        return self.kv_transfer_us_per_token * tokens / 1000


class _ProfileFile(msgspec.Struct, frozen=True):
    note: str
    profiles: dict[str, Profile]


@cache
def load_profiles() -> dict[str, Profile]:
    """All shipped profiles by name."""
    text = resources.files("pdrouter").joinpath("data/profiles.json").read_bytes()
    return msgspec.json.decode(text, type=_ProfileFile).profiles


def load_profile(name: str) -> Profile:
    """Profile of this name. Raises: ``ValueError`` that lists the names there are."""
    profiles = load_profiles()
    if name not in profiles:
        raise ValueError(f"unknown profile {name!r}; there are: {', '.join(sorted(profiles))}")
    return profiles[name]
