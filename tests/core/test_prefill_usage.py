"""What a prefill engine counted corrects what was believed: of its cache, and of how fast it reads."""

from collections.abc import Callable

import pytest

from pdrouter.core import events
from pdrouter.core.cost import NEUTRAL, prefill_s, transfer_s
from pdrouter.core.decision import Decision
from pdrouter.core.ledger import RankKey
from pdrouter.core.load import RankReport
from pdrouter.core.request import RequestFacts
from pdrouter.core.router import Router

from .builders import decide, decode, facts, make_options, make_router, prefill, prefill_of, regular

BLOCK = 250
RANK = RankKey("p", 0)


def make_least() -> Router:
    """Return a router over one prefill and one decode rank."""
    return make_router([prefill("p"), decode("d")], make_options(policy="least_work"))


def prompt(*blocks: int) -> RequestFacts:
    """Return a request with these blocks."""
    return facts(BLOCK * len(blocks), prefix_blocks=blocks, block_tokens=float(BLOCK))


def read(router: Router, decision: Decision, now_s: float) -> None:
    """Let a prompt have been read."""
    router.observe(events.FirstTokenSeen(decision), now_s)


def run(router: Router, request: RequestFacts, now_s: float) -> Decision:
    """Let a request come and be read."""
    decision = decide(router, request, now_s)
    read(router, decision, now_s + 0.5)
    return decision


def count(router: Router, decision: Decision, cached_tokens: int, now_s: float = 90.0, scale: float = 1.0) -> None:
    """Let the engine tell what it had of a prompt, in tokens of its own."""
    prompt_tokens = round(decision.facts.prompt_tokens * scale)
    router.observe(events.PrefillUsageSeen(decision, prompt_tokens, round(cached_tokens * scale)), now_s)
    router.validate()


START = tuple(range(1, 11))


def lost(router: Router) -> Decision:
    """Let a rank hold two talks with one beginning, and come back with a third; others part from it earlier."""
    run(router, prompt(*START[:3], 60), 0.1)
    run(router, prompt(*START[:5], 70), 0.2)
    run(router, prompt(*START, 20, 21), 1.0)
    run(router, prompt(*START, 30), 2.0)
    decision = decide(router, prompt(*START, 40), 3.0)
    assert decision.prefix_tokens == 10 * BLOCK
    return decision


@pytest.mark.parametrize("scale", [1.0, 0.6, 1.7])
def test_what_a_cache_has_lost_is_forgotten(scale: float) -> None:
    """With all that hangs on it, whatever the engine's tokens are; what was read just now is there."""
    router = make_least()
    decision = lost(router)
    count(router, decision, 4 * BLOCK, scale=scale)
    assert router.lost_prefixes == 1
    assert router.prefixes.match((*START, 20, 21)) == {RANK: 10}
    assert router.prefixes.match((*START, 30)) == {RANK: 10}
    assert router.prefixes.match((*START, 40)) == {RANK: 11}
    assert router.prefixes.match((*START[:3], 60)) == {RANK: 4}
    assert router.prefixes.match((*START[:5], 70)) == {RANK: 5}


def test_what_was_sent_since_stays() -> None:
    """A later prompt with the same beginning is read behind this one, and finds it."""
    router = make_least()
    decision = lost(router)
    decide(router, prompt(*START, 50), 3.1)
    count(router, decision, 0)
    assert router.prefixes.match((*START, 50)) == {RANK: 11}
    assert router.prefixes.match((*START, 30)) == {RANK: 10}


@pytest.mark.parametrize("cached_tokens", [8 * BLOCK, 10 * BLOCK, 11 * BLOCK])
def test_two_blocks_less_or_any_more_change_nothing(cached_tokens: int) -> None:
    """That is rounding, or another router's prompt."""
    router = make_least()
    count(router, lost(router), cached_tokens)
    assert router.lost_prefixes == 0
    assert router.prefixes.match((*START, 20, 21)) == {RANK: 12}


def test_a_burst_isnt_a_loss() -> None:
    """What was still being read when the prompt was sent may count as uncached: it is there by now."""
    router = make_least()
    first = decide(router, prompt(*START, 20), 1.0)
    second = decide(router, prompt(*START, 30), 1.0)
    read(router, first, 2.0)
    read(router, second, 2.0)
    count(router, second, 0)
    assert router.lost_prefixes == 0
    assert router.prefixes.match((*START, 20)) == {RANK: 11}


def test_what_was_read_long_ago_is_told_from_a_burst() -> None:
    """Whoever else comes with the beginning meanwhile, and in whatever order prompts are read."""
    router = make_least()
    run(router, prompt(*START, 20, 21, 22), 1.0)
    first, second = (decide(router, prompt(*START, number), 2.0) for number in (30, 31))
    third = decide(router, prompt(*START, 20, 21, 22, 23), 3.0)
    count(router, third, 10 * BLOCK)
    assert router.lost_prefixes == 1
    read(router, second, 4.0)
    read(router, first, 4.0)
    count(router, decide(router, prompt(*START, 31), 5.0), 0)
    assert router.lost_prefixes == 2


def test_a_prompt_that_was_given_up_is_found_out() -> None:
    """Its blocks are believed in until a later prompt has been read, and then corrected."""
    router = make_least()
    given_up = decide(router, prompt(*START, 20), 1.0)
    router.settle(given_up, 1.1)
    run(router, prompt(99), 2.0)
    decision = decide(router, prompt(*START, 30), 3.0)
    count(router, decision, 0)
    assert router.lost_prefixes == 1
    assert router.prefixes.match((*START, 20)) == {RANK: 10}


def test_a_count_of_an_endpoint_that_left_is_nothing() -> None:
    """It doesn't come back by it."""
    router = make_least()
    decision = lost(router)
    router.observe(events.EndpointLeft("p"), 4.0)
    read(router, decision, 4.0)
    count(router, decision, 0)
    assert router.prefixes.match(START) == {}
    assert router.prefixes.used_bytes == 0


@pytest.mark.parametrize(("prompt_tokens", "cached_tokens"), [(0, 0), (100, -1), (100, 101), (-5, -5)])
def test_a_count_that_cant_be_is_nothing(prompt_tokens: int, cached_tokens: int) -> None:
    """No more can be cached than there is."""
    router = make_least()
    decision = lost(router)
    router.observe(events.PrefillUsageSeen(decision, prompt_tokens, cached_tokens), 4.0)
    assert decision.prefill_usage is None
    assert router.lost_prefixes == 0


def test_a_prompt_without_blocks_may_be_counted() -> None:
    """It is told, and corrects nothing; so with a regular endpoint."""
    router = make_router([regular("r")], make_options(policy="least_work"))
    decision = decide(router, facts(100), 0.0)
    count(router, decision, 50)
    assert decision.prefill_usage is not None
    assert router.lost_prefixes == 0


# Speed.

READ_S = prefill_s(NEUTRAL, 3000, 5000)
Order = Callable[[Router, Decision, float], None]


def usage_first(router: Router, decision: Decision, now_s: float) -> None:
    """An engine that answers before the decode engine is asked."""
    router.observe(events.PrefillUsageSeen(decision, 8000, 5000), now_s)
    read(router, decision, now_s)
    router.settle(decision, now_s)


def usage_later(router: Router, decision: Decision, now_s: float) -> None:
    """Engines that run at once: the answer has begun already."""
    read(router, decision, now_s)
    router.observe(events.PrefillUsageSeen(decision, 8000, 5000), now_s + 0.1)
    router.settle(decision, now_s + 0.2)


def usage_never(router: Router, decision: Decision, now_s: float) -> None:
    """An engine that doesn't count for us."""
    read(router, decision, now_s)
    router.settle(decision, now_s + 0.2)


@pytest.mark.parametrize(
    ("order", "factor"), [(usage_first, 1.0), (usage_later, 1.0), (usage_never, READ_S / prefill_s(NEUTRAL, 8000, 0))]
)
def test_a_speed_is_learned_from_what_was_read(order: Order, factor: float) -> None:
    """A prompt that was cached without our knowing isn't read fast: the engine's count says so, wherever it tells."""
    router = make_least()
    for number in range(30):
        decision = decide(router, facts(8000), 10.0 * number)
        order(router, decision, 10.0 * number + READ_S + transfer_s(NEUTRAL, 8000))
    assert router.work.sites["p"].speed.prefill_factor == pytest.approx(factor, rel=0.05)


def test_a_prompt_that_was_cached_teaches_nothing() -> None:
    """What is left of it is too short to tell of a speed."""
    router = make_least()
    for number in range(30):
        decision = decide(router, facts(8000), 10.0 * number)
        read(router, decision, 10.0 * number + 5)
        router.observe(events.PrefillUsageSeen(decision, 8000, 7999), 10.0 * number + 5)
        router.settle(decision, 10.0 * number + 5)
    assert router.work.sites["p"].speed.prefill_factor == 1.0


def report_totals(router: Router, address: str, totals: list[tuple[float | None, float | None]], t_s: float) -> None:
    """Let an endpoint tell its totals, a pair a rank."""
    ranks = [
        RankReport(rank, 0.0, 0.0, prefill_tokens_total=tokens, prefill_busy_s_total=busy_s)
        for rank, (tokens, busy_s) in enumerate(totals)
    ]
    router.observe(events.LoadReported(address, ranks, t_s), t_s)


def test_totals_teach_a_speed_though_no_prompt_had_its_rank_to_itself() -> None:
    """They are summed over the ranks, and set against what the prompts were like."""
    router = make_router([prefill("p", dp_size=2), decode("d")], make_options(policy="least_work"))
    step_s = 3 * prefill_s(NEUTRAL, 8000, 0)
    for number in range(60):
        report_totals(router, "p", [(8000.0 * number, step_s * number)] * 2, float(number))
        pair = [decide(router, facts(8000), number + 0.5) for _ in range(4)]
        for decision in pair:
            read(router, decision, number + 0.6)
            router.settle(decision, number + 0.7)
    assert prefill_of(pair[0]).endpoint.address == "p"
    assert router.work.sites["p"].speed.prefill_factor == pytest.approx(3, rel=0.05)
    assert router.work.workers[RankKey("p", 0)].prefill_tier is not None


@pytest.mark.parametrize(
    "last",
    [(None, 9.0), (9.0, None), (None, None)],
    ids=["no tokens", "no time", "neither"],
)
def test_totals_of_some_ranks_are_none(last: tuple[float | None, float | None]) -> None:
    """A sum over ranks that don't all tell would mean nothing."""
    router = make_router([prefill("p", dp_size=2), decode("d")], make_options(policy="least_work"))
    for number in range(60):
        report_totals(router, "p", [(8000.0 * number, 9.0 * number), last], float(number))
    assert not router.work.sites["p"].speed.tells_totals


def test_totals_of_a_report_that_is_none_are_none() -> None:
    """So with a rank too few, one too many, and with an endpoint that isn't there."""
    router = make_router([prefill("p", dp_size=2), decode("d")], make_options(policy="least_work"))
    for totals in ([(1.0, 1.0)], [(1.0, 1.0)] * 3):
        report_totals(router, "p", [*totals], 1.0 + len(totals))
        report_totals(router, "never", [*totals], 1.0 + len(totals))
    assert not router.work.sites["p"].speed.tells_totals
    report_totals(router, "p", [(1.0, 1.0)] * 2, 9.0)
    assert router.work.sites["p"].speed.tells_totals


def test_another_policy_learns_no_totals() -> None:
    """It doesn't weigh times."""
    router = make_router([prefill("p"), decode("d")], make_options(policy="round_robin"))
    report_totals(router, "p", [(1.0, 1.0)], 1.0)
    assert not router.work.sites


def test_a_story_tells_what_was_counted() -> None:
    """Beside what was predicted, at its moment, while the request lives and afterwards."""
    router = make_least()
    decision = lost(router)
    count(router, decision, 4 * BLOCK, 3.5)
    read(router, decision, 4.0)
    told = "prefill usage: 2750 prompt tokens; cached: predicted 2500, engine counted 1000"
    for _ in range(2):
        moments = router.journal.story("r", 5.0)[-1].moments
        assert [moment.what for moment in moments][1:3] == [told, "first token"]
        assert moments[1].after_s == pytest.approx(0.5)
        router.settle(decision, 4.5)
