"""The clock of ranks that read in step."""

import msgspec
import pytest

from pdrouter.core.cost import NEUTRAL
from pdrouter.core.together import Together

PROFILE = msgspec.structs.replace(NEUTRAL, prefill_token_s=1e-4, prefill_pair_s=1e-8)


def test_it_goes_as_slowly_as_the_deepest_prompt_is_read() -> None:
    """At 10,000 tokens a token takes twice as long; what was shown before stays."""
    together = Together(PROFILE)
    assert together.clock_s(100.0) == 100.0
    assert together.keep_step(10_000, 1.0)
    assert together.stretch == pytest.approx(2.0)
    assert together.clock_s(101.0) == pytest.approx(100.5)
    assert together.read_s(1000) == pytest.approx(0.2)
    assert together.keep_step(10_000, 3.0)
    assert together.read_s(1000) == pytest.approx(0.6)


def test_small_changes_are_not_followed() -> None:
    """A tenth of the pace is less than anybody knows of it."""
    together = Together(PROFILE)
    assert not together.keep_step(900, 1.0)
    assert together.stretch == 1.0
    assert together.keep_step(1100, 1.0)
    assert together.stretch == pytest.approx(1.11)
    assert not together.keep_step(50, 1.05)
