"""Bodies that are hard to read, made from what is read: each field of each API, full of each small thing."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec
from msgspec import UNSET

from pdrouter.engines.sglang import OWNED_FIELDS
from pdrouter.proxy.bodies import Api, body_type

SMALL: Sequence[bytes] = (
    b"{}",
    b"[]",
    b'""',
    b"1",
    b"null",
    b"true",
    b'"\\\\"',
    b'"{"',
    b'"a,b"',
    b"[[]]",
    b"[1]",
    b'["a"]',
    b"[{}]",
    b'{"a":1}',
    b'{"text":""}',
    b'{"role":1}',
    b'{"role":"user","content":"a"}',
    b'{"content":[{}]}',
    b'{"content":{"content":{"content":{"content":{"content":""}}}}}',
    b'{"content":[[],[]]}',
    b'{"tool_calls":[]}',
    b'{"image_url":1}',
    b'{"image_url":null}',
    b'{"source":{}}',
    b'{"source":{"type":"text","data":""}}',
    b'{"type":"tool_use","input":{}}',
    b'{"n":1,"max_new_tokens":1}',
)
"""What a list may be full of."""

_PROMPTS: Mapping[Api, bytes] = {
    Api.CHAT: b'"messages":[{"role":"user","content":"x"}]',
    Api.COMPLETIONS: b'"prompt":"x"',
    Api.GENERATE: b'"text":"x"',
    Api.RESPONSES: b'"input":"x"',
    Api.MESSAGES: b'"messages":[{"role":"user","content":"x"}]',
}
_ALONE: Mapping[str, bytes] = {"input_ids": b"", "input_embeds": b""}
"""What can't stand beside the prompt above."""


APIS: Sequence[Api] = (*_PROMPTS, Api.EMBEDDINGS, Api.TOKENIZE)
_ALIKE = (OWNED_FIELDS - {"rid", "bootstrap_room"}) | {"audio_data", "video_data"}
"""Fields that are read as ``bootstrap_room`` is, or as ``image_data``."""
_CONVERSATIONS = frozenset({"messages", "system", "input"})


def bodies(api: Api, size_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Yield bodies of about that size, each with a name."""
    prompt = _PROMPTS.get(api, b'"input":"x"')
    fields = [field.encode_name for field in msgspec.structs.fields(body_type(api)) if _is_open(field)]
    for field in (*(name for name in fields if name not in _ALIKE), "unknown"):
        start = _ALONE.get(field, prompt + b",")
        for item in SMALL:
            for name, value in _full_of(item, size_bytes, has_contents=field in _CONVERSATIONS):
                yield f"{field} {name}", b'{%b"%b":%b}' % (start, field.encode(), value)
        yield f"{field} many", b'{%b%b"z":1}' % (start, _fields(field.encode(), size_bytes))
    for name, value in _deep(size_bytes):
        yield name, b'{%b,"messages":%b}' % (prompt, value)


def _is_open(field: msgspec.structs.FieldInfo) -> bool:
    """Whether a field may hold lists or objects; others refuse them."""
    return field.default is UNSET or field.encode_name == "sampling_params"


def _full_of(item: bytes, size_bytes: int, *, has_contents: bool) -> Iterator[tuple[str, bytes]]:
    """Yield a list of such items, and lists in which they stand deeper."""
    many = (item + b",") * max(1, size_bytes // (len(item) + 1))
    text = item.decode()
    yield f"[{text},...]", b"[%b%b]" % (many, item)
    yield f"[[{text},...]]", b"[[%b%b]]" % (many, item)
    if not has_contents:
        return
    yield f"[content:[{text},...]]", b'[{"role":"user","content":[%b%b]}]' % (many, item)
    yield f"[content:[content:[{text},...]]]", b'[{"content":[{"content":[%b%b]}]}]' % (many, item)


def _fields(name: bytes, size_bytes: int) -> bytes:
    field = b'"%b":null,' % name
    return field * (size_bytes // len(field))


def _deep(size_bytes: int) -> Iterator[tuple[str, bytes]]:
    level = b'[{"content":'
    depth = size_bytes // (len(level) + 2)
    yield "deep contents", level * depth + b'""' + b"}]" * depth
    yield "deep lists", b"[" * (size_bytes // 2) + b"]" * (size_bytes // 2)
    yield "one long text", b'[{"content":"%b"}]' % (b"x" * size_bytes)
    yield "escapes", b'[{"content":"%b"}]' % (b'\\"' * (size_bytes // 2))
    yield "braces in text", b'[{"content":"%b"}]' % (b"{" * size_bytes)
