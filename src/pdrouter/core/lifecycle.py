"""The states of a routed request and the only ways between them."""

from collections.abc import Mapping
from enum import StrEnum

from pdrouter.errors import InvariantViolation


class State(StrEnum):
    """Where a decided request stands."""

    PREFILLING = "prefilling"
    DECODING = "decoding"
    SETTLED = "settled"


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.PREFILLING: frozenset({State.DECODING, State.SETTLED}),
    State.DECODING: frozenset({State.SETTLED}),
    State.SETTLED: frozenset(),
}


def advance(current: State, target: State, story: str) -> State:
    """Return ``target`` if it may follow ``current``.

    Raises: InvariantViolation with the request's story otherwise.
    """
    if target not in TRANSITIONS[current]:
        raise InvariantViolation(f"{current} can't become {target}: {story}")
    return target
