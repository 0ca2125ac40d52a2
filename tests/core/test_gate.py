"""When a request may go to an engine: some rank below its watermark, and fewer running than may."""

from collections.abc import Sequence

import msgspec
import pytest

from pdrouter.core import events
from pdrouter.core import gate as gate_module
from pdrouter.core.cost import NEUTRAL
from pdrouter.core.fleet import Endpoint
from pdrouter.core.gate import Gate, GateOptions
from pdrouter.core.router import Router

from .builders import decide, decode, facts, make_options, make_router, prefill, prefill_of, regular

ALWAYS, NEVER = float("-inf"), float("inf")
OPEN = GateOptions(max_running=None, max_queue_s=None, max_kv_share=None)
SMALL = msgspec.structs.replace(NEUTRAL, kv_capacity_tokens=1000)


def router_of(endpoints: Sequence[Endpoint], policy: str = "least_work") -> Router:
    """Return a router whose ranks hold 1000 tokens of KV."""
    return make_router(endpoints, make_options(policy=policy, profile=SMALL))


def gate_of(router: Router, **changes: object) -> Gate:
    """Return a gate before a router."""
    return Gate(msgspec.structs.replace(OPEN, **changes), router.work, router.live)


def test_without_watermarks_it_is_open() -> None:
    """Whatever runs."""
    router = router_of([prefill("p"), decode("d")])
    for _ in range(50):
        decide(router, facts(900), 0.0)
    assert gate_of(router).opens_at_s(None) == ALWAYS


@pytest.mark.invariant("I9")
def test_so_many_at_once() -> None:
    """Under any policy; it opens when one has ended."""
    router = router_of([prefill("p"), decode("d")], "round_robin")
    gate = gate_of(router, max_running=2, max_queue_s=0.0, max_kv_share=0.1)
    first = decide(router, facts(900), 0.0)
    assert gate.opens_at_s(None) == ALWAYS
    decide(router, facts(900), 0.0)
    assert gate.opens_at_s(None) == NEVER
    router.settle(first, 1.0)
    assert gate.opens_at_s(None) == ALWAYS


def test_a_prefill_rank_is_free_again_at_a_moment() -> None:
    """It is shut while every rank has too much queued, and opens when the first has read enough of it."""
    router = router_of([prefill("p", dp_size=2), decode("d")])
    gate = gate_of(router, max_queue_s=0.01)
    decide(router, facts(500), 10.0)
    assert gate.opens_at_s(None) <= 10.0
    second = decide(router, facts(300), 10.0)
    queued_s = prefill_of(second).reservation.prefill_s
    assert gate.opens_at_s(None) == pytest.approx(10.0 + queued_s - 0.01)
    router.observe(events.FirstTokenSeen(second), 10.001)
    assert gate.opens_at_s(None) <= 10.001


def test_a_decode_rank_has_room_again_when_an_answer_ends() -> None:
    """Time alone doesn't bring it; one rank below its watermark is enough."""
    router = router_of([prefill("p"), decode("d", dp_size=2)])
    gate = gate_of(router, max_kv_share=0.5)
    first = decide(router, facts(600), 0.0)
    assert gate.opens_at_s(None) == ALWAYS
    decide(router, facts(501), 0.0)
    assert gate.opens_at_s(None) == NEVER
    router.settle(first, 1.0)
    assert gate.opens_at_s(None) == ALWAYS


def test_an_unknown_capacity_is_never_full() -> None:
    """Where no profile says how much KV there is."""
    router = make_router([prefill("p"), decode("d")], make_options(policy="least_work", profile=NEUTRAL))
    decide(router, facts(10**6), 0.0)
    assert gate_of(router, max_kv_share=0.5).opens_at_s(None) == ALWAYS


def test_both_sides_must_be_of_one_pool() -> None:
    """A free prefill rank of one group and a free decode rank of another don't make a pair."""
    endpoints = [side(f"{side.__name__}-{group}", group=group) for group in "ab" for side in (prefill, decode)]
    router = router_of(endpoints)
    gate = gate_of(router, max_queue_s=0.0, max_kv_share=0.5)
    assert gate.opens_at_s(None) <= 0.0
    held = decide(router, facts(600), 0.0)
    router.observe(events.FirstTokenSeen(held), 0.001)  # its group's decode rank is full
    assert gate.opens_at_s(None) <= 0.001
    other = decide(router, facts(100), 0.001)
    assert other.decode.endpoint.group != held.decode.endpoint.group
    queued_s = prefill_of(other).reservation.prefill_s
    assert gate.opens_at_s(None) == pytest.approx(0.001 + queued_s)


def test_each_model_for_itself() -> None:
    """One that is busy shuts no other; without a model, any will do."""
    endpoints = [side(f"{side.__name__}-{model}", model=model) for model in "mn" for side in (prefill, decode)]
    router = router_of(endpoints)
    gate = gate_of(router, max_queue_s=0.0)
    decide(router, facts(100, model="m"), 5.0)
    assert gate.opens_at_s("m") > 5.0
    assert gate.opens_at_s("n") <= 5.0
    assert gate.opens_at_s(None) <= 5.0


def test_where_nobody_is_ready_nobody_waits() -> None:
    """The decision says then why nobody is."""
    router = router_of([prefill("p"), decode("d")])
    gate = gate_of(router, max_queue_s=0.0, max_kv_share=0.5)
    decide(router, facts(900), 0.0)
    assert gate.opens_at_s(None) == NEVER
    for address in "dp":
        router.observe(events.ReadinessChanged(address, "gone"), 0.0)
        assert gate.opens_at_s(None) == ALWAYS
        router.observe(events.ReadinessChanged(address, None), 0.0)
        assert gate.opens_at_s(None) == NEVER
    router.observe(events.EndpointLeft("p"), 0.0)
    router.observe(events.EndpointLeft("d"), 0.0)
    assert gate.opens_at_s(None) == ALWAYS


def test_regular_ranks() -> None:
    """They count where no pair is ready."""
    router = router_of([regular("r")])
    gate = gate_of(router, max_queue_s=0.0, max_kv_share=0.5)
    assert gate.opens_at_s(None) <= 0.0
    held = decide(router, facts(400), 0.0)
    assert 0.0 < gate.opens_at_s(None) < NEVER
    router.observe(events.FirstTokenSeen(held), 0.1)
    assert gate.opens_at_s(None) <= 0.1
    decide(router, facts(101), 0.1)
    assert gate.opens_at_s(None) == NEVER
    router.observe(events.EndpointJoined(prefill("p")), 0.1)
    router.observe(events.EndpointJoined(decode("d")), 0.1)
    assert gate.opens_at_s(None) <= 0.1


def many_groups(monkeypatch: pytest.MonkeyPatch) -> tuple[Router, Gate]:
    """Return a router of eight groups and a gate that asks two of them from either side."""
    monkeypatch.setattr(gate_module, "_MOST_POOLS", 2)
    endpoints = [side(f"{side.__name__}{n}", group=str(n)) for n in range(8) for side in (prefill, decode)]
    router = router_of(endpoints)
    return router, gate_of(router, max_queue_s=0.0, max_kv_share=0.5)


def test_of_many_groups_the_first_free_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though others have less to write."""
    router, gate = many_groups(monkeypatch)
    held = [decide(router, facts(tokens), 0.0) for tokens in range(500, 100, -50)]
    first_s = min(prefill_of(one).reservation.prefill_s for one in held[1:])
    router.observe(events.FirstTokenSeen(held[0]), first_s / 2)
    assert gate.opens_at_s(None) <= first_s / 2


def test_of_many_groups_the_least_loaded_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though others are free sooner, whose KV is full."""
    router, gate = many_groups(monkeypatch)
    held = [decide(router, facts(600), 0.0) for _ in range(8)]
    assert gate.opens_at_s(None) == NEVER
    for one in held[1:]:
        router.observe(events.FirstTokenSeen(one), 0.001)
    prefill_s = prefill_of(held[0]).reservation.prefill_s
    router.settle(held[0], 0.001)
    busy = decide(router, facts(100), 0.001)
    assert busy.decode.endpoint.group == held[0].decode.endpoint.group
    assert 0.001 < gate.opens_at_s(None) <= 0.001 + prefill_s


def test_of_many_groups_none_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then something must happen first."""
    router, gate = many_groups(monkeypatch)
    held = [decide(router, facts(600), 0.0) for _ in range(8)]
    assert gate.opens_at_s(None) == NEVER
    router.settle(held[5], 0.001)
    assert gate.opens_at_s(None) <= 0.001
