"""``cache_aware``, by the SGLang router's three rules."""

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest

from pdrouter.core.fleet import Role
from pdrouter.core.policies.cache_aware import CacheAware

from .builders import decide, decode, facts, make_options, make_router, prefill, prefill_of
from .pools import ask, busy_pool, options


@pytest.mark.parametrize(
    ("counts", "held", "right"),
    [
        pytest.param((0, 65), {"p1": 99}, {0}, id="beyond both thresholds: imbalance beats any match"),
        pytest.param((0, 64), {"p1": 99}, {1}, id="the absolute test is strict"),
        pytest.param((130, 195), {"p1": 99}, {1}, id="the relative test is strict: 195 is 1.5 times 130"),
        pytest.param((130, 196), {"p1": 99}, {0}, id="just beyond it"),
        pytest.param((5, 0), {"p0": 31}, {0}, id="above the threshold: the match"),
        pytest.param((5, 0), {"p0": 30}, {1}, id="the threshold is strict: the least loaded"),
        pytest.param((5, 3, 4), {}, {1}, id="no match: the least loaded"),
        pytest.param((9, 0, 0), {"p0": 40, "p1": 50}, {1}, id="the longest match"),
        pytest.param((2, 1, 0), {"p0": 50, "p1": 50}, {1}, id="equal matches: the least loaded of them"),
        pytest.param((1, 1, 0), {"p0": 50, "p1": 50}, {0, 1}, id="equal in both: in turn"),
        pytest.param((0, 0), {}, {0, 1}, id="idle: in turn"),
        pytest.param((7,), {}, {0}, id="alone"),
    ],
)
def test_the_rules(counts: Sequence[int], held: Mapping[str, int], right: set[int]) -> None:
    """Imbalance, match, load: in this order, with the published thresholds."""
    pool = busy_pool(counts)
    policy = CacheAware(options())
    found = Counter(policy.choose(ask(held=held), pool).index for _ in range(40))
    assert set(found) == right
    assert max(found.values()) - min(found.values()) <= 1


def test_the_thresholds_are_settings() -> None:
    """All three."""
    pool = busy_pool((0, 4))
    question = ask(held={"p1": 50})
    assert CacheAware(options()).choose(question, pool).index == 1
    assert CacheAware(options(balance_abs_threshold=3, balance_rel_threshold=1.0)).choose(question, pool).index == 0
    assert CacheAware(options(cache_threshold=0.5)).choose(question, pool).index == 0


def test_decode_goes_to_the_least_loaded() -> None:
    """Nobody is known to hold anything there."""
    assert CacheAware(options()).choose(ask(Role.DECODE), busy_pool((2, 1))).index == 1


def test_only_an_imbalance_is_notable() -> None:
    """And the rule says what fired."""
    policy = CacheAware(options(balance_abs_threshold=1))
    whys = [
        policy.choose(ask(held=held), busy_pool(counts)).why for held, counts in (({}, (0, 2)), ({"p0": 50}, (0, 0)))
    ]
    assert [why.is_notable for why in whys] == [True, False]
    assert "imbalance" in whys[0].rule
    assert "holds 50% of the prompt" in whys[1].rule


def test_a_conversation_stays_where_it_began() -> None:
    """Through the router: what was sent there is held there."""
    router = make_router([prefill("p:1"), prefill("p:2"), decode("d:1")], make_options(policy="cache_aware"))
    first = [decide(router, facts(100, prefix_blocks=(n,), block_tokens=100.0), 1.0) for n in (1, 2)]
    again = [decide(router, facts(200, prefix_blocks=(n, 9), block_tokens=100.0), 2.0) for n in (1, 2, 1)]
    homes = [prefill_of(d).endpoint.address for d in first]
    assert set(homes) == {"p:1", "p:2"}
    assert [prefill_of(d).endpoint.address for d in again] == [homes[0], homes[1], homes[0]]
