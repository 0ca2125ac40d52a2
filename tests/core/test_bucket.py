"""``bucket``: ranges of prompt lengths that carry the same work."""

from collections import Counter

import pytest

from pdrouter.core.policies import bucket as module
from pdrouter.core.policies.bucket import Bucket

from .pools import ask, busy_pool, options

LENGTHS = (10, 20, 30, 60, 120, 240, 480, 960)


def go(policy: Bucket, length: int, now_s: float, workers: int = 2, scope: str = "x") -> int:
    """Return the worker's index."""
    return policy.choose(ask(tokens=length, now_s=now_s, scope=(scope,)), busy_pool((0,) * workers)).index


def taught(lengths: tuple[int, ...] = LENGTHS) -> Bucket:
    """Return a policy that has seen these lengths in its first interval."""
    policy = Bucket(options(bucket_adjust_interval_s=5.0))
    for length in lengths:
        go(policy, length, 1.0)
    return policy


def test_at_first_workers_take_turns() -> None:
    """No range is better than another before an interval has ended."""
    policy = Bucket(options())
    assert [go(policy, 100, 0.0, 3) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_ranges_carry_the_same_work() -> None:
    """Of 1920 tokens, half are in prompts of up to 480."""
    policy = taught()
    assert [go(policy, length, 6.0) for length in (1, 479, 481, 9999)] == [0, 0, 1, 1]
    assert {go(policy, 480, 6.0) for _ in range(2)} == {0, 1}


def test_work_is_even_on_what_it_learned_from() -> None:
    """With many lengths, each of four workers gets about a quarter of the tokens."""
    lengths = tuple(range(1, 1000))
    policy = taught(lengths)
    work: Counter[int] = Counter()
    for length in lengths:
        work[go(policy, length, 7.0, 4)] += length
    assert max(work.values()) < 1.02 * min(work.values())


def test_equal_lengths_take_turns_among_their_workers() -> None:
    """A length at which ranges meet has several; nobody gets all."""
    policy = taught((100,) * 8)
    assert Counter(go(policy, 100, 7.0, 4) for _ in range(40)) == {0: 10, 1: 10, 2: 10, 3: 10}
    assert (go(policy, 99, 7.0, 4), go(policy, 101, 7.0, 4)) == (0, 3)


def test_bounds_move_each_interval_and_not_sooner() -> None:
    """They follow the newest interval that has ended."""
    policy = taught()
    assert go(policy, 400, 5.9) == 0 == go(policy, 400, 6.0)
    for _ in range(9):
        go(policy, 50, 7.0)
    assert go(policy, 400, 10.9) == 0
    assert go(policy, 400, 11.0) == 1


def test_a_worker_more_or_less_moves_the_bounds_at_once() -> None:
    """By the same lengths."""
    policy = taught()
    assert [go(policy, 470, 6.0, workers) for workers in (2, 4, 1, 2)] == [0, 1, 0, 0]


@pytest.mark.invariant("I9")
def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths of an interval and sets that are chosen from; what goes is counted."""
    monkeypatch.setattr(module, "MAX_LENGTHS", 4)
    monkeypatch.setattr(module, "MAX_BOOKS", 2)
    policy = taught()
    assert policy.evictions == 4
    for scope in ("b", "x", "c"):
        go(policy, 1, 2.0, scope=scope)
    assert list(policy._books) == [("x",), ("c",)]
