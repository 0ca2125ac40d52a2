"""How many tokens a text has: learned for each model from what engines count.

One rate of bytes per token can't be right for English, Chinese, code and JSON at once. So a text is told by its shape:
how many of its bytes are letters, digits, punctuation, spaces, or beyond ASCII, from a few samples. What each of these
costs in tokens is a small regression for each model (ridge, least squares of the relative error), which forgets slowly.
"""

import re
from collections.abc import Sequence
from operator import mul

import msgspec

_SAMPLES, _SAMPLE_BYTES, _ESCAPED_SAMPLE_BYTES = 8, 64, 256
"""How a longer text is judged. Chosen: more bytes don't make estimates better; fewer would cut too many escapes."""

_ESCAPED_CHARACTER = re.compile(rb"\\u[0-9a-fA-F]{4}")
_THREE_BYTES = b"\xe4\xbd\xa0"
"""What most characters that are written so take in UTF-8."""

_KINDS = bytes(
    ord("c") if byte >= 128 else ord("a") if chr(byte).isalpha() else ord("0") if chr(byte).isdigit()
    else ord(" ") if byte in b" \t\r\n" else ord(".")
    for byte in range(256)
)  # fmt: skip

_FIXED_TOKENS = 16.0
"""The unit of what a request costs beside its text: the model's chat template."""

_PLAIN = (0.78, 0.01, 0.03, 0.18, 0.0, 0.0)
"""The shares of English prose."""

_COUNTED_SHARES = 2
"""A counted text's shape: its tokens, and its pieces. They are told apart from bytes by their number."""

_RIDGE = 0.01
"""What the prior weighs beside one request; chosen on the fixture, anything from 0.003 to 0.1 does."""

_COUNTED_RIDGE = 1e-5
"""The same where tokens were counted: little is left to learn, and that is nearly exact. Chosen."""

_KEPT = 0.995
"""What is kept with each request that is learned from: the memory is about two hundred."""

_EAGER_REQUESTS, _LAZY_STEP = 64, 16
"""Each of the first is learned from, then one in so many: a lesson takes some 70 microseconds."""

_DOUBT = 0.5
"""A count that is further off than this has less weight, once a few are known."""

_FEW_REQUESTS = 8

_MOST_BYTES_PER_TOKEN = 64.0
_MOST_TOKENS_PER_BYTE = 4.0
_MOST_FIXED_TOKENS = 512.0
"""Counts beyond these are a lie or another unit."""


class TextShape(msgspec.Struct, frozen=True):
    """What a text's tokens are judged by.

    ``size`` is its bytes in UTF-8; ``shares`` are those of letters, digits, punctuation, spaces and bytes beyond ASCII,
    and of pairs of punctuation marks, which often make one token. Of a text whose tokens were counted, ``size`` is the
    count, and what is left to learn is what the model's chat template adds.
    """

    size: float
    shares: tuple[float, ...]

    @classmethod
    def of(cls, text: bytes) -> "TextShape":
        r"""Judge text as it stands in JSON: ``\n`` is one byte, ``\uXXXX`` about three. Long text is sampled."""
        sample = _sample(text, _SAMPLE_BYTES)
        size = float(len(text))
        if b"\\" in sample:
            if b"\\u" in sample:
                sample = _sample(text, _ESCAPED_SAMPLE_BYTES)
            plain = _ESCAPED_CHARACTER.sub(_THREE_BYTES, sample).replace(b"\\n", b"\n").replace(b"\\", b"")
            size *= len(plain) / len(sample)
            sample = plain
        count = sample.translate(_KINDS).count
        scale = 1.0 / (len(sample) or 1)
        return cls(
            size,
            (
                count(b"a") * scale,
                count(b"0") * scale,
                count(b".") * scale,
                count(b" ") * scale,
                count(b"c") * scale,
                count(b"..") * scale,
            ),
        )

    @classmethod
    def counted(cls, tokens: int, pieces: int) -> "TextShape":
        """Return the shape of a text that has so many tokens in so many pieces: roles, contents."""
        return cls(float(tokens), (1.0, pieces / max(1, tokens)))

    @classmethod
    def plain(cls, size: float) -> "TextShape":
        """Return the shape of English prose."""
        return cls(size, _PLAIN)


class _Rates:
    """What one model's tokens cost: weights for the shares, and for the part that no text accounts for."""

    __slots__ = ("_moments", "_prior", "_sums", "requests", "ridge", "weights")

    def __init__(self, prior: Sequence[float], ridge: float) -> None:
        self.requests = 0
        self.ridge = ridge
        self.weights = self._prior = list(prior)
        self._moments = [[0.0] * len(prior) for _ in prior]
        self._sums = [0.0] * len(prior)

    def tokens(self, text: TextShape) -> float:
        """Return the estimate."""
        *rates, fixed = self.weights
        tokens = float(text.size * sum(map(mul, rates, text.shares)) + fixed * _FIXED_TOKENS)
        return min(max(tokens, text.size / _MOST_BYTES_PER_TOKEN), _most_tokens(text.size))

    def learn(self, text: TextShape, tokens: int) -> None:
        """Take in a count."""
        self.requests += 1
        if self.requests > _EAGER_REQUESTS and self.requests % _LAZY_STEP:
            return
        scale = text.size / tokens
        seen = [*(share * scale for share in text.shares), _FIXED_TOKENS / tokens]
        error = abs(1.0 - sum(map(mul, self.weights, seen)))
        weight = _DOUBT / error if error > _DOUBT and self.requests > _FEW_REQUESTS else 1.0
        for row, number in zip(self._moments, seen, strict=True):
            share = weight * number
            row[:] = [_KEPT * known + share * other for known, other in zip(row, seen, strict=True)]
        self._sums = [_KEPT * known + weight * number for known, number in zip(self._sums, seen, strict=True)]
        self.weights = self._solve()

    def _solve(self) -> list[float]:
        rows = [[*row, known + self.ridge * prior] for row, known, prior in
                zip(self._moments, self._sums, self._prior, strict=True)]  # fmt: skip
        for index, row in enumerate(rows):
            row[index] += self.ridge
        return solve(rows)


class TokenEstimator:
    """Tokens of texts, by model; at most ``max_models`` are kept (I9).

    A model has rates for texts by their bytes, and others for texts that were counted.
    """

    def __init__(self, bytes_per_token: float, max_models: int) -> None:
        self.overflows = 0
        self._prior = _Rates([1.0 / bytes_per_token] * (len(_PLAIN) - 1) + [0.0, 0.0], _RIDGE)
        self._counted_prior = _Rates([1.0, 0.0, 0.0], _COUNTED_RIDGE)
        self._max_models = max_models
        self._rates: dict[str | None, _Rates] = {}
        self._counted_rates: dict[str | None, _Rates] = {}

    def estimate(self, model: str | None, text: TextShape | int) -> int:
        """Return the tokens of a text, at least 1; of one that only its size in bytes is known of, as if English.

        A model that nothing is known of is taken for the one without a name.
        """
        text = _shape(text)
        known, prior = self._of(text)
        rates = known.get(model) or known.get(None, prior)
        return max(1, round(rates.tokens(text)))

    def learn(self, model: str | None, text: TextShape | int, tokens: int) -> None:
        """Take in what an engine counted."""
        text = _shape(text)
        if tokens <= 0 or not text.size / _MOST_BYTES_PER_TOKEN <= tokens <= _most_tokens(text.size):
            return
        known, prior = self._of(text)
        rates = known.get(model)
        if rates is None:
            if len(known) >= self._max_models:
                self.overflows += 1
                return
            rates = known[model] = _Rates(prior.weights, prior.ridge)
        rates.learn(text, tokens)

    def _of(self, text: TextShape) -> tuple[dict[str | None, _Rates], _Rates]:
        """Return the rates for texts of that kind, and those of a model that nothing is known of."""
        if len(text.shares) == _COUNTED_SHARES:
            return self._counted_rates, self._counted_prior
        return self._rates, self._prior


def solve(rows: list[list[float]]) -> list[float]:
    """Solve linear equations, each a row of factors and its sum, by elimination; for positive definite factors."""
    for index, pivot in enumerate(rows):
        for row in rows[index + 1 :]:
            factor = row[index] / pivot[index]
            row[index:] = [number - factor * other for number, other in zip(row[index:], pivot[index:], strict=True)]
    solution: list[float] = []
    for index in range(len(rows) - 1, -1, -1):
        *factors, total = rows[index][index:]
        solution.insert(0, (total - sum(map(mul, factors[1:], solution))) / factors[0])
    return solution


def _sample(text: bytes, length: int) -> bytes:
    """Return so many bytes each from all over a text, or all of it."""
    if len(text) <= _SAMPLES * length:
        return text
    step = (len(text) - length) // (_SAMPLES - 1)
    return b"".join([text[start : start + length] for start in range(0, _SAMPLES * step, step)])


def _shape(text: TextShape | int) -> TextShape:
    return text if isinstance(text, TextShape) else TextShape.plain(text)


def _most_tokens(size: float) -> float:
    return size * _MOST_TOKENS_PER_BYTE + _MOST_FIXED_TOKENS
