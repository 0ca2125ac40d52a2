"""Tokens of a streamed event: learned slowly, for each endpoint, from counts that can be."""

import pytest

from pdrouter.core.event_tokens import EventTokens


def test_they_are_learned_slowly() -> None:
    """One answer moves the mean a little, many move it all the way; another endpoint has its own."""
    known = EventTokens()
    known.learn("a", 10, 40)
    assert 1.0 < known.of("a") < 2.0
    for _ in range(100):
        known.learn("a", 10, 40)
    assert known.of("a") == pytest.approx(4.0, abs=0.01)
    assert known.of("b") == 1.0
    known.forget("a")
    assert known.of("a") == 1.0


@pytest.mark.parametrize(("events", "tokens"), [(0, 40), (-1, 40), (10, 9), (10, 0), (1, 10**9)])
def test_counts_that_teach_nothing(events: int, tokens: int) -> None:
    """No events, fewer tokens than events, or more than can be."""
    known = EventTokens()
    known.learn("a", events, tokens)
    assert known.of("a") == 1.0
