"""Prompts: what they share, and how long they are."""

from collections.abc import Sequence

import pytest

from pdrouter.sim.replay.caller import CannotAsk
from pdrouter.sim.replay.prompts import IDS, PROBED_WORDS, Density, Prompts, density_of, probes
from pdrouter.sim.virtual.trace import EXCERPT, Request, read_trace

BLOCK = 64
WORD = 4
"""Letters of a word, the space behind it included."""


def make_prompts(density: Density = IDS, salt: str = "a") -> Prompts:
    """Return a maker of prompts in blocks of 64 tokens."""
    return Prompts(BLOCK, density, salt)


def shared(one: Sequence[object], other: Sequence[object]) -> int:
    """Return how many leading items are the same."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def request(tokens: int, *blocks: int) -> Request:
    """Return a request."""
    return Request(0.0, tokens, 1, blocks)


@pytest.mark.parametrize("density", [IDS, Density(1.7, 9.0), Density(0.4, 30.0)])
def test_equal_blocks_are_equal_text_and_nothing_else_is(density: Density) -> None:
    """Prompts agree exactly as far as their blocks do: no more, whatever a word costs."""
    prompts = make_prompts(density)
    one = prompts.text(0, request(4 * BLOCK, 1, 2, 3))
    for number, (other, blocks) in enumerate(
        [(request(9 * BLOCK, 1, 2, 3, 4, 5), 3), (request(4 * BLOCK, 1, 2, 9), 2), (request(4 * BLOCK), 0)], start=1
    ):
        common = shared(one, prompts.text(number, other)) // WORD
        assert common == pytest.approx(blocks * BLOCK / density.word_tokens, abs=3)


@pytest.mark.parametrize("density", [IDS, Density(1.7, 9.0), Density(0.4, 30.0)])
@pytest.mark.parametrize("tokens", [100, 1000, 5000])
def test_lengths_in_tokens(density: Density, tokens: int) -> None:
    """As the endpoint counts, with blocks or without."""
    for asked in (request(tokens), request(tokens, *range(tokens // BLOCK))):
        words = len(make_prompts(density).text(0, asked)) / WORD
        assert words * density.word_tokens + density.fixed_tokens == pytest.approx(tokens, abs=density.word_tokens)


def test_the_shortest_prompt_is_a_word() -> None:
    """Where the template alone is longer than the recorded prompt."""
    assert len(make_prompts(Density(1.0, 50.0)).text(0, request(3))) == WORD


def test_a_salt_makes_new_prompts_and_none_makes_the_same() -> None:
    """A second run finds nothing of the first in a cache, unless it wants to."""
    asked = request(200, 1, 2)
    texts = [make_prompts(salt=salt).text(0, asked) for salt in "aab"]
    assert texts[0] == texts[1]
    assert shared(texts[0], texts[2]) < WORD
    assert probes("a") != probes("b")


def test_what_is_no_block_is_shared_with_nobody() -> None:
    """Two prompts of a trace without prefixes, and the ends of two that have the same blocks."""
    prompts = make_prompts()
    assert shared(prompts.text(0, request(200)), prompts.text(1, request(200))) < WORD
    ends = [prompts.text(number, request(2 * BLOCK, 1)) for number in (0, 1)]
    assert BLOCK <= shared(*ends) / WORD < BLOCK + 1


def test_token_ids() -> None:
    """As many as there are tokens, with the prefixes of the trace, small enough for any vocabulary."""
    prompts = make_prompts()
    one, two = prompts.ids(0, request(200, 1, 2)), prompts.ids(1, request(300, 1, 7))
    assert (len(one), len(two)) == (200, 300)
    assert one[:BLOCK] == two[:BLOCK]
    assert one[BLOCK : BLOCK + 9] != two[BLOCK : BLOCK + 9]
    assert 1000 <= min(one) <= max(one) < 1256


def test_lengths_by_a_tokenizer_whose_words_differ() -> None:
    """Each word is probed once, so that what a mean word costs is exact and not by chance."""

    def count(text: str) -> int:
        return 25 + sum(1 + (ord(word[0]) + ord(word[1])) % 3 for word in text.split())

    for salt in "abcd":
        density = density_of(*map(count, probes(salt)))
        prompts = make_prompts(density, salt)
        counted = sum(count(prompts.text(number, request(900, number))) for number in range(40))
        assert counted == pytest.approx(40 * 900, rel=0.003)


def test_a_density_is_found_by_two_counts() -> None:
    """What a word costs, and what stands around a prompt."""
    short, long = PROBED_WORDS
    found = density_of(round(12 + 1.5 * short), round(12 + 1.5 * long))
    assert (found.word_tokens, found.fixed_tokens) == (1.5, 12)
    with pytest.raises(CannotAsk, match="it counts 7 tokens in 256 words, 7 in 512"):
        density_of(7, 7)


def test_the_excerpt_s_prompts_hit_as_its_blocks_do() -> None:
    """Of a real trace, the shared words are the shared blocks."""
    trace = read_trace(EXCERPT, 0)
    prompts = Prompts(trace.block_tokens, IDS, "")
    some = [(n, r) for n, r in enumerate(trace.requests) if len(r.blocks) > 2][:24]
    texts = [prompts.text(number, asked) for number, asked in some]
    for (_, one), text in zip(some, texts, strict=True):
        for (_, two), other in zip(some, texts, strict=True):
            if one is not two:
                blocks = shared(one.blocks, two.blocks)
                assert shared(text, other) // WORD // trace.block_tokens == blocks
