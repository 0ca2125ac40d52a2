"""Who has which profile: its own, else by model and GPU, else that of all; and the KV capacity that engines tell."""

from typing import Any

import msgspec
import pytest

from pdrouter.core import events
from pdrouter.core.cost import NEUTRAL
from pdrouter.core.ledger import RankKey
from pdrouter.core.profiles import ProfileRule, Profiles

from .builders import decide, decode, facts, make_options, make_router, prefill

OWN, BIG, SMALL, ANY = (msgspec.structs.replace(NEUTRAL, step_base_s=step_s) for step_s in (0.1, 0.2, 0.3, 0.4))
NAMED = {"own": OWN, "big": BIG, "small": SMALL}
RULES = (
    ProfileRule("*70B*", "H[12]00*", "big"),
    ProfileRule("meta/*", "*", "small"),
    ProfileRule("*", "L4", "own"),
)


@pytest.mark.parametrize(
    ("fields", "profile"),
    [
        ({"profile": "own", "model": "meta/Llama-70B", "gpu": "H100"}, OWN),
        ({"model": "meta/Llama-70B", "gpu": "H100 80GB"}, BIG),
        ({"model": "meta/Llama-70B", "gpu": "A100"}, SMALL),
        ({"model": "meta/Llama-70B"}, SMALL),
        ({"model": "META/llama", "gpu": "L4"}, OWN),
        ({"gpu": "L4"}, OWN),
        ({"model": "other"}, ANY),
        ({}, ANY),
        ({"profile": "unknown"}, ANY),
    ],
)
def test_the_first_that_says_something_counts(fields: dict[str, Any], profile: object) -> None:
    """An endpoint's own profile, the first rule that fits model and GPU, the profile of all."""
    assert Profiles(ANY, NAMED, RULES).of(prefill("p", **fields)) is profile


@pytest.mark.parametrize(
    ("told", "counts"), [(1_119_235, 1_100_000), (1_119_236, 1_100_000), (99, 99), (7, 7), (100, 100), (2059, 2000)]
)
def test_a_told_capacity_stands_above_the_profiles(told: int, counts: int) -> None:
    """It is rounded down, so that engines alike stay alike."""
    profiles = Profiles(msgspec.structs.replace(NEUTRAL, kv_capacity_tokens=5), {})
    profile = profiles.of(prefill("p", kv_capacity_tokens=told))
    assert profile == msgspec.structs.replace(NEUTRAL, kv_capacity_tokens=counts)


@pytest.mark.parametrize("told", [None, 0])
def test_without_a_told_capacity_the_profiles_counts(told: int | None) -> None:
    """Nothing and nought tell nothing."""
    assert Profiles(NEUTRAL, {}).of(prefill("p", kv_capacity_tokens=told)) is NEUTRAL


def test_a_model_that_is_told_later_brings_its_profile() -> None:
    """Rules are looked at again with each description."""
    rules = [ProfileRule("m", "*", "big")]
    router = make_router(
        [prefill("p"), decode("d")], make_options(policy="least_work", profiles=NAMED, profile_rules=rules)
    )
    assert router.work.sites["p"].profile is NEUTRAL
    router.observe(events.EndpointDescribed(prefill("p", model="m")), 0.0)
    assert router.work.sites["p"].profile is BIG


def test_a_told_capacity_bounds_the_prefix_index() -> None:
    """A rank holds no more of prompts than its KV takes; decode ranks hold none."""
    blocks = tuple(range(1, 9))
    fleet = [prefill("p", kv_capacity_tokens=1024), decode("d", kv_capacity_tokens=1024)]
    router = make_router(fleet, make_options(prefix_block_tokens=256.0))
    decide(router, facts(2048, prefix_blocks=blocks, block_tokens=256.0), 0.0)
    assert router.prefixes.match(blocks) == {RankKey("p", 0): 3}


def test_least_work_waits_for_room_in_a_told_capacity() -> None:
    """A request goes where its KV fits, though the other rank steps a little faster."""
    fleet = [prefill("p"), decode("small", kv_capacity_tokens=2000), decode("large", kv_capacity_tokens=1_000_000)]
    router = make_router(fleet, make_options(policy="least_work"))
    for _ in range(4):
        assert decide(router, facts(3000), 0.0).decode.endpoint.address == "large"
