"""The three verbs: decide reserves, observe learns, settle returns."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import cast

import pytest

from pdrouter.core import events
from pdrouter.core.fleet import Endpoint
from pdrouter.core.ledger import LegKind, RankKey
from pdrouter.core.lifecycle import State
from pdrouter.core.load import RankReport
from pdrouter.core.policies import ENGINE, POLICIES, RANK_POLICIES
from pdrouter.core.router import Router
from pdrouter.core.tokens import TextShape
from pdrouter.errors import InvalidRank, InvariantViolation, ModelNotFound, NoReadyPair

from .builders import (
    decide,
    decode,
    effective,
    facts,
    make_options,
    make_router,
    prefill,
    prefill_of,
    regular,
    reject,
    report,
    report_requests,
)


def place(router: Router, tokens: int, now_s: float) -> tuple[int | None, int | None]:
    """Place a request and return its prefill rank and decode rank."""
    decision = decide(router, facts(tokens), now_s)
    return prefill_of(decision).rank, decision.decode.rank


@pytest.mark.invariant("I11")
def test_the_worked_example() -> None:
    """Three requests over reports at t = 0, then a report taken at t = 2.5 that comes at t = 4."""
    router = make_router([prefill("p", dp_size=4), decode("d", dp_size=2)])
    report(router, "p", [900, 100, 400, 100], 0.0)
    report(router, "d", [50, 70], 0.0)
    placed = [place(router, tokens, now_s) for tokens, now_s in ((300, 1.0), (200, 2.0), (100, 3.0))]
    first, second = placed[0][0], placed[1][0]
    assert {first, second} == {1, 3}
    assert placed[2][0] == second
    assert [rank for _, rank in placed] == [0, 1, 1]
    assert sorted(effective(router, "p")) == [400, 400, 400, 900]
    assert effective(router, "d") == [350, 370]
    counted = [900, 400, 400, 300] if first == 1 else [900, 300, 400, 400]
    report(router, "p", counted, 2.5, now_s=4.0)
    assert effective(router, "p") == [900, 400, 400, 400]
    router.validate()


@pytest.mark.parametrize("shape", [(1, 4), (4, 1), (2, 2)])
def test_a_burst_over_equal_ranks_lands_evenly(shape: tuple[int, int]) -> None:
    """256 equal requests at one moment over 4 idle ranks, however they are grouped: 64 each, on both sides."""
    endpoints, ranks = shape
    fleet = [side(f"{side.__name__}{n}", dp_size=ranks) for side in (prefill, decode) for n in range(endpoints)]
    router = make_router(fleet)
    decisions = [decide(router, facts(500), 1.0) for _ in range(256)]
    for legs in ([prefill_of(d) for d in decisions], [d.decode for d in decisions]):
        assert sorted(Counter((p.endpoint.address, p.rank) for p in legs).values()) == [64] * 4


class TestOneStep:
    """Choosing and counting are one step, and each leg is counted where its work is."""

    @pytest.mark.invariant("I3")
    def test_a_decision_holds_its_load(self) -> None:
        """Both legs are reserved when ``decide`` returns: the prompt on prefill, the prompt on decode."""
        router = make_router([prefill("p"), decode("d")])
        decision = decide(router, facts(300), 1.0)
        legs = [p.reservation for p in decision.placements]
        assert [(leg.kind, leg.tokens, leg.is_live) for leg in legs] == [
            (LegKind.PREFILL, 300, True),
            (LegKind.DECODE, 300, True),
        ]
        assert (effective(router, "p"), effective(router, "d")) == ([300], [300])

    def test_the_second_request_sees_the_first(self) -> None:
        """At the same moment, without a report between."""
        router = make_router([prefill("p", dp_size=2), decode("d", dp_size=2)])
        first, second = (place(router, tokens, 1.0) for tokens in (10, 10_000))
        assert set(zip(first, second, strict=True)) <= {(0, 1), (1, 0)}

    def test_a_heavy_request_weighs_more_than_many_light_ones(self) -> None:
        """Tokens are compared, not requests."""
        router = make_router([prefill("p", dp_size=2), decode("d")])
        heavy, _ = place(router, 30_000, 1.0)
        light = [place(router, 100, 1.0)[0] for _ in range(50)]
        assert heavy not in light

    def test_a_request_without_a_decode_endpoint_reserves_nothing(self) -> None:
        """Both are chosen before anything is counted."""
        router = make_router([prefill("p"), decode("d", dp_size=2)])
        reject(router, facts(decode_rank=7), 1.0)
        router.observe(events.ReadinessChanged("d", "down"), 1.0)
        reject(router, facts(), 1.0)
        assert (effective(router, "p"), effective(router, "d"), router.live) == ([0], [0, 0], {})


class TestLegs:
    """Each leg holds its kind of load for as long as its work lasts."""

    def test_prefill_ends_with_the_first_token(self) -> None:
        """Until then it counts in full; the decode leg stays. Said twice it is one."""
        router = make_router([prefill("p"), decode("d")])
        decision = decide(router, facts(300), 1.0)
        assert (effective(router, "p"), decision.state) == ([300], State.PREFILLING)
        for _ in range(2):
            router.observe(events.FirstTokenSeen(decision), 2.0)
        assert (effective(router, "p"), effective(router, "d"), decision.state) == ([0], [300], State.DECODING)

    def test_decode_grows_with_what_is_generated(self) -> None:
        """Prompt plus generated so far, one request throughout."""
        router = make_router([prefill("p"), decode("d")])
        decision = decide(router, facts(300), 1.0)
        for tokens in (1, 4, 0):
            router.observe(events.TokensGenerated(decision, tokens), 2.0)
        rank = router.load.endpoints["d"].ranks[0]
        assert (rank.effective_tokens, rank.effective_requests) == (305, 1)
        assert effective(router, "p") == [300]

    def test_a_regular_leg_holds_prompt_and_answer(self) -> None:
        """The first token ends nothing there."""
        router = make_router([regular("w")])
        decision = decide(router, facts(300), 1.0)
        router.observe(events.FirstTokenSeen(decision), 2.0)
        router.observe(events.TokensGenerated(decision, 5), 3.0)
        assert (effective(router, "w"), decision.prefill, decision.state) == ([305], None, State.DECODING)
        assert decision.decode.kind is LegKind.REGULAR
        assert router.settle(decision, 4.0)
        assert effective(router, "w") == [0]

    @pytest.mark.invariant("I1")
    @pytest.mark.invariant("I2")
    @pytest.mark.parametrize("has_started", [False, True])
    def test_settle_returns_all_once(self, has_started: bool) -> None:
        """Before or after the first token; the second time nothing happens, nor by news that comes late."""
        router = make_router([prefill("p"), decode("d")])
        kept, decision = decide(router, facts(7), 1.0), decide(router, facts(300), 1.0)
        if has_started:
            router.observe(events.FirstTokenSeen(decision), 2.0)
        assert router.settle(decision, 3.0) is True
        assert router.settle(decision, 3.0) is False
        router.observe(events.FirstTokenSeen(decision), 4.0)
        router.observe(events.TokensGenerated(decision, 9), 4.0)
        router.observe(events.UsageSeen(decision, 300, 9, 9), 4.0)
        assert (effective(router, "p"), effective(router, "d"), decision.state) == ([7], [7], State.SETTLED)
        assert list(router.live.values()) == [kept]
        router.validate()

    @pytest.mark.invariant("I2")
    def test_requests_that_share_an_id_are_two(self) -> None:
        """The client's id is a label: each settles by itself."""
        router = make_router([prefill("p"), decode("d")])
        first, second = (decide(router, facts(10, request_id="same"), 1.0) for _ in range(2))
        assert first.number != second.number
        assert router.settle(first, 2.0)
        assert effective(router, "d") == [10]
        assert router.settle(second, 2.0)
        assert effective(router, "d") == [0]

    @pytest.mark.invariant("I9")
    def test_nothing_is_left_behind(self) -> None:
        """After thousands of requests nobody is live, and what is remembered is bounded."""
        router = make_router([prefill("p"), decode("d")], make_options(history_events=64, prefix_bytes=4000))
        for number in range(3000):
            now_s = number / 100
            decision = decide(router, facts(10, prefix_blocks=(number, -number), block_tokens=5.0), now_s)
            assert router.settle(decision, now_s)
        assert router.live == {}
        assert router.prefixes.used_bytes <= 4000
        accounts = [rank.account for load in router.load.endpoints.values() for rank in load.ranks]
        assert all(len(account._history) <= 64 and not account.live for account in accounts)


class TestPair:
    """A decision names a compatible pair, or says why there is none."""

    @pytest.mark.invariant("I6")
    @pytest.mark.parametrize("policy", POLICIES)
    def test_pairs_stay_in_their_group(self, policy: str) -> None:
        """Also when the least loaded decode endpoint is in another."""
        router = make_router(
            [side(f"{side.__name__}-{g}", group=g) for side in (prefill, decode) for g in ("a", "b")],
            make_options(policy=policy),
        )
        report(router, "decode-a", [9_000_000], 0.0)
        for _ in range(40):
            decision = decide(router, facts(), 1.0)
            assert prefill_of(decision).endpoint.group == decision.decode.endpoint.group

    @pytest.mark.invariant("I6")
    def test_a_request_without_a_model_gets_a_pair_of_one(self) -> None:
        """Two models in a fleet never meet in a pair."""
        router = make_router([side(f"{side.__name__}-{m}", model=m) for side in (prefill, decode) for m in ("m", "n")])
        for _ in range(20):
            decision = decide(router, facts(), 1.0)
            assert prefill_of(decision).endpoint.model == decision.decode.endpoint.model

    def test_a_model_is_looked_for_only_where_there_are_several(self) -> None:
        """The engine of a single model judges the name itself; in a fleet of two, an unknown one is a 404."""
        router = make_router([regular("w", model="m")])
        decide(router, facts(model="alias"), 1.0)
        router.observe(events.EndpointJoined(regular("v", model="n")), 2.0)
        assert decide(router, facts(model="n"), 3.0).decode.endpoint.address == "v"
        error = reject(router, facts(model="alias"), 3.0)
        assert isinstance(error, ModelNotFound)
        assert str(error) == "the model 'alias' is not served; known: m, n"
        assert error.param == "model"

    def test_without_a_pair_a_regular_endpoint_serves_and_says_so(self) -> None:
        """The step down is notable; in a fleet without PD endpoints it is the normal case."""
        router = make_router([prefill("p"), decode("d"), regular("w")])
        assert decide(router, facts(), 1.0).prefill is not None
        router.observe(events.ReadinessChanged("d", "down"), 1.0)
        decision = decide(router, facts(), 1.0)
        assert (decision.decode.endpoint.address, decision.decode.endpoint_why.is_notable) == ("w", True)
        assert "no ready pair" in decision.story()
        alone = decide(make_router([regular("w")]), facts(), 1.0)
        assert not alone.decode.endpoint_why.is_notable

    @pytest.mark.invariant("I6")
    def test_a_wrong_pair_is_never_let_out(self) -> None:
        """Should a policy's pool be wrong, the last check fails the request and reserves nothing."""
        router = make_router([prefill("p"), decode("d")])
        decide(router, facts(), 1.0)
        router.fleet._out["d"] = {"health": "went out behind the pools"}
        assert isinstance(reject(router, facts(), 1.0), InvariantViolation)
        assert len(router.live) == 1


class TestNobody:
    """A choice that finds nobody says who was there and why each was out."""

    @pytest.mark.parametrize("policy", ["random", "load_aware"])
    @pytest.mark.parametrize(
        ("fleet", "outs", "words"),
        [
            ([], {}, "no endpoint is known"),
            (
                [prefill("p"), decode("d")],
                {"p": "starting", "d": "probe failed 3 times"},
                (
                    "no prefill endpoint is ready (1 known: p starting); "
                    "no decode endpoint is ready (1 known: d probe failed 3 times)"
                ),
            ),
            (
                [prefill("p"), decode("d")],
                {"d": "probe failed"},
                "no decode endpoint is ready (1 known: d probe failed)",
            ),
            (
                [prefill("p"), decode("d")],
                {"p": "draining"},
                "no prefill endpoint is ready (1 known: p draining)",
            ),
            (
                [prefill("p", group="a"), decode("d", group="b")],
                {},
                (
                    "no ready prefill endpoint has a ready decode endpoint as its partner "
                    "(engine, KV transport, group and model must agree; 2 known)"
                ),
            ),
            ([prefill("p")], {}, "no decode endpoint is known"),
            ([regular("w")], {"w": "unhealthy"}, "no regular endpoint is ready (1 known: w unhealthy)"),
        ],
    )
    def test_it_names_everybody(self, policy: str, fleet: list[Endpoint], outs: dict[str, str], words: str) -> None:
        """With the reason of each, whatever the policy."""
        router = make_router(fleet, make_options(policy=policy))
        for address, out in outs.items():
            router.observe(events.ReadinessChanged(address, out), 1.0)
        error = reject(router, facts(), 2.0)
        assert isinstance(error, NoReadyPair)
        assert error.message == words

    def test_it_names_the_model_and_no_more_than_a_few(self) -> None:
        """A large fleet is counted."""
        router = make_router([regular(f"w{n}", model="m") for n in range(10)] + [regular("v", model="n")])
        for n in range(10):
            router.observe(events.ReadinessChanged(f"w{n}", "down"), 1.0)
        message = reject(router, facts(model="m"), 2.0).message
        assert message.startswith("no regular endpoint of model 'm' is ready (10 known: w0 down;")
        assert message.endswith("w7 down and 2 more)")


class TestClientRank:
    """The caller's own rank is honoured and charged where it exists, else it is a 400."""

    def test_it_is_honoured_and_charged(self) -> None:
        """On both legs, whatever the load says."""
        router = make_router([prefill("p", dp_size=4), decode("d", dp_size=2)])
        report(router, "p", [0, 0, 0, 9000], 0.0)
        decision = decide(router, facts(100, prefill_rank=3, decode_rank=1), 1.0)
        assert (prefill_of(decision).rank, decision.decode.rank) == (3, 1)
        assert prefill_of(decision).rank_why.policy == "client"
        assert (effective(router, "p"), effective(router, "d")) == ([0, 0, 0, 9100], [0, 100])

    @pytest.mark.parametrize(
        ("wanted", "words"),
        [
            ({"prefill_rank": 4}, "rank 4 isn't there: prefill endpoints have 0 to 3"),
            ({"prefill_rank": -1}, "rank -1 isn't there"),
            ({"decode_rank": 2}, "rank 2 isn't there: decode endpoints have 0 to 1"),
        ],
    )
    def test_one_that_is_not_there_is_refused(self, wanted: dict[str, int], words: str) -> None:
        """With the ranks that are, and nothing is reserved."""
        router = make_router([prefill("p", dp_size=4), decode("d", dp_size=2)])
        error = reject(router, facts(**wanted), 1.0)
        assert isinstance(error, InvalidRank)
        assert words in error.message
        assert router.live == {}

    def test_it_decides_the_endpoint(self) -> None:
        """Only endpoints that have the rank are asked, also for the partner's rank in another group."""
        router = make_router(
            [
                prefill("p1", group="a"),
                decode("d1", group="a"),
                prefill("p4", group="b", dp_size=4),
                decode("d4", group="b", dp_size=4),
            ]
        )
        for wanted in ({"prefill_rank": 2}, {"decode_rank": 2}):
            for _ in range(4):
                decision = decide(router, facts(**wanted), 1.0)
                assert [p.endpoint.address for p in decision.placements] == ["p4", "d4"]

    @pytest.mark.parametrize("wanted", [{"decode_rank": 2}, {"prefill_rank": 2}])
    def test_a_regular_endpoint_takes_either(self, wanted: dict[str, int]) -> None:
        """There is one leg."""
        assert decide(make_router([regular("w", dp_size=4)]), facts(**wanted), 1.0).decode.rank == 2


class TestRank:
    """How a rank is chosen where the client asks for none."""

    @pytest.mark.parametrize("rank_policy", RANK_POLICIES)
    def test_the_rank_is_said(self, rank_policy: str) -> None:
        """Every decision names a rank that is there, and all are used."""
        router = make_router([prefill("p", dp_size=4), decode("d", dp_size=4)], make_options(rank_policy=rank_policy))
        placed = [place(router, 10, 1.0) for _ in range(60)]
        assert {p for p, _ in placed} == {d for _, d in placed} == {0, 1, 2, 3}

    def test_left_to_the_engine(self) -> None:
        """No rank is named, the load is held for the endpoint, and a single rank is named all the same."""
        router = make_router([prefill("p", dp_size=4), decode("d")], make_options(rank_policy=ENGINE))
        decision = decide(router, facts(100), 1.0)
        assert (prefill_of(decision).rank, decision.decode.rank) == (None, 0)
        assert prefill_of(decision).report_age_s is None
        assert prefill_of(decision).label == "p rank engine"
        load = router.load.endpoints["p"]
        assert (load.unassigned.tokens, load.comparable_tokens) == (100, 100)
        assert router.settle(decision, 2.0)
        assert load.comparable_tokens == 0

    def test_one_idle_rank_beats_a_lower_total(self) -> None:
        """The choice is joint over all ranks of the fleet."""
        router = make_router([prefill("busy", dp_size=2), prefill("calm", dp_size=2), decode("d")])
        report(router, "busy", [9000, 0], 0.0)
        report(router, "calm", [500, 500], 0.0)
        chosen = prefill_of(decide(router, facts(100), 1.0))
        assert (chosen.endpoint.address, chosen.rank) == ("busy", 1)


class TestPrefix:
    """Affinity is worth the tokens it saves."""

    def test_a_prefix_stays_on_its_rank_and_is_charged_uncached(self) -> None:
        """The second request with the same prefix pays only for the rest, on prefill."""
        router = make_router([prefill("p", dp_size=4), decode("d", dp_size=2)])
        prompt = facts(1000, prefix_blocks=(1, 2, 3), block_tokens=300.0)
        first = decide(router, prompt, 1.0)
        router.observe(events.FirstTokenSeen(first), 2.0)
        for _ in range(3):
            second = decide(router, prompt, 3.0)
            assert prefill_of(second).rank == prefill_of(first).rank
            assert (second.prefix_tokens, prefill_of(second).reservation.tokens) == (900, 100)
            assert second.decode.reservation.tokens == 1000
            assert router.settle(second, 4.0)

    def test_affinity_yields_to_load(self) -> None:
        """Traffic that shares one prompt spreads once its rank carries more than the prefix saves."""
        router = make_router([prefill("p", dp_size=4), decode("d")])
        prompt = facts(1000, prefix_blocks=(1, 2, 3), block_tokens=300.0)
        placed = Counter(prefill_of(decide(router, prompt, 1.0)).rank for _ in range(40))
        assert sorted(placed.values()) == [10] * 4

    def test_one_hot_rank_leaves_the_affinity_of_others(self) -> None:
        """Imbalance is judged by target: another prompt still goes where its prefix is."""
        router = make_router([prefill("p", dp_size=3), decode("d")])
        mine = facts(1000, prefix_blocks=(7,), block_tokens=900.0)
        home = prefill_of(decide(router, mine, 1.0)).rank
        assert home is not None
        hot = (home + 1) % 3
        report(router, "p", [90_000 if rank == hot else 400 if rank == home else 100 for rank in range(3)], 2.0)
        assert prefill_of(decide(router, mine, 3.0)).rank == home

    def test_at_least_one_token_is_computed(self) -> None:
        """A prompt that is cached to its end, and a prompt of nothing, still weigh."""
        router = make_router([prefill("p"), decode("d")], make_options(policy="load_aware"))
        for tokens in (100, 100, 0):
            decision = decide(router, facts(tokens, prefix_blocks=(1,), block_tokens=500.0), 1.0)
            assert prefill_of(decision).reservation.tokens >= 1
            assert 0 <= decision.prefix_tokens <= max(0, tokens - 1)

    def test_it_outlives_a_moment_out_and_not_the_endpoint(self) -> None:
        """Unready and back keeps the affinity; gone forgets it."""
        router = make_router([prefill("p", dp_size=4), decode("d")])
        prompt = facts(1000, prefix_blocks=(1, 2, 3), block_tokens=300.0)
        first = decide(router, prompt, 1.0)
        assert router.settle(first, 1.0)
        for out in ("flaps", None):
            router.observe(events.ReadinessChanged("p", out), 2.0)
        second = decide(router, prompt, 3.0)
        assert (prefill_of(second).rank, second.prefix_tokens) == (prefill_of(first).rank, 900)
        router.observe(events.EndpointLeft("p"), 4.0)
        router.observe(events.EndpointJoined(prefill("p", dp_size=4)), 4.0)
        assert decide(router, prompt, 5.0).prefix_tokens == 0

    def test_a_regular_endpoint_is_remembered_as_well(self) -> None:
        """It holds the prefix of what it served."""
        router = make_router([regular("a", dp_size=2), regular("b", dp_size=2)])
        prompt = facts(1000, prefix_blocks=(1, 2), block_tokens=300.0)
        first = decide(router, prompt, 1.0)
        assert router.settle(first, 2.0)
        second = decide(router, prompt, 3.0)
        assert (second.decode.label, second.prefix_tokens) == (first.decode.label, 600)


class TestUnknownIsNotIdle:
    """A fresh endpoint is judged by its ledger beside what its peers carry."""

    @pytest.mark.parametrize("policy", ["minimum_tokens", "least_request", "load_aware"])
    def test_a_fresh_endpoint_is_not_flooded(self, policy: str) -> None:
        """Beside busy peers it gets its share, not all."""
        router = make_router(
            [prefill("old1"), prefill("old2"), prefill("fresh"), decode("d")], make_options(policy=policy)
        )
        for address, tokens, requests in (("old1", 5000, 5), ("old2", 5000, 5)):
            router.observe(events.LoadReported(address, [RankReport(0, tokens, requests)], 0.0), 0.0)
        placed = Counter(prefill_of(decide(router, facts(1000), 1.0)).endpoint.address for _ in range(30))
        assert placed["fresh"] <= 16

    @pytest.mark.parametrize("number", [-1, math.nan, math.inf, -math.inf])
    def test_a_failed_poll_never_wins(self, number: float) -> None:
        """What can't be a load isn't the smallest one."""
        router = make_router([prefill("bad"), prefill("good"), decode("d")])
        report(router, "good", [100], 0.0)
        report(router, "bad", [5000], 0.0)
        report(router, "bad", [number], 1.0)
        placed = {prefill_of(decide(router, facts(10), 2.0)).endpoint.address for _ in range(10)}
        assert placed == {"good"}
        assert router.load.rejected_reports == {"not_a_load": 1}

    def test_a_lagging_gauge_does_not_hide_our_own_work(self) -> None:
        """An engine that says 0 while it can't know better yet is corrected by the visible delay."""
        router = make_router([prefill("p"), decode("d")], make_options(visible_delay_s=5.0))
        decide(router, facts(300), 1.0)
        report(router, "p", [0], 4.0)
        assert effective(router, "p") == [300]


class TestChange:
    """Endpoints come, go and change under way."""

    def test_load_survives_a_description(self) -> None:
        """Same address, same load, whatever else is told of it."""
        router = make_router([prefill("p"), decode("d")])
        decision = decide(router, facts(100), 1.0)
        router.observe(events.EndpointDescribed(prefill("p", dp_size=4, version="0.5.10")), 2.0)
        router.observe(events.EndpointJoined(decode("d", dp_size=2), out="again"), 2.0)
        assert (effective(router, "p"), effective(router, "d")) == ([100, 0, 0, 0], [100, 0])
        assert router.fleet.is_ready("d")
        assert router.settle(decision, 3.0)
        assert (effective(router, "p"), effective(router, "d")) == ([0] * 4, [0] * 2)

    def test_the_unknown_is_not_described(self) -> None:
        """A description that comes after the endpoint left doesn't bring it back."""
        router = make_router([prefill("p"), decode("d")])
        router.observe(events.EndpointLeft("p"), 1.0)
        router.observe(events.EndpointDescribed(prefill("p")), 2.0)
        assert "p" not in router.load.endpoints
        assert isinstance(reject(router, facts(), 3.0), NoReadyPair)

    @pytest.mark.invariant("I2")
    def test_ranks_of_a_dead_endpoint_are_gone(self) -> None:
        """Its running legs settle without a trace, also when the address has come back."""
        router = make_router([prefill("p"), decode("d")])
        decision = decide(router, facts(100), 1.0)
        router.observe(events.EndpointLeft("d"), 2.0)
        assert "d" not in router.load.endpoints
        router.observe(events.EndpointJoined(decode("d")), 3.0)
        router.observe(events.TokensGenerated(decision, 5), 3.0)
        assert router.settle(decision, 4.0)
        assert (effective(router, "p"), effective(router, "d")) == ([0], [0])
        router.validate()

    def test_an_endpoint_may_join_out(self) -> None:
        """It is asked once it is ready."""
        router = make_router([])
        router.observe(events.EndpointJoined(regular("w"), out="starting"), 0.0)
        assert "starting" in reject(router, facts(), 1.0).message
        router.observe(events.ReadinessChanged("w", None), 2.0)
        decide(router, facts(), 3.0)


def test_an_event_that_nobody_knows_is_a_fault() -> None:
    """It isn't dropped in silence."""
    with pytest.raises(AssertionError):
        make_router([]).observe(cast("events.Event", "joined"), 1.0)


class TestLearning:
    """Usage corrects estimates."""

    def test_usage_teaches_the_rate_of_a_known_model(self) -> None:
        """Whatever name a request uses, its base model learns, so that clients can't fill the memory."""
        text = TextShape.of(b"a" * 300)
        for model in ("m", "made up", None):
            router = make_router([regular("w", model="m")])
            for _ in range(60):
                decision = decide(router, facts(100, model=model, text=text), 1.0)
                router.observe(events.UsageSeen(decision, 150, 80, 20), 2.0)
            assert router.tokens.estimate("m", text) == pytest.approx(150, rel=0.1)
            assert router.event_tokens.of("w") == pytest.approx(4, rel=0.1)

    def test_tokens_of_an_event_go_with_the_endpoint(self) -> None:
        """One that left is forgotten, and what comes late of it isn't kept."""
        router = make_router([regular("w"), regular("x")])
        late = decide(router, facts(), 1.0)
        address = late.decode.endpoint.address
        for _ in range(2):
            router.observe(events.UsageSeen(late, 100, 80, 20), 2.0)
            router.observe(events.EndpointLeft(address), 3.0)
            assert router.event_tokens.of(address) == 1.0

    def test_an_exact_count_teaches_nothing(self) -> None:
        """Token ids say nothing of bytes."""
        router = make_router([regular("w", model="m")])
        decision = decide(router, facts(100, model="m"), 1.0)
        router.observe(events.UsageSeen(decision, 100), 2.0)
        assert router.tokens.estimate("m", 400) == 100


class TestStory:
    """A decision explains itself."""

    def test_it_says_where_why_and_how_old_the_signals_are(self) -> None:
        """Each leg with its endpoint, rank, rules, what was seen, and the report's age."""
        router = make_router([prefill("p", dp_size=2), decode("d")])
        report(router, "p", [900, 100], 0.0)
        decision = decide(router, facts(300, request_id="abc"), 1.5)
        assert decision.story() == (
            "request abc (300 tokens): "
            "prefill on p rank 1 [single: the only endpoint; "
            "minimum_tokens: fewest tokens, less what it holds of this prompt (rank 0=900, rank 1=100); "
            "report 1.5 s old], "
            "decode on d rank 0 [single: the only endpoint; "
            "single: the only rank; no report]"
        )
        assert decision.decided_at_s == 1.5

    def test_a_rule_without_scores_stands_alone(self) -> None:
        """Policies that look at no load show none."""
        router = make_router(
            [regular("w", dp_size=2), regular("v")], make_options(policy="round_robin", rank_policy=ENGINE)
        )
        story = decide(router, facts(), 1.0).story()
        assert "regular on w rank engine [round_robin: its turn; engine: left to the engine; no report]" in story


def _journal(seed: int, policy: str, rank_policy: str) -> Sequence[tuple[object, ...]]:
    """Return the decisions of one fixed course of events."""
    fleet = [side(f"{side.__name__}{n}", dp_size=3) for side in (prefill, decode) for n in range(3)]
    router = make_router(fleet, make_options(policy=policy, rank_policy=rank_policy, seed=seed))
    placed = []
    for step in range(60):
        decision = decide(router, facts(10 + step * 7 % 50), step * 1.0)
        placed.append(tuple((p.endpoint.address, p.rank) for p in decision.placements))
        if step % 3 == 0:
            router.settle(decision, step + 0.5)
        if step % 5 == 0:
            report_requests(router, f"prefill{step % 3}", [step % 7, 1, 2], step + 0.6)
    return placed


@pytest.mark.invariant("I4")
@pytest.mark.parametrize("rank_policy", [*RANK_POLICIES, ENGINE])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_course_gives_the_same_decisions(policy: str, rank_policy: str) -> None:
    """Same settings, seed and events: nothing else has a say."""
    assert _journal(5, policy, rank_policy) == _journal(5, policy, rank_policy)


def test_the_rooms_rank_is_the_decisions() -> None:
    """The prefill rank is said by the decision and held where it says, for every leg."""
    router = make_router([prefill("p", dp_size=4), decode("d", dp_size=4)])
    for _ in range(20):
        for placement in decide(router, facts(), 1.0).placements:
            assert placement.rank is not None
            key = RankKey(placement.endpoint.address, placement.rank)
            assert placement.reservation.account.key == key


def test_usage_is_read_for_some_of_many() -> None:
    """For all at first, later for about one in eight, whatever turns ranks take."""
    router = make_router([regular("w")])
    wanted = []
    for _ in range(4096):
        decision = decide(router, facts(10), 1.0)
        wanted.append(router.wants_usage(decision))
        router.settle(decision, 1.0)
    assert all(wanted[:256])
    for turn in range(4):
        later = wanted[256 + turn :: 4]
        assert 0.08 < sum(later) / len(later) < 0.17
