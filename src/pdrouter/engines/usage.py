"""What engines count of a request, in the bytes of its answer; read and written without decoding the rest.

Source: OpenAI's ``usage`` (``prompt_tokens``, ``completion_tokens``, ``prompt_tokens_details.cached_tokens``), and
SGLang's ``meta_info``, which has the same names; ``input_tokens`` and ``output_tokens`` on ``/v1/responses`` and
``/v1/messages``, there without the cached ones (SGLang 0.5.23, ``anthropic/serving.py``).
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

PROMPT_TOKENS = b'"prompt_tokens"'
COMPLETION_TOKENS = b'"completion_tokens"'
CACHED_TOKENS = b'"cached_tokens"'

_NAMES: Mapping[str, tuple[bytes | None, bytes]] = {
    "/v1/responses": (b'"input_tokens"', b'"output_tokens"'),
    "/v1/messages": (None, b'"output_tokens"'),
}
"""How a path's prompt and answer tokens are called, where not as above."""

TAIL_BYTES = 8192
"""Where the count stands: at the end of an answer."""

_MOST_TOKENS = 999_999_999
"""A number beyond isn't a count."""

_NUMBER = re.compile(rb"[ \t]{0,8}:[ \t]{0,8}(\d{1,9})(?![\d.eE])")
"""A whole number; the beginning of a longer one isn't it."""


_UNFINISHED = re.compile(rb"[ \t]{0,8}(?::[ \t]{0,8}\d{0,9})?")
_CAN_GO_ON = frozenset(CACHED_TOKENS + b": \t0123456789")
"""What ends a piece that was cut inside a mention of the cached tokens, or before it is sure that its number ends."""


class PromptCount(NamedTuple):
    """An engine's own count of a prompt, and how much of it was in its cache."""

    prompt_tokens: int
    cached_tokens: int

    @property
    def is_possible(self) -> bool:
        """Whether an engine can have counted so."""
        return 0 <= self.cached_tokens <= _MOST_TOKENS and 0 <= self.prompt_tokens <= _MOST_TOKENS


class Tail:
    """The end of an answer, ``TAIL_BYTES`` of it however it is cut; at most twice as many are held (I9)."""

    __slots__ = ("_before", "_last")

    def __init__(self) -> None:
        self._before = b""
        self._last = bytearray()

    def add(self, piece: bytes) -> None:
        """Take in what comes next."""
        self._last += piece
        if len(self._last) >= TAIL_BYTES:  # I9
            self._before, self._last = bytes(self._last[-TAIL_BYTES:]), bytearray()

    def text(self) -> bytes:
        """Return the end."""
        return (self._before + self._last)[-TAIL_BYTES:]


def prompt_count(tail: bytes) -> PromptCount | None:
    """Return what the end of an answer tells of the prompt; ``None`` where the engine doesn't tell what was cached."""
    cached_tokens = last_number(CACHED_TOKENS, tail)
    if cached_tokens is None:
        return None
    return PromptCount(last_number(PROMPT_TOKENS, tail) or 0, cached_tokens)


def answer_count(path: str, tail: bytes) -> tuple[int | None, int | None]:
    """Return the prompt's and the answer's tokens that the end of an answer tells, ``None`` for what it doesn't."""
    prompt, completion = _NAMES.get(path, (PROMPT_TOKENS, COMPLETION_TOKENS))
    return None if prompt is None else last_number(prompt, tail), last_number(completion, tail)


def last_number(name: bytes, text: bytes) -> int | None:
    """Return the number behind the last mention of a field."""
    start = text.rfind(name)
    found = _NUMBER.match(text, start + len(name)) if start >= 0 else None
    return int(found[1]) if found else None


class CachedTokens:
    """Writes another number of cached tokens into an answer as it comes; all other bytes are untouched (I10).

    Nothing is held back but a mention that isn't whole yet (I9).
    """

    __slots__ = ("_cached_tokens", "_held")

    def __init__(self, cached_tokens: int) -> None:
        self._cached_tokens = cached_tokens
        self._held = b""

    def feed(self, piece: bytes) -> bytes:
        """Return what can be told of the answer so far."""
        text = self._held + piece if self._held else piece
        end = _whole_bytes(text)
        self._held = text[end:]
        return with_cached_tokens(text[:end], self._cached_tokens)

    def whole(self, answer: bytes) -> bytes:
        """Return an answer that has come in one piece."""
        return with_cached_tokens(answer, self._cached_tokens)

    def finish(self) -> bytes:
        """Return what is left at the end of the answer."""
        rest, self._held = self._held, b""
        return with_cached_tokens(rest, self._cached_tokens)


def _whole_bytes(text: bytes) -> int:
    """Return where a mention begins that may go on behind this, or the end."""
    if not text or text[-1] not in _CAN_GO_ON:
        return len(text)
    start = text.rfind(CACHED_TOKENS)
    if start >= 0 and _UNFINISHED.fullmatch(text, start + len(CACHED_TOKENS)):
        return start
    sizes = range(min(len(CACHED_TOKENS) - 1, len(text)), 0, -1)
    return len(text) - next((size for size in sizes if text.endswith(CACHED_TOKENS[:size])), 0)


def with_cached_tokens(piece: bytes, cached_tokens: int) -> bytes:
    """Return a piece of an answer with another number of cached tokens, wherever it has one; the rest is untouched.

    Nothing is written that can't be a count.
    """
    if not 0 <= cached_tokens <= _MOST_TOKENS:
        return piece
    number, start = b"%d" % cached_tokens, piece.find(CACHED_TOKENS)
    while start >= 0:
        end = start + len(CACHED_TOKENS)
        found = _NUMBER.match(piece, end)
        if found is not None and found[1] != number:
            piece = piece[: found.start(1)] + number + piece[found.end(1) :]
            end = found.start(1) + len(number)
        start = piece.find(CACHED_TOKENS, end)
    return piece
