"""Splicing: our fields go in, the client's bytes stay as they are."""

import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrouter.core.fleet import Role
from pdrouter.engines.base import Described, request_head, rest_without, splice
from pdrouter.errors import DuplicateField, InvalidJson

from .builders import make_endpoint

OURS = b'"rid":"ours","bootstrap_room":7000000000000000001'
OWNED = ("rid", "bootstrap_room", "routed_dp_rank")

SPACE = st.text(" \t\r\n", max_size=3)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NUMBER = st.sampled_from(["1e-05", "-0.0", "1.10", "12345678901234567890", "9" * 30, "-7", "0", "1E+2"])


@st.composite
def spelled(draw: st.DrawFn, text: str) -> str:
    """Return a JSON string for ``text``, each character plain or escaped."""
    escape = draw(st.sampled_from(["none", "all", "ascii"]))
    if escape == "all":
        return '"' + "".join(f"\\u{unit:04x}" for unit in _utf16(text)) + '"'
    return json.dumps(text, ensure_ascii=escape == "ascii")


def _utf16(text: str) -> list[int]:
    raw = text.encode("utf-16-be")
    return [int.from_bytes(raw[i : i + 2]) for i in range(0, len(raw), 2)]


@st.composite
def written(draw: st.DrawFn, fields: list[tuple[str, str]]) -> str:
    """Return an object of these fields in the spelling of some client."""
    pieces = []
    for name, value in fields:
        before, between, after, end = (draw(SPACE) for _ in range(4))
        pieces.append(f"{before}{draw(spelled(name))}{between}:{after}{value}{end}")
    return "{" + (",".join(pieces) or draw(SPACE)) + "}"


def _objects(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Return nested objects; a name may stand twice in them."""
    names = st.sampled_from(["a", "rid", "bootstrap_room"])
    return st.lists(st.tuples(names, values), max_size=3).flatmap(written)


VALUES = st.recursive(
    st.one_of(NUMBER, st.sampled_from(["null", "true", "false"]), TEXT.flatmap(spelled)),
    lambda values: st.one_of(st.lists(values, max_size=3).map(lambda v: "[" + " , ".join(v) + "]"), _objects(values)),
    max_leaves=6,
)
FOREIGN = st.dictionaries(TEXT.filter(lambda name: name not in OWNED), VALUES, max_size=5)


def exactly(body: bytes) -> object:
    """Return what a body says: order, repeated names and the digits of numbers included."""
    return json.loads(body, object_pairs_hook=list, parse_int=lambda s: ("int", s), parse_float=lambda s: ("float", s))


@pytest.mark.invariant("I10")
@given(FOREIGN.map(lambda f: list(f.items())).flatmap(written), SPACE)
def test_a_spliced_body_is_ours_then_the_clients_bytes(body: str, space: str) -> None:
    """It parses to our fields and the original, and no byte behind the opening brace is another."""
    rest = body[1:].encode() + space.encode()
    spliced = b"".join(splice(rest, OURS))
    assert spliced.endswith(rest)
    assert exactly(spliced) == exactly(b"{" + OURS + b"}") + exactly(body.encode())  # type: ignore[operator]


@pytest.mark.invariant("I10")
@given(st.data(), FOREIGN, st.lists(st.sampled_from(OWNED), unique=True))
def test_a_rewritten_body_loses_our_fields_only(
    data: st.DataObject, foreign: Mapping[str, str], owned: list[str]
) -> None:
    """However they are spelled and wherever they stand; the others keep order and the bytes of their values."""
    values = {name: data.draw(VALUES) for name in owned}
    fields = data.draw(st.permutations([*foreign.items(), *values.items()]))
    body = data.draw(SPACE) + data.draw(written(fields))
    rest = rest_without(body.encode(), OWNED)
    kept = [(name, value) for name, value in fields if name not in owned]
    assert rest == b",".join(_name(name) + b":" + value.encode() for name, value in kept) + b"}"
    spliced = b"".join(splice(rest, OURS))
    assert json.loads(spliced) == {**json.loads(b"{" + OURS + b"}"), **{n: json.loads(v) for n, v in kept}}


def _name(text: str) -> bytes:
    """Return a name in its shortest spelling."""
    short = json.dumps(text, ensure_ascii=False)
    return short.encode()


@pytest.mark.invariant("I10")
@pytest.mark.parametrize(
    ("rest", "fields", "spliced"),
    [
        (b'"a":1}', b'"b":2', b'{"b":2,"a":1}'),
        (b"}", b'"b":2', b'{"b":2}'),
        (b" \n}", b'"b":2', b'{"b":2 \n}'),
        (b' "a":1} ', b'"b":2', b'{"b":2, "a":1} '),
        (b'"a":1}', b"", b'{"a":1}'),
        (b"}", b"", b"{}"),
        (b'"":""}', b'"b":2', b'{"b":2,"":""}'),
    ],
)
def test_splicing(rest: bytes, fields: bytes, spliced: bytes) -> None:
    """A comma stands where one is needed; a view of the body is as good as bytes."""
    assert b"".join(splice(rest, fields)) == spliced
    assert b"".join(splice(memoryview(rest), fields)) == spliced


def test_a_large_body_is_not_copied() -> None:
    """What is sent is a view of what was received."""
    view = memoryview(b'{"text":"' + b"x" * 100_000 + b'"}')[1:]
    assert splice(view, OURS)[1] is view


@pytest.mark.parametrize(
    "body",
    [
        b'{"rid":"a","rid":"b"}',
        b'{"rid":"a","text":"x","rid":null}',
        b'{"rid":"a","\\u0072id":"b"}',
        b'{"\\u0072\\u0069\\u0064":"a","r\\u0069d":"b"}',
        b' {"x":{"rid":1}, "rid" : "a" , "rid" : "a" } ',
    ],
)
def test_a_field_of_ours_twice_is_refused(body: bytes) -> None:
    """Which of them counts depends on who reads; nobody guesses."""
    with pytest.raises(DuplicateField) as caught:
        rest_without(body, OWNED)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "duplicate_field", "rid")


@pytest.mark.invariant("I10")
@pytest.mark.parametrize(
    ("body", "rest"),
    [
        (b'{"rid":"a","meta":{"rid":1,"rid":2}}', b'"meta":{"rid":1,"rid":2}}'),
        (b'{"rid":"a","x":[{"rid":1},{"rid":2}]}', b'"x":[{"rid":1},{"rid":2}]}'),
        (b'{"text":"\\"rid\\":1,\\"rid\\":2","rid":"a"}', b'"text":"\\"rid\\":1,\\"rid\\":2"}'),
        (b'{"a":1,"rid":"a","a":2}', b'"a":1,"a":2}'),
        (b'{"rid":"a"}', b"}"),
        (b'{"n":12345678901234567890123,"rid":"a","f":1e-05}', b'"n":12345678901234567890123,"f":1e-05}'),
        (b'{"n":' + b"9" * 5000 + b',"rid":"a"}', b'"n":' + b"9" * 5000 + b"}"),
    ],
)
def test_what_only_looks_like_a_field_of_ours_stays(body: bytes, rest: bytes) -> None:
    """Nested ones, text, and a foreign field that stands twice go through."""
    assert rest_without(body, OWNED) == rest


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"rid":}', b'{"\xff":1}', b'{"a":' + b"[" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000],
)
def test_what_is_not_json_is_refused(body: bytes) -> None:
    """Cut short, of wrong bytes, or too deep to be read."""
    with pytest.raises(InvalidJson):
        rest_without(body, OWNED)


def test_a_head_ends_its_lines_and_itself() -> None:
    """Host and length are ours, the other lines are the client's."""
    head = request_head("POST", "/generate", make_endpoint(Role.DECODE), b"accept: */*\r\n", 12)
    assert head.endswith(b"\r\n\r\n")
    first, *lines = head.decode().removesuffix("\r\n\r\n").split("\r\n")
    assert first == "POST /generate HTTP/1.1"
    assert sorted(lines) == ["accept: */*", "content-length: 12", "host: decode:30000"]


@pytest.mark.invariant("I9")
@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("dp_size", (1, 4096), (0, -1, 4097, 10**400)),
        ("rank_base", (0, 64), (-1, 10**400)),
        ("bootstrap_port", (1, 65_535), (0, -1, 65_536)),
        ("kv_capacity_tokens", (1, 10**9), (0, -5, 10**400)),
    ],
)
def test_an_engine_cannot_be_anything(name: str, good: tuple[int, ...], bad: tuple[int, ...]) -> None:
    """A number that would make the router reserve the memory of a million ranks counts as not told."""
    assert [getattr(Described(model="m", **{name: number}), name) for number in good] == list(good)  # type: ignore[arg-type]
    assert {Described(**{name: number}) for number in bad} == {Described()}  # type: ignore[arg-type]
