"""Multipart forms: the fields that routing needs, whatever stands around them, in time linear in the bytes."""

import contextlib
import time

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrouter.errors import ClientError, DuplicateField, InvalidRequest
from pdrouter.proxy.bodies import Api
from pdrouter.proxy.forms import form_fields
from pdrouter.proxy.intake import Intake
from tests.proxy.test_intake import make_intake

TYPE = b"multipart/form-data; boundary=b"
NAMES = frozenset((b"model", b"stream"))


def part(head: bytes, data: bytes = b"x") -> bytes:
    """Return a part of a form."""
    return b"--b\r\n" + head + b"\r\n\r\n" + data + b"\r\n"


def field(name: str, data: bytes = b"x") -> bytes:
    """Return a part that is a plain field."""
    return part(b'Content-Disposition: form-data; name="%b"' % name.encode(), data)


def read(*parts: bytes, kind: bytes = TYPE) -> dict[bytes, str]:
    """Read a form."""
    return dict(form_fields(kind, b"".join(parts) + b"--b--\r\n", NAMES))


def test_as_a_client_sends_it() -> None:
    """Fields before and behind the file are found, and nothing of the file is one."""
    file = ("a.wav", b'\r\n--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nno\r\n' * 1000)
    request = httpx2.Request("POST", "http://a", data={"model": "whisper", "stream": "true"}, files={"file": file})
    body = request.read()
    assert form_fields(request.headers["content-type"].encode(), body, NAMES) == {
        b"model": "whisper",
        b"stream": "true",
    }


def test_where_fields_may_stand() -> None:
    """In any part, with any other headers, by names in any case; a file of that name is no field."""
    disposition = b'content-type: text/plain\r\nCONTENT-DISPOSITION: form-data; name="model"'
    assert read(field("file", b"y" * 100_000), part(disposition, b"m"), field("models")) == {b"model": "m"}
    assert read(part(b'Content-Disposition: form-data; name="model"; filename="model"', b"m")) == {}
    assert read(part(b'X-Other: name="model"', b"m")) == {}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--b",
        b"--b--",
        b"--c\r\n\r\n",
        field("model"),
        field("model")[:-1],
        b"--b\r\nno colon\r\n\r\nx\r\n--b--\r\n",
        b"--b\r\na: " + b"b" * 2000 + b"\r\n\r\nx\r\n--b--\r\n",
        b"--b\r\n" + b"a: b\r\n" * 100 + b"\r\nx\r\n--b--\r\n",
        field("model", b"m" * 257) + b"--b--\r\n",
        part(b"Content-Disposition: form-data" + b";a" * 17) + b"--b--\r\n",
        field("x") * 129 + b"--b--\r\n",
    ],
)
def test_what_is_no_form(body: bytes) -> None:
    """A body that is cut, has other boundaries, or breaks a limit is refused."""
    if body == b"--b--":  # a form without parts
        assert form_fields(TYPE, body, NAMES) == {}
        return
    with pytest.raises(InvalidRequest):
        form_fields(TYPE, body, NAMES)


def test_a_field_that_stands_twice() -> None:
    """The engine might read the other one."""
    with pytest.raises(DuplicateField):
        read(field("model"), field("model"))


@pytest.mark.parametrize("kind", [b"multipart/form-data", b"multipart/form-data; boundary=", TYPE + b";" * 500])
def test_a_type_without_a_boundary(kind: bytes) -> None:
    """It is refused, and so is one that is too long."""
    with pytest.raises(InvalidRequest):
        read(field("model"), kind=kind)


@given(st.binary(max_size=200), st.lists(st.sampled_from([b"--b", b"\r\n", b"-", field("model"), b"\r\n--b--"])))
def test_any_bytes_are_read_or_refused(data: bytes, pieces: list[bytes]) -> None:
    """Nothing else is raised."""
    with contextlib.suppress(ClientError):
        form_fields(TYPE, b"".join(pieces) + data, NAMES)


@pytest.mark.invariant("I9")
@pytest.mark.parametrize(
    "data",
    [b'name="model"\r\n', b"\r\n", b"\r\n--", b"\r", b"-", b"--b", b"a: b\r\n", b";", field("x"), field("model")],
)
def test_time_is_linear(data: bytes) -> None:
    """CPU of one megabyte of what a parser likes least, be it refused."""
    head = b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n'
    cost_s = []
    for count in (1 << 16, 1 << 20):
        body = head + data * (count // len(data)) + b"\r\n--b--\r\n"
        began_s = time.process_time()
        for _ in range(3):
            with contextlib.suppress(ClientError):
                form_fields(TYPE, body, NAMES)
        cost_s.append(time.process_time() - began_s)
    assert cost_s[1] < 16 * 4 * max(cost_s[0], 0.002)


def test_the_model_of_a_transcription() -> None:
    """It is what routing goes by, and the body goes on as it came."""
    intake: Intake = make_intake()
    body = field("file", b"y" * 1000) + field("model", b"whisper") + field("stream", b"true") + b"--b--\r\n"
    facts, inbound = intake.read(Api.TRANSCRIPTIONS, [(b"content-type", TYPE)], body, "r")
    assert (facts.model, inbound.is_stream, inbound.body) == ("whisper", True, body)
