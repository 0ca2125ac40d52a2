"""From a body to its Prompt: the bytes to compare with others', and what its tokens are judged by.

All in the order in which the engine will see it. Text is never decoded, token ids and embeddings are counted.
"""

import re
from contextlib import suppress

import msgspec
import xxhash
from msgspec import UNSET, Raw, Struct, UnsetType

from pdrouter.errors import InvalidRequest
from pdrouter.proxy.bodies import (
    AnyBody,
    Body,
    Chat,
    Completion,
    Generate,
    Message,
    Messages,
    RawField,
    Responses,
)

_FIRST = re.compile(rb"\[\s*(.)", re.DOTALL)
"""The first character inside an array."""

_NOT_IN_IDS = (b'"', b"[", b"{", b"-", b".", b"e", b"E", b"n")
"""Each value that isn't a token id has one of these; one byte each, because such a scan costs next to nothing."""

_FIRST_ROLES = (b'"system"', b'"developer"')
"""Chat templates put tools behind the messages of these roles at the beginning, and before all others."""

_DIGESTS_PER_TOKEN = 0.5
"""An image stands among the compared bytes as its digest of 8 bytes, so often that it is as wide as so much text."""


class Prompt(Struct, frozen=True):
    """A prompt as far as it is read.

    ``raw`` is what is compared with other prompts; ``text`` the raw JSON of what was written, ``tokens`` what is
    counted without it: ids, embeddings, images. ``samples`` is ``None`` where the prompt stands alone, else how many
    there are.
    """

    raw: bytes
    text: bytes
    tokens: int
    samples: int | None = None
    is_ids: bool = False

    def blocks(self, block_bytes: int) -> list[memoryview]:
        """Return the whole blocks to compare: of so many bytes, or of so many up to the end of a token id."""
        raw = memoryview(self.raw)
        if not self.is_ids:
            return [raw[end - block_bytes : end] for end in range(block_bytes, len(raw) + 1, block_bytes)]
        blocks, start = [], 0
        while (end := self.raw.find(b",", start + block_bytes)) >= 0:
            blocks.append(raw[start:end])
            start = end
        return blocks


def read_prompt(body: AnyBody, image_tokens: int) -> Prompt:
    """Return the prompt of a body; ``image_tokens`` is what an image counts for.

    Raises: InvalidRequest.
    """
    if isinstance(body, Chat):
        return _conversation(body, image_tokens)
    if isinstance(body, Messages):
        return _anthropic(body, image_tokens)
    if isinstance(body, Responses):
        return _responses(body)
    if isinstance(body, Completion):
        return _text_or_ids("prompt", _required("prompt", body.prompt))
    return _generate_prompt(body)


def cache_key(body: Body, model: str) -> bytes:
    """Return what separates engines' caches: base model and adapter, and the keys that clients may set (salts)."""
    parts = [_value(field) or b"" for field in (body.lora_path, body.cache_salt, body.extra_key)]
    return b"\0".join([model.encode(), *parts])


def adapter_of(lora_path: RawField) -> str | None:
    """Return the LoRA adapter that a body names beside its model; of a list the first, ``None`` if it names none."""
    raw = _value(lora_path)
    if raw is None:
        return None
    with suppress(msgspec.MsgspecError, RecursionError):
        named = msgspec.json.decode(raw, type=str | list[str | None])
        if isinstance(named, list):
            named = next((name for name in named if name), "")
        return named or None
    return None


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
    tools = _value(body.tools)
    pieces: list[bytes] = []
    media: list[int] = []  # where images stand among the pieces
    for message in body.messages:
        if tools is not None and _value(message.role) not in _FIRST_ROLES:
            pieces.append(tools)
            tools = None
        _add_message(message, pieces, media, image_tokens)
    if tools is not None:
        pieces.append(tools)
    raw = b",".join(pieces)
    if not media:
        return Prompt(raw, raw, 0)
    for index in reversed(media):
        del pieces[index]
    return Prompt(raw, b",".join(pieces), len(media) * image_tokens)


def _anthropic(body: Messages, image_tokens: int) -> Prompt:
    """Read a conversation whose system text stands apart, before the messages."""
    system = _value(body.system)
    first = [] if system is None else [Message(role=Raw(_FIRST_ROLES[0]), content=Raw(system))]
    messages = [] if isinstance(body.messages, UnsetType) else body.messages
    if not messages:
        raise InvalidRequest("messages must be a list of at least one message", param="messages")
    return _conversation(Chat(messages=[*first, *messages], tools=body.tools), image_tokens)


def _responses(body: Responses) -> Prompt:
    """Read instructions, tools and input; what an engine remembers of earlier responses isn't known here."""
    given = [raw for field in (body.instructions, body.tools) if (raw := _value(field)) is not None]
    raw = b",".join([*given, _required("input", body.input)])
    return Prompt(raw, raw, 0)


def _add_message(message: Message, pieces: list[bytes], media: list[int], image_tokens: int) -> None:
    """Add a message's pieces in order, and the places of its images."""
    if message.role is not UNSET:
        pieces.append(bytes(message.role))
    content = _value(message.content)
    if content is not None and content.startswith(b"["):
        for part in _parts(content):
            if "text" in part:
                pieces.append(bytes(part["text"]))
            else:
                media.append(len(pieces))
                pieces.append(_digest(part) * int(image_tokens * _DIGESTS_PER_TOKEN))
    elif content is not None:
        pieces.append(content)
    calls = _value(message.tool_calls)
    if calls is not None:
        pieces.append(calls)


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
        return Prompt(raw, raw, 0)
    first = _FIRST.match(raw)
    if first is None:
        raise _neither(name)
    if first[1] not in b'"[':
        return Prompt(raw, b"", _count_ids(name, raw), is_ids=True)
    items = [bytes(item) for item in _items(name, raw)]
    if any(not item.startswith(first[1]) for item in items):
        raise _neither(name)
    if first[1] == b"[":
        return Prompt(raw, b"", sum(_count_ids(name, item) for item in items), len(items), is_ids=True)
    return Prompt(raw, raw, 0, len(items))


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
        return Prompt(raw, b"", len(rows))
    return Prompt(raw, b"", sum(len(_items(name, row)) for row in rows), len(rows))


def _items(name: str, raw: bytes) -> list[Raw]:
    try:
        return msgspec.json.decode(raw, type=list[Raw])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _neither(name) from error


def _neither(name: str) -> InvalidRequest:
    return InvalidRequest(f"the field {name!r} must be text, token ids, or a list of either", param=name)


def _parts(raw: bytes) -> list[dict[str, Raw]]:
    try:
        return msgspec.json.decode(raw, type=list[dict[str, Raw]])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequest(f"messages: content: {error}", param="messages") from error


def _digest(part: dict[str, Raw]) -> bytes:
    """Return a digest of an image's content: all that is said of it."""
    digest = xxhash.xxh3_64()
    for name, value in part.items():
        digest.update(name.encode())
        digest.update(memoryview(value))
    return digest.digest()
