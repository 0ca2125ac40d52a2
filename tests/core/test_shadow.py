"""A shadow policy looks on: it decides on the same inputs, acts on nothing, and is told in counters and stories."""

import random
from collections.abc import Callable, Sequence

import pytest

from pdrouter.core import events
from pdrouter.core.decision import Decision
from pdrouter.core.policies import POLICIES, RANK_POLICIES
from pdrouter.core.policies.base import Candidate, Pick, Question
from pdrouter.core.router import Router
from pdrouter.core.shadow import Result, Shadow, ShadowOptions

from .builders import decide, decode, facts, make_options, make_router, prefill, prefill_of, regular, report

NAMES = sorted(POLICIES)


def make_shadow(policy: str, seed: int = 1, rank_policy: str | None = None) -> ShadowOptions:
    """Return a policy that looks on, for ranks as well where it can."""
    ranks = rank_policy or (policy if policy in RANK_POLICIES else "minimum_tokens")
    return ShadowOptions(policy=policy, rank_policy=ranks, chance=random.Random(seed))


def make_fleet(policy: str, shadow: ShadowOptions | None, rank_policy: str | None = None) -> Router:
    """Return a router over three pairs of two ranks and two regular endpoints."""
    fleet = [e for n in range(3) for e in (prefill(f"p:{n}", dp_size=2), decode(f"d:{n}", dp_size=2))]
    options = make_options(policy=policy, shadow=shadow)
    if rank_policy is not None:
        options = make_options(policy=policy, shadow=shadow, rank_policy=rank_policy)
    return make_router([*fleet, regular("w:0"), regular("w:1", dp_size=2)], options)


def looker(router: Router) -> Shadow:
    """Return the one that looks on."""
    assert router.shadow is not None
    return router.shadow


def drive(router: Router, seed: int, steps: int = 120) -> list[tuple[object, ...]]:
    """Send a load with reports, first tokens, ends, and times without a pair; return where each request went."""
    rng = random.Random(seed)
    live: list[Decision] = []
    placed: list[tuple[object, ...]] = []
    for step in range(steps):
        now_s = step * 0.1
        if step in (40, 60):
            for n in range(3):
                router.observe(events.ReadinessChanged(f"d:{n}", "gone" if step == 40 else None), now_s)
        if step % 9 == 0:
            report(router, f"p:{rng.randrange(3)}", [rng.randrange(5000), rng.randrange(5000)], now_s)
        shared = rng.randrange(4)
        blocks = tuple(shared * 1000 + n for n in range(rng.randrange(1, 8)))
        rank = rng.choice([None, None, None, 0])
        request = facts(rng.randrange(1, 3000), prefix_blocks=blocks, block_tokens=100.0, decode_rank=rank)
        decision = decide(router, request, now_s)
        live.append(decision)
        placed.append(tuple((p.label, p.reservation.tokens, p.report_age_s) for p in decision.placements))
        if rng.random() < 0.7:
            router.observe(events.FirstTokenSeen(rng.choice(live)), now_s)
        while len(live) > 12:
            router.settle(live.pop(rng.randrange(len(live))), now_s)
    for decision in live:
        router.settle(decision, steps * 0.1)
    router.validate()
    return placed


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("shadow", NAMES)
def test_a_shadow_changes_nothing(policy: str, shadow: str) -> None:
    """With and without one, whatever it is, the same requests get the same places, and the books end at zero."""
    alone = make_fleet(policy, None)
    watched = make_fleet(policy, make_shadow(shadow, seed=7))
    assert drive(watched, 3) == drive(alone, 3)
    for load in watched.load.endpoints.values():
        assert load.ledger_requests == 0
    assert sum(looker(watched).counts.values()) == 120


@pytest.mark.parametrize("policy", NAMES)
def test_a_policy_agrees_with_itself(policy: str) -> None:
    """The same policy with the same seed sees the same and chooses the same: it is asked before the reservation."""
    rank_policy = policy if policy in RANK_POLICIES else "minimum_tokens"
    router = make_fleet(policy, None, rank_policy)
    watched = make_fleet(policy, make_shadow(policy), rank_policy)
    assert drive(watched, 5) == drive(router, 5)
    assert looker(watched).counts[Result.SAME] == 120


def test_what_differs() -> None:
    """Another endpoint counts before another rank; the rest is the same."""
    pair = [prefill("p:1", dp_size=2), prefill("p:2", dp_size=2), decode("d:1", dp_size=2)]
    router = make_router(pair, make_options(policy="round_robin", shadow=make_shadow("minimum_tokens")))
    report(router, "p:1", [500.0, 400.0], 0.0)
    report(router, "p:2", [900.0, 900.0], 0.0)
    report(router, "d:1", [0.0, 10.0], 0.0)
    first = decide(router, facts(1), 1.0)  # real: p:1 by turns; both rank 1 by tokens
    assert looker(router).counts[Result.SAME] == 1
    decide(router, facts(1), 1.0)
    assert looker(router).counts[Result.OTHER_ENDPOINT] == 1
    assert prefill_of(first).endpoint.address == "p:1"
    ranks = make_shadow("round_robin", rank_policy="round_robin")
    router = make_router([prefill("p:1", dp_size=2), decode("d:1")], make_options(shadow=ranks))
    report(router, "p:1", [500.0, 0.0], 0.0)
    decide(router, facts(1), 1.0)
    assert looker(router).counts == {"same": 0, "other_endpoint": 0, "other_rank": 1, "none": 0}


def test_it_is_told() -> None:
    """The journal says what it would have chosen and what it predicted, as it was at that moment."""
    router = make_fleet("round_robin", make_shadow("least_work"))
    decision = decide(router, facts(100, request_id="a"), 1.0)
    (live,) = router.journal.story("a", 2.0)
    for _ in range(4):
        decide(router, facts(9000), 1.0)
    router.settle(decision, 3.0)
    (ended,) = router.journal.story("a", 4.0)
    assert ended.shadow == live.shadow
    assert ended.shadow is not None
    assert (ended.shadow.policy, ended.shadow.failure) == ("least_work", None)
    first, second = ended.shadow.legs
    assert (first.kind, second.kind) == ("prefill", "decode")
    assert first.endpoint_why.rule == "least predicted seconds"
    assert [c.value is not None and c.value > 0 for c in first.endpoint_why.candidates] == [True]


def test_none_looks_on() -> None:
    """Without one there is nothing to tell."""
    router = make_fleet("round_robin", None)
    decide(router, facts(100, request_id="a"), 1.0)
    assert (router.shadow, router.journal.story("a", 2.0)[0].shadow) == (None, None)


def _divides(question: Question, candidates: Sequence[Candidate]) -> Pick:
    raise ZeroDivisionError("no load")


def _wants_too_much(question: Question, candidates: Sequence[Candidate]) -> Pick:
    return Pick(len(candidates), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("choose", "failure"), [(_divides, "ZeroDivisionError: no load"), (_wants_too_much, "Index")])
def test_a_shadow_that_fails_fails_alone(
    choose: Callable[[Question, Sequence[Candidate]], Pick], failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is served all the same; the failure is counted and kept."""
    monkeypatch.setattr("pdrouter.core.policies.least_request.LeastRequest.choose", lambda self, *seen: choose(*seen))
    router = make_fleet("round_robin", make_shadow("least_request"))
    decision = decide(router, facts(100, request_id="a"), 1.0)
    router.settle(decision, 2.0)
    assert looker(router).counts[Result.NONE] == 1
    (story,) = router.journal.story("a", 3.0)
    assert (story.outcome, story.shadow is not None) == ("answered", True)
    assert story.shadow is not None
    assert (story.shadow.result, story.shadow.legs) == ("none", [])
    assert str(story.shadow.failure).startswith(failure)
