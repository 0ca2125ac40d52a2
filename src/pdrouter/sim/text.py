"""Text of an emulated engine: token counts, block hashes, and answers that are a pure function of the prompt.

The pseudo-tokenizer: a text has ``ceil(utf-8 bytes / 4)`` tokens (the 4 is a setting of the emulator); a list
of token ids has its length. Each generated token is a three-letter word and a space: four bytes.
Who knows the prompt knows the answer, and so can tell a mixed-up stream from a right one.
"""

from array import array
from collections.abc import Mapping, Sequence

import msgspec
import xxhash

BYTES_PER_TOKEN = 4
BLOCK_TOKENS = 64

_MASK = (1 << 64) - 1
_WORDS = [f"{a}{b}{c} " for a in "bdfgklmnprstvzhj" for b in "aeio" for c in "nrst"]
_FIRST_WORD_ID = 1000


def render_chat(messages: Sequence[Mapping[str, object]], tools: Sequence[object] | None = None) -> str:
    """Prompt that a chat request becomes: every message in order with its role and all of its fields."""
    parts = [f"<|tools|>\n{msgspec.json.encode(tools).decode()}\n"] if tools else []
    for message in messages:
        parts.append(f"<|{message.get('role', '')}|>\n{_render_content(message.get('content'))}\n")
        extra = {key: value for key, value in message.items() if key not in {"role", "content"}}
        if extra:
            parts.append(msgspec.json.encode(extra, order="deterministic").decode() + "\n")
    parts.append("<|assistant|>\n")
    return "".join(parts)


def as_messages(source: str | list[dict[str, object]] | None, system: object) -> list[dict[str, object]]:
    """Return the chat that the ``input`` of a response or the messages of a message stand for, after its ``system``.

    None of it: an empty list.
    """
    messages = [{"role": "user", "content": source}] if isinstance(source, str) else source
    head: list[dict[str, object]] = [{"role": "system", "content": system}] if system else []
    return [*head, *messages] if messages else []


def _render_content(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_render_part(part) for part in content)
    return msgspec.json.encode(content, order="deterministic").decode()


def _render_part(part: object) -> str:
    if isinstance(part, dict) and part.get("type") == "text":
        return str(part.get("text", ""))
    return msgspec.json.encode(part, order="deterministic").decode()


class Prompt:
    """A prompt as an engine sees it: how long it is, its blocks for prefix reuse, its digest.

    ``blocks`` are chained hashes of full blocks only; each names itself and all before it.
    """

    __slots__ = ("blocks", "digest", "tokens")

    def __init__(self, prompt: str | Sequence[int], bytes_per_token: int) -> None:
        if isinstance(prompt, str):
            raw = prompt.encode("utf-8", "surrogatepass")
            unit = bytes_per_token
        else:
            raw = array("q", prompt).tobytes()
            unit = 8
        self.tokens = -(-len(raw) // unit)
        self.blocks = _chain(raw, unit * BLOCK_TOKENS, unit)
        self.digest = xxhash.xxh3_64_intdigest(raw)


def _chain(raw: bytes, size: int, seed: int) -> list[int]:
    view = memoryview(raw)
    digest = xxhash.xxh3_64_intdigest
    blocks = []
    for start in range(0, len(raw) - size + 1, size):
        seed = digest(view[start : start + size], seed)
        blocks.append(seed)
    return blocks


def text_seed(digest: int, choice: int) -> int:
    """Seed of the answer to a prompt of this digest; choices of one request (``n`` > 1) differ."""
    return (digest + choice * 0xD1342543DE82EF95) & _MASK


def token_id(seed: int, index: int) -> int:
    """Id of the token at ``index`` (from 0) of the answer with this seed."""
    return _FIRST_WORD_ID + _word(seed, index)


def token_text(seed: int, index: int) -> str:
    """Text of the token at ``index`` (from 0) of the answer with this seed."""
    return _WORDS[_word(seed, index)]


def _word(seed: int, index: int) -> int:
    # Source of the mixing constants: SplitMix64 (Steele, Lea, Flood 2014).
    mixed = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    return mixed >> 56


def answer_text(seed: int, start: int, end: int) -> str:
    """Text of the tokens ``start`` up to, not including, ``end``."""
    return "".join([_WORDS[_word(seed, index)] for index in range(start, end)])


def words(raw: bytes) -> str:
    """Text of a word for each byte."""
    return "".join([_WORDS[byte] for byte in raw])


def echo_text(prompt: str | Sequence[int]) -> str:
    """Text of a prompt as an answer repeats it; token ids become words."""
    return prompt if isinstance(prompt, str) else "".join([_WORDS[token % len(_WORDS)] for token in prompt])


def expected_text(prompt: str | Sequence[int], n_tokens: int, choice: int = 0) -> str:
    """Answer of ``n_tokens`` that an emulated engine gives to this rendered prompt (or token ids)."""
    digest = Prompt(prompt, BYTES_PER_TOKEN).digest
    return answer_text(text_seed(digest, choice), 0, n_tokens)
