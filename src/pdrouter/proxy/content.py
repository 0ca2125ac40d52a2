"""The content of messages and items, for all APIs: which of it is text, and which is media.

One rule, by the names of fields, whatever the ``type``: under ``text`` stands text; under ``content``, ``output`` and
``summary`` more parts; under the names of ``Part`` that end it, media. A part without any of these is the text that its
JSON is. Media count as tokens, and are compared by a digest of what they say; their bytes are never text.

Source of the names: OpenAI's API reference (chat, responses), Anthropic's (messages), vLLM 0.32
(``chat_completion/protocol.py``, ``anthropic/protocol.py``), SGLang 0.5.23 (``protocol.py``, ``serving_responses.py``).
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import TypeVar

import msgspec
import xxhash
from msgspec import UNSET, Raw, Struct, UnsetType

from pdrouter.errors import InvalidRequest

T = TypeVar("T")

RawField = Raw | UnsetType
Piece = Raw | bytes

MAX_MEDIA = 1024
"""Images, clips and files of one request (I9); chosen."""

_MAX_DEPTH = 4
"""How deep parts may stand in parts: a document in a tool's result in a message. What is deeper is text."""

DIGEST_BYTES = 16
"""What stands for a medium among what is compared."""

_EMPTY_BYTES = 2
"""The length of an empty text, list or object."""

_ARRAY, _OBJECT, _NULL = b"[{n"
"""What a JSON value begins with."""


class Message(Struct, gc=False):
    """One message of a conversation."""

    role: RawField = UNSET
    content: RawField = UNSET
    tool_calls: RawField = UNSET


class Part(Struct, gc=False):
    """A part of a content, or an item of ``/v1/responses``."""

    text: RawField = UNSET
    role: RawField = UNSET
    content: RawField = UNSET
    output: RawField = UNSET
    summary: RawField = UNSET
    source: RawField = UNSET
    image_url: RawField = UNSET
    audio_url: RawField = UNSET
    video_url: RawField = UNSET
    input_audio: RawField = UNSET
    file: RawField = UNSET
    file_data: RawField = UNSET
    file_url: RawField = UNSET
    file_id: RawField = UNSET
    image_embeds: RawField = UNSET
    audio_embeds: RawField = UNSET


class _Source(Struct, gc=False):
    """Where an image or a document of ``/v1/messages`` comes from; a document may be text, or parts."""

    type: RawField = UNSET
    data: RawField = UNSET
    content: RawField = UNSET


_MEDIA = attrgetter(*Part.__struct_fields__[Part.__struct_fields__.index("image_url") :])
_NOTHING = Part()
_PLAIN_TEXT = b'"text"'

_decode_parts = msgspec.json.Decoder(list[Part]).decode
_decode_raws = msgspec.json.Decoder(list[Raw]).decode
_decode_part = msgspec.json.Decoder(Part).decode
_decode_source = msgspec.json.Decoder(_Source).decode


class Content:
    """What has been read: ``pieces`` in order, and which of them stand for media."""

    __slots__ = ("_field", "media", "pieces")

    def __init__(self, field: str) -> None:
        self.pieces: list[Piece] = []
        self.media: list[int] = []
        self._field = field

    def add_message(self, message: Message) -> None:
        """Add a message."""
        if message.role is not UNSET:
            self.pieces.append(message.role)
        if message.content is not UNSET:
            self.add(message.content)
        calls = value(message.tool_calls)
        if calls is not None:
            self.pieces.append(calls)

    def add(self, raw: Raw, depth: int | None = None) -> None:
        """Add a content: a text, a list of parts, or one part.

        Raises: InvalidRequest.
        """
        depth = _MAX_DEPTH if depth is None else depth
        first = memoryview(raw)[0]
        if first == _ARRAY and depth:
            self._add_parts(raw, depth - 1)
        elif first == _OBJECT and depth:
            part = self._decoded(_decode_part, raw)
            if not self._add_part(part, part.text, depth - 1):
                self.pieces.append(raw)
        elif first != _NULL:
            self.pieces.append(raw)

    def text(self) -> bytes:
        """Return all pieces but media."""
        media = set(self.media)
        return b",".join([piece for index, piece in enumerate(self.pieces) if index not in media])

    def media_ends(self) -> list[int]:
        """Return where the digests of media end once the pieces are joined, a byte between each two."""
        ends = list(accumulate(1 + len(memoryview(piece)) for piece in self.pieces))
        return [ends[index] - 1 for index in self.media]

    def add_medium(self, values: Sequence[Raw]) -> None:
        """Add a medium: all that is said of it.

        Raises: InvalidRequest.
        """
        if len(self.media) == MAX_MEDIA:  # I9
            text = f"{self._field}: more than {MAX_MEDIA} images, clips and files"
            raise InvalidRequest(text, param=self._field)
        said = values[0] if len(values) == 1 else b",".join(values)
        self.media.append(len(self.pieces))
        self.pieces.append(xxhash.xxh3_64_hexdigest(memoryview(said)).encode())

    def _add_parts(self, raw: Raw, depth: int) -> None:
        raws: Sequence[Raw] = ()
        for index, part in enumerate(self._decoded(_decode_parts, raw)):
            text, part.text = part.text, UNSET
            is_other = part != _NOTHING
            if isinstance(text, Raw) and not is_other:  # by far the most frequent
                self.pieces.append(text)
            elif not is_other or not self._add_part(part, text, depth):
                raws = raws or _decode_raws(raw)
                self.pieces.append(raws[index])

    def _add_part(self, part: Part, text: RawField, depth: int) -> bool:
        """Add what is known of a part beside its ``text``; return whether anything is."""
        before = len(self.pieces)
        self.pieces += [one for one in (part.role, text) if one is not UNSET]
        media = [medium for medium in _MEDIA(part) if medium is not UNSET]
        if media and (media := [medium for medium in media if says_something(medium)]):
            self.add_medium(media)
        inner = [content for content in (part.content, part.output, part.summary) if content is not UNSET]
        for content in inner:
            self.add(content, depth)
        if part.source is not UNSET and not inner:
            self._add_source(part.source, depth)
        return len(self.pieces) > before or bool(inner)

    def _add_source(self, raw: Raw, depth: int) -> None:
        """Add what a source says: text, parts, or else a medium."""
        if value(raw) is None:
            return
        source = self._decoded(_decode_source, raw) if memoryview(raw)[0] == _OBJECT else _Source()
        if source.content is not UNSET:
            self.add(source.content, depth)
        elif source.data is not UNSET and source.type is not UNSET and bytes(source.type) == _PLAIN_TEXT:
            self.pieces.append(source.data)
        else:
            self.add_medium([raw])

    def _decoded(self, decode: Callable[[Raw], T], raw: Raw) -> T:
        try:
            return decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"{self._field}: content: {error}", param=self._field) from error


def says_something(raw: Raw) -> bool:
    """Whether a value can be a medium: null and what is empty can't."""
    seen = memoryview(raw)
    return len(seen) > _EMPTY_BYTES and seen[0] != _NULL


def is_array(field: RawField) -> bool:
    """Whether a field is there, and is a list."""
    return not isinstance(field, UnsetType) and memoryview(field)[0] == _ARRAY


def value(field: RawField) -> Raw | None:
    """Return a field's raw JSON, ``None`` where it is null or missing."""
    return None if isinstance(field, UnsetType) or memoryview(field)[0] == _NULL else field
