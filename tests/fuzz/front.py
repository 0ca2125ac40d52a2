"""Fuzzes a client's connection: any bytes, in pieces cut by chance, against what ``tests/front.py`` holds of them.

`make fuzz`, or `python tests/fuzz/front.py -max_total_time=60 tests/fuzz/corpus/front`. Bytes that break it are written
to a file; once mended, they belong into the corpus, which the tests read as well.
"""

import random
import sys
from pathlib import Path

import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore]

sys.path.insert(0, str(Path(__file__).parents[2]))

with atheris.instrument_imports(include=["pdrouter.proxy"]):
    from tests.front import hold


def one_input(raw: bytes) -> None:
    """Hold that the bytes mean the same whole and in pieces."""
    chance = random.Random(raw)
    cuts = sorted(chance.randrange(len(raw) + 1) for _ in range(chance.randrange(6)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True) if a < b]
    whole, cut = hold([raw]), hold(pieces, answers_at_once=chance.random() < 0.5)
    assert whole.app.served == cut.app.served, pieces
    assert bool(whole.app.refused) == bool(cut.app.refused), pieces


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
