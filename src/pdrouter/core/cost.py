"""Predicted times of a prefill, a queue of prefills, a decode step and a KV transfer, from an engine's profile.

It knows formulas only: no ranks, no loads, no files. What an endpoint makes of its profile is learned in
``speed.py``. All functions are finite, never negative, and never fall when one of their arguments grows.
"""

from collections.abc import Mapping
from math import isfinite

import msgspec

LONG_PROMPT_TOKENS = 16_384
"""Up to here a queue is taken for one prompt, beyond it for prompts of that size. Chosen: of 8,192, 16,384 and 32,768
it errs least over the Mooncake conversation trace and the Azure one of 2023 together (``queue_s``)."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What a model takes on one DP rank of one kind of GPU under one engine.

    Units: seconds and tokens. ``chunk_tokens`` is what one prefill step reads at most; ``kv_capacity_tokens`` and
    ``max_batch`` are those of a rank, ``None`` if not known; ``steps_together`` says that the ranks of an endpoint
    wait for each other at every step (DP attention), so that the slowest rank's step counts.
    Raises: ValueError for a number that is negative, infinite or none, and for a chunk without tokens.
    Source: ``prefill_*`` are a0, a1, a2 of ``prefill_s``, ``step_*`` are b0, b1, b2 of ``step_s``, fitted to an
    operator-level model over measured kernel tables (aiconfigurator-core 0.12.0; ``data/profiles.json``).
    """

    prefill_base_s: float
    prefill_token_s: float
    prefill_pair_s: float
    step_base_s: float
    step_request_s: float
    step_kv_token_s: float
    transfer_token_s: float
    chunk_tokens: int
    kv_capacity_tokens: int | None
    max_batch: int | None
    steps_together: bool

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not (isfinite(value) and value >= 0):
                raise ValueError(f"{name} of a profile must be a number from 0, not {value}")
        if self.chunk_tokens < 1:
            raise ValueError("chunk_tokens of a profile must be at least 1")


NEUTRAL = Profile(
    prefill_base_s=8.45e-3,
    prefill_token_s=4.23e-5,
    prefill_pair_s=1.24e-9,
    step_base_s=9.68e-3,
    step_request_s=3.05e-5,
    step_kv_token_s=2.96e-8,
    transfer_token_s=1.31e-6,
    chunk_tokens=8192,
    kv_capacity_tokens=None,
    max_batch=None,
    steps_together=False,
)
"""Where nothing is known. Source: the median of each coefficient over the twelve shipped profiles, to three digits:
about 70 B parameters on four H100. Capacities aren't guessed."""


class _PrefillEntry(msgspec.Struct, frozen=True):
    a0: float
    a1: float
    a2: float


class _DecodeEntry(msgspec.Struct, frozen=True):
    b0: float
    b1: float
    b2: float


class _Entry(msgspec.Struct, frozen=True):
    prefill: _PrefillEntry
    decode: _DecodeEntry
    kv_transfer_us_per_token: float
    prefill_chunk_tokens: int
    kv_capacity_tokens: int | None = None
    max_batch: int | None = None
    dp_split: Mapping[str, object] | None = None


def profile_from(entry: Mapping[str, object]) -> Profile:
    """Return the profile that one entry of ``data/profiles.json`` describes.

    Units: the entry's are ms (us for the transfer) and tokens; fields that aren't needed may be missing or be there.
    Raises: ValueError that names the field which is missing or wrong.
    """
    read = msgspec.convert(entry, _Entry)
    return Profile(
        prefill_base_s=read.prefill.a0 / 1e3,
        prefill_token_s=read.prefill.a1 / 1e3,
        prefill_pair_s=read.prefill.a2 / 1e3,
        step_base_s=read.decode.b0 / 1e3,
        step_request_s=read.decode.b1 / 1e3,
        step_kv_token_s=read.decode.b2 / 1e3,
        transfer_token_s=read.kv_transfer_us_per_token / 1e6,
        chunk_tokens=read.prefill_chunk_tokens,
        kv_capacity_tokens=read.kv_capacity_tokens,
        max_batch=read.max_batch,
        steps_together=read.dp_split is not None,
    )


def prefill_s(profile: Profile, uncached_tokens: float, past_tokens: float) -> float:
    """Return the seconds to compute a prompt's uncached tokens behind those that are cached.

    A negative number counts as none, here and below.
    Source: ``a0 + a1*n + a2*n*(p + n/2)``: a fixed part, a part for each token, and one for each pair of a new token
    and one before it. As one step: an engine that reads in chunks pays ``a0`` for each.
    """
    new = max(0.0, uncached_tokens)
    past = max(0.0, past_tokens)
    return profile.prefill_base_s + profile.prefill_token_s * new + profile.prefill_pair_s * new * (past + new / 2)


def queue_s(profile: Profile, uncached_tokens_queued: float, requests_queued: float) -> float:
    """Return the seconds to prefill what is queued, of which only the sums are known.

    Steps hold a chunk each, whatever the number of requests. Pairs need the lengths: up to ``LONG_PROMPT_TOKENS`` the
    queue is one prompt, above it has prompts of that size. An equal split over the requests errs about as much and
    would make a rank look less busy when a short prompt joins a long one. A request has one uncached token at least.
    Sums of ``prefill_s`` are better where each request is known.
    Source: chosen. Error against ``prefill_s`` step by step, queues of 1 to 30 successive prompts: mean 8 to 14 % on
    the Mooncake conversation trace, 5 to 12 % on the Azure one of 2023, by profile. It is too low, by up to
    45 % (5th percentile), for prompts well above ``LONG_PROMPT_TOKENS`` or behind long cached ones.
    """
    tokens = max(0.0, uncached_tokens_queued, requests_queued)
    if tokens == 0:
        return 0.0
    steps = max(1.0, tokens / profile.chunk_tokens)
    pair_tokens = min(tokens, LONG_PROMPT_TOKENS) / 2
    return profile.prefill_base_s * steps + tokens * (profile.prefill_token_s + profile.prefill_pair_s * pair_tokens)


def step_s(profile: Profile, requests: float, kv_tokens: float) -> float:
    """Return the seconds of one decode step of a rank that holds so many requests and KV tokens.

    Source: ``b0 + b1*requests + b2*KV tokens``; the reading of weights, the work for each request, the reading of KV.
    """
    return (
        profile.step_base_s
        + profile.step_request_s * max(0.0, requests)
        + profile.step_kv_token_s * max(0.0, kv_tokens)
    )


def transfer_s(profile: Profile, tokens: float) -> float:
    """Return the seconds to move the KV of so many tokens from a prefill rank to a decode rank."""
    return profile.transfer_token_s * max(0.0, tokens)
