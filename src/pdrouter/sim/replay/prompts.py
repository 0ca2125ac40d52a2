"""Prompts of a trace that has none: equal blocks become equal text, and lengths in tokens are about the recorded ones.

Text is words; how many make a token is found out by asking (``Density``), once and before the replay, because a prompt
that is cut to another measure than an earlier one would begin otherwise. Token ids need no measure.
"""

import random
from functools import lru_cache

import msgspec

from pdrouter.sim.replay.caller import CannotAsk
from pdrouter.sim.text import words
from pdrouter.sim.virtual.trace import Request

_TEXTS_KEPT = 16_384
_FIRST_ID = 1000
"""An id is this and a byte: ordinary tokens in any vocabulary of today's models."""

PROBED_WORDS = (256, 512)
"""Lengths of the prompts by which a density is found: each word that there is once, and twice."""


class Density(msgspec.Struct, frozen=True):
    """How an endpoint counts: tokens of a word, and of what it puts around each prompt."""

    word_tokens: float
    fixed_tokens: float

    def words_of(self, tokens: int) -> int:
        """Return how many words make a prompt of so many tokens; at least one."""
        return max(1, round((tokens - self.fixed_tokens) / self.word_tokens))


IDS = Density(1.0, 0.0)
"""A token id is a token."""


def density_of(short_tokens: int, long_tokens: int) -> Density:
    """Return the density by the counts of two prompts of ``PROBED_WORDS``. Raises: CannotAsk."""
    short_words, long_words = PROBED_WORDS
    word_tokens = (long_tokens - short_tokens) / (long_words - short_words)
    if word_tokens <= 0:
        raise CannotAsk(f"it counts {short_tokens} tokens in {short_words} words, {long_tokens} in {long_words}")
    return Density(word_tokens, max(0.0, short_tokens - short_words * word_tokens))


class Prompts:
    """Makes the prompts of one replay; another ``salt`` makes others, so that nobody has them cached."""

    def __init__(self, block_tokens: int, density: Density, salt: str) -> None:
        self._density = density
        self._block_words = max(1, round(block_tokens / density.word_tokens))
        self._salt = salt
        self._block = lru_cache(maxsize=_TEXTS_KEPT)(self._new_block)

    def text(self, number: int, request: Request) -> str:
        """Return the prompt of the request with this number in its trace."""
        return words(self._bytes(number, request))

    def ids(self, number: int, request: Request) -> list[int]:
        """Return it as token ids."""
        return [_FIRST_ID + byte for byte in self._bytes(number, request)]

    def _bytes(self, number: int, request: Request) -> bytes:
        """Return a byte for each word: those of its blocks, then what it shares with nobody."""
        size = self._density.words_of(request.prompt_tokens)
        raw = b"".join([self._block(block) for block in request.blocks])[:size]
        return raw + self._random(f"rest {number}", size - len(raw))

    def _new_block(self, block: int) -> bytes:
        return self._random(f"block {block}", self._block_words)

    def _random(self, what: str, size: int) -> bytes:
        return random.Random(f"{self._salt} {what}").randbytes(size)  # noqa: S311 - no secret


def probes(salt: str) -> tuple[str, str]:
    """Return two prompts of ``PROBED_WORDS``."""
    chance = random.Random(f"{salt} probe")  # noqa: S311 - no secret
    once, again = (words(bytes(chance.sample(range(256), 256))) for _ in range(2))
    return once, once + again
