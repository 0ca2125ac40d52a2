"""The ways in which a request may be served: by a pair, by a regular endpoint, by a decode endpoint alone."""

from typing import Any

import msgspec
import pytest

from pdrouter.core import events
from pdrouter.core.cost import NEUTRAL, prefill_s
from pdrouter.core.fleet import Disaggregation, Endpoint, Fleet, Role, Way
from pdrouter.core.ledger import LegKind, RankKey
from pdrouter.core.request import RequestFacts, Task
from pdrouter.core.router import Router

from .builders import decide, decode, facts, make_options, make_router, prefill, prefill_of, regular, reject

VLLM: dict[str, Any] = {
    "engine": "vllm",
    "kv_transport": "nixl",
    "pairs_lists": False,
    "pairs_copies": True,
    "reads_prompts": True,
}
CHAT = facts()
LIST = facts(is_list=True, prompts=2)
MESSAGES = facts(task=Task.MESSAGES)
READ = facts(task=Task.READ)
OTHER = facts(task=Task.OTHER)
WHOLE = facts(is_whole=True)
COPIES = facts(prompts=2, copies=2)
LIST_COPIES = facts(is_list=True, prompts=4, copies=2)

SGLANG_PAIR = (prefill("p"), decode("d"))
VLLM_PAIR = (prefill("p", **VLLM), decode("d", **VLLM))


@pytest.mark.parametrize(
    ("mode", "endpoints", "request_", "ways"),
    [
        ("auto", SGLANG_PAIR, CHAT, ["pair"]),
        ("auto", SGLANG_PAIR, LIST, ["pair"]),
        ("auto", SGLANG_PAIR, MESSAGES, []),
        ("auto", (*SGLANG_PAIR, regular("r")), MESSAGES, ["regular"]),
        ("auto", (*SGLANG_PAIR, regular("r")), CHAT, ["pair", "regular"]),
        ("always", (*SGLANG_PAIR, regular("r")), CHAT, ["pair"]),
        ("never", (*SGLANG_PAIR, regular("r")), CHAT, ["regular"]),
        ("never", SGLANG_PAIR, CHAT, ["pair"]),
        ("auto", SGLANG_PAIR, WHOLE, []),
        ("auto", VLLM_PAIR, CHAT, ["pair", "decode"]),
        ("always", VLLM_PAIR, CHAT, ["pair"]),
        ("never", VLLM_PAIR, CHAT, ["decode"]),
        ("auto", VLLM_PAIR, LIST, ["decode"]),
        ("always", VLLM_PAIR, COPIES, ["pair"]),
        ("always", (prefill("p", **VLLM | {"pairs_copies": False}), VLLM_PAIR[1]), COPIES, ["decode"]),
        ("auto", SGLANG_PAIR, COPIES, []),
        ("auto", SGLANG_PAIR, LIST_COPIES, []),
        ("auto", (*SGLANG_PAIR, regular("r")), LIST_COPIES, ["regular"]),
        ("always", VLLM_PAIR, LIST, ["decode"]),
        ("always", VLLM_PAIR, WHOLE, ["decode"]),
        ("auto", VLLM_PAIR[1:], CHAT, ["decode"]),
        ("auto", VLLM_PAIR[:1], CHAT, []),
        ("auto", SGLANG_PAIR, READ, ["prefill"]),
        ("auto", (*SGLANG_PAIR, regular("r")), READ, ["regular", "prefill"]),
        ("auto", SGLANG_PAIR[1:], READ, []),
        ("auto", SGLANG_PAIR[1:], OTHER, ["decode"]),
        ("auto", SGLANG_PAIR, OTHER, ["prefill", "decode"]),
        ("auto", (), OTHER, []),
    ],
)
def test_which_ways_are_open(
    mode: str, endpoints: tuple[Endpoint, ...], request_: RequestFacts, ways: list[str]
) -> None:
    """What engines can do together and alone, and what the operator wants."""
    fleet = Fleet(Disaggregation(mode), takes_any=True)
    for endpoint in endpoints:
        fleet.put(endpoint)
    assert [way.value for way in fleet.ways(None, request_)] == ways


MOONCAKE: dict[str, Any] = VLLM | {"kv_transport": "mooncake", "pairs_copies": False}


@pytest.mark.parametrize(
    ("endpoints", "request_", "splits"),
    [
        (SGLANG_PAIR, COPIES, True),
        (SGLANG_PAIR, LIST_COPIES, True),
        (SGLANG_PAIR, CHAT, False),
        (SGLANG_PAIR, LIST, False),
        (SGLANG_PAIR[1:], COPIES, False),
        ((), COPIES, False),
        ((*SGLANG_PAIR, regular("r")), COPIES, False),
        (VLLM_PAIR, COPIES, False),
        ((prefill("p", **MOONCAKE), decode("d", **MOONCAKE)), COPIES, False),
    ],
)
def test_who_takes_one_answer_at_a_time(endpoints: tuple[Endpoint, ...], request_: RequestFacts, splits: bool) -> None:
    """SGLang's pairs, where nobody else takes the request as it is."""
    assert make_router(endpoints).fleet.splits(request_) is splits


def test_several_answers_of_an_unknown_model() -> None:
    """It is for the decision to say that nobody has it."""
    sides = [side(f"{model}-{side.__name__}", model=model) for side in (prefill, decode) for model in "mn"]
    fleet = make_router(sides).fleet
    assert fleet.splits(facts(prompts=2, copies=2, model="m"))
    assert not fleet.splits(facts(prompts=2, copies=2, model="x"))


def test_ways_follow_the_fleet() -> None:
    """A way that was open isn't when its endpoints are out."""
    fleet = Fleet(Disaggregation.AUTO, takes_any=True)
    for endpoint in SGLANG_PAIR:
        fleet.put(endpoint)
    assert fleet.ways(None, CHAT) == (Way.PAIR,)
    fleet.set_ready("d", "out")
    assert fleet.ways(None, CHAT) == ()


def vllm_router(mode: str = "auto", policy: str = "least_work", *more: Endpoint) -> Router:
    """Return a router over a vLLM pair."""
    return make_router((*VLLM_PAIR, *more), make_options(policy=policy, disaggregation=Disaggregation(mode)))


def load_decode(router: Router, requests: int) -> None:
    """Let answers be under way on the decode side."""
    for _ in range(requests):
        router.observe(events.FirstTokenSeen(decide(router, facts(2000), 0.0)), 0.1)


def test_a_short_prompt_on_an_idle_decode_rank_stays_there() -> None:
    """No transfer is paid for; with others decoding there, reading it would keep them all waiting."""
    router = vllm_router()
    decision = decide(router, facts(20), 0.0)
    assert decision.prefill is None
    assert (decision.decode.endpoint.address, decision.decode.kind) == ("d", LegKind.REGULAR)
    router.settle(decision, 1.0)
    load_decode(router, 8)
    assert decide(router, facts(2000), 1.0).prefill is not None
    router.validate()


def test_what_the_decode_side_holds_needs_no_prefill() -> None:
    """A follow-up whose history is in the decode rank's cache goes there, though others decode beside it."""
    router = vllm_router()
    history = facts(30_000, prefix_blocks=tuple(range(1, 101)), block_tokens=300.0)
    router.settle(decide(router, msgspec.structs.replace(history, is_whole=True), 0.0), 0.5)
    load_decode(router, 8)
    followed = decide(router, history, 1.0)
    assert (followed.prefill, followed.prefix_tokens) == (None, 29_999)
    assert decide(router, facts(30_000), 1.0).prefill is not None


@pytest.mark.parametrize("policy", ["least_work", "minimum_tokens", "round_robin"])
def test_what_is_cached_is_held_by_whoever_answers(policy: str) -> None:
    """A leg that does both takes the KV of its whole prompt, and the time to read only what isn't cached."""
    router = make_router([regular("r")], make_options(policy=policy, rank_policy="least_work"))
    known = facts(1000, prefix_blocks=(1, 2, 3), block_tokens=300.0)
    router.settle(decide(router, known, 0.0), 1.0)
    again = decide(router, known, 1.0)
    leg = again.decode.reservation
    assert (again.prefix_tokens, leg.tokens, leg.held_tokens) == (900, 1000, 1000)
    assert router.load.endpoints["r"].ranks[0].effective_tokens == 1000
    assert leg.prefill_s == pytest.approx(prefill_s(NEUTRAL, 100, 900))


def test_both_sides_hold_what_a_pair_has_read() -> None:
    """Where a decode endpoint reads prompts, it can use what it was given."""
    router = vllm_router("always")
    read = facts(1000, prefix_blocks=(1, 2, 3), block_tokens=300.0)
    router.settle(decide(router, read, 0.0), 0.5)
    assert {rank.endpoint for rank in router.prefixes.find((1, 2, 3)).longest(8)} == {"p", "d"}
    assert decide(router, read, 1.0).prefix_tokens == 900


@pytest.mark.parametrize("policy", ["least_work", "round_robin", "load_aware", "minimum_tokens"])
def test_a_list_is_read_where_it_is_answered(policy: str) -> None:
    """Whatever the policy: its engine would hand over the first prompt's KV for all."""
    router = vllm_router("always", policy)
    decision = decide(router, LIST, 0.0)
    assert decision.prefill is None
    assert decision.decode.endpoint.address == "d"
    router.settle(decision, 1.0)
    router.validate()


def test_a_regular_endpoint_beside_a_pair_gets_what_it_does_faster() -> None:
    """By predicted time: the idle one, be it a pair or not."""
    router = make_router((*SGLANG_PAIR, regular("r")), make_options(policy="least_work"))
    chosen = [decide(router, facts(8000), 0.0) for _ in range(6)]
    kinds = {decision.decode.kind for decision in chosen}
    assert kinds == {LegKind.REGULAR, LegKind.DECODE}
    router.validate()


def test_only_reading() -> None:
    """Embeddings go to a prefill endpoint and count as a prefill until they are answered."""
    router = make_router(SGLANG_PAIR, make_options(policy="least_work"))
    decision = decide(router, msgspec.structs.replace(READ, prompt_tokens=500), 0.0)
    assert (decision.prefill, decision.decode.kind) == (None, LegKind.PREFILL)
    assert router.load.endpoints["p"].ranks[0].account.tokens == 500
    router.settle(decision, 1.0)
    assert router.load.endpoints["p"].ranks[0].account.tokens == 0
    router.validate()


def test_nobody_can() -> None:
    """The error says who is known: while they are out, and for good."""
    router = make_router(SGLANG_PAIR)
    error = reject(router, MESSAGES, 0.0)
    assert (error.status, error.code, error.is_retryable) == (501, "not_supported", False)
    assert error.message == (
        "the fleet can't serve messages requests: no regular endpoint, and no pair that can "
        "(p is sglang of an unknown version; d is sglang of an unknown version)"
    )
    router.observe(events.ReadinessChanged("p", "not reached yet"), 1.0)
    error = reject(router, MESSAGES, 1.0)
    assert (error.status, error.code) == (503, "no_ready_pair")


def test_a_pair_is_still_a_pair() -> None:
    """Where nothing else is open, nothing is compared."""
    router = make_router(SGLANG_PAIR, make_options(policy="least_work"))
    assert prefill_of(decide(router, CHAT, 0.0)).endpoint.role is Role.PREFILL


def test_a_pair_that_the_search_cant_see_is_still_a_pair() -> None:
    """An engine that hasn't told its model may be paired with one that has; the policies of the sides find it."""
    router = make_router([prefill("p"), decode("d", model="m")], make_options(policy="least_work"))
    decision = decide(router, CHAT, 0.0)
    assert (prefill_of(decision).endpoint.address, decision.decode.endpoint.address) == ("p", "d")
    router.settle(decision, 1.0)
    router.validate()


@pytest.mark.invariant("I8")
@pytest.mark.parametrize("policy", ["least_work", "round_robin", "load_aware", "minimum_tokens"])
def test_where_the_pair_has_failed_one_endpoint_serves(policy: str) -> None:
    """The decode endpoint reads the prompt itself when its prefill partner has failed, and leaves it when it failed."""
    router = vllm_router("auto", policy, decode("e", **VLLM))
    for number in range(6):
        decision = decide(router, CHAT, number / 100, frozenset({RankKey("p", 0), RankKey("d", 0)}))
        assert (decision.prefill, decision.decode.endpoint.address) == (None, "e")
        decision = decide(router, WHOLE, number / 100, frozenset({RankKey("e", 0)}))
        assert (decision.prefill, decision.decode.endpoint.address) == (None, "d")


@pytest.mark.invariant("I8")
@pytest.mark.parametrize("policy", ["least_work", "minimum_tokens"])
def test_a_way_that_is_not_open_isnt_taken_for_a_retry(policy: str) -> None:
    """Where the operator wants pairs only, or none, what failed is tried again rather than another way."""
    for mode, is_pair in (("always", True), ("never", False)):
        router = vllm_router(mode, policy)
        decision = decide(router, CHAT, 0.0, frozenset({RankKey("p", 0), RankKey("d", 0)}))
        assert (decision.prefill is not None) is is_pair
