"""Predicted times: the published formulas, what profiles are, and how far a queue's estimate may be off."""

import json
from collections.abc import Callable, Mapping
from importlib import resources
from itertools import pairwise
from math import ceil, inf, isfinite, nan
from statistics import median
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrouter.core.cost import (
    LONG_PROMPT_TOKENS,
    NEUTRAL,
    Profile,
    prefill_s,
    profile_from,
    queue_s,
    step_s,
    transfer_s,
)

LLAMA = "llama31-70b-h100-tp4-sglang-fp8"
DEEPSEEK = "deepseek-v3-h200-dp8ep8-sglang-deepep-fp8"


def shipped() -> dict[str, dict[str, object]]:
    """Return the entries of the shipped file."""
    text = resources.files("pdrouter").joinpath("data/profiles.json").read_text("utf-8")
    return cast("dict[str, dict[str, object]]", json.loads(text)["profiles"])


ENTRIES = shipped()
PROFILES = {name: profile_from(entry) for name, entry in ENTRIES.items()} | {"neutral": NEUTRAL}

profiles = st.sampled_from(sorted(PROFILES)).map(PROFILES.__getitem__)
tokens = st.one_of(st.integers(0, 200_000), st.floats(0, 1e12))
Cost = Callable[[Profile, float, float], float]


def transfer_of_two(profile: Profile, first: float, second: float) -> float:
    """Return ``transfer_s`` as a function of two arguments, as the others are."""
    return transfer_s(profile, first + second)


COSTS: Mapping[str, Cost] = {"prefill": prefill_s, "queue": queue_s, "step": step_s, "transfer": transfer_of_two}


# Identity with what is published.


@pytest.mark.parametrize(
    ("name", "uncached", "past", "milliseconds"),
    [
        (LLAMA, 1000, 0, 8.10661 + 40.4552 + 0.457517),
        (LLAMA, 1000, 2000, 8.10661 + 40.4552 + 2.287585),
        (LLAMA, 1, 0, 8.10661 + 0.0404552 + 0.000000457517),
        (DEEPSEEK, 1000, 0, 65.9244 + 106.482 + 3.66142),
        (DEEPSEEK, 1000, 2000, 65.9244 + 106.482 + 18.3071),
    ],
)
def test_a_prefill_by_hand(name: str, uncached: int, past: int, milliseconds: float) -> None:
    """``a0 + a1*n + a2*n*(p + n/2)`` in seconds."""
    assert prefill_s(PROFILES[name], uncached, past) == pytest.approx(milliseconds / 1000, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "requests", "kv_tokens", "milliseconds"),
    [
        (LLAMA, 0, 0, 9.23461),
        (LLAMA, 10, 50_000, 9.23461 + 0.336419 + 0.972945),
        (DEEPSEEK, 0, 0, 28.2511),
        (DEEPSEEK, 10, 50_000, 28.2511 + 1.04621 + 1.894315),
    ],
)
def test_a_step_by_hand(name: str, requests: int, kv_tokens: int, milliseconds: float) -> None:
    """``b0 + b1*requests + b2*KV tokens`` in seconds."""
    assert step_s(PROFILES[name], requests, kv_tokens) == pytest.approx(milliseconds / 1000, rel=1e-9)


def test_a_transfer_by_hand() -> None:
    """Microseconds a token, in seconds."""
    assert transfer_s(PROFILES[LLAMA], 10_000) == pytest.approx(0.008192)


# Profiles.


def test_every_shipped_profile_is_read() -> None:
    """Capacities are taken over, and ranks step together where the entry splits a step."""
    for name, entry in ENTRIES.items():
        profile = PROFILES[name]
        assert profile.chunk_tokens == entry["prefill_chunk_tokens"]
        assert profile.kv_capacity_tokens == entry["kv_capacity_tokens"]
        assert profile.max_batch == entry["max_batch"]
        assert profile.steps_together is ("dp_split" in entry)
    assert PROFILES[DEEPSEEK].steps_together
    assert not PROFILES[LLAMA].steps_together


def test_the_neutral_profile_is_the_median() -> None:
    """Each coefficient is the median over the shipped profiles, and no capacity is claimed."""
    known = [PROFILES[name] for name in ENTRIES]
    for field in NEUTRAL.__struct_fields__[:8]:
        expected = median(getattr(profile, field) for profile in known)
        assert getattr(NEUTRAL, field) == pytest.approx(expected, rel=0.005), field
    assert (NEUTRAL.kv_capacity_tokens, NEUTRAL.max_batch, NEUTRAL.steps_together) == (None, None, False)


def test_a_profile_without_capacities() -> None:
    """What isn't told stays unknown."""
    needed = ("prefill", "decode", "kv_transfer_us_per_token", "prefill_chunk_tokens")
    profile = profile_from({name: ENTRIES[LLAMA][name] for name in needed})
    assert (profile.kv_capacity_tokens, profile.max_batch, profile.steps_together) == (None, None, False)
    assert prefill_s(profile, 5000, 0) == prefill_s(PROFILES[LLAMA], 5000, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefill": {"a0": 1.0, "a1": 1.0}}, "a2"),
        ({"decode": {"b0": "fast", "b1": 1.0, "b2": 1.0}}, "b0"),
        ({"decode": {"b0": -1.0, "b1": 1.0, "b2": 1.0}}, "step_base_s"),
        ({"prefill": {"a0": 1.0, "a1": nan, "a2": 1.0}}, "prefill_token_s"),
        ({"kv_transfer_us_per_token": inf}, "transfer_token_s"),
        ({"kv_capacity_tokens": -1}, "kv_capacity_tokens"),
        ({"prefill_chunk_tokens": 0}, "chunk_tokens"),
    ],
)
def test_a_wrong_profile_is_refused(change: dict[str, object], message: str) -> None:
    """The error names the field."""
    with pytest.raises(ValueError, match=message):
        profile_from(ENTRIES[LLAMA] | change)


def test_a_profile_can_be_changed() -> None:
    """What an engine tells of itself replaces a part of its profile, under the same checks."""
    assert msgspec.structs.replace(NEUTRAL, chunk_tokens=2048, max_batch=64).chunk_tokens == 2048


# What holds for all of them.


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@given(profile=profiles, first=tokens, second=tokens, more=tokens)
def test_no_time_falls_when_an_argument_grows(
    cost: Cost, profile: Profile, first: float, second: float, more: float
) -> None:
    """Finite, never negative, monotone in each argument."""
    here = cost(profile, first, second)
    assert isfinite(here)
    assert here >= 0
    assert cost(profile, first + more, second) >= here
    assert cost(profile, first, second + more) >= here


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@given(profile=profiles, other=tokens, wrong=st.one_of(st.floats(-1e12, 0), st.just(nan)))
def test_what_is_no_number_of_tokens_counts_as_none(cost: Cost, profile: Profile, other: float, wrong: float) -> None:
    """A negative sum, or none at all, can't make a rank attractive."""
    if cost is not transfer_of_two:
        assert cost(profile, wrong, other) == cost(profile, 0, other)
        assert cost(profile, other, wrong) == cost(profile, other, 0)
    assert transfer_s(profile, wrong) == 0


# A queue, of which only the sums are known.


def step_by_step_s(profile: Profile, lengths: list[int]) -> float:
    """Return the time of prompts that are read one after the other in full chunks."""
    steps = ceil(sum(lengths) / profile.chunk_tokens)
    return sum(prefill_s(profile, n, 0) for n in lengths) + (steps - len(lengths)) * profile.prefill_base_s


def test_an_empty_queue() -> None:
    """No time at all, and a first token costs a step."""
    assert queue_s(NEUTRAL, 0, 0) == 0
    assert queue_s(NEUTRAL, 0, 1) == queue_s(NEUTRAL, 1, 1) == prefill_s(NEUTRAL, 1, 0)


@given(profile=profiles, length=st.integers(1, LONG_PROMPT_TOKENS))
def test_a_queue_of_one_prompt_within_a_chunk(profile: Profile, length: int) -> None:
    """The formula of a prefill itself."""
    if length <= profile.chunk_tokens:
        assert queue_s(profile, length, 1) == pytest.approx(prefill_s(profile, length, 0))


@given(profile=profiles, lengths=st.lists(st.integers(1, LONG_PROMPT_TOKENS), min_size=1, max_size=40))
def test_how_far_a_queue_may_be_off(profile: Profile, lengths: list[int]) -> None:
    """Of prompts that aren't long: short by a part of a step at most, too long by the pairs of long prompts at most."""
    true_s = step_by_step_s(profile, lengths)
    estimate_s = queue_s(profile, sum(lengths), len(lengths))
    pairs = profile.prefill_pair_s * LONG_PROMPT_TOKENS / 2 / profile.prefill_token_s
    assert estimate_s >= (true_s - profile.prefill_base_s) * (1 - 1e-9)
    assert estimate_s <= true_s * (1 + pairs) * (1 + 1e-9)


def test_the_bound_in_numbers() -> None:
    """Dense models of 8 to 70 B: a queue is taken for at most 54 % longer than it is, by profile from 16 % on."""
    dense = [PROFILES[name] for name in ENTRIES if not name.startswith("deepseek")]
    excess = [p.prefill_pair_s * LONG_PROMPT_TOKENS / 2 / p.prefill_token_s for p in dense]
    assert min(excess) > 0.16
    assert max(excess) < 0.54


@given(profile=profiles, count=st.integers(1, 20), queued=st.integers(0, 500_000), length=st.integers(1, 200_000))
def test_a_prompt_that_joins_makes_no_queue_shorter(profile: Profile, count: int, queued: int, length: int) -> None:
    """However short the prompt and however long those before it: a rank never looks better for having more."""
    assert queue_s(profile, queued + length, count + 1) > queue_s(profile, queued, count)


def test_a_long_queue_grows_evenly() -> None:
    """Beyond one long prompt, twice as much takes twice as long."""
    once, twice, thrice = (queue_s(NEUTRAL, LONG_PROMPT_TOKENS * k, 1) for k in (1, 2, 3))
    assert twice == pytest.approx(2 * once)
    assert thrice == pytest.approx(3 * once)


def test_long_prompts_are_underestimated() -> None:
    """The error that is documented: prompts of 32 k by under a fifth, of 128 k by about a half."""
    llama = PROFILES[LLAMA]
    errors = [queue_s(llama, 4 * n, 4) / step_by_step_s(llama, [n] * 4) - 1 for n in (16_384, 32_768, 131_072)]
    assert errors == pytest.approx([0.0, -0.13, -0.51], abs=0.02)
    assert all(less < more for more, less in pairwise(errors))
