"""Token ids of an emulated TensorRT-LLM, from which a text comes back: the legs of a request have the same prompt.

Ids of a text are above those of any tokenizer, so a client's own list of ids is never taken for a text.
"""

from collections.abc import Sequence

_TEXT = 1 << 40
_SIZE_MARK = b"\x01"
"""Stands before the bytes of a token, and so says how many there are."""


def ids_of(prompt: str | Sequence[int], bytes_per_token: int) -> list[int]:
    """Return the ids of a prompt, as many as it has tokens."""
    if not isinstance(prompt, str):
        return list(prompt)
    raw = prompt.encode("utf-8", "surrogatepass")
    pieces = [raw[start : start + bytes_per_token] for start in range(0, len(raw), bytes_per_token)]
    return [_TEXT + int.from_bytes(_SIZE_MARK + piece, "big") for piece in pieces]


def prompt_of(ids: Sequence[int]) -> str | Sequence[int]:
    """Return the text that these are the ids of; ids of something else as they are. Raises: UnicodeDecodeError."""
    if not ids or any(number < _TEXT for number in ids):
        return ids
    return b"".join(map(_piece, ids)).decode("utf-8", "surrogatepass")


def _piece(number: int) -> bytes:
    marked = number - _TEXT
    return marked.to_bytes(-(-marked.bit_length() // 8), "big")[1:]
