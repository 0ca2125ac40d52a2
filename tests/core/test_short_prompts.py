"""Prompts shorter than a block: an equal one is found where it was read, and nothing else shifts."""

from collections import Counter

import pytest

from pdrouter.core import events
from pdrouter.core.ledger import RankKey
from pdrouter.core.request import RequestFacts
from pdrouter.core.router import Router

from .builders import decide, decode, facts, make_options, make_router, prefill, regular

WORKERS = 8


def short(number: int, tokens: int = 8) -> RequestFacts:
    """Return a request whose whole prompt has a hash of its own."""
    return facts(tokens, prefix_blocks=(number + 1,), block_tokens=float(tokens), is_short=True)


def spread(router: Router, requests: list[RequestFacts]) -> Counter[str]:
    """Return how many of these requests, all at once, each endpoint gets."""
    placed = [decide(router, request, 1.0) for request in requests]
    return Counter(decision.decode.endpoint.address for decision in placed)


def test_equal_prompts_go_where_the_first_was_read() -> None:
    """By ``cache_aware``; different ones are spread as before."""
    router = make_router([regular(f"w{n}") for n in range(2)], make_options(policy="cache_aware"))
    assert max(spread(router, [short(0)] * 12).values()) == 12
    router = make_router([regular(f"w{n}") for n in range(2)], make_options(policy="cache_aware"))
    assert spread(router, [short(n) for n in range(12)]) == {"w0": 6, "w1": 6}


@pytest.mark.parametrize("tokens", [2, 8, 256])
def test_equal_prompts_dont_crowd_under_least_work(tokens: int) -> None:
    """What they save is weighed against the load, so that they spread like different ones."""
    workers = [regular(f"w{n}", dp_size=2) for n in range(WORKERS)]
    same, others = (
        spread(make_router(workers, make_options(policy="least_work")), [short(n * step, tokens) for n in range(160)])
        for step in (0, 1)
    )
    assert max(same.values()) <= max(others.values()) + 2
    assert min(same.values()) >= min(others.values()) - 2


@pytest.mark.invariant("I9")
def test_many_short_prompts_push_out_no_long_one() -> None:
    """Neither from memory nor from what a rank's KV is thought to hold."""
    router = make_router([regular("w", kv_capacity_tokens=10_000)])
    long = facts(2560, prefix_blocks=tuple(range(1, 11)), block_tokens=256.0)
    decide(router, long, 1.0)
    for number in range(5000):
        router.settle(decide(router, short(1000 + number), 2.0), 2.0)
    assert router.prefixes.match(long.prefix_blocks) == {RankKey("w", 0): 10}
    total = router.prefixes.used_bytes + router.short_prompts.used_bytes
    assert total <= make_options().prefix_bytes
    router.validate()


@pytest.mark.invariant("I9")
def test_short_prompts_have_a_part_of_the_memory() -> None:
    """The ones used longest ago go first."""
    router = make_router([regular("w")], make_options(prefix_bytes=2**20))
    for number in range(1000):
        router.settle(decide(router, short(number), 1.0), 1.0)
    assert router.short_prompts.evictions > 0
    assert router.short_prompts.used_bytes <= 2**20 // 8
    assert router.short_prompts.match((1000,)) == {RankKey("w", 0): 1}
    assert router.short_prompts.match((1,)) == {}


def test_they_are_forgotten_with_their_endpoint() -> None:
    """When it begins anew, and when it leaves."""
    for event in (events.EndpointRestarted("w"), events.EndpointLeft("w")):
        router = make_router([regular("w")])
        decide(router, short(0), 1.0)
        assert router.short_prompts.entries == 1
        router.observe(event, 2.0)
        assert router.short_prompts.entries == 0


def test_what_the_prefill_read_is_known_to_be_read() -> None:
    """As with long prompts: only then a report of fewer cached tokens says that a cache was lost."""
    router = make_router([prefill("p"), decode("d")])
    first = decide(router, short(0), 1.0)
    assert not decide(router, short(0), 1.1).prefix_is_read
    router.observe(events.FirstTokenSeen(first), 1.2)
    router.observe(events.FirstTokenSeen(decide(router, short(0), 1.3)), 1.4)
    again = decide(router, short(0), 1.5)
    assert again.prefix_is_read
    assert again.prefix_tokens == 7
    router.observe(events.PrefillUsageSeen(again, 8, 0), 1.6)
    assert router.lost_prefixes == 0  # less than a block: an engine keeps whole pages
