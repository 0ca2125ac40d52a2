"""Counting before reading: what is counted is what a JSON reader sees."""

import json
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrouter.proxy.bounds import exceeds, has_more, items

JSON = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(st.sampled_from('{,"\\[]}a\n\u4f60'), max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.sampled_from("{,a"), inner, max_size=3)),
    max_leaves=20,
)


def objects(value: object) -> Iterator[object]:
    """Return all objects in a value."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from objects(inner)


@given(JSON, st.booleans())
def test_objects_are_counted_as_they_are(value: object, is_ascii: bool) -> None:
    """Not those in strings, however they are escaped."""
    raw, count = json.dumps(value, ensure_ascii=is_ascii).encode(), len(list(objects(value)))
    assert not has_more(raw, b"{", count)
    assert count == 0 or has_more(raw, b"{", count - 1)


@given(st.lists(st.text(st.sampled_from(',"\\a'), max_size=6), min_size=1, max_size=8))
def test_commas_are_counted_as_they_are(texts: list[str]) -> None:
    """A list of texts has one less than items."""
    raw = json.dumps(texts).encode()
    assert not has_more(raw, b",", len(texts) - 1)
    assert len(texts) == 1 or has_more(raw, b",", len(texts) - 2)


@given(st.binary(max_size=30), st.integers(0, 10))
def test_a_byte_is_counted(raw: bytes, limit: int) -> None:
    """Wherever it stands."""
    assert exceeds(raw, b"{", limit) == (raw.count(b"{") > limit)


@given(JSON, st.integers(1, 6))
def test_items(value: object, limit: int) -> None:
    """All, as they are written, or none if there are more; what isn't an array is refused."""
    raw = json.dumps(value).encode()
    if not isinstance(value, list):
        with pytest.raises(msgspec.ValidationError):
            items(raw, limit, raw.count(b","))
        return
    found = items(raw, limit, raw.count(b","))
    assert (found is None) == (len(value) > limit)
    assert found is None or [json.loads(bytes(item)) for item in found] == value


@given(st.lists(st.text(st.sampled_from(',"\\a '), max_size=4), max_size=8), st.integers(1, 6), st.booleans())
def test_items_that_are_texts(texts: list[str], limit: int, is_spaced: bool) -> None:
    """Those are counted before they are read."""
    raw = json.dumps(texts, indent=1 if is_spaced else None).encode()
    found = items(raw, limit)
    assert found is None if len(texts) > limit else [json.loads(bytes(item)) for item in found or ()] == texts


def test_what_is_broken_ends() -> None:
    """Strings without an end, and nothing at all."""
    assert not has_more(b"", b"{", 0)
    assert has_more(b'{"a{{', b"{", 2)
