"""The prefix cache shares, pins and evicts whole chains rightly."""

from hypothesis import given
from hypothesis import strategies as st

from pdrouter.sim.radix import PrefixCache


def test_shared_blocks_count_once_and_stay_until_the_last_user_leaves() -> None:
    """Two requests with a common prefix hold it together."""
    cache = PrefixCache(10)
    assert cache.pin([1, 2, 3]) == 3
    assert cache.pin([1, 2, 4]) == 1
    assert (cache.pinned_tokens, cache.idle_tokens) == (40, 0)
    cache.unpin([1, 2, 3])
    assert (cache.pinned_tokens, cache.idle_tokens) == (30, 10)
    cache.unpin([1, 2, 4])
    assert (cache.pinned_tokens, cache.idle_tokens) == (0, 40)
    assert cache.match([1, 2, 4, 5], 4) == 3
    assert cache.match([1, 2, 4, 5], 2) == 2


def test_eviction_takes_the_oldest_and_leaves_before_roots() -> None:
    """What was used last goes last, and no chain loses its middle."""
    cache = PrefixCache(10)
    for chain in ([1, 2], [3, 4]):
        cache.pin(chain)
        cache.unpin(chain)
    cache.pin([1])
    cache.unpin([1])
    assert cache.evict(15) == 20
    assert cache.match([1, 2], 2) == 1
    assert cache.match([3, 4], 2) == 1
    assert cache.evict(10) == 10
    assert (cache.match([1], 1), cache.match([3], 1)) == (1, 0)


def test_pinned_blocks_are_never_evicted() -> None:
    """Eviction frees what it can and says how much that was."""
    cache = PrefixCache(10)
    cache.pin([1, 2])
    cache.pin([3])
    cache.unpin([3])
    assert cache.evict(1000) == 10
    assert cache.match([1, 2], 2) == 2


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), max_size=4)), max_size=40))
def test_random_use_never_breaks_a_chain(steps: list[tuple[int, list[int]]]) -> None:
    """A block is present only if all before it are, whatever the order of pins, unpins and evictions."""
    cache = PrefixCache(1)
    held: list[list[int]] = []
    known: set[tuple[int, ...]] = set()
    for action, path in steps:
        chain = [hash(tuple(path[: i + 1])) for i in range(len(path))]
        known.update(tuple(chain[: i + 1]) for i in range(len(chain)))
        if action <= 1:
            cache.pin(chain)
            held.append(chain)
        elif action == 2 and held:
            cache.unpin(held.pop(len(path) % len(held)))
        else:
            cache.evict(len(path))
        for prefix in known:
            assert cache.match([prefix[-1]], 1) <= (cache.match(prefix, len(prefix)) == len(prefix))
        assert cache.pinned_tokens == len({block for chain in held for block in chain})
