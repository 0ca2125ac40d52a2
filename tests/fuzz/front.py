"""A client's connection: any bytes, however cut, mean the same, against what ``tests/front.py`` holds of them."""

import random

from tests.front import Front, hold


def one_input(raw: bytes) -> None:
    """Hold that the bytes mean the same whole, in a few pieces and byte by byte."""
    chance = random.Random(raw)
    cuts = sorted(chance.randrange(len(raw) + 1) for _ in range(chance.randrange(6)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True) if a < b]
    whole = _read(hold([raw]))
    answers_at_once, is_slow = chance.random() < 0.5, chance.random() < 0.5
    assert whole == _read(hold(pieces, answers_at_once=answers_at_once, is_slow=is_slow)), pieces
    assert whole == _read(hold([raw[at : at + 1] for at in range(len(raw))]))


def _read(front: Front) -> tuple[object, bool]:
    """Return what came through, and whether anything was refused."""
    return front.app.served, bool(front.app.refused)
