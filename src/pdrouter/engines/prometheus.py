"""Finds a few series in a Prometheus exposition without reading the rest: such pages are long, and asked for often."""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice

_MAX_SERIES = 16_384
"""Four of each of the most ranks that an endpoint can have; chosen."""

_LABEL = rb'[a-zA-Z_]\w*="(?:[^"\\]|\\.)*"'
_LABELS = re.compile(rb'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')


def series(page: bytes, *names: str) -> Iterator[tuple[Mapping[str, str], float]]:
    """Yield labels and value of each series that has one of these names; what isn't a number is left out.

    No more than ``_MAX_SERIES`` (I9).
    """
    for found in islice(_series(names).finditer(page), _MAX_SERIES):
        try:
            value = float(found[2])
        except ValueError:
            continue
        yield {key.decode(): text.decode("utf-8", "replace") for key, text in _LABELS.findall(found[1] or b"")}, value


@lru_cache(maxsize=64)
def _series(names: tuple[str, ...]) -> "re.Pattern[bytes]":
    alternatives = b"|".join(re.escape(name.encode()) for name in names)
    return re.compile(rb"^(?:%b)(?:\{((?:%b,?)*)\})?[ \t]+(\S+)" % (alternatives, _LABEL), re.MULTILINE)
