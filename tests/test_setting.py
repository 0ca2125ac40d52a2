"""Reading and checking one value."""

from typing import Annotated, Literal

import pytest
from msgspec import UNSET, Struct, UnsetType

from pdrouter.setting import SECRET, Secret, check_forwarded, check_url, check_weight, setting, settings_of, shown


class Sample(Struct, kw_only=True):
    name: str
    count: Annotated[int, setting("A", "How many.", unit="items", low=1, high=9)] = 3
    share: Annotated[float, setting("A", "How much.", unit="parts", low=0, high=1)] = 0.5
    limit: Annotated[int, setting("B", "At most.", unit="items", low=0, high=9)] | UnsetType | None = UNSET
    is_on: Annotated[bool, setting("B", "Whether.")] = True
    mode: Annotated[Literal["fast", "slow"] | None, setting("B", "Which.")] = None
    words: Annotated[tuple[str, ...], setting("B", "Some.")] = ("a", "b")
    key: Annotated[Secret | None, setting("B", "Hidden.")] = None
    keys: Annotated[tuple[Secret, ...], setting("B", "Hidden, too.", check=check_weight)] = ()


SAMPLE = settings_of(Sample)


def test_annotations_are_read_back() -> None:
    """A field's type, default, unit, range, choices, group and sentence are known from its declaration."""
    count, limit, mode = SAMPLE["count"], SAMPLE["limit"], SAMPLE["mode"]
    assert (count.base, count.default, count.unit, count.range_text) == (int, 3, "items", "1 to 9")
    assert (count.group, count.description, count.is_optional) == ("A", "How many.", False)
    assert (limit.base, limit.is_optional, limit.default_text) == (int, True, "unset")
    assert (mode.choices, mode.is_optional, mode.range_text) == (("fast", "slow"), True, "fast, slow")
    assert (SAMPLE["name"].is_required, SAMPLE["name"].default_text) == (True, "required")
    assert (SAMPLE["words"].is_list, SAMPLE["words"].default_text) == (True, "a, b")
    assert (SAMPLE["is_on"].range_text, SAMPLE["is_on"].default_text) == ("true, false", "true")


def test_notes_annotate_a_plain_struct() -> None:
    """A struct without annotations gets them from notes; fields without a note are no settings."""
    (item,) = settings_of(Sample, {"name": setting("N", "Who.")}).values()
    assert (item.name, item.group, item.description) == ("name", "N", "Who.")


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("count", 4, 4),
        ("count", "4", 4),
        ("share", 1, 1.0),
        ("share", "1e-1", 0.1),
        ("limit", "none", None),
        ("limit", None, None),
        ("limit", "7", 7),
        ("is_on", False, False),
        ("is_on", "off", False),
        ("is_on", "TRUE", True),
        ("is_on", "1", True),
        ("mode", "slow", "slow"),
        ("mode", "none", None),
        ("words", " x, ,y ", ("x", "y")),
        ("words", ["x"], ("x",)),
        ("words", [], ()),
        ("key", "sk-1", Secret("sk-1")),
        ("key", Secret("sk-1"), Secret("sk-1")),
        ("key", "none", None),
        ("keys", "sk-1=2, sk-2=3", (Secret("sk-1=2"), Secret("sk-2=3"))),
    ],
)
def test_value(name: str, raw: object, value: object) -> None:
    """Text and YAML values give the same typed value."""
    read = SAMPLE[name].read(raw)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("name", "raw", "problem"),
    [
        ("count", "x", '"x" is not a whole number (items)'),
        ("count", "1.5", '"1.5" is not a whole number (items)'),
        ("count", 1.5, "1.5 is not a whole number (items)"),
        ("count", True, "true is not a whole number (items)"),
        ("count", None, "null is not a whole number (items)"),
        ("count", float("inf"), "Infinity is not a whole number (items)"),
        ("count", 10, "10 is out of range; write 1 to 9 (items)"),
        ("count", "0", '"0" is out of range; write 1 to 9 (items)'),
        ("share", float("nan"), "NaN is out of range; write 0 to 1 (parts)"),
        ("share", "inf", '"inf" is out of range; write 0 to 1 (parts)'),
        ("share", [1], "[1] is not a number (parts)"),
        ("is_on", "maybe", '"maybe" is neither true nor false'),
        ("is_on", 2, "2 is neither true nor false"),
        ("mode", "quick", '"quick" is not one of fast, slow'),
        ("mode", 3, "3 is not one of fast, slow"),
        ("words", 3, "3 is not a list"),
        ("words", [3], "3 is not text; put it in quotes"),
        ("name", {"a": 1}, '{"a": 1} is not text; put it in quotes'),
    ],
)
def test_value_refused(name: str, raw: object, problem: str) -> None:
    """What is wrong is said with the value, the unit and the range."""
    with pytest.raises(ValueError) as error:  # noqa: PT011 - compared whole below
        SAMPLE[name].read(raw)
    assert str(error.value) == problem


def test_long_value_is_shortened() -> None:
    """A problem stays one short line whatever was given."""
    with pytest.raises(ValueError, match="is not a whole number") as error:
        SAMPLE["count"].read("9\n" * 10_000)
    assert len(str(error.value)) < 200
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://engine", "http://engine:80"),
        ("http://engine/", "http://engine:80"),
        ("HTTP://Engine.Example:30000", "http://engine.example:30000"),
        ("http://10.0.0.1:1", "http://10.0.0.1:1"),
        ("http://10.0.0.1:65535/", "http://10.0.0.1:65535"),
        ("http://prefill_0:8000", "http://prefill_0:8000"),
        ("http://[0:0::1]:30000", "http://[::1]:30000"),
    ],
)
def test_url(text: str, url: str) -> None:
    """One engine has one spelling."""
    assert check_url(text) == url


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("htp:/x", "is not a URL; write http://HOST:PORT"),
        ("", "is not a URL"),
        ("10.0.0.1:30000", "is not a URL"),
        ("http://", "is not a URL"),
        ("http://:80", "is not a URL"),
        ("http://h:", "is not a URL"),
        ("http://h:x", "is not a URL"),
        ("http://h:٣", "is not a URL"),
        ("http://h\n:1", "is not a URL"),
        ("http://h:1 ", "is not a URL"),
        ("http://a b:1", "is not a URL"),
        ("http://[::1", "is not a URL"),
        ("http://[::1]x", "is not a URL"),
        ("http://[12345::]:1", "no valid IPv6 address"),
        ("http://h:0", "port 0; write a port from 1 to 65535"),
        ("http://h:65536", "port 65536; write a port from 1 to 65535"),
        ("https://h:1", "https to engines is not served yet"),
        ("grpc://h:1", "grpc to engines is not served yet"),
        ("http://h:1@3", "names a rank; ranks are learned from the engine"),
        ("h:1@0", "names a rank"),
        ("http://h:1/v1", "has a path, query or fragment"),
        ("http://h:1?a=b", "has a path, query or fragment"),
        ("http://h:1/#f", "has a path, query or fragment"),
    ],
)
def test_url_refused(text: str, problem: str) -> None:
    """A URL that can't be an engine's is refused with what to write."""
    with pytest.raises(ValueError, match=r"^\S.*http://HOST:PORT|port from 1|IPv6") as error:
        check_url(text)
    assert problem in str(error.value)


def test_password_is_not_shown() -> None:
    """A URL with user info is refused without repeating it."""
    with pytest.raises(ValueError, match="user info") as error:
        check_url("http://bob:secret@h:1")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("name", ["Transfer-Encoding", "cookie", "x-request-id", "X-Data-Parallel-Rank", "a b", ""])
def test_headers_that_are_not_sent_on(name: str) -> None:
    """What ends at the router or is its own to write is refused, and what is no name."""
    with pytest.raises(ValueError, match=r"its own to write|is not a header name"):
        check_forwarded(name)
    assert check_forwarded("X-Lane") == "x-lane"


def test_a_secret_isnt_shown() -> None:
    """Neither by itself nor in what holds it; and it is still itself."""
    sample = Sample(name="x", key=Secret("sk-1"))
    assert repr(Secret("sk-1")) == str(Secret("sk-1")) == f"{Secret('sk-1')!s}" == SECRET
    assert "sk-1" not in repr(sample)
    assert (Secret("a"), hash(Secret("a"))) == (Secret("a"), hash(Secret("a")))
    assert Secret("a") != Secret("b")
    assert Secret("a") != "a"
    assert Secret("sk-1").reveal() == "sk-1"


@pytest.mark.parametrize(
    ("name", "raw"), [("key", 87654), ("key", ["87654"]), ("keys", "87654=x"), ("keys", [87654]), ("key", SECRET)]
)
def test_a_wrong_secret_isnt_shown(name: str, raw: object) -> None:
    """What is wrong with it is told without it; what stands for a secret is none."""
    with pytest.raises(ValueError, match=r".") as error:
        SAMPLE[name].read(raw)
    assert "87654" not in str(error.value)


def test_what_is_shown_ends() -> None:
    """Also of a value that grows with each level, or contains itself."""
    bomb: list[object] = ["x"]
    for _ in range(60):
        bomb = [bomb, bomb]
    loop: list[object] = []
    loop.append(loop)
    assert len(shown(bomb)) == 120
    assert shown(loop) == "a value that contains itself"
    assert shown(["a", 1, None]) == '["a", 1, null]'
