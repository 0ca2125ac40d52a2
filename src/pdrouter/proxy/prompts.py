"""From a body to its Prompt: the bytes to compare with others', and what its tokens are judged by.

All in the order in which the engine will see it. Text is never decoded, token ids and embeddings are counted; lists are
counted before they are read. Read next: ``content.py``.
"""

import re
from collections.abc import Sequence
from contextlib import suppress

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from pdrouter.errors import InvalidRequest
from pdrouter.proxy.bodies import (
    MAX_BATCH,
    AnyBody,
    Body,
    Chat,
    Completion,
    Generate,
    Messages,
    Responses,
    too_many_samples,
)
from pdrouter.proxy.bounds import items
from pdrouter.proxy.content import DIGEST_BYTES, MAX_MEDIA, Content, Message, RawField, is_array, says_something, value

_FIRST = re.compile(rb"\[\s*+(.)", re.DOTALL)
"""The first character inside an array."""

_NOT_IN_IDS = (b'"', b"{", b"-", b".", b"e", b"E", b"n")
"""Each value that isn't a token id or a list has one of these; such a scan costs next to nothing."""

_SPACE = b" \t\r\n"
_STRING = b'"'[0]
"""What a JSON text begins with."""

_FIRST_ROLES = (b'"system"', b'"developer"')
"""Chat templates put tools behind the messages of these roles at the beginning, and before all others."""

_BYTES_PER_TOKEN = 4
"""A medium is compared as if it were so wide a text for each of its tokens: as wide as English prose is."""

_MEDIA_COMMAS = 4 * MAX_MEDIA
"""Commas in the media of ``/generate``, strings aside: each may be an object. Chosen."""

_MAX_BLOCKS = 16_384
"""Blocks of a prompt that are compared, the first ones (I9): 16 MB of text by default. Chosen: 5 ms to hash."""


class Prompt(Struct, frozen=True):
    """A prompt as far as it is read.

    ``raw`` is what is compared with other prompts; ``text`` the raw JSON of what was written, ``tokens`` what is
    counted without it: ids, embeddings, media. ``samples`` is ``None`` where the prompt stands alone, else how many
    there are. ``media_ends`` are where the digests of media end in ``raw``; each stands for ``media_bytes`` more.
    """

    raw: bytes
    text: bytes
    tokens: int
    samples: int | None = None
    is_ids: bool = False
    media_ends: Sequence[int] = ()
    media_bytes: int = 0

    def blocks(self, block_bytes: int) -> list[memoryview]:
        """Return the whole blocks to compare: of so many bytes, or of so many up to the end of a token id.

        A block ends behind each medium; the other blocks that it fills are empty, as its digest says all of it.
        """
        raw, start = memoryview(self.raw), 0
        blocks: list[memoryview] = []
        cut = _id_blocks if self.is_ids else _text_blocks
        if not self.media_ends:
            return cut(raw, block_bytes)
        for end in self.media_ends:
            whole = _text_blocks(raw[start:end], block_bytes)
            start += block_bytes * len(whole)
            more = min((end - start + self.media_bytes) // block_bytes - 1, _MAX_BLOCKS)
            blocks += [*whole, raw[start:end], *[raw[:0]] * more]
            start = end
            if len(blocks) >= _MAX_BLOCKS:
                return blocks[:_MAX_BLOCKS]
        return (blocks + cut(raw[start:], block_bytes))[:_MAX_BLOCKS]


def _text_blocks(raw: memoryview, block_bytes: int) -> list[memoryview]:
    ends = range(block_bytes, len(raw) + 1, block_bytes)[:_MAX_BLOCKS]
    return [raw[end - block_bytes : end] for end in ends]


def _id_blocks(raw: memoryview, block_bytes: int) -> list[memoryview]:
    blocks: list[memoryview] = []
    start, text = 0, bytes(raw)
    while len(blocks) < _MAX_BLOCKS and (end := text.find(b",", start + block_bytes)) >= 0:
        blocks.append(raw[start:end])
        start = end
    return blocks


def read_prompt(body: AnyBody, image_tokens: int) -> Prompt:
    """Return the prompt of a body; ``image_tokens`` is what an image counts for, and any other medium.

    Raises: InvalidRequest.
    """
    if isinstance(body, Chat):
        return _conversation(body, image_tokens)
    if isinstance(body, Messages):
        return _anthropic(body, image_tokens)
    if isinstance(body, Responses):
        return _responses(body, image_tokens)
    if isinstance(body, Completion):
        return _text_or_ids("prompt", bytes(_required("prompt", body.prompt)))
    return _generate_prompt(body, image_tokens)


def cache_key(body: Body, model: str) -> bytes:
    """Return what separates engines' caches: base model and adapter, and the keys that clients may set (salts)."""
    parts = [bytes(value(field) or b"") for field in (body.lora_path, body.cache_salt, body.extra_key)]
    return b"\0".join([model.encode(), *parts])


def adapter_of(lora_path: RawField) -> str | None:
    """Return the LoRA adapter that a body names beside its model; of a list the first, ``None`` if it names none."""
    raw = value(lora_path)
    if raw is None:
        return None
    with suppress(msgspec.MsgspecError, RecursionError):
        named = msgspec.json.decode(raw, type=str | list[str | None])
        if isinstance(named, list):
            named = next((name for name in named if name), "")
        return named or None
    return None


def _conversation(body: Chat, image_tokens: int) -> Prompt:
    if isinstance(body.messages, UnsetType) or not body.messages:
        raise InvalidRequest("messages must be a list of at least one message", param="messages")
    tools = value(body.tools)
    content = Content("messages")
    for message in body.messages:
        if tools is not None and (message.role is UNSET or bytes(message.role) not in _FIRST_ROLES):
            content.pieces.append(tools)
            tools = None
        content.add_message(message)
    if tools is not None:
        content.pieces.append(tools)
    return _prompt_of(content, image_tokens)


def _anthropic(body: Messages, image_tokens: int) -> Prompt:
    """Read a conversation whose system text stands apart, before the messages."""
    system = value(body.system)
    first = [] if system is None else [Message(role=Raw(_FIRST_ROLES[0]), content=system)]
    messages = [] if isinstance(body.messages, UnsetType) else body.messages
    if not messages:
        raise InvalidRequest("messages must be a list of at least one message", param="messages")
    return _conversation(Chat(messages=[*first, *messages], tools=body.tools), image_tokens)


def _responses(body: Responses, image_tokens: int) -> Prompt:
    """Read instructions, tools and input; what an engine remembers of earlier responses isn't known here."""
    content = Content("input")
    content.pieces += [raw for field in (body.instructions, body.tools) if (raw := value(field)) is not None]
    content.add(_required("input", body.input))
    return _prompt_of(content, image_tokens)


def _prompt_of(content: Content, image_tokens: int) -> Prompt:
    raw = b",".join(content.pieces)
    if not content.media:
        return Prompt(raw, raw, 0)
    return _with_media(Prompt(raw, content.text(), len(content.media) * image_tokens), content, image_tokens)


def _with_media(prompt: Prompt, content: Content, image_tokens: int) -> Prompt:
    """Say of a prompt where its media stand."""
    width_bytes = max(0, image_tokens * _BYTES_PER_TOKEN - DIGEST_BYTES)
    return msgspec.structs.replace(prompt, media_ends=content.media_ends(), media_bytes=width_bytes)


def _generate_prompt(body: Generate, image_tokens: int) -> Prompt:
    fields = (("text", body.text), ("input_ids", body.input_ids), ("input_embeds", body.input_embeds))
    given = [(name, raw) for name, field in fields if (raw := value(field)) is not None]
    if len(given) != 1:
        raise InvalidRequest("send exactly one of text, input_ids, input_embeds", param="text")
    name, raw = given[0]
    prompt = _embeddings(bytes(raw)) if name == "input_embeds" else _text_or_ids(name, bytes(raw))
    if body.image_data is UNSET and body.video_data is UNSET and body.audio_data is UNSET:
        return prompt
    content, tokens = Content("image_data"), 0
    media = (("image_data", body.image_data), ("video_data", body.video_data), ("audio_data", body.audio_data))
    for name, field in media:
        if (medium := value(field)) is not None:
            tokens += image_tokens * _add_media(content, name, medium, prompt.samples or 1)
    # Where in the text they stand is known by the engine's placeholders only: most often at the beginning.
    whole = b",".join([*content.pieces, prompt.raw])
    counted = msgspec.structs.replace(prompt, raw=whole, tokens=prompt.tokens + tokens)
    return _with_media(counted, content, image_tokens)


def _add_media(content: Content, name: str, raw: Raw, samples: int) -> int:
    """Add the media of a field of ``/generate``; return how many the engine sees: one alone is every sample's.

    Source: SGLang 0.5.23, ``io_struct.py``, ``_normalize_image_data``: one, one for each sample, or a list for each.
    """
    before = len(content.media)
    for item in _media_in(name, raw):
        for one in _media_in(name, item):
            if says_something(one):
                content.add_medium([one])
    return (len(content.media) - before) * (1 if is_array(raw) else samples)


def _media_in(name: str, raw: Raw) -> Sequence[Raw]:
    """Return the items of a list, or else the one that there is."""
    if not is_array(raw):
        return (raw,)
    found = items(bytes(raw), MAX_MEDIA, _MEDIA_COMMAS)
    if found is None:
        raise InvalidRequest(f"the field {name!r} has more than {MAX_MEDIA} items", param=name)
    return found


def _required(name: str, field: RawField) -> Raw:
    raw = value(field)
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
    if first[1] == b'"':
        texts = items(raw, MAX_BATCH)
        if texts is None:
            raise too_many_samples()
        if any(memoryview(text)[0] != _STRING for text in texts):
            raise _neither(name)
        return Prompt(raw, raw, 0, len(texts))
    if first[1] == b"]":
        raise InvalidRequest(f"the field {name!r} is empty", param=name)
    if first[1] != b"[":
        if raw.find(b"[", 1) >= 0:
            raise _neither(name)
        return Prompt(raw, b"", _count_ids(name, raw), is_ids=True)
    compact = raw.translate(None, _SPACE)
    lists = _rows(compact)
    if lists is None:
        raise _neither(name)
    if lists > MAX_BATCH:
        raise too_many_samples()
    return Prompt(raw, b"", _count_ids(name, compact[1:]), lists, is_ids=True)


def _count_ids(name: str, raw: bytes) -> int:
    if any(raw.find(mark, 1) >= 0 for mark in _NOT_IN_IDS):
        raise _neither(name)
    return raw.count(b",") + 1


def _embeddings(raw: bytes) -> Prompt:
    """Read embeddings: a row for each token, or a list of such prompts."""
    compact = raw.translate(None, _SPACE)
    rows = _rows(compact)
    if rows is not None:
        return Prompt(raw, b"", rows)
    prompts = compact.count(b"]],[[") + 1
    rows = compact.count(b"[") - 1 - prompts
    ends = compact.startswith(b"[[[") and compact.endswith(b"]]]")
    if not ends or b"[]" in compact or compact.count(b"],[") != rows - 1:
        text = "the field 'input_embeds' must be a list of rows, or a list of such lists"
        raise InvalidRequest(text, param="input_embeds")
    if prompts > MAX_BATCH:
        raise too_many_samples()
    return Prompt(raw, b"", rows, prompts)


def _rows(compact: bytes) -> int | None:
    """Return how many lists stand in a list, ``None`` where anything else does, or lists that are empty or deeper.

    JSON without spaces and strings is told by its brackets: nothing is read one by one.
    """
    rows = compact.count(b"[") - 1
    ends = compact.startswith(b"[[") and compact.endswith(b"]]")
    return rows if ends and b"[]" not in compact and compact.count(b"],[") == rows - 1 else None


def _neither(name: str) -> InvalidRequest:
    return InvalidRequest(f"the field {name!r} must be text, token ids, or a list of either", param=name)
