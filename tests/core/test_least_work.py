"""The search for the least work against a full scan, and what it means for traffic."""

import random
from collections import Counter
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrouter.core import events
from pdrouter.core.cost import NEUTRAL, Profile, prefill_s, step_s, transfer_s
from pdrouter.core.decision import Decision
from pdrouter.core.fleet import BREAKER, Endpoint, Role
from pdrouter.core.ledger import RankKey
from pdrouter.core.load import RankReport
from pdrouter.core.names import Card
from pdrouter.core.places import Worker
from pdrouter.core.policies.base import Question
from pdrouter.core.policies.least_work import AVOIDED_S, LeastWork, decode_cost_s, prefill_cost_s
from pdrouter.core.router import Router

from .builders import (
    decide,
    decode,
    facts,
    make_options,
    make_policy_options,
    make_router,
    prefill,
    prefill_of,
    regular,
)

SLOW = msgspec.structs.replace(NEUTRAL, prefill_token_s=NEUTRAL.prefill_token_s * 3, step_base_s=0.03)
TOGETHER = msgspec.structs.replace(NEUTRAL, steps_together=True, prefill_pair_s=4e-8)
SMALL = msgspec.structs.replace(NEUTRAL, kv_capacity_tokens=3000, max_batch=2)
PROFILES: Mapping[str, Profile] = {"slow": SLOW, "together": TOGETHER, "small": SMALL}


def make_least(endpoints: list[Endpoint]) -> Router:
    """Return a router that places by least work."""
    return make_router(endpoints, make_options(policy="least_work", profiles=PROFILES))


def search_of(router: Router) -> LeastWork:
    """Return the policy over a router's own index."""
    return LeastWork(msgspec.structs.replace(make_policy_options(1), work=router.work))


def is_ready(router: Router, worker: Worker) -> bool:
    """Whether a rank takes requests."""
    return router.fleet.is_ready(worker.load.key.endpoint) and router.fleet.why_out(worker.load.key) is None


def scan_pairs(router: Router, question: Question, model: str | None = None) -> float:
    """Return the least cost over all pairs of ready ranks that serve a model and may be paired, each looked at."""
    workers = [w for w in router.work.workers.values() if is_ready(router, w) and w.site.endpoint.serves(model)]
    prefills = [w for w in workers if w.site.endpoint.role is Role.PREFILL]
    decodes = [w for w in workers if w.site.endpoint.role is Role.DECODE]
    costs = [
        prefill_cost_s(question, p) + decode_cost_s(question, d)
        for p in prefills
        for d in decodes
        if p.site.endpoint.pairs_with(d.site.endpoint)
    ]
    return min(costs, default=float("inf"))


def assert_cost(offer_s: float, best_s: float) -> None:
    """Assert that two costs are the same, as far as numbers of that size tell."""
    assert offer_s == pytest.approx(best_s, rel=1e-9 if best_s < AVOIDED_S else 0, abs=1e-8)


FAILED = st.frozensets(st.builds(RankKey, st.sampled_from([f"e{n}" for n in range(8)]), st.integers(-1, 3)), max_size=9)


def scan_groups(router: Router, question: Question) -> float:
    """Return the least cost over groups of the best prefill rank and the best decode rank in each."""
    best_s: dict[tuple[str, Role], float] = {}
    for worker in router.work.workers.values():
        endpoint = worker.site.endpoint
        cost_s = (prefill_cost_s if endpoint.role is Role.PREFILL else decode_cost_s)(question, worker)
        key = (endpoint.group, endpoint.role)
        best_s[key] = min(cost_s, best_s.get(key, cost_s))
    return min(cost_s + best_s[group, Role.DECODE] for (group, role), cost_s in best_s.items() if role is Role.PREFILL)


ADAPTER = Card("lora", parent="m")
ACTIONS = ("decide", "decide", "decide", "first", "settle", "report", "ready", "rank", "rank", "speed")
PROFILE_NAMES = st.sampled_from([None, "slow", "together", "small"])


@st.composite
def routers(draw: st.DrawFn) -> Router:
    """Return a fleet with a past: groups, profiles, live legs, reports, learned speeds, some of it not ready."""
    groups = [f"g{n}" for n in range(draw(st.integers(1, 4)))]
    endpoints: list[Endpoint] = []
    for number in range(draw(st.integers(2, 8))):
        make = draw(st.sampled_from([prefill, decode]))
        endpoints.append(
            make(
                f"e{number}",
                dp_size=draw(st.integers(1, 4)),
                group=draw(st.sampled_from(groups)),
                profile=draw(PROFILE_NAMES),
                model="m",
                cards=draw(st.sampled_from([(), (), (ADAPTER,)])),
            )
        )
    router = make_least(endpoints)
    now_s = 0.0
    live: list[Decision] = []
    for _ in range(draw(st.integers(0, 25))):
        now_s += draw(st.sampled_from([0.0, 0.01, 0.5]))
        action = draw(st.sampled_from(ACTIONS))
        if action == "decide":
            placed = router.decide(
                facts(draw(st.integers(1, 4000)), max_output_tokens=draw(st.integers(1, 500))), now_s
            )
            if isinstance(placed, Decision):
                live.append(placed)
        elif action == "first" and live:
            router.observe(events.FirstTokenSeen(draw(st.sampled_from(live))), now_s)
        elif action == "settle" and live:
            router.settle(live.pop(draw(st.integers(0, len(live) - 1))), now_s)
        elif action == "report":
            endpoint = draw(st.sampled_from(list(router.fleet)))
            ranks = [
                RankReport(r, draw(st.integers(0, 5000)), draw(st.integers(0, 5))) for r in range(endpoint.dp_size)
            ]
            router.observe(events.LoadReported(endpoint.address, ranks, now_s), now_s)
        elif action == "ready":
            endpoint = draw(st.sampled_from(list(router.fleet)))
            router.observe(events.ReadinessChanged(endpoint.address, draw(st.sampled_from([None, "out"]))), now_s)
        elif action == "rank":
            endpoint = draw(st.sampled_from(list(router.fleet)))
            key = RankKey(endpoint.address, draw(st.integers(0, endpoint.dp_size - 1)))
            router._set_ready(key, draw(st.sampled_from([None, "out", "out"])), BREAKER, now_s)
        elif action == "speed":
            site = router.work.sites[draw(st.sampled_from(list(router.work.sites)))]
            for _ in range(60):
                site.speed.saw_prefill(1000, 0, draw(st.sampled_from([0.02, 0.05, 0.2])))
    router.now_s = now_s  # type: ignore[attr-defined]
    return router


@pytest.mark.invariant("I6")
@given(
    router=routers(),
    prompt_tokens=st.integers(1, 20_000),
    output_tokens=st.integers(1, 2000),
    held=st.dictionaries(st.tuples(st.integers(0, 7), st.integers(0, 3)), st.integers(1, 20_000), max_size=5),
    failed=st.just(frozenset()) | FAILED,
    model=st.sampled_from([None, "m", "lora"]),
)
def test_the_search_finds_what_a_full_scan_finds(
    router: Router,
    prompt_tokens: int,
    output_tokens: int,
    held: dict[tuple[int, int], int],
    failed: frozenset[RankKey],
    model: str | None,
) -> None:
    """Whatever fleet, loads, groups, prefixes and speeds are, wherever it has failed, whoever has the adapter."""
    cached = {RankKey(f"e{e}", r): min(tokens, prompt_tokens - 1) for (e, r), tokens in held.items()}
    now_s: float = router.now_s  # type: ignore[attr-defined]
    question = Question(("x",), Role.PREFILL, prompt_tokens, cached, float(output_tokens), now_s, facts(), failed)
    name = router.fleet.names.target(model, None).name
    offer = search_of(router).choose_pair(question, name)
    best_s = scan_pairs(router, question, name)
    if offer is None:
        assert best_s == float("inf")
        return
    assert_cost(offer.cost_s, best_s)
    assert offer.prefill is not None
    router.fleet.check_pair(offer.prefill.worker.site.endpoint, offer.decode.worker.site.endpoint, name)
    assert is_ready(router, offer.prefill.worker)
    assert is_ready(router, offer.decode.worker)


def learn(router: Router, rng: random.Random) -> None:
    """Let each endpoint have a speed of its own."""
    for site in router.work.sites.values():
        factor = rng.choice([0.6, 0.9, 1.0, 1.5])
        for _ in range(30):
            site.speed.saw_prefill(1000, 0, factor * prefill_s(site.profile, 1000, 0))
            site.speed.saw_step(1, 1000, factor * step_s(site.profile, 1, 1000))
        router.work.reported(site.endpoint.address, 0.0)


@pytest.mark.parametrize("is_learned", [False, True])
@pytest.mark.parametrize("groups", [2, 12, 80])
def test_the_search_finds_the_best_of_few_and_of_many_groups(groups: int, is_learned: bool) -> None:
    """While some ranks are idle, while all have much to do, and when they are free again.

    Of many groups whose ranks read in step not all are looked at.
    """
    rng = random.Random(groups)
    names = [None, None, "slow", "together" if groups <= 16 else "slow"]
    fleet = [
        make(f"{make.__name__}{n}", group=f"g{n % groups}", profile=rng.choice(names))
        for make in (prefill, decode)
        for n in range(2 * groups)
    ]
    router = make_least(fleet)
    if is_learned:
        learn(router, rng)
    for number in range(12 * groups):
        placed = decide(router, facts(rng.randrange(1, 3000)), number / 1000)
        if number % 3 == 0:
            router.observe(events.FirstTokenSeen(placed), number / 1000)
        if number % groups == 0:
            now_s = number / 1000 + rng.choice([0.0, 0.0, 0.1, 9.0])
            question = Question(("x",), Role.PREFILL, rng.randrange(1, 5000), {}, rng.choice([1.0, 30.0, 900.0]), now_s)
            offer = search_of(router).choose_pair(question, None)
            assert offer is not None
            assert_cost(offer.cost_s, scan_groups(router, question))


def test_a_pool_without_one_side_is_left_out() -> None:
    """Nobody to pair with, nobody at all, and prefixes held by those that left."""
    cached = {RankKey("gone", 0): 50, RankKey("lonely", 0): 50}
    question = Question(("x",), Role.PREFILL, 100, cached, 10.0, 0.0)
    lonely = [prefill("lonely", group="a"), prefill("many", group="a", dp_size=8, profile="together")]
    router = make_least([*lonely, decode("d", group="b"), decode("e", group="c")])
    assert search_of(router).choose_pair(question, None) is None
    for profile in (None, "together"):
        alone = make_least([prefill("lonely", profile=profile)])
        assert search_of(alone).choose_pair(question, None) is None
    assert search_of(make_least([])).choose_regular(question, None) is None
    idle = make_least([regular("r")])
    idle.observe(events.ReadinessChanged("r", "out"), 0.0)
    assert search_of(idle).choose_regular(question, None) is None


def test_the_predicted_time_is_the_formula() -> None:
    """Wait, prefill behind what is cached, transfer; steps under the load with this request, and room for it."""
    fleet = [decode("small", profile="small"), decode("d", dp_size=2, profile="together")]
    router = make_least([prefill("p"), *fleet])
    cached = {RankKey("p", 0): 300}
    question = Question(("x",), Role.PREFILL, 1000, cached, 200.0, 5.0, facts())
    worker = router.work.workers[RankKey("p", 0)]
    worker.free_at_s = 7.0
    seconds = 2.0 + prefill_s(NEUTRAL, 700, 300) + transfer_s(NEUTRAL, 1000)
    assert prefill_cost_s(question, worker) == pytest.approx(seconds)

    router.observe(events.LoadReported("d", [RankReport(0, 4000.0, 3.0), RankReport(1, 0.0, 0.0)], 0.0), 0.0)
    for rank in (0, 1):
        step = step_s(NEUTRAL, 4, 4000 + 1100) if rank == 0 else step_s(NEUTRAL, 3, 4000)
        cost_s = decode_cost_s(question, router.work.workers[RankKey("d", rank)])
        assert cost_s == pytest.approx(200 * step)

    small = router.work.workers[RankKey("small", 0)]
    for at_s, tokens, requests, lacking in ((1, 500, 1, 0.0), (2, 2000, 1, 200 / 2000), (3, 500, 4, 3 / 4)):
        router.observe(events.LoadReported("small", [RankReport(0, tokens, requests)], at_s), at_s)
        step = step_s(SMALL, requests + 1, tokens + 1100)
        assert decode_cost_s(question, small) == pytest.approx(200 * step * (1 + lacking))


def test_beside_a_deep_prompt_a_short_one_takes_longer() -> None:
    """All of it at the pace of the slowest step; so it goes where shallow ones are read, though later."""
    router = make_least([*(prefill(name, dp_size=3, profile="together") for name in "ab"), decode("d", dp_size=4)])
    first = decide(router, facts(60_000), 0.0)
    deep = router.work.sites[prefill_of(first).endpoint.address]
    (other,) = {"a", "b"} - {deep.endpoint.address}
    router.observe(events.LoadReported(deep.endpoint.address, [RankReport(r, 0.0, 0.0) for r in range(3)], 9.0), 9.0)
    assert deep.together is not None
    assert deep.together.stretch > 5
    idle = next(worker for worker in deep.workers if not worker.legs)
    question = Question(("x",), Role.PREFILL, 1000, {}, 1.0, 9.0, facts())
    seconds = deep.together.stretch * TOGETHER.prefill_token_s * 1000 + transfer_s(TOGETHER, 1000)
    assert prefill_cost_s(question, idle) == pytest.approx(seconds)
    cached = Question(("x",), Role.PREFILL, 1000, {idle.load.key: 900}, 1.0, 9.0, facts())
    seconds = deep.together.stretch * TOGETHER.prefill_token_s * 100 + transfer_s(TOGETHER, 1000)
    assert prefill_cost_s(cached, idle) == pytest.approx(seconds)
    almost = Question(("x",), Role.PREFILL, 20_000, {idle.load.key: 10_000}, 1.0, 9.0, facts())
    offer = search_of(router).choose_pair(almost, None)
    assert offer is not None
    assert_cost(offer.cost_s, scan_pairs(router, almost))
    landed = Counter(prefill_of(decide(router, facts(1000), 9.0)).endpoint.address for _ in range(3))
    assert landed == {other: 3}


def test_of_many_ranks_in_step_those_of_other_endpoints_are_looked_at_once() -> None:
    """What differs between ranks of one endpoint is when they are free, so its first is its best."""
    router = make_least([*(prefill(f"p{n}", dp_size=8, profile="together") for n in range(9)), decode("d")])
    for number in range(9):
        decide(router, facts(30_000 + number), 0.0)
        router.observe(events.LoadReported(f"p{number}", [RankReport(r, 0.0, 0.0) for r in range(8)], 5.0), 5.0)
    offer = search_of(router).choose_pair(Question(("x",), Role.PREFILL, 1000, {}, 1.0, 5.0, facts()), None)
    assert offer is not None
    assert 2 <= offer.seen <= 9


def test_of_many_groups_in_step_only_some_are_looked_at() -> None:
    """Deep prompts everywhere make each worse than its bound."""
    groups = [f"g{n}" for n in range(60)]
    readers = [prefill(f"p{g}", dp_size=2, group=g, profile="together") for g in groups]
    router = make_least([*readers, *(decode(f"d{g}", group=g) for g in groups)])
    for number in range(60):
        decide(router, facts(60_000 + number), 0.0)
    for reader in readers:
        router.observe(events.LoadReported(reader.address, [RankReport(r, 0.0, 0.0) for r in range(2)], 9.0), 9.0)
    question = Question(("x",), Role.PREFILL, 1000, {}, 1.0, 9.0, facts())
    offer = search_of(router).choose_pair(question, None)
    assert offer is not None
    assert offer.seen <= 18


def test_a_rank_costs_nothing_less_than_everything_on_the_side_where_it_isnt() -> None:
    """A decode rank reads no prompts, and a prefill rank writes no answers."""
    router = make_least([prefill("p"), decode("d")])
    question = Question(("x",), Role.PREFILL, 100, {}, 10.0, 0.0, facts())
    assert prefill_cost_s(question, router.work.workers[RankKey("d", 0)]) == float("inf")
    assert decode_cost_s(question, router.work.workers[RankKey("p", 0)]) == float("inf")


@given(st.integers(0, 2**32), st.integers(1, 5000), st.integers(1, 500), st.just(frozenset()) | FAILED)
def test_the_search_for_a_regular_rank_finds_what_a_scan_finds(
    chance: int, prompt: int, output: int, failed: frozenset[RankKey]
) -> None:
    """Prefill and decode of one rank together."""
    rng = random.Random(chance)
    cards = [(ADAPTER,) if rng.random() < 0.7 else () for _ in range(4)]
    profiles = rng.choices([None, "slow", "small"], k=4)
    router = make_least([regular(f"e{n}", dp_size=2, profile=profiles[n], model="m", cards=cards[n]) for n in range(4)])
    name = router.fleet.names.target(rng.choice([None, "lora"]), None).name
    for number in rng.sample(range(4), rng.randrange(4)):
        router._set_ready(RankKey(f"e{number}", rng.randrange(2)), "out", BREAKER, 0.0)
    for _ in range(rng.randrange(20)):
        placed = decide(router, facts(rng.randrange(1, 3000)), rng.random() / 100)
        if rng.random() < 0.5:
            router.observe(events.FirstTokenSeen(placed), 0.02)
    cached = {RankKey("e1", 0): prompt // 2}
    question = Question(("x",), Role.REGULAR, prompt, cached, float(output), 0.03, facts(), failed)
    workers = [w for w in router.work.workers.values() if is_ready(router, w) and w.site.endpoint.serves(name)]
    offer = search_of(router).choose_regular(question, name)
    assert (offer is None) is (not workers)
    if offer is None:
        return
    best_s = min(prefill_cost_s(question, w) + decode_cost_s(question, w) for w in workers)
    assert is_ready(router, offer.decode.worker)
    assert_cost(offer.cost_s, best_s)


def test_a_rank_that_failed_isnt_chosen_for_what_it_holds() -> None:
    """Another one reads it all."""
    router = make_least([prefill("a"), prefill("b"), decode("d")])
    held = RankKey("a", 0)
    for failed, expected in ((frozenset[RankKey](), "a"), (frozenset({held}), "b")):
        question = Question(("x",), Role.PREFILL, 9000, {held: 8000}, 1.0, 0.0, facts(), failed)
        offer = search_of(router).choose_pair(question, None)
        assert offer is not None
        assert offer.prefill is not None
        assert offer.prefill.worker.load.key.endpoint == expected


def test_a_decode_rank_that_reads_is_sought_in_the_lightest_group_that_didnt_fail() -> None:
    """By load; in the lightest again when all have failed; none where there are prefill ranks only."""
    router = make_least([prefill("p", group="a"), *(decode(f"d{n}", group="abc"[n]) for n in range(3))])
    for number in range(3):
        router.observe(events.LoadReported(f"d{number}", [RankReport(0, 100.0 * number, number)], 0.0), 0.0)
    cached = {RankKey("gone", 0): 5, RankKey("p", 0): 5}
    for failed, expected in (((), "d0"), (("d0",), "d1"), (("d0", "d1"), "d2"), (("d0", "d1", "d2"), "d0")):
        avoid = frozenset(RankKey(address, 0) for address in failed)
        question = Question(("x",), Role.DECODE, 100, cached, 10.0, 0.0, facts(), avoid)
        offer = search_of(router).choose_decode(question, None)
        assert offer is not None
        assert offer.decode.worker.load.key.endpoint == expected
    assert search_of(make_least([prefill("p")])).choose_decode(question, None) is None


@pytest.mark.parametrize("shape", [(1, 4), (4, 1), (2, 2)])
def test_a_burst_is_spread_evenly(shape: tuple[int, int]) -> None:
    """256 requests over 4 idle equal ranks land 64 on each, on both sides."""
    count, dp_size = shape
    fleet: list[Endpoint] = [
        make(f"{make.__name__}{n}", dp_size=dp_size) for make in (prefill, decode) for n in range(count)
    ]
    router = make_least(fleet)
    placed = [decide(router, facts(1000), 0.0) for _ in range(256)]
    for side in ("prefill", "decode"):
        landed = Counter(getattr(d, side).reservation.account.key for d in placed)
        assert sorted(landed.values()) == [64] * 4


def test_a_slow_endpoint_gets_less() -> None:
    """Work goes where it takes the least time: three times as slow, about a third of the prompts."""
    router = make_least([prefill("fast"), prefill("slow", profile="slow"), decode("d", dp_size=4)])
    landed = Counter(decide(router, facts(4000), 0.0).prefill.endpoint.address for _ in range(100))  # type: ignore[union-attr]
    assert 20 <= landed["slow"] <= 35


def test_a_learned_slowness_counts() -> None:
    """An endpoint that takes three times what its profile says is treated so."""
    router = make_least([prefill("a"), prefill("b"), decode("d", dp_size=4)])
    for _ in range(60):
        router.work.sites["b"].speed.saw_prefill(4000, 0, 0.6)
    landed = Counter(decide(router, facts(4000), 0.0).prefill.endpoint.address for _ in range(100))  # type: ignore[union-attr]
    assert 15 <= landed["b"] <= 35


def test_a_hot_prefix_spreads_as_its_traffic_needs() -> None:
    """Requests with one prefix stay on one rank while that is quicker than reading it elsewhere; a flood uses more."""
    blocks = tuple(range(100))
    for gap_s, least, most in ((0.05, 1, 1), (0.004, 2, 6)):
        router = make_least([prefill("p", dp_size=8), decode("d", dp_size=8)])
        ranks: Counter[int | None] = Counter()
        for number in range(60):
            now_s = number * gap_s + (0.3 if number else 0.0)
            placed = decide(router, facts(4100, prefix_blocks=blocks, block_tokens=40.0), now_s)
            assert placed.prefill is not None
            ranks[placed.prefill.rank] += 1
            if number == 0 or most == 1:
                router.observe(events.FirstTokenSeen(placed), now_s + (gap_s / 2 if number else 0.2))
        assert least <= len(ranks) <= most, ranks


def test_idle_ranks_with_the_same_match_take_turns() -> None:
    """A system prompt that all ranks hold doesn't make one of them the favourite."""
    router = make_least([prefill("p", dp_size=4), decode("d")])
    ranks: Counter[int | None] = Counter()
    placed = [decide(router, facts(130, prefix_blocks=(-1, -2, number), block_tokens=40.0), 0.0) for number in range(4)]
    for number in range(4, 44):
        for earlier in placed:
            router.observe(events.FirstTokenSeen(earlier), number - 0.5)
        placed = [decide(router, facts(130, prefix_blocks=(-1, -2, number), block_tokens=40.0), float(number))]
        assert placed[0].prefill is not None
        assert placed[0].prefix_tokens == 80
        ranks[placed[0].prefill.rank] += 1
    assert max(ranks.values()) <= 11, ranks


def test_the_second_of_a_burst_sees_where_the_first_went() -> None:
    """A prefix counts as held from the moment of dispatch: waiting for the rank that reads it beats reading it anew."""
    router = make_least([prefill("p", dp_size=4), decode("d")])
    request = facts(9000, prefix_blocks=tuple(range(200)), block_tokens=44.0)
    first, second = decide(router, request, 0.0), decide(router, request, 0.1)
    assert first.prefill is not None
    assert second.prefill is not None
    assert first.prefill.rank == second.prefill.rank
    assert second.prefix_tokens == 8800


def test_kv_that_doesnt_fit_goes_elsewhere() -> None:
    """A decode rank whose KV is full costs the time until it isn't."""
    router = make_least([prefill("p"), decode("small", profile="small"), decode("large")])
    router.observe(events.LoadReported("large", [RankReport(0, 2000.0, 1.0)], 0.0), 0.0)
    placed = decide(router, facts(2900, max_output_tokens=200), 0.0)
    assert placed.decode.endpoint.address == "large"


def test_work_of_others_counts() -> None:
    """What a report shows beyond our own work is waited for."""
    router = make_least([prefill("a"), prefill("b"), decode("d")])
    router.observe(events.LoadReported("a", [RankReport(0, 50_000.0, 3.0)], 0.0), 0.0)
    router.observe(events.LoadReported("b", [RankReport(0, 0.0, 0.0)], 0.0), 0.0)
    landed = {decide(router, facts(100), 0.0).prefill.endpoint.address for _ in range(10)}  # type: ignore[union-attr]
    assert landed == {"b"}


def test_the_index_is_empty_handed_at_the_end() -> None:
    """When all is settled no rank has work left, and heaps hold one entry a rank."""
    router = make_least([prefill("p", dp_size=4), decode("d", dp_size=4)])
    placed = [decide(router, facts(1000), 0.0) for _ in range(500)]
    for number, decision in enumerate(placed):
        if number % 2:
            router.observe(events.FirstTokenSeen(decision), 1.0)
            router.observe(events.TokensGenerated(decision, 10), 1.5)
        router.settle(decision, 2.0)
    for worker in router.work.workers.values():
        assert worker.queued_s == 0.0
        assert worker.share_s == 0.0
        tier = worker.prefill_tier or worker.decode_tier
        assert tier is not None
        assert len(tier.heap) == 4
        assert tier.heap.left_behind <= 4 + 64


def test_a_prefix_that_all_hold_is_seen_on_the_one_that_is_free() -> None:
    """Of more holders than are looked at one by one, the first free rank counts as what it is."""
    router = make_least([prefill("p", dp_size=100), decode("d")])
    blocks = tuple(range(50))
    for rank in range(100):
        router.prefixes.insert(blocks, RankKey("p", rank))
    placed = [decide(router, facts(1000, prefix_blocks=blocks, block_tokens=18.0), 0.0) for _ in range(100)]
    assert {d.prefix_tokens for d in placed} == {900}
    assert len({d.prefill.rank for d in placed if d.prefill}) == 100


def test_equal_groups_take_turns() -> None:
    """Where nobody has anything to do, requests that come one at a time go round the groups."""
    fleet = [make(f"{make.__name__}{n}", group=f"g{n}") for make in (prefill, decode) for n in range(5)]
    router = make_least(fleet)
    seen: list[str] = []
    for number in range(10):
        placed = decide(router, facts(1000), float(number))
        router.observe(events.FirstTokenSeen(placed), number + 0.5)
        router.settle(placed, number + 0.9)
        seen.append(placed.decode.endpoint.group)
    assert sorted(seen[:5]) == sorted(seen[5:]) == [f"g{n}" for n in range(5)]


def test_groups_that_are_alike_arent_looked_at_one_by_one() -> None:
    """The first one is as good as any, though the sums of their bounds differ by rounding."""
    fleet = [make(f"{make.__name__}{n}", group=f"g{n}") for make in (prefill, decode) for n in range(50)]
    router = make_least(fleet)
    for number in range(100):
        decide(router, facts(1000), number / 1000)
    looks = Counter[int]()
    for tokens in range(1, 3000, 7):
        question = Question(("x",), Role.PREFILL, tokens, {}, 77.7, 100.0)
        offer = search_of(router).choose_pair(question, None)
        assert offer is not None
        looks[offer.seen] += 1
    assert set(looks) == {1}


def test_a_profile_that_is_wrong_for_all_starves_nobody() -> None:
    """Two engines ten times faster than said: the one that shows it first doesn't get everything from then on."""
    router = make_router([prefill("p1"), prefill("p2"), decode("d")], make_options(policy="least_work"))
    served = {"p1": 0, "p2": 0}
    now_s = 0.0
    for _ in range(60):
        pair = [decide(router, facts(8000), now_s) for _ in range(2)]
        for decision in pair:
            served[prefill_of(decision).endpoint.address] += 1
        now_s += 0.04
        for decision in pair:
            router.observe(events.FirstTokenSeen(decision), now_s)
            router.settle(decision, now_s)
        now_s += 0.01
    assert min(served.values()) > 40
