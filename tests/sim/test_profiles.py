"""The shipped profiles and their formulas."""

from typing import Any

import pytest

from pdrouter.sim.profiles import (
    DEFAULT_PROFILE,
    DecodeCurve,
    DecodeExperts,
    PrefillCurve,
    load_profile,
    load_profiles,
)


def test_every_shipped_profile_names_its_source_and_is_usable() -> None:
    """Each profile says where it is from and gives positive, growing times."""
    profiles = load_profiles()
    assert DEFAULT_PROFILE in profiles
    for profile in profiles.values():
        assert profile.source
        assert profile.units == "ms; tokens"
        assert 0 < profile.prefill_ms(1, 0) < profile.prefill_ms(8192, 0) < profile.prefill_ms(8192, 8192)
        assert profile.decode.step_ms(1, 100) < profile.decode.step_ms(2, 200)
        assert profile.kv_capacity_tokens > profile.prefill_chunk_tokens


def test_only_dp_attention_profiles_step_together() -> None:
    """The split of local and experts' time is there exactly where the ranks are more than one."""
    for profile in load_profiles().values():
        assert (profile.dp_split is not None) == (profile.dp > 1)


def test_the_default_profile_has_the_published_numbers() -> None:
    """Numbers are carried over unchanged."""
    profile = load_profile(DEFAULT_PROFILE)
    assert profile.prefill == PrefillCurve(a0=8.10661, a1=0.0404552, a2=9.15034e-07)
    assert profile.decode == DecodeCurve(b0=9.23461, b1=0.0336419, b2=1.94589e-05)
    assert (profile.kv_capacity_tokens, profile.max_batch) == (1119235, 512)


def test_formulas(new_profile: Any) -> None:
    """a0 + a1*n + a2*n*(p + n/2); b0 + b1*requests + b2*KV; us per token; the experts' knee."""
    profile = new_profile(prefill=PrefillCurve(a0=10.0, a1=1.0, a2=0.001))
    assert profile.prefill_ms(100, 50) == pytest.approx(10 + 100 + 0.001 * 100 * (50 + 50))
    assert profile.decode.step_ms(3, 1000) == pytest.approx(10 + 3 + 10)
    assert profile.transfer_ms(50) == pytest.approx(5)
    experts = DecodeExperts(g0=1.0, g1=2.0, g2=0.5, knee=4)
    assert [experts.step_ms(count) for count in (0, 4, 6)] == [1, 9, 10]


def test_an_unknown_profile_is_refused_with_the_names_there_are() -> None:
    """The message helps."""
    with pytest.raises(ValueError, match=DEFAULT_PROFILE):
        load_profile("nope")
