"""JSON read one level deep and written again: values stay the bytes that they came as (I10).

Engines' answers are hostile input: what isn't the expected kind counts as empty, and nothing here raises.
"""

from collections.abc import Iterable, Mapping

import msgspec
from msgspec import Raw

Fields = dict[str, Raw]

_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_FIELDS = msgspec.json.Decoder(Fields)
_OBJECTS = msgspec.json.Decoder(list[Fields])
_ITEMS = msgspec.json.Decoder(list[Raw])
_MAX_DIGITS = 15


def read_object(raw: bytes | Raw) -> Fields:
    """Return an object's fields; of those that stand twice the last."""
    try:
        return _FIELDS.decode(raw)
    except _UNREADABLE:
        return {}


def read_objects(raw: bytes | Raw) -> list[Fields]:
    """Return the objects of a list of nothing else."""
    try:
        return _OBJECTS.decode(raw)
    except _UNREADABLE:
        return []


def read_items(raw: bytes | Raw) -> list[Raw]:
    """Return a list's items."""
    try:
        return _ITEMS.decode(raw)
    except _UNREADABLE:
        return []


def read_count(raw: bytes | Raw | None) -> int | None:
    """Return a whole number that isn't negative, and isn't too large to be a count; ``None`` if it is anything else."""
    text = bytes(raw or b"")
    return int(text) if text.isdigit() and len(text) <= _MAX_DIGITS else None


def write_object(fields: Mapping[str, bytes | Raw]) -> Raw:
    """Return an object."""
    return Raw(b"{" + b",".join(msgspec.json.encode(k) + b":" + bytes(v) for k, v in fields.items()) + b"}")


def write_list(items: Iterable[bytes | Raw]) -> Raw:
    """Return a list."""
    return Raw(b"[" + b",".join(map(bytes, items)) + b"]")
