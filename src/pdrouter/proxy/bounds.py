"""How much stands in a body, counted before anything is made of it: small things can be many.

Each function takes time by the length of the body and next to no memory. It knows no fields.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

_OUTSIDE_STRINGS: Mapping[bytes, "re.Pattern[bytes]"] = {
    mark: re.compile(rb'(?:[^"\%b]++|"(?:[^"\\]++|\\.)*+")*+' % mark, re.DOTALL) for mark in (b"{", b",")
}
"""What stands before the next such mark that isn't part of a string. Possessive: nothing is read twice."""


_decode_items = msgspec.json.Decoder(list[Raw]).decode


def first_items(raw: Raw | bytes, limit: int) -> Sequence[Raw]:
    """Return the first items of a JSON array, ``limit`` at most; the others are passed over.

    Raises: msgspec.MsgspecError if it isn't an array.
    """
    if len(memoryview(raw)) <= 2 * limit:
        return _decode_items(raw)
    items = msgspec.structs.astuple(_array_of(limit).decode(raw))
    return items if items[-1] is not UNSET else items[: items.index(UNSET)]


@cache
def _array_of(limit: int) -> "msgspec.json.Decoder[Struct]":
    """Return a decoder for arrays that reads no more items than a struct has fields."""
    fields = [(f"item{index}", Raw | UnsetType, UNSET) for index in range(limit)]
    return msgspec.json.Decoder(msgspec.defstruct("Items", fields, array_like=True, gc=False))


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
