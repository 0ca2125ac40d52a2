"""``consistent_hashing``: same key, same worker."""

from collections import Counter

import pytest
from xxhash import xxh3_64_intdigest

from pdrouter.core.policies import consistent_hashing as module
from pdrouter.core.policies.consistent_hashing import POINTS, ConsistentHashing

from .pools import ask, busy_pool, options

KEYS = [xxh3_64_intdigest(b"client %d" % number) for number in range(2000)]


def owners(policy: ConsistentHashing, names: set[str]) -> dict[int, str]:
    """Return each key's worker, of ``p0`` to ``p7`` those named."""
    pool = [load for load in busy_pool((0,) * 8) if load.key in names]
    return {key: pool[policy.choose(ask(client_key=key), pool).index].key for key in KEYS}


ALL = {f"p{number}" for number in range(8)}


def test_a_key_leads_to_the_same_worker() -> None:
    """Whatever the load, the seed and the order of the candidates."""
    first = owners(ConsistentHashing(options(1)), ALL)
    pool = list(reversed(busy_pool((9,) * 8)))
    policy = ConsistentHashing(options(2))
    assert {key: pool[policy.choose(ask(client_key=key), pool).index].key for key in KEYS} == first


def test_keys_are_shared_about_alike() -> None:
    """150 points each even it out."""
    counts = Counter(owners(ConsistentHashing(options()), ALL).values())
    assert set(counts) == ALL
    assert min(counts.values()) > len(KEYS) / 8 * 0.6
    assert max(counts.values()) < len(KEYS) / 8 * 1.5


def test_only_the_keys_of_one_that_leaves_move() -> None:
    """And they come back with it; the same on a ring that never knew it."""
    policy = ConsistentHashing(options())
    before = owners(policy, ALL)
    without = owners(policy, ALL - {"p3"})
    assert {key: name for key, name in before.items() if name != "p3"} == {
        key: name for key, name in without.items() if before[key] != "p3"
    }
    assert "p3" not in without.values()
    assert owners(policy, ALL) == before
    assert owners(ConsistentHashing(options()), ALL - {"p3"}) == without


def test_without_a_key_any() -> None:
    """By chance."""
    policy = ConsistentHashing(options())
    assert {policy.choose(ask(), busy_pool((0, 9, 0))).index for _ in range(60)} == {0, 1, 2}


def test_the_end_of_the_ring_is_its_beginning() -> None:
    """The greatest key and the least have the same worker."""
    pool = busy_pool((0,) * 8)
    policy = ConsistentHashing(options())
    assert policy.choose(ask(client_key=2**64 - 1), pool).index == policy.choose(ask(client_key=0), pool).index


@pytest.mark.invariant("I9")
def test_rings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one not used longest goes; a ring holds at most twice the workers that there are, and those to come."""
    monkeypatch.setattr(module, "MAX_RINGS", 2)
    policy = ConsistentHashing(options())
    for scope in ("a", "b", "a", "c"):
        policy.choose(ask(client_key=1, scope=(scope,)), busy_pool((0, 0)))
    assert (policy.evictions, list(policy._rings)) == (1, [("a",), ("c",)])
    owners(policy, ALL)
    owners(policy, {"p1", "p2"})
    assert len(policy._rings["x",]._points) == 2 * POINTS
