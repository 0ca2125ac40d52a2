"""How much stands in a body, counted before anything is made of it: small things can be many.

Each function takes time by the length of the body and next to no memory. It knows no fields.
"""

import re
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Raw

_OUTSIDE_STRINGS: Mapping[bytes, "re.Pattern[bytes]"] = {
    mark: re.compile(rb'(?:[^"\%b]++|"(?:[^"\\]++|\\.)*+")*+' % mark, re.DOTALL) for mark in (b"{", b",")
}
"""What stands before the next such mark that isn't part of a string. Possessive: nothing is read twice."""


_decode_items = msgspec.json.Decoder(list[Raw]).decode


def items(raw: bytes, limit: int, commas: int | None = None) -> Sequence[Raw] | None:
    """Return the items of a JSON array, ``None`` if there are more than ``limit``.

    ``commas`` is how many may stand in all of it, strings aside; unset: as many as so many plain items have.

    Raises: msgspec.MsgspecError if it isn't an array.
    """
    if has_more(raw, b",", limit - 1 if commas is None else commas):
        return None
    found = _decode_items(raw)
    return found if len(found) <= limit else None


def exceeds(raw: bytes, mark: bytes, limit: int) -> bool:
    """Whether a byte stands more than ``limit`` times in ``raw``, be it part of a string or not."""
    return len(raw) > limit and len(raw) - len(raw.replace(mark, b"", limit + 1)) > limit


def has_more(raw: bytes, mark: bytes, limit: int) -> bool:
    """Whether a mark, ``{`` or ``,``, stands more than ``limit`` times in JSON, strings aside."""
    if not exceeds(raw, mark, limit):
        return False
    skip, at = _OUTSIDE_STRINGS[mark].match, 0
    for _ in range(limit + 1):
        found = skip(raw, at)
        at = len(raw) if found is None else found.end()
        if at == len(raw):
            return False
        at += 1
    return True
