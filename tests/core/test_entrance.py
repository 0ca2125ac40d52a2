"""The entrance: who is let past the queue by what was chosen for it, and who has to wait, with nothing reserved."""

from collections.abc import Mapping
from typing import cast

import msgspec
import pytest

from pdrouter.core import events
from pdrouter.core.admission import Queued, Rejected
from pdrouter.core.cost import NEUTRAL, Profile, prefill_s
from pdrouter.core.decision import Decision
from pdrouter.core.entrance import Entrance, EntranceOptions, MustWait
from pdrouter.core.fleet import Endpoint
from pdrouter.core.gate import GateOptions
from pdrouter.core.line import Waiting
from pdrouter.core.policies import ENGINE
from pdrouter.core.request import RequestFacts
from pdrouter.core.router import Router

from .builders import decide, decode, facts, make_options, make_router, prefill, prefill_of, regular
from .waiting import OPTIONS as LINE
from .waiting import waiting

SMALL = msgspec.structs.replace(NEUTRAL, kv_capacity_tokens=1000)
PAIR = (prefill("p"), decode("d"))


def guarded(
    *endpoints: Endpoint,
    policy: str = "least_work",
    profile: Profile = NEUTRAL,
    changes: Mapping[str, object] | None = None,
    **gate: object,
) -> Router:
    """Return a router with a queue before it; ``gate`` are its watermarks."""
    shut_by = msgspec.structs.replace(GateOptions(max_running=None, max_queue_s=None, max_kv_share=None), **gate)
    options = make_options(policy=policy, profile=profile, entrance=EntranceOptions(LINE, shut_by))
    return make_router(endpoints or PAIR, msgspec.structs.replace(options, **(changes or {})))


def entrance_of(router: Router) -> Entrance:
    """Return what guards a router."""
    assert router.entrance is not None
    return router.entrance


def held(router: Router, request: RequestFacts, now_s: float = 0.0) -> MustWait:
    """Return what a request is told that has to wait."""
    answer = router.decide(request, now_s)
    assert isinstance(answer, MustWait), answer
    return answer


def line_up(router: Router, model: str | None = None) -> None:
    """Let a request of a model wait."""
    one = cast("Waiting[object]", waiting(model=model))
    assert isinstance(entrance_of(router).admission.offer(one, 0.0), Queued)


@pytest.mark.invariant("I1")
def test_nothing_is_held_for_one_that_waits() -> None:
    """It is told what its prompt takes; no load is counted and no decision lives."""
    router = guarded(max_queue_s=0.01)
    decide(router, facts(1000), 0.0)
    assert held(router, facts(2000)) == MustWait(None, prefill_s(NEUTRAL, 2000, 0))
    assert (len(router.live), router.decided) == (1, 1)
    assert [load.comparable_tokens for load in router.load.endpoints.values()] == [1000, 1000]
    router.validate()


def test_what_is_cached_makes_a_wait_shorter() -> None:
    """Its work is what is left to read on the rank that holds the rest."""
    router = guarded(max_queue_s=0.01)
    known = facts(1000, prefix_blocks=(1, 2, 3), block_tokens=300.0)
    decide(router, known, 0.0)
    assert held(router, known).work_s == prefill_s(NEUTRAL, 100, 900)


def test_one_that_had_its_turn_waits_no_more() -> None:
    """However full it has become."""
    router = guarded(max_running=1)
    decide(router, facts(), 0.0)
    held(router, facts())
    assert isinstance(router.decide(facts(), 0.0, is_admitted=True), Decision)


def test_other_settings() -> None:
    """They count for the next to come, at the gate and in the line; whoever waits already keeps its place."""
    router = guarded(max_running=1)
    entrance = entrance_of(router)
    decide(router, facts(), 0.0)
    held(router, facts())
    line_up(router)
    gate = GateOptions(max_running=2, max_queue_s=None, max_kv_share=None)
    entrance.set_options(EntranceOptions(msgspec.structs.replace(LINE, max_waiting=0), gate))
    assert len(entrance.admission) == 1
    assert isinstance(entrance.admission.offer(cast("Waiting[object]", waiting()), 0.0), Rejected)
    assert entrance.admission.release(0.0) is not None
    decide(router, facts(), 0.0)
    held(router, facts())


@pytest.mark.invariant("I9")
@pytest.mark.parametrize(("policy", "changes"), [("round_robin", {}), ("least_work", {"rank_policy": ENGINE})])
def test_so_many_run_whatever_the_policy(policy: str, changes: Mapping[str, object]) -> None:
    """Where no work is kept or the engine chooses the rank, only their number counts, and no work is named."""
    gate = {"max_running": 2, "max_queue_s": 0.0, "max_kv_share": 0.0}
    fleet = (prefill("p", dp_size=2), decode("d", dp_size=2))
    router = guarded(*fleet, policy=policy, profile=SMALL, changes=changes, **gate)
    first = decide(router, facts(900), 0.0)
    decide(router, facts(900), 0.0)
    assert held(router, facts()) == MustWait(None, 0.0)
    router.settle(first, 1.0)
    decide(router, facts(900), 1.0)


def test_the_chosen_ranks_queue_counts() -> None:
    """Up to the watermark it is let through; time opens it again."""
    router = guarded(max_queue_s=1.5 * prefill_s(NEUTRAL, 1000, 0))
    decide(router, facts(1000), 0.0)
    decide(router, facts(1000), 0.0)
    held(router, facts(1000))
    decide(router, facts(1000), 0.6 * prefill_s(NEUTRAL, 1000, 0))


def test_a_busy_choice_is_no_reason_while_another_rank_is_free() -> None:
    """A prompt that had better queue where it is cached isn't held: the other rank is there for whoever comes next."""
    router = guarded(prefill("p", dp_size=2), decode("d"), max_queue_s=0.001)
    known = facts(20_000, prefix_blocks=tuple(range(1, 21)), block_tokens=1000.0)
    first = decide(router, known, 0.0)
    holder = prefill_of(first).rank
    router.observe(events.FirstTokenSeen(first), 1.0)
    for decision in [decide(router, facts(500), 1.0) for _ in range(2)]:
        if prefill_of(decision).rank != holder:
            router.settle(decision, 1.0)
    assert prefill_of(decide(router, known, 1.0)).rank == holder
    decide(router, facts(500), 1.0)
    held(router, facts(500), 1.0)


@pytest.mark.parametrize("endpoints", [PAIR, (regular("r"),)])
def test_kv_in_use_counts(endpoints: tuple[Endpoint, ...]) -> None:
    """Beyond its share of the capacity of the rank that answers, until an answer has ended."""
    router = guarded(*endpoints, profile=SMALL, max_kv_share=0.5)
    first = decide(router, facts(500), 0.0)
    second = decide(router, facts(1), 0.0)
    held(router, facts(1))
    router.settle(first, 1.0)
    decide(router, facts(1), 1.0)
    router.settle(second, 1.0)


@pytest.mark.parametrize(("profile", "share"), [(NEUTRAL, 0.1), (SMALL, None)])
def test_kv_counts_only_where_its_limit_is_known(profile: Profile, share: float | None) -> None:
    """Without a capacity or without a share nobody waits for KV."""
    router = guarded(profile=profile, max_kv_share=share, max_queue_s=1000.0)
    for _ in range(5):
        decide(router, facts(900), 0.0)


def test_whoever_comes_later_stands_behind() -> None:
    """While one of its model waits a request waits too, though there is room; other models' requests don't."""
    router = guarded(
        *(make(f"{make.__name__}-{m}", model=m, group=m) for make in (prefill, decode) for m in "mn"), max_running=2
    )
    running = [decide(router, facts(model=m), 0.0) for m in "mn"]
    line_up(router, "m")
    for decision in running:
        router.settle(decision, 1.0)
    assert held(router, facts(model="m"), 1.0).model == "m"
    decide(router, facts(model="n"), 1.0)
    assert entrance_of(router).admission.release(1.0) is not None
    decide(router, facts(model="m"), 1.0)


def test_a_rank_that_left_holds_nobody() -> None:
    """The next choice is made among those that are there."""
    router = guarded(max_queue_s=0.01)
    decide(router, facts(1000), 0.0)
    held(router, facts(1000))
    router.observe(events.EndpointLeft("p"), 0.0)
    router.observe(events.EndpointJoined(prefill("p")), 0.0)
    decide(router, facts(1000), 0.0)
