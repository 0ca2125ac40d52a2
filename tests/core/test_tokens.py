"""The token estimator: what kinds of characters cost, learned for each model from what engines count."""

import json
import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrouter.core.tokens import TextShape, TokenEstimator, solve


class Text(msgspec.Struct, frozen=True):
    """A text of one kind, and how many tokens each tokenizer makes of it."""

    kind: str
    text: str
    tokens: dict[str, int]


class Counts(msgspec.Struct, frozen=True):
    """The fixture; ``about`` tells its sources."""

    about: str
    texts: list[Text]


TEXTS = msgspec.json.decode((Path(__file__).parent / "token_counts.json").read_bytes(), type=Counts).texts
KINDS = ("english", "chinese", "code", "json")
TEMPLATE_TOKENS = 20


def shape_of(text: str, *, is_escaped: bool = False) -> TextShape:
    """Return the shape of text as it stands in a body."""
    return TextShape.of(json.dumps(text, ensure_ascii=is_escaped).encode())


def make_estimator() -> TokenEstimator:
    """Return an estimator of 4 bytes a token for at most two models."""
    return TokenEstimator(4.0, 2)


# Shapes


@pytest.mark.parametrize(
    ("text", "size", "shares"),
    [
        (b"", 0, (0, 0, 0, 0, 0, 0)),
        (b"abcde12.. ", 10, (0.5, 0.2, 0.2, 0.1, 0, 0.1)),
        (b"a\\nb\\tc", 5, (0.8, 0, 0, 0.2, 0, 0)),
        (b'\\"ab\\"', 4, (0.5, 0, 0.5, 0, 0, 0)),
        ("你好".encode(), 6, (0, 0, 0, 0, 1, 0)),
        (b"\\u4f60\\u597d", 6, (0, 0, 0, 0, 1, 0)),
        (b"\\u4F60a", 4, (0.25, 0, 0, 0, 0.75, 0)),
    ],
)
def test_a_shape(text: bytes, size: float, shares: tuple[float, ...]) -> None:
    """Escapes count for what they stand for; that of a tab for a letter, which is near enough."""
    shape = TextShape.of(text)
    assert shape.size == pytest.approx(size)
    assert shape.shares == pytest.approx(shares)


@pytest.mark.parametrize("is_escaped", [False, True])
def test_long_text_is_judged_by_samples(is_escaped: bool) -> None:
    """Whatever it is made of, and in whatever order, its shape is about right."""
    text = ("你好" * 2000 + "word " * 2400) * 4
    shape = shape_of(text, is_escaped=is_escaped)
    assert shape.size == pytest.approx(len(text.encode()), rel=0.35 if is_escaped else 0.001)
    letters, _, _, spaces, beyond, _ = shape.shares
    assert letters == pytest.approx(4 * spaces, rel=0.2)
    assert letters + spaces + beyond == pytest.approx(1.0, abs=0.03)
    assert beyond == pytest.approx(0.5, abs=0.2)


# Estimates


@pytest.mark.parametrize(("prompt_bytes", "tokens"), [(0, 1), (1, 1), (400, 100), (402, 100)])
def test_an_estimate_before_anything_is_known(prompt_bytes: int, tokens: int) -> None:
    """The configured rate for any text, and at least one token."""
    estimator = make_estimator()
    assert estimator.estimate("m", prompt_bytes) == tokens
    assert estimator.estimate("m", TextShape.of(b"a" * prompt_bytes)) == tokens
    assert estimator.estimate("m", TextShape.of(b"7" * prompt_bytes)) == tokens


@pytest.mark.parametrize("tokenizer", ["qwen", "tekken"])
@pytest.mark.parametrize("is_escaped", [False, True])
def test_fifty_mixed_requests_teach_each_kind(tokenizer: str, is_escaped: bool) -> None:
    """Then texts of a kind that weren't seen are within 10 % together, whichever half of the texts was learned from."""
    errors: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for seed in range(10):
        chance = random.Random(seed)
        known, unknown = [], {}
        for kind in KINDS:
            texts = [text for text in TEXTS if text.kind == kind]
            chance.shuffle(texts)
            known += texts[: len(texts) // 2]
            unknown[kind] = texts[len(texts) // 2 :]
        estimator = make_estimator()
        for _ in range(50):
            parts = [chance.choice(known) for _ in range(chance.randint(1, 4))]
            shape = shape_of("\n\n".join(part.text for part in parts), is_escaped=is_escaped)
            estimator.learn("m", shape, sum(part.tokens[tokenizer] for part in parts) + TEMPLATE_TOKENS)
        for kind, texts in unknown.items():
            estimated = sum(estimator.estimate("m", shape_of(text.text, is_escaped=is_escaped)) for text in texts)
            counted = sum(text.tokens[tokenizer] + TEMPLATE_TOKENS for text in texts)
            errors[kind].append(abs(estimated / counted - 1.0))
    means = {kind: sum(known) / len(known) for kind, known in errors.items()}
    assert max(means.values()) < 0.1, means
    assert max(max(known) for known in errors.values()) < 0.2, errors


def test_no_rate_alone_could_be_right() -> None:
    """The fixture tells kinds apart: bytes per token differ by more than a half."""
    rates = {}
    for kind in KINDS:
        texts = [text for text in TEXTS if text.kind == kind]
        rates[kind] = sum(len(text.text.encode()) for text in texts) / sum(text.tokens["qwen"] for text in texts)
    assert rates["english"] > 1.5 * rates["json"]


def test_what_a_request_costs_beside_its_text() -> None:
    """A chat template's tokens are learned from short prompts and don't spoil the rate of long ones."""
    estimator = make_estimator()
    for letters in (40, 80, 400, 4000, 20_000) * 12:
        estimator.learn("m", TextShape.of(b"a" * letters), letters // 4 + 60)
    assert estimator.estimate("m", TextShape.of(b"a" * 40)) == pytest.approx(70, rel=0.15)
    assert estimator.estimate("m", TextShape.of(b"a" * 100_000)) == pytest.approx(25_000, rel=0.03)


def test_models_are_told_apart() -> None:
    """One that nothing is known of is taken for the one without a name, if that is known."""
    estimator = make_estimator()
    for _ in range(50):
        estimator.learn("m", 4000, 2000)
    assert estimator.estimate("m", 4000) == pytest.approx(2000, rel=0.01)
    assert estimator.estimate("other", 4000) == 1000
    for _ in range(50):
        estimator.learn(None, 4000, 500)
    assert estimator.estimate("other", 4000) == pytest.approx(500, rel=0.01)
    assert estimator.estimate("m", 4000) == pytest.approx(2000, rel=0.01)


def test_a_model_that_changes_is_learned_again() -> None:
    """Slowly: after the first requests not each is learned from, and what was known fades."""
    estimator = make_estimator()
    for _ in range(200):
        estimator.learn("m", 4000, 1000)
    for _ in range(6000):
        estimator.learn("m", 4000, 2000)
    assert estimator.estimate("m", 4000) == pytest.approx(2000, rel=0.1)


def test_a_few_wild_counts_do_little_harm() -> None:
    """One in ten is four times too large."""
    estimator = make_estimator()
    for number in range(60):
        estimator.learn("m", 4000, 4000 if number % 10 == 9 else 1000)
    assert estimator.estimate("m", 4000) == pytest.approx(1000, rel=0.1)


@pytest.mark.parametrize(
    ("prompt_bytes", "tokens"), [(1000, 0), (1000, -5), (1000, 1), (1000, 10_000), (0, 10_000), (10**9, 2)]
)
def test_a_count_beyond_belief_is_left_out(prompt_bytes: int, tokens: int) -> None:
    """Engines that count nothing or something else don't spoil the rate."""
    estimator = make_estimator()
    estimator.learn("m", prompt_bytes, tokens)
    assert estimator.estimate("m", 4000) == 1000


LESSON = st.tuples(st.binary(max_size=600), st.integers(1, 5000))


@given(st.lists(LESSON, max_size=40), st.binary(max_size=2000))
def test_whatever_is_learned_estimates_stay_sane(lessons: list[tuple[bytes, int]], text: bytes) -> None:
    """Between a 64th of the bytes and four times them, and a template."""
    estimator = make_estimator()
    for seen, tokens in lessons:
        estimator.learn("m", TextShape.of(seen), tokens)
    shape = TextShape.of(text)
    assert max(1, round(shape.size / 64)) <= estimator.estimate("m", shape) <= 4 * shape.size + 513


def test_equations_are_solved() -> None:
    """By elimination."""
    assert solve([[4.0, 2.0, 1.0, 11.0], [2.0, 5.0, 3.0, 21.0], [1.0, 3.0, 6.0, 25.0]]) == pytest.approx([1, 2, 3])
    assert solve([]) == []


def test_counted_texts_are_learned_of_apart() -> None:
    """Where a text's own tokens are known, what a template adds to each piece and to all; not so for texts by bytes."""
    estimator = make_estimator()
    assert estimator.estimate("m", TextShape.counted(1000, 8)) == 1000
    for number in range(30):
        tokens, pieces = 50 + 970 * number % 3000, 1 + number * 5 % 13
        estimator.learn("m", TextShape.counted(tokens, pieces), tokens + 3 * pieces + 20)
    assert estimator.estimate("m", TextShape.counted(500, 40)) == pytest.approx(640, rel=0.02)
    assert estimator.estimate("m", TextShape.counted(0, 1)) >= 1
    assert estimator.estimate("m", 4000) == 1000


@pytest.mark.invariant("I9")
def test_models_are_bounded() -> None:
    """Further ones are estimated with what is configured, and counted."""
    estimator = make_estimator()
    for model in ("a", "b", "c"):
        for _ in range(20):
            estimator.learn(model, 2000, 1000)
    assert [estimator.estimate(m, 4000) for m in "abc"] == [pytest.approx(2000, rel=0.02)] * 2 + [1000]
    assert estimator.overflows == 20
