"""The plain fields of a multipart form that routing needs; files and all other fields are passed over.

Source of the form: RFC 7578; its bytes are read by python-multipart. Read next: ``reading.py``.
"""

from collections.abc import Collection, Mapping

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from pdrouter.errors import DuplicateField, InvalidRequest

_MAX_PARTS = 128
"""Parts of a form (I9); chosen."""

_MAX_FIELD_BYTES = 256
"""A longer value is none that routing knows (I9)."""

_MAX_HEADER_BYTES = 1024
_MAX_TYPE_BYTES = 512
_MAX_PARAMETERS = 16
"""Parameters of a header, and a header's length: the time that they take grows with the square of both. Chosen."""


def form_fields(content_type: bytes, body: bytes, names: Collection[bytes]) -> Mapping[bytes, str]:
    """Return the fields of a form that have these names; those that hold a file are none.

    Raises: InvalidRequest if the body isn't such a form; DuplicateField if a field stands there twice.
    """
    if len(content_type) > _MAX_TYPE_BYTES:
        raise InvalidRequest("the content type of a form is too long", param="content-type")
    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        raise InvalidRequest("the content type of a form needs a boundary", param="content-type")
    reader = _Reader(names)
    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": reader.part_begins,
                "on_header_begin": reader.header_begins,
                "on_header_field": reader.header_name,
                "on_header_value": reader.header_value,
                "on_header_end": reader.header_ends,
                "on_part_data": reader.data,
                "on_part_end": reader.part_ends,
                "on_end": reader.ends,
            },
            max_header_size=_MAX_HEADER_BYTES,
        )
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise InvalidRequest(f"the body isn't a multipart form: {error}") from error
    if not reader.is_whole:
        raise InvalidRequest("the body isn't a multipart form: its end is missing")
    return reader.fields


class _Reader:
    """Hears of a form's parts, and keeps the fields that are wanted."""

    def __init__(self, names: Collection[bytes]) -> None:
        self.fields: dict[bytes, str] = {}
        self.is_whole = False
        self._names = names
        self._parts = 0
        self._header = b""
        self._value = b""
        self._name = b""
        self._data = b""

    def part_begins(self) -> None:
        """Count a part."""
        self._parts += 1
        self._name = self._data = b""
        if self._parts > _MAX_PARTS:  # I9
            raise InvalidRequest(f"a form of more than {_MAX_PARTS} parts")

    def header_begins(self) -> None:
        """Forget the header before."""
        self._header = self._value = b""

    def header_name(self, data: bytes, start: int, end: int) -> None:
        """Take the name of a header, or a piece of it."""
        self._header += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        """Take the value of a header, or a piece of it."""
        self._value += data[start:end]

    def header_ends(self) -> None:
        """Find out whether the part is wanted."""
        if self._header.lower() != b"content-disposition":
            return
        if self._value.count(b";") > _MAX_PARAMETERS:  # I9
            raise InvalidRequest("a part of the form has too many parameters")
        _, parameters = parse_options_header(self._value)
        name = parameters.get(b"name", b"")
        self._name = name if name in self._names and b"filename" not in parameters else b""

    def data(self, data: bytes, start: int, end: int) -> None:
        """Take a piece of a part's value, if it is wanted."""
        if self._name and len(self._data) <= _MAX_FIELD_BYTES:  # I9
            self._data += data[start : min(end, start + _MAX_FIELD_BYTES + 1)]

    def part_ends(self) -> None:
        """Keep a field."""
        name = self._name
        if not name:
            return
        if name in self.fields:
            raise DuplicateField(f"the form's field {name.decode()!r} stands there twice", param=name.decode())
        if len(self._data) > _MAX_FIELD_BYTES:
            raise InvalidRequest(f"the form's field {name.decode()!r} is too long", param=name.decode())
        self.fields[name] = self._data.decode("utf-8", "replace")

    def ends(self) -> None:
        """Take note of the form's end."""
        self.is_whole = True
