"""Multipart forms: what was written into a good form is read out of it, and any bytes are read or refused."""

import contextlib
from collections.abc import Mapping
from typing import NamedTuple

from pdrouter.errors import ClientError, DuplicateField, InvalidRequest
from pdrouter.proxy.forms import form_fields
from tests.fuzz.source import Source

NAMES = frozenset((b"model", b"stream"))
MOST_BYTES = 256

_BOUNDARIES = (b"b", b"----x.y'z", b"0123456789" * 7, b"a b")
_PART_NAMES = (b"model", b"stream", b"file", b"models", b"Model", b"", b"a;b", b"name")
_HEADERS = (
    b"content-type: text/plain",
    b'X-Other: form-data; name="model"',
    b"content-transfer-encoding: 8bit",
    b"content-length: 5",
)
_VALUES = (
    b"whisper",
    b"true",
    b"",
    b"\r\n",
    b"\r\n--",
    b"--",
    b"\r",
    b"\xff\xfe",
    b'Content-Disposition: form-data; name="model"\r\n\r\nx',
    b"x" * MOST_BYTES,
    b"x" * (MOST_BYTES + 1),
    b"y" * 3000,
)
_ODDITIES = (b"\r\n", b"--", b"\r", b"\n", b":", b'"', b";", b"\0", b"\r\n\r\n", b"--b--", b"\xff")


class Part(NamedTuple):
    """What is written: a field, or a file."""

    name: bytes
    value: bytes
    is_file: bool


def one_input(raw: bytes) -> None:
    """Write a form and read it, whole or spoilt."""
    source = Source(raw)
    boundary = source.pick(_BOUNDARIES)
    kind = b'multipart/form-data; boundary="%b"' % boundary
    parts: list[Part] = []
    body = b""
    for _ in range(source.below(6)):
        part, text = written(source, boundary)
        parts.append(part)
        body += text
    body += b"--%b--\r\n" % boundary
    if source.once_in(2):
        body = spoilt(source, body)
        with contextlib.suppress(ClientError):
            form_fields(kind, body, NAMES)
    elif parts:
        hold(parts, kind, body)


def written(source: Source, boundary: bytes) -> tuple[Part, bytes]:
    """Return a part, and how it is written."""
    name, is_file = source.pick(_PART_NAMES), source.once_in(4)
    value = b"".join(source.pick(_VALUES) for _ in range(source.below(3)))
    disposition = b'Content-Disposition: form-data; name="%b"' % name + (b'; filename="a;b"' if is_file else b"")
    lines = [disposition]
    if source.once_in(2):
        lines.insert(source.below(2), source.pick(_HEADERS))
    text = b"--%b\r\n%b\r\n\r\n%b\r\n" % (boundary, b"\r\n".join(lines), value)
    return Part(name, value, is_file), text


def spoilt(source: Source, body: bytes) -> bytes:
    """Return a body with something cut out of it or put into it."""
    for _ in range(1 + source.below(3)):
        at = (source.below(256) * 256 + source.below(256)) % (len(body) + 1)
        body = body[:at] + (source.pick(_ODDITIES) if source.once_in(2) else b"") + body[at + source.below(9) :]
    return body


def hold(parts: list[Part], kind: bytes, body: bytes) -> None:
    """Hold that the fields are those that were written, or that the form is refused for the right reason."""
    wanted = [part for part in parts if part.name in NAMES and not part.is_file]
    is_twice = len({part.name for part in wanted}) < len(wanted)
    is_long = any(len(part.value) > MOST_BYTES for part in wanted)
    told: Mapping[bytes, str] | ClientError
    try:
        told = form_fields(kind, body, NAMES)
    except ClientError as error:
        told = error
    if is_twice or is_long:
        assert isinstance(told, DuplicateField | InvalidRequest)
    else:
        assert told == {part.name: part.value.decode("utf-8", "replace") for part in wanted}
