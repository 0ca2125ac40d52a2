"""Requests and tokens per minute: of each key alone, refused with the time until there is room."""

from typing import Any

import pytest

from pdrouter.core.request import RequestFacts
from pdrouter.errors import RateLimited
from pdrouter.proxy.rates import RateOptions, Rates
from tests.lab import CHAT, COMPLETIONS, GENERATE, chat, make_lab

KEY = {b"authorization": b"Bearer a"}


def rates(**options: Any) -> Rates:
    """Return rates of nothing but what is said."""
    unset: dict[str, Any] = {"requests_per_min": None, "tokens_per_min": None}
    return Rates(RateOptions(**unset | {"key_header": b"authorization", "output_tokens": 100} | options))


def facts(prompt_tokens: int = 50, **more: Any) -> RequestFacts:
    """Return a request of one prompt."""
    return RequestFacts(request_id="x", model="m", prompt_tokens=prompt_tokens, **more)


async def test_requests_of_a_key() -> None:
    """A key's minute may be used at once; then it gets 429 with the time until there is room; others aren't touched."""
    async with make_lab(rate_limit_requests_per_min=2, rate_limit_key_header="X-Tenant") as lab:
        for tenant in ("a", "b"):
            for _ in range(2):
                assert (await lab.post(CHAT, chat("x"), {"x-tenant": tenant})).status == 200
        reply = await lab.post(CHAT, chat("x"), {"x-tenant": "a"})
        assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
        assert 20 <= int(reply.headers["retry-after"]) <= 30
        assert "2 requests per minute" in reply.error["message"]
        assert (await lab.post(CHAT, chat("x"))).status == 200
        assert (await lab.get("/health")).status == 200
        text = (await lab.get("/metrics")).body.decode()
        assert 'pdrouter_rate_limited_total{event="requests"} 1.0' in text
        assert 'pdrouter_failures_total{code="rate_limit_exceeded"} 1.0' in text
        assert lab.core.decided == 5


async def test_there_is_no_rate_unless_it_is_set() -> None:
    """By default nobody counts."""
    async with make_lab() as lab:
        assert lab.router.service.rates is None
        body = {"text": "x", "sampling_params": {"max_new_tokens": 1}}
        assert [(await lab.post(GENERATE, body)).status for _ in range(5)] == [200] * 5


@pytest.mark.invariant("I9")
def test_tokens_of_a_key() -> None:
    """Prompt and longest answer count, or the expected one where none is named; each prompt's answer does."""
    for request, tokens in (
        (facts(), 150),
        (facts(max_output_tokens=10), 60),
        (facts(max_output_tokens=0), 50),
        (facts(max_output_tokens=10, prompts=3), 80),
    ):
        enough, too_few = rates(tokens_per_min=2 * tokens), rates(tokens_per_min=2 * tokens - 1)
        for bucket in (enough, too_few):
            bucket.take(KEY, request)
        enough.take(KEY, request)
        with pytest.raises(RateLimited, match="tokens per minute") as caught:
            too_few.take(KEY, request)
        assert caught.value.retry_after_s == 1
        too_few.take({b"authorization": b"Bearer b"}, request)
        too_few.take({}, request)
        assert too_few.counters() == {"tokens": 1}


async def test_the_limit_that_counts_is_the_one_that_the_engine_reads() -> None:
    """A small number in a field that an engine doesn't read buys nothing."""
    async with make_lab(0, 0, 1, rate_limit_tokens_per_min=1000) as lab:
        body = {"model": "emulated", "prompt": "x", "max_tokens": 600, "max_completion_tokens": 1}
        assert [(await lab.post(COMPLETIONS, body)).status for _ in range(2)] == [200, 429]


def test_more_than_a_minute_holds() -> None:
    """What costs more than a minute's worth passes with a full bucket, and empties it."""
    bucket = rates(tokens_per_min=60)
    bucket.take(KEY, facts(1_000_000))
    with pytest.raises(RateLimited) as caught:
        bucket.take(KEY, facts(1_000_000))
    assert 55 <= caught.value.retry_after_s <= 60


def test_a_key_is_not_kept() -> None:
    """A key may be a secret: no bucket knows it."""
    bucket = rates(requests_per_min=5)
    bucket.take({b"authorization": b"Bearer secret"}, facts())
    assert "secret" not in repr(vars(bucket._requests._store._backend))
