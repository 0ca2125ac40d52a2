"""Whatever bytes a client sends, in whatever pieces: no failure, valid replies, an end, and one reading of them."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tests.front import Front, Served, hold

TOKENS = st.text("abcXYZ-_09", min_size=1, max_size=8).map(str.encode)
VALUES = st.text("abc,;= \t\xe4", max_size=12).map(lambda text: text.strip().encode("latin-1"))
BODIES = st.binary(max_size=60)
ODDITIES = st.sampled_from(
    [
        *(b"\r\n \r \n \0 : ; \t , 0 \r\n\r\n".split(b" ")),
        b" ",
        b"\r\n ",
        b"chunked",
        b"Content-Length: 3\r\n",
        b"content-length : 5\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"transfer-encoding: identity\r\n",
        b"Connection: close\r\n",
        b"Connection: upgrade\r\nUpgrade: h2c\r\n",
        b"Expect: 100-continue\r\n",
        b"host: other\r\n",
        b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n",
        b"HTTP/1.0",
        b"\xff",
        b"0\r\n\r\n",
        b"ffffffffffffffff\r\n",
    ]
)


@st.composite
def chunked(draw: st.DrawFn, body: bytes) -> bytes:
    """Write a body in chunks, some with an extension, perhaps with a trailer."""
    cuts = sorted(draw(st.lists(st.integers(0, len(body)), max_size=4)))
    pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True) if a < b]
    extension = draw(st.sampled_from([b"", b";a", b";a=b", b';a="b c"']))
    trailer = draw(st.sampled_from([b"", b"x-sum: 7\r\n"]))
    return b"".join(b"%x%b\r\n%b\r\n" % (len(p), extension, p) for p in pieces) + b"0\r\n" + trailer + b"\r\n"


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, Served]:
    """Write a valid request, and say what it asks."""
    method = draw(st.sampled_from([b"POST", b"POST", b"GET", b"HEAD", b"DELETE"]))
    path = b"/" + draw(TOKENS)
    target = draw(st.sampled_from([path, path + b"?q=/", b"http://h:80" + path]))
    lines = [
        b"host: h",
        *(b"x-" + name + b":" + value for name, value in draw(st.lists(st.tuples(TOKENS, VALUES), max_size=8))),
    ]
    body = draw(BODIES) if method == b"POST" else b""
    framed = body
    if method == b"POST" and draw(st.booleans()):
        lines.append(b"Transfer-Encoding: chunked")
        framed = draw(chunked(body))
    elif body or draw(st.booleans()):
        lines.append(b"content-length: %d" % len(body))
    lines += draw(
        st.sampled_from([[], [b"connection: Keep-Alive"], [b"Connection: Upgrade, x-a", b"Upgrade: h2c"]]),
    )
    if method == b"POST" and draw(st.booleans()):
        lines.append(b"expect: 100-Continue")
    head = b"%b %b HTTP/1.1\r\n%b\r\n\r\n" % (method, target, b"\r\n".join(draw(st.permutations(lines))))
    return head + framed, Served(method, path, body)


@st.composite
def pieces(draw: st.DrawFn, raw: bytes) -> list[bytes]:
    """Cut bytes anywhere."""
    cuts = sorted(draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    return [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True) if a < b]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Spoil some valid requests a little."""
    raw = bytearray(b"".join(asked for asked, _ in draw(st.lists(requests(), min_size=1, max_size=3))))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(raw)))
        size = draw(st.sampled_from([0, 0, 1, 2, 20]))
        raw[at : at + size] = draw(st.one_of(ODDITIES, st.binary(max_size=3)))
    return bytes(raw)


def read(front: Front) -> tuple[Sequence[Served], bool]:
    """Return what came through, and whether anything was refused."""
    return front.app.served, bool(front.app.refused)


@given(st.lists(requests(), min_size=1, max_size=4), st.data(), st.booleans(), st.booleans())
def test_good_requests(
    asked: list[tuple[bytes, Served]], data: st.DataObject, answers_at_once: bool, is_slow: bool
) -> None:
    """Valid requests are served whole and in order, one by one or pipelined, wherever the network cuts them."""
    cut = data.draw(pieces(b"".join(raw for raw, _ in asked)))
    front = hold(cut, answers_at_once=answers_at_once, is_slow=is_slow)
    assert front.app.served == [served for _, served in asked]
    assert front.statuses() == [200] * len(asked)


@given(st.lists(requests(), min_size=1, max_size=3), st.booleans())
def test_many_requests_in_one_piece(asked: list[tuple[bytes, Served]], is_slow: bool) -> None:
    """However many requests come at once, each is served, in order."""
    asked = [one for one in asked if b"expect" not in one[0].lower()] * 20
    front = hold([b"".join(raw for raw, _ in asked)], is_slow=is_slow)
    assert front.app.served == [served for _, served in asked]


@given(mutated(), st.data(), st.booleans(), st.booleans())
def test_spoilt_requests(raw: bytes, data: st.DataObject, answers_at_once: bool, is_slow: bool) -> None:
    """Spoilt ones are read as another parser reads them, or refused; cutting them changes nothing."""
    whole = hold([raw])
    cut = hold(data.draw(pieces(raw)), answers_at_once=answers_at_once, is_slow=is_slow)
    assert read(whole) == read(cut)


@given(st.binary(max_size=200))
def test_any_bytes(raw: bytes) -> None:
    """Any bytes at all."""
    assert read(hold([raw])) == read(hold([bytes([byte]) for byte in raw]))
