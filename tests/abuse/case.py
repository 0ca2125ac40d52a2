"""What a case is, and the list that ``@case`` fills."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from tests.abuse.stage import Failed, Stage

Play = Callable[[Stage], Awaitable[str]]
"""Plays a case; returns what happened. Raises: Failed."""


class Case(NamedTuple):
    """``item``: of the threat model's list; ``input`` and ``limit`` are told in the table.

    The router may grow by ``grows_mib`` while it plays. ``is_shared``: it plays on the shared router, so that it may
    be repeated beside honest traffic.
    """

    item: int
    name: str
    input: str
    limit: str
    play: Play
    grows_mib: float
    is_shared: bool


CASES: list[Case] = []


def case(
    item: int, input_: str, limit: str, *, grows_mib: float = 40.0, is_shared: bool = True
) -> Callable[[Play], Play]:
    """Add a case to the list."""

    def add(play: Play) -> Play:
        name = getattr(play, "__name__", "?").replace("_", "-")
        CASES.append(Case(item, name, input_, limit, play, grows_mib, is_shared))
        return play

    return add


def must(holds: object, what: str) -> None:
    """Raise Failed unless something holds."""
    if not holds:
        raise Failed(what)
