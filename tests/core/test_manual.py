"""``manual``: a routing key sticks to its worker."""

from collections import Counter

import pytest

from pdrouter.core.policies import manual as module
from pdrouter.core.policies.manual import Manual

from .pools import ask, busy_pool, options


def go(policy: Manual, key: int | None, pool: list, now_s: float = 0.0) -> str:  # type: ignore[type-arg]
    """Return the worker of a key."""
    return str(pool[policy.choose(ask(routing_key=key, now_s=now_s), pool).index].key)


def test_a_key_sticks() -> None:
    """To the worker that it was given, whatever the load."""
    policy = Manual(options())
    homes = {key: go(policy, key, busy_pool((0, 0, 0))) for key in range(50)}
    assert set(homes.values()) == {"p0", "p1", "p2"}
    assert {key: go(policy, key, busy_pool((9, 0, 3))) for key in range(50)} == homes


def test_without_a_key_any() -> None:
    """And nothing is remembered."""
    policy = Manual(options())
    assert {go(policy, None, busy_pool((0, 0))) for _ in range(40)} == {"p0", "p1"}
    assert len(policy) == 0


def test_two_workers_are_kept_and_the_first_is_preferred() -> None:
    """One that is out is stood in for, and gets its keys back; with a third, the first is forgotten."""
    policy = Manual(options(assignment_mode="min_load"))
    everybody = busy_pool((0, 1, 2))
    assert go(policy, 7, everybody) == "p0"
    assert go(policy, 7, everybody[1:]) == "p1"
    assert go(policy, 7, everybody) == "p0"
    assert go(policy, 7, everybody[1:]) == "p1"
    assert go(policy, 7, everybody[2:]) == "p2"
    assert go(policy, 7, everybody) == "p1"
    assert policy._keys_on == {"p1": 1, "p2": 1}


def test_min_load_takes_the_fewest_requests() -> None:
    """Ties by chance."""
    policy = Manual(options(assignment_mode="min_load"))
    assert {go(policy, key, busy_pool((3, 1, 1))) for key in range(40)} == {"p1", "p2"}


def test_min_group_takes_the_fewest_keys() -> None:
    """So that keys are shared alike."""
    policy = Manual(options(assignment_mode="min_group"))
    assert Counter(go(policy, key, busy_pool((9, 0, 0))) for key in range(9)) == {"p0": 3, "p1": 3, "p2": 3}


def test_idle_keys_are_forgotten() -> None:
    """After max_idle_secs without use, and with them what they count for."""
    policy = Manual(options(max_idle_s=10.0))
    go(policy, 1, busy_pool((0,)), 0.0)
    go(policy, 2, busy_pool((0,)), 5.0)
    go(policy, 1, busy_pool((0,)), 8.0)
    go(policy, 3, busy_pool((0,)), 15.5)
    assert len(policy) == 2
    assert policy._keys_on == {"p0": 2}
    go(policy, 3, busy_pool((0,)), 30.0)
    assert len(policy) == 1


@pytest.mark.invariant("I9")
def test_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one not used longest goes, and it is counted."""
    monkeypatch.setattr(module, "MAX_KEYS", 2)
    policy = Manual(options())
    for key in (1, 2, 1, 3):
        go(policy, key, busy_pool((0,)))
    assert (policy.evictions, [key for _, key in policy._keys]) == (1, [1, 3])


def test_it_says_why() -> None:
    """New, or the key's own."""
    policy = Manual(options())
    rules = [policy.choose(ask(routing_key=1), busy_pool((0, 0))).why.rule for _ in range(2)]
    assert rules == ["new for the routing key: random", "the routing key's worker"]
