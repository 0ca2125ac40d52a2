"""JSON one level deep: values keep their bytes, and what isn't the expected kind counts as empty."""

import pytest

from pdrouter.engines.raw_json import read_count, read_items, read_object, read_objects, write_list, write_object

STRANGE = (b"", b"null", b"5", b'"x"', b"{", b"[1", b"\xff", b'{"a":\xff}', b"[" * 100_000, b'{"a":1} x')


@pytest.mark.invariant("I10")
def test_values_keep_their_bytes() -> None:
    """Numbers keep their digits, text its escapes, and fields their order."""
    raw = b'{ "b" : 1e-05, "a": [ 12345678901234567890, "\\u00e9" ] }'
    assert bytes(write_object(read_object(raw))) == b'{"b":1e-05,"a":[ 12345678901234567890, "\\u00e9" ]}'
    assert bytes(write_list(read_items(b' [ 1.0 , {"a" :2}, [] ]'))) == b'[1.0,{"a" :2},[]]'
    assert bytes(write_list(map(write_object, read_objects(b'[{"a": 1},{}]')))) == b'[{"a":1},{}]'


@pytest.mark.parametrize("raw", STRANGE)
def test_what_is_something_else_is_empty(raw: bytes) -> None:
    """Nothing is raised, however strange it is."""
    assert read_object(raw) == {}
    assert read_objects(raw) == []
    assert read_items(raw) == []


def test_a_list_of_not_only_objects() -> None:
    """It counts as empty as well."""
    assert read_objects(b'[{"a":1},2]') == []


@pytest.mark.parametrize(
    ("raw", "count"),
    [
        (b"0", 0),
        (b"123456789012345", 123456789012345),
        (b"1234567890123456", None),
        (b"-1", None),
        (b"1.0", None),
        (b"1e3", None),
        (b"true", None),
        (b"null", None),
        (b'"5"', None),
        (None, None),
    ],
)
def test_counts(raw: bytes | None, count: int | None) -> None:
    """Whole numbers of at most 15 digits."""
    assert read_count(raw) == count
