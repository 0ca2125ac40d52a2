"""From a body to its Prompt: the bytes to compare with others', and about how many tokens they are.

Text is never decoded: its size is judged from its raw JSON. Token ids and embeddings are counted.
"""

import re

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from pdrouter.errors import InvalidRequest
from pdrouter.proxy.bodies import AnyBody, Chat, Completion, Generate, RawField

_SAMPLE_BYTES = 4096

_FIRST = re.compile(rb"\[\s*(.)", re.DOTALL)
"""The first character inside an array."""

_NOT_IN_IDS = (b'"', b"[", b"{", b"-", b".", b"e", b"E", b"n")
"""Each value that isn't a token id has one of these; one byte each, because such a scan costs next to nothing."""


class Prompt(Struct, frozen=True):
    """A prompt as far as it is read: raw bytes to hash, and its size in bytes of text or in exact tokens.

    ``samples`` is ``None`` where the prompt stands alone, else how many prompts there are.
    """

    raw: bytes
    text_bytes: int
    tokens: int
    samples: int | None = None
    seed: bytes = b""


def read_prompt(body: AnyBody, image_tokens: int) -> Prompt:
    """Return the prompt of a body; ``image_tokens`` is what an image counts for.

    Raises: InvalidRequest.
    """
    if isinstance(body, Chat):
        return _conversation(body, image_tokens)
    if isinstance(body, Completion):
        return _text_or_ids("prompt", _required("prompt", body.prompt))
    return _generate_prompt(body)


def _generate_prompt(body: Generate) -> Prompt:
    fields = (("text", body.text), ("input_ids", body.input_ids), ("input_embeds", body.input_embeds))
    given = [(name, raw) for name, field in fields if (raw := _value(field)) is not None]
    if len(given) != 1:
        raise InvalidRequest("send exactly one of text, input_ids, input_embeds", param="text")
    name, raw = given[0]
    return _embeddings(raw) if name == "input_embeds" else _text_or_ids(name, raw)


def _conversation(body: Chat, image_tokens: int) -> Prompt:
    if isinstance(body.messages, UnsetType) or not body.messages:
        raise InvalidRequest("messages must be a list of at least one message", param="messages")
    tools = b"" if isinstance(body.tools, UnsetType) else bytes(body.tools)
    pieces: list[bytes] = []
    text_bytes, media = _text_bytes(tools) if tools else 0, 0
    for message in body.messages:
        for field in (message.role, message.tool_calls):
            if field is not UNSET:
                raw = bytes(field)
                pieces.append(raw)
                text_bytes += len(raw)
        if message.content is not UNSET:
            raw = bytes(message.content)
            pieces.append(raw)
            if raw.startswith(b"["):
                part_bytes, part_media = _parts_size(raw)
                text_bytes += part_bytes
                media += part_media
            else:
                text_bytes += _text_bytes(raw)
    return Prompt(b",".join(pieces), max(1, text_bytes), media * image_tokens, seed=tools)


def _value(field: RawField) -> bytes | None:
    """Return a field's raw JSON, ``None`` where it is null or missing."""
    raw = b"null" if isinstance(field, UnsetType) else bytes(field)
    return None if raw == b"null" else raw


def _required(name: str, field: RawField) -> bytes:
    raw = _value(field)
    if raw is None:
        raise InvalidRequest(f"the field {name!r} is missing", param=name)
    return raw


def _text_or_ids(name: str, raw: bytes) -> Prompt:
    """Read a prompt: text, token ids, or a list of either."""
    if raw.startswith(b'"'):
        return Prompt(raw, max(1, _text_bytes(raw) - 2), 0)
    first = _FIRST.match(raw)
    if first is None:
        raise _neither(name)
    if first[1] not in b'"[':
        return Prompt(raw, 0, _count_ids(name, raw))
    items = [bytes(item) for item in _items(name, raw)]
    if any(not item.startswith(first[1]) for item in items):
        raise _neither(name)
    if first[1] == b"[":
        return Prompt(raw, 0, sum(_count_ids(name, item) for item in items), len(items))
    return Prompt(raw, max(1, sum(_text_bytes(item) - 2 for item in items)), 0, len(items))


def _count_ids(name: str, raw: bytes) -> int:
    first = _FIRST.match(raw)
    if first is None or first[1] == b"]":
        raise InvalidRequest(f"the field {name!r} is empty", param=name)
    if any(raw.find(mark, 1) >= 0 for mark in _NOT_IN_IDS):
        raise _neither(name)
    return raw.count(b",") + 1


def _embeddings(raw: bytes) -> Prompt:
    """Read embeddings: a row for each token, or a list of such prompts."""
    name = "input_embeds"
    rows = [bytes(row) for row in _items(name, raw)]
    marks = [first[1] if (first := _FIRST.match(row)) else b"" for row in rows]
    if not rows or b"" in marks:
        raise InvalidRequest(f"the field {name!r} must be a list of rows, or a list of such lists", param=name)
    if marks[0] != b"[":
        return Prompt(raw, 0, len(rows))
    return Prompt(raw, 0, sum(len(_items(name, row)) for row in rows), len(rows))


def _items(name: str, raw: bytes) -> list[Raw]:
    try:
        return msgspec.json.decode(raw, type=list[Raw])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _neither(name) from error


def _neither(name: str) -> InvalidRequest:
    return InvalidRequest(f"the field {name!r} must be text, token ids, or a list of either", param=name)


def _parts_size(raw: bytes) -> tuple[int, int]:
    """Return the bytes of text and the number of images and the like in a message's list of parts."""
    try:
        parts = msgspec.json.decode(raw, type=list[dict[str, Raw]])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequest(f"messages: content: {error}", param="messages") from error
    text_bytes = sum(_text_bytes(bytes(part["text"])) for part in parts if "text" in part)
    return text_bytes, sum("text" not in part for part in parts)


def _text_bytes(raw: bytes) -> int:
    r"""Return about how many bytes of UTF-8 raw JSON text holds: an escape ``\uXXXX`` stands for about three.

    Long text is judged by samples of it.
    """
    if b"\\" not in raw:
        return len(raw)
    step = max(_SAMPLE_BYTES, len(raw) // 4)
    sampled = escapes = 0
    for start in range(0, len(raw), step):
        sample = raw[start : start + _SAMPLE_BYTES]
        sampled += len(sample)
        escapes += sample.count(b"\\u")
    return len(raw) - 3 * escapes * len(raw) // sampled
