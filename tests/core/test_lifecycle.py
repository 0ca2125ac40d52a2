"""The states of a request and the only ways between them."""

import pytest

from pdrouter.core.lifecycle import TRANSITIONS, State, advance
from pdrouter.errors import InvariantViolation


@pytest.mark.parametrize("target", State)
@pytest.mark.parametrize("current", State)
def test_only_the_ways_of_the_table_are_open(current: State, target: State) -> None:
    """Any other step is a fault of ours that carries the story."""
    if target in TRANSITIONS[current]:
        assert advance(current, target, "story") is target
    else:
        with pytest.raises(InvariantViolation, match=f"{current} can't become {target}: story"):
            advance(current, target, "story")


@pytest.mark.invariant("I2")
def test_every_state_ends_settled_and_nothing_follows() -> None:
    """There is a way out of each state, and none out of the last."""
    assert all(State.SETTLED in targets for state, targets in TRANSITIONS.items() if state is not State.SETTLED)
    assert not TRANSITIONS[State.SETTLED]
    assert set(TRANSITIONS) == set(State)
