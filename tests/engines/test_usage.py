"""What engines count: read at the end of an answer, and told anew."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrouter.engines.usage import (
    CACHED_TOKENS,
    TAIL_BYTES,
    CachedTokens,
    PromptCount,
    Tail,
    last_number,
    prompt_count,
    with_cached_tokens,
)

USAGE = b'{"usage":{"prompt_tokens":453,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":256}}}'


@pytest.mark.parametrize(
    ("tail", "count"),
    [
        (USAGE, PromptCount(453, 256)),
        (b'{"meta_info":{"prompt_tokens": 7, "cached_tokens" : 3}}', PromptCount(7, 3)),
        (b'{"usage":{"prompt_tokens":453,"prompt_tokens_details":null}}', None),
        (b'{"cached_tokens":"many"}', None),
        (b'{"cached_tokens":-1}', None),
        (b'"cached_tokens":5', PromptCount(0, 5)),
        (b'"cached_tokens":999999999}', PromptCount(0, 999_999_999)),
        (b'"cached_tokens":1234567890}', None),
        (b'"cached_tokens":1.5}', None),
        (b'"cached_tokens":2e3}', None),
        (b"", None),
    ],
)
def test_what_was_cached(tail: bytes, count: PromptCount | None) -> None:
    """OpenAI's usage and SGLang's meta_info; nothing where an engine doesn't tell."""
    assert prompt_count(tail) == count


def test_the_last_mention_counts() -> None:
    """An answer may quote the name; the engine's own count comes after it."""
    assert last_number(CACHED_TOKENS, b'"\\"cached_tokens\\":1" ... "cached_tokens":2') == 2


@pytest.mark.invariant("I10")
@given(st.integers(0, 10**9 - 1), st.integers(0, 10**9 - 1), st.text(max_size=20))
def test_only_the_number_changes(before: int, after: int, text: str) -> None:
    """All other bytes of a piece stay."""
    answer = {"text": text, "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": before}}}
    told = json.loads(with_cached_tokens(json.dumps(answer).encode(), after))
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == after
    told["usage"]["prompt_tokens_details"]["cached_tokens"] = before
    assert told == answer


@pytest.mark.parametrize(
    "piece", [b"", b'data: {"choices":[]}\n\n', b'{"cached_tokens":null}', b'"cached_tokens"', b'"cached_tokens":1.5']
)
def test_a_piece_without_the_number_stays(piece: bytes) -> None:
    """There is nothing to tell anew."""
    assert with_cached_tokens(piece, 5) == piece


@pytest.mark.parametrize("cached_tokens", [-1, 10**9, 10**400])
def test_what_no_engine_can_have_counted(cached_tokens: int) -> None:
    """It is told as such, and to nobody."""
    assert not PromptCount(1, cached_tokens).is_possible
    assert not PromptCount(cached_tokens, 1).is_possible
    assert with_cached_tokens(USAGE, cached_tokens) == USAGE


@given(st.lists(st.one_of(st.binary(max_size=5), st.integers(0, 3 * TAIL_BYTES).map(bytes)), max_size=8))
def test_the_end_of_an_answer(pieces: list[bytes]) -> None:
    """It is the same in whatever pieces it came, and no more than twice as much is held."""
    tail = Tail()
    for piece in pieces:
        tail.add(piece)
        assert len(tail._before) + len(tail._last) < 2 * TAIL_BYTES
    assert tail.text() == b"".join(pieces)[-TAIL_BYTES:]


MENTION = b'"cached_tokens"\t:  123456789'


@pytest.mark.invariant("I10")
@given(
    st.lists(st.sampled_from([MENTION, b'"cached_tokens":7', b'"', b"c", b"5", b"}", b"\n", b"1.5 "]), max_size=6),
    st.lists(st.integers(0, 80), max_size=6),
)
def test_a_mention_that_was_cut(parts: list[bytes], cuts: list[int]) -> None:
    """However an answer is cut, the number is told anew as if it had come in one piece; little is held back."""
    answer = b"".join(parts)
    edges = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    editor, told = CachedTokens(42), b""
    for start, end in pairwise(edges):
        told += editor.feed(answer[start:end])
        assert len(editor._held) <= len(CACHED_TOKENS) + 8 + 1 + 8 + 9
    assert told + editor.finish() == with_cached_tokens(answer, 42)
