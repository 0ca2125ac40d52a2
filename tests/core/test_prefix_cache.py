"""``prefix_cache``: AIBrix's prefill score alone."""

from collections.abc import Mapping, Sequence

import msgspec
import pytest

from pdrouter.core.fleet import Role
from pdrouter.core.policies.prefix_cache import PrefixCache

from .pools import ask, busy_pool, options, picks


@pytest.mark.parametrize(
    ("counts", "held", "right"),
    [
        pytest.param((4, 0, 2), {}, {"p1"}, id="no match: the fewest requests"),
        pytest.param((0, 0, 0), {}, {"p0", "p1", "p2"}, id="all alike: any"),
        pytest.param(
            (0, 20), {"p1": 11}, {"p1"}, id="11 % of match outweigh the whole range of load, and no fast path"
        ),
        pytest.param((0, 20), {"p1": 10}, {"p0", "p1"}, id="10 % weigh as much"),
        pytest.param((0, 20), {"p1": 9}, {"p0"}, id="9 % don't"),
        pytest.param((3, 3, 3), {"p0": 20, "p2": 60}, {"p2"}, id="the longest match"),
        pytest.param((1, 1, 1, 8), {"p3": 99}, {"p0", "p1", "p2"}, id="above mean + sigma: passed over"),
        pytest.param((7,), {}, {"p0"}, id="alone"),
    ],
)
def test_the_score(counts: Sequence[int], held: Mapping[str, int], right: set[str]) -> None:
    """(100 - match %) / 10 + requests / most requests; the least wins, ties by chance."""
    assert set(picks(PrefixCache, ask(held=held), busy_pool(counts))) == right


def test_decode_takes_the_fewest() -> None:
    """Nothing is known to be held there."""
    assert set(picks(PrefixCache, ask(Role.DECODE), busy_pool((2, 1)))) == {"p1"}


def test_sigma_is_a_setting() -> None:
    """Shared with load_aware."""
    wide = msgspec.structs.replace(options(), load_aware_sigma=2.0)
    assert PrefixCache(wide).choose(ask(held={"p3": 99}), busy_pool((1, 1, 1, 8))).index == 3


def test_it_shows_the_scores() -> None:
    """As they were compared."""
    why = PrefixCache(options()).choose(ask(held={"p1": 50}), busy_pool((0, 4))).why
    assert list(why.values) == [10.0, 6.0]
