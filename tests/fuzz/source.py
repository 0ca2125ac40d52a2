"""Choices read from a fuzzer's bytes, and grammars of JSON over them: bytes that it changes change what is written.

When the bytes are used up every choice is the first, so that whatever is being written ends.
"""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")

_SPACES = (b"", b"", b"", b" ", b"\n", b"\t \r\n")
_NUMBERS = (
    *(b"0 1 7 -1 -0 1.0 0.5 1e3 -2.5E-7 1e400 9007199254740993 9223372036854775807 18446744073709551616".split()),
    b"9" * 30,
    b"9" * 400,
    b"12345678901234567890.000",
)
_TEXTS = (b"", b"x", b"hello, world", b"\\u00e9\\ud83d\\ude42", b'\\"\\\\/\\n', b"\xc3\xa9\xe4\xbd\xa0", b"}{][:,")
_ODDITIES = (
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\\",
    b"\xff",
    b"\0",
    b" ",
    b"0",
    b"null",
    b"\n\n",
    b"\r\n",
    b"e",
)
_MOST_PIECES = 200
_LONG_TEXT = b"lorem ipsum dolor 12.5, "


class Source:
    """Reads choices from bytes."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._at = 0

    def below(self, limit: int) -> int:
        """Return a number from 0, by one byte."""
        self._at += 1
        return self._raw[self._at - 1] % limit if self._at <= len(self._raw) else 0

    def pick(self, options: Sequence[T]) -> T:
        """Return one of these."""
        return options[self.below(len(options))]

    def once_in(self, times: int) -> bool:
        """Return true so rarely."""
        return self.below(times) == times - 1

    def rest(self) -> bytes:
        """Return the bytes that are left, as they are."""
        at, self._at = self._at, len(self._raw)
        return self._raw[at:]

    def spoilt(self, raw: bytes) -> bytes:
        """Return bytes as they are, or with something cut out, put in or turned over."""
        for _ in range(max(0, self.below(8) - 5)):
            at = self._place(raw)
            raw = raw[:at] + self.pick(_ODDITIES) + raw[at + self.below(6) :]
        return raw

    def pieces(self, raw: bytes) -> Sequence[bytes]:
        """Return bytes cut in a few places, or everywhere; long ones in small pieces."""
        cuts = self.below(8)
        if cuts == 7:
            size = 1 + len(raw) // _MOST_PIECES
            return [raw[at : at + size] for at in range(0, len(raw), size)]
        edges = [0, *sorted(self._place(raw) for _ in range(cuts)), len(raw)]
        return [raw[start:end] for start, end in pairwise(edges) if start < end]

    def _place(self, raw: bytes) -> int:
        return (self.below(256) << 8 | self.below(256)) % (len(raw) + 1)


Shape = Callable[[Source], bytes]
"""Writes JSON of a shape."""


def word(*texts: bytes) -> Shape:
    """Write one of these as they are."""
    return lambda source: source.pick(texts)


def either(*shapes: Shape) -> Shape:
    """Write one of these."""
    return lambda source: source.pick(shapes)(source)


def array(*shapes: Shape) -> Shape:
    """Write an array of these."""

    def written(source: Source) -> bytes:
        space = source.pick(_SPACES)
        items = (source.pick(shapes)(source) for _ in range(source.below(4)))
        return b"[" + space + (b"," + space).join(items) + b"]"

    return written


def record(**fields: Shape) -> Shape:
    """Write an object of some of these fields, in any order and spelling; seldom one stands twice, or is odd."""
    names = tuple(fields)

    def written(source: Source) -> bytes:
        parts = []
        first = source.below(len(names))
        count = source.below(len(names) + 2)
        for step in range(count):
            name = source.pick(names) if source.once_in(8) else names[(first + step) % len(names)]
            shape = anything if source.once_in(8) else fields[name]
            parts.append(_spelled(source, name) + b":" + source.pick(_SPACES) + shape(source))
        space = source.pick(_SPACES)
        return b"{" + space + (space + b"," + space).join(parts) + space + b"}"

    return written


def number(source: Source) -> bytes:
    """Write a number."""
    return b"%d" % source.below(256) if source.once_in(2) else source.pick(_NUMBERS)


def text(source: Source) -> bytes:
    """Write a string."""
    if source.once_in(8):
        return b'"' + _LONG_TEXT * source.below(64) + b'"'
    return b'"' + source.pick(_TEXTS) + b'"'


def flag(source: Source) -> bytes:
    """Write a truth value, or null."""
    return source.pick((b"true", b"false", b"null"))


def anything(source: Source, depth: int | None = None) -> bytes:
    """Write any JSON."""
    left = 4 if depth is None else depth
    kind = source.below(6 if left else 4)
    if kind < 4:
        return (number, text, flag, word(b"null", b"{}", b"[]", b'"null"', b"[" * 2000 + b"]" * 2000))[kind](source)
    items = [anything(source, left - 1) for _ in range(source.below(4))]
    if kind == 4:
        return b"[" + b",".join(items) + b"]"
    return b"{" + b",".join(text(source) + b":" + item for item in items) + b"}"


def _spelled(source: Source, name: str) -> bytes:
    """Write a name, seldom with an escape, rarely as another that resembles it."""
    style = source.below(16)
    if style == 13:
        return b'"\\u%04x%b"' % (ord(name[0]), name[1:].encode())
    if style == 14:
        return b'"' + "".join(f"\\u{ord(letter):04x}" for letter in name).encode() + b'"'
    return json.dumps(name + " " * (style == 15)).encode()
