"""The policies, one by one, over loads as they see them."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import pytest

from pdrouter.core.fleet import Role
from pdrouter.core.ledger import LegKind, RankKey
from pdrouter.core.load import EndpointLoad, LoadView, RankReport
from pdrouter.core.policies import POLICIES, RANK_POLICIES
from pdrouter.core.policies.base import MAX_SCOPES, Question, Turns
from pdrouter.core.policies.load_aware import LoadAware
from pdrouter.core.policies.minimum_tokens import MinimumTokens
from pdrouter.core.policies.power_of_two import PowerOfTwo

from .builders import make_policy_options, prefill

SEEDS = range(200)


def make_pool(counts: Sequence[float], *, dp_size: int = 1) -> list[EndpointLoad]:
    """Return endpoints ``p0``, ``p1``... that report so many requests and hundred times as many tokens."""
    view = LoadView(report_max_age_s=10.0, visible_delay_s=0.0, history_events=100)
    for number, count in enumerate(counts):
        view.add(prefill(f"p{number}", dp_size=dp_size))
        ranks = [RankReport(r, tokens=count * 100, requests=count) for r in range(dp_size)]
        view.accept(f"p{number}", ranks, 1.0, 1.0)
    return list(view.endpoints.values())


def ask(role: Role = Role.PREFILL, held: Mapping[str, int] | None = None, prompt_tokens: int = 100) -> Question:
    """Return a question about a prompt of which endpoints hold so many tokens on rank 0."""
    cached = {RankKey(address, 0): tokens for address, tokens in (held or {}).items()}
    return Question((role,), role, prompt_tokens, cached, 50.0, 0.0)


def load_aware_picks(question: Question, counts: Sequence[float]) -> Counter[str]:
    """Return which endpoints ``load_aware`` picks over many seeds, and how often."""
    pool = make_pool(counts)
    return Counter(pool[LoadAware(make_policy_options(seed)).choose(question, pool).index].key for seed in SEEDS)


class TestLoadAware:
    """AIBrix's published rules (SEMANTICS: vllm-project/aibrix #1601)."""

    @pytest.mark.parametrize(
        ("counts", "right"),
        [
            ((1, 10, 6, 12), {"p0"}),
            ((10, 1, 4, 3), {"p1"}),
            ((9, 10, 8, 12), {"p0", "p1", "p2", "p3"}),
            ((6, 1, 4, 3), {"p0", "p1", "p2", "p3"}),
            ((0, 8), {"p0", "p1"}),
            ((0, 9), {"p0"}),
            ((0, 9, 0), {"p0", "p2"}),
            ((7,), {"p0"}),
        ],
    )
    def test_the_published_table(self, counts: Sequence[float], right: set[str]) -> None:
        """Beyond a spread of 8 only the least loaded are picked, else each of all, about equally often."""
        picks = load_aware_picks(ask(), counts)
        assert set(picks) == right
        assert min(picks.values()) > len(SEEDS) / len(right) / 2

    def test_imbalance_beats_a_match(self) -> None:
        """However long the match is."""
        assert set(load_aware_picks(ask(held={"p1": 99}), (0, 9))) == {"p0"}

    @pytest.mark.parametrize(
        ("held", "counts", "right"),
        [
            pytest.param({"p2": 10}, (5, 5, 5, 5), {"p2"}, id="any match"),
            pytest.param({"p0": 10, "p2": 20}, (0, 0, 4, 4), {"p2"}, id="longer beats idler"),
            pytest.param({"p0": 20, "p2": 20}, (3, 0, 2, 4), {"p2"}, id="equal matches: idler"),
            pytest.param({"p0": 20, "p2": 20, "p3": 20}, (2, 0, 2, 3), {"p0", "p2"}, id="equal in both: any of them"),
            pytest.param({"p3": 90, "p1": 10}, (1, 1, 1, 8), {"p1"}, id="longest above mean + sigma: the next"),
            pytest.param({"p3": 90}, (1, 1, 1, 8), {"p0", "p1", "p2", "p3"}, id="only match above: any"),
            pytest.param({"p1": 90}, (0, 8), {"p1"}, id="one of two is never above"),
            pytest.param({"p0": 90}, (5,), {"p0"}, id="alone"),
        ],
    )
    def test_the_best_match_within_mean_and_deviation(
        self, held: Mapping[str, int], counts: Sequence[float], right: set[str]
    ) -> None:
        """By match, then by requests, ties at random, and none above the mean plus one sample deviation."""
        assert set(load_aware_picks(ask(held=held), counts)) == right

    def test_the_deviation_is_the_samples(self) -> None:
        """Of 0, 0, 4, 6 the mean is 2.5; 6 is above it by 3.5: more than the sample's deviation of 3 by half.

        Of 0, 3, 6 the mean is 3 and the sample deviation exactly 3: 6 is just allowed, which it would not be
        with the population's 2.45.
        """
        assert set(load_aware_picks(ask(held={"p2": 50}), (0, 3, 6))) == {"p2"}
        assert set(load_aware_picks(ask(held={"p3": 50}), (0, 0, 4, 6))) == {"p0", "p1", "p2", "p3"}

    def test_settings_set_spread_and_sigma(self) -> None:
        """Both published numbers are settings."""
        options = make_policy_options(1)
        pool = make_pool((0, 3))
        strict = msgspec.structs.replace(options, load_aware_spread_requests=2)
        assert {LoadAware(strict).choose(ask(), pool).index for _ in SEEDS} == {0}
        narrow = msgspec.structs.replace(options, load_aware_sigma=0.0)
        assert {LoadAware(narrow).choose(ask(held={"p1": 50}), pool).index for _ in SEEDS} == {0, 1}

    @pytest.mark.parametrize(
        ("counts", "right"),
        [((3, 1, 2), {"p1"}), ((2, 1, 1), {"p1", "p2"}), ((0, 0, 0), {"p0", "p1", "p2"}), ((0, 100), {"p0"})],
    )
    def test_decode_takes_the_fewest(self, counts: Sequence[float], right: set[str]) -> None:
        """Ties are uniform; so are all, when nobody has any."""
        assert set(load_aware_picks(ask(Role.DECODE), counts)) == right

    def test_decode_without_counts_is_uniform(self) -> None:
        """Nobody has reported and nothing is held."""
        view = LoadView(report_max_age_s=10.0, visible_delay_s=0.0, history_events=100)
        for name in "abc":
            view.add(prefill(name))
        pool = list(view.endpoints.values())
        question = ask(Role.DECODE)
        assert {LoadAware(make_policy_options(s)).choose(question, pool).index for s in SEEDS} == {0, 1, 2}

    def test_a_match_counts_on_any_rank(self) -> None:
        """The endpoint's best rank, or where the engine chose the rank, the endpoint."""
        pool = make_pool((1, 1, 1), dp_size=2)
        policy = LoadAware(make_policy_options(1))
        for key in (RankKey("p1", 1), RankKey("p1", -1)):
            question = Question(("x",), Role.PREFILL, 100, {key: 50, RankKey("p0", 0): 20}, 50.0, 0.0)
            assert {policy.choose(question, pool).index for _ in range(20)} == {1}
        ranks = pool[1].ranks
        question = Question(("x",), Role.PREFILL, 100, {RankKey("p1", 1): 50}, 50.0, 0.0)
        assert {policy.choose(question, ranks).index for _ in range(20)} == {1}

    def test_an_empty_prompt_is_placed(self) -> None:
        """Nothing is divided by its length."""
        assert LoadAware(make_policy_options(1)).choose(ask(prompt_tokens=0), make_pool((1, 1))).index in {0, 1}

    @pytest.mark.parametrize(
        ("held", "counts", "rule", "is_notable"),
        [
            ({}, (0, 9), "imbalance", True),
            ({"p0": 9}, (1, 1), "longest prefix match", False),
            ({}, (1, 1), "no prefix match", False),
            ({"p3": 90}, (1, 1, 1, 8), "overloaded", True),
        ],
    )
    def test_it_says_which_rule_fired(
        self, held: Mapping[str, int], counts: Sequence[float], rule: str, is_notable: bool
    ) -> None:
        """With the counts it saw; imbalance and fallback are notable."""
        why = LoadAware(make_policy_options(1)).choose(ask(held=held), make_pool(counts)).why
        assert rule in why.rule
        assert why.is_notable is is_notable
        assert list(why.values) == list(counts)


class TestMinimumTokens:
    """Effective tokens plus what of the prompt isn't cached."""

    @pytest.mark.parametrize(
        ("counts", "held", "right"),
        [
            ((3, 1, 2), {}, 1),
            ((3, 2, 2.5), {"p0": 90}, 1),
            ((3, 2, 2.5), {"p2": 90}, 2),
            ((2, 1, 9), {"p0": 99, "p2": 99}, 1),
        ],
    )
    def test_uncached_work_counts_like_load(self, counts: Sequence[float], held: dict[str, int], right: int) -> None:
        """A match is worth its tokens and no more."""
        picks = MinimumTokens(make_policy_options(1)).choose(ask(held=held), make_pool(counts))
        assert picks.index == right

    def test_an_endpoint_is_worth_its_best_rank(self) -> None:
        """One idle rank beats a lower total; work whose rank isn't known is spread."""
        view = LoadView(report_max_age_s=10.0, visible_delay_s=0.0, history_events=100)
        for name in ("a", "b"):
            view.add(prefill(name, dp_size=2))
        view.accept("a", [RankReport(0, tokens=900), RankReport(1, tokens=0)], 1.0, 1.0)
        view.accept("b", [RankReport(0, tokens=100), RankReport(1, tokens=100)], 1.0, 1.0)
        pool = list(view.endpoints.values())
        policy = MinimumTokens(make_policy_options(1))
        assert {policy.choose(ask(), pool).index for _ in range(4)} == {0}
        pool[0].unassigned.reserve(LegKind.PREFILL, 300, 300, 2.0)
        assert {policy.choose(ask(), pool).index for _ in range(4)} == {1}


class TestPowerOfTwo:
    """The better of two, in one unit."""

    def test_the_worst_of_many_is_never_picked(self) -> None:
        """It is always drawn with a better one."""
        pool = make_pool((5, 9, 7))
        policy = PowerOfTwo(make_policy_options(1))
        picks = Counter(policy.choose(ask(), pool).index for _ in SEEDS)
        assert set(picks) == {0, 2}
        assert picks[0] > picks[2]

    def test_alone_it_is_picked(self) -> None:
        """No second one is drawn."""
        assert PowerOfTwo(make_policy_options(1)).choose(ask(), make_pool((5,))).index == 0

    def test_units_are_never_mixed(self) -> None:
        """If one of the two has no report, requests in flight are compared, and it says so."""
        view = LoadView(report_max_age_s=10.0, visible_delay_s=0.0, history_events=100)
        for name in ("a", "b"):
            view.add(prefill(name))
        pool = list(view.endpoints.values())
        view.accept("a", [RankReport(0, tokens=9000)], 1.0, 1.0)
        pool[1].ranks[0].account.reserve(LegKind.PREFILL, 10, 10, 1.0)
        policy = PowerOfTwo(make_policy_options(1))
        for candidates in (pool, [p.ranks[0] for p in pool]):
            pick = policy.choose(ask(), candidates)
            assert (pick.index, pick.why.is_notable) == (0, True)
            assert "requests in flight" in pick.why.rule
        view.accept("b", [RankReport(0, tokens=10)], 1.0, 1.0)
        pick = policy.choose(ask(), pool)
        assert (pick.index, pick.why.is_notable) == (1, False)

    def test_a_report_is_taken_as_it_is(self) -> None:
        """What was sent since isn't added to it: with old reports it herds, as published."""
        pool = make_pool((1, 2))
        for _ in range(50):
            pool[0].ranks[0].account.reserve(LegKind.PREFILL, 1000, 1000, 5.0)
        policy = PowerOfTwo(make_policy_options(1))
        for candidates in (pool, [p.ranks[0] for p in pool]):
            assert {policy.choose(ask(), candidates).index for _ in range(20)} == {0}

    def test_a_report_without_tokens_is_none(self) -> None:
        """Then requests in flight are compared."""
        view = LoadView(report_max_age_s=10.0, visible_delay_s=0.0, history_events=100)
        for name in ("a", "b"):
            view.add(prefill(name))
            view.accept(name, [RankReport(0, requests=1, tokens=None if name == "a" else 0)], 1.0, 1.0)
        pool = list(view.endpoints.values())
        pool[1].ranks[0].account.reserve(LegKind.PREFILL, 10, 10, 2.0)
        pick = PowerOfTwo(make_policy_options(1)).choose(ask(), pool)
        assert (pick.index, list(pick.why.values)) in [(0, [0, 1]), (0, [1, 0])]


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_goes_by_its_name(name: str) -> None:
    """The table's name is the policy's, and it is what explanations say."""
    policy = POLICIES[name](make_policy_options(1))
    pick = policy.choose(ask(), make_pool((1, 2, 3)))
    assert policy.name == name == pick.why.policy
    assert pick.why.sentence().startswith(f"{name}: ")


@pytest.mark.parametrize("name", POLICIES)
def test_idle_equals_share_alike(name: str) -> None:
    """Over many picks among equals each gets its share, none is always first."""
    pool = make_pool((0, 0, 0, 0))
    policy = POLICIES[name](make_policy_options(7))
    picks = Counter(policy.choose(ask(), pool).index for _ in range(400))
    assert set(picks) == {0, 1, 2, 3}
    assert min(picks.values()) > 70


@pytest.mark.parametrize("name", RANK_POLICIES)
def test_rank_policies_choose_ranks(name: str) -> None:
    """A rank is a candidate as an endpoint is."""
    ranks = make_pool((0,), dp_size=4)[0].ranks
    policy = RANK_POLICIES[name](make_policy_options(3))
    assert {policy.choose(ask(), ranks).index for _ in range(80)} == {0, 1, 2, 3}


@pytest.mark.parametrize("name", ["least_request", "minimum_tokens"])
def test_ties_rotate_among_those_that_tie(name: str) -> None:
    """Two idle ones beside two busy ones get half each."""
    pool = make_pool((0, 5, 5, 0))
    policy = POLICIES[name](make_policy_options(1))
    assert Counter(policy.choose(ask(), pool).index for _ in range(20)) == {0: 10, 3: 10}


def test_turns_are_taken_within_a_scope() -> None:
    """Another scope has its own, and a set that shrank goes on within its size."""
    turns = Turns()
    assert [turns.take(("a",), 3) for _ in range(4)] == [0, 1, 2, 0]
    assert turns.take(("b",), 3) == 0
    assert turns.take(("a",), 1) == 0


@pytest.mark.invariant("I9")
def test_turns_are_bounded() -> None:
    """Endpoints that come and go leave nothing behind for ever."""
    turns = Turns()
    turns.least(("old",), [0.0])
    turns.take(("new",), 3)
    turns.least(("old",), [0.0, 0.0])
    for number in range(MAX_SCOPES - 1):
        turns.take((f"endpoint {number}",), 3)
    assert turns.evictions == 1
    assert (turns.take(("old",), 3), turns.take(("new",), 3)) == (2, 0)


def test_policies_use_only_the_chance_they_are_given() -> None:
    """The global generator is left alone, and the same seed gives the same picks."""
    state = random.getstate()
    pool = make_pool((1, 2, 3))
    for name in POLICIES:
        first, second = (POLICIES[name](make_policy_options(5)) for _ in range(2))
        assert [first.choose(ask(), pool).index for _ in range(30)] == [
            second.choose(ask(), pool).index for _ in range(30)
        ]
    assert random.getstate() == state
