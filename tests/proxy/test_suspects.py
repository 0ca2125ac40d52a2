"""Requests that break engines: the same one isn't given to more of them, and engines are charged once for it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from pdrouter.core.fleet import Role
from pdrouter.errors import (
    ConnectFailed,
    FirstTokenTimeout,
    RouterError,
    SuspectRequest,
    UpstreamClosed,
    UpstreamProtocol,
)
from pdrouter.proxy.legs import EngineReply
from pdrouter.proxy.suspects import SuspectOptions, Suspects, points_at_request
from tests.engines.builders import make_endpoint, make_inbound, place
from tests.lab import CHAT, Asked, Lab, Script, ScriptedEngine, always, chat, http, route_to

QUICK: dict[str, Any] = {
    "disable_retries": False,
    "retry_initial_backoff_ms": 1.0,
    "retry_max_backoff_ms": 1.0,
    "retry_budget_per_sec": 1000.0,
}
GOOD = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}]}


def dies_of(word: bytes, how: Script) -> Script:
    """Return an engine that answers all but what has this word in it."""

    async def script(asked: Asked) -> bytes | None:
        return await how(asked) if word in asked.body else http(200, GOOD)

    return script


async def resets(asked: Asked) -> bytes:
    """Close the connection without a word."""
    asked.writer.transport.abort()
    raise asyncio.IncompleteReadError(b"", None)


@asynccontextmanager
async def fleet(script: Script, count: int = 4, **flags: Any) -> AsyncIterator[tuple[Lab, Sequence[ScriptedEngine]]]:
    """Run a router over engines that follow a script."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(ScriptedEngine(None, {CHAT: script}).listen()) for _ in range(count)]
        lab = await stack.enter_async_context(route_to((), (), engines, **QUICK | flags))
        yield lab, engines


def asked(engines: Sequence[ScriptedEngine], word: bytes) -> int:
    """Return how many engines were asked such a thing."""
    return sum(any(word in one.body for one in engine.asked_for(CHAT)) for engine in engines)


async def test_a_query_of_death() -> None:
    """All engines answer it with 500: it is refused from the second time on, and none of them is out."""
    async with fleet(dies_of(b"DEATH", always(500, {"error": "x"})), cb_failure_threshold=2) as (lab, _):
        statuses = [(await lab.post(CHAT, chat("DEATH"))).status for _ in range(11)]
        assert statuses == [500, *[422] * 10]
        refused = await lab.post(CHAT, chat("DEATH"))
        assert (refused.error["code"], refused.error["type"]) == ("suspect_request", "invalid_request_error")
        good = [(await lab.post(CHAT, chat(f"good {n}"))).status for n in range(12)]
        assert good == [200] * 12
        assert all(lab.core.fleet.is_ready(endpoint.address) for endpoint in lab.core.fleet)
        assert lab.router.service.dispatcher.suspects.counts == {"suspected": 1, "refused": 11}


async def test_a_request_that_kills_its_reader() -> None:
    """After a reset without any reply there is one more try, and none for the same request afterwards."""
    async with fleet(dies_of(b"DEATH", resets)) as (lab, engines):
        assert (await lab.post(CHAT, chat("DEATH"))).status == 502
        assert asked(engines, b"DEATH") == 2
        assert (await lab.post(CHAT, chat("DEATH"))).status == 422
        assert asked(engines, b"DEATH") == 2


async def test_an_outage_is_not_the_requests_doing() -> None:
    """Many different requests that fail are a failure of the engines: none is refused when those are back."""
    async with fleet(always(500, {"error": "x"}), cb_failure_threshold=1000, suspect_max=3) as (lab, engines):
        for number in range(8):
            assert (await lab.post(CHAT, chat(f"{number}"))).status == 500
        for engine in engines:
            engine.scripts[CHAT] = always(200, GOOD)
        again = [(await lab.post(CHAT, chat(f"{number}"))).status for number in range(8)]
        assert again == [200] * 8
        assert lab.router.service.dispatcher.suspects.counts == {"suspected": 4, "outages": 1}


@pytest.mark.parametrize("status", [503, 429, 400])
async def test_what_blames_no_request(status: int) -> None:
    """An engine that is busy, or refuses, says nothing of what the request does to engines."""
    async with fleet(always(status, {"error": "x"}), cb_failure_threshold=1000) as (lab, _):
        for _ in range(3):
            assert (await lab.post(CHAT, chat("x"))).status == status
        assert lab.router.service.dispatcher.suspects.counts == {}


async def test_it_can_be_turned_off() -> None:
    """With no time to live nothing is refused."""
    async with fleet(always(500, {"error": "x"}), cb_failure_threshold=1000, suspect_ttl_secs=0) as (lab, _):
        assert [(await lab.post(CHAT, chat("x"))).status for _ in range(3)] == [500] * 3


def test_they_are_refused_for_a_while() -> None:
    """Then it may be tried again; another body, or another path, was never refused."""
    now_s = 100.0
    suspects = Suspects(SuspectOptions(ttl_s=30.0, most=4), lambda: now_s)
    inbound = make_inbound(b'"text":"a"}')
    suspects.check(inbound)
    suspects.note(inbound)
    with pytest.raises(SuspectRequest, match="for 30 s more"):
        suspects.check(inbound)
    suspects.check(make_inbound(b'"text":"b"}'))
    suspects.check(make_inbound(b'"text":"a"}', path="/v1/completions"))
    now_s = 131.0
    suspects.check(inbound)


@pytest.mark.parametrize(
    ("error", "points"),
    [
        (EngineReply(place(make_endpoint(Role.REGULAR), 0), 500, [], b""), True),
        (EngineReply(place(make_endpoint(Role.REGULAR), 0), 503, [], b""), False),
        (EngineReply(place(make_endpoint(Role.REGULAR), 0), 502, [], b""), False),
        (UpstreamClosed("x"), True),
        (UpstreamProtocol("x"), True),
        (ConnectFailed("x"), False),
        (FirstTokenTimeout("x"), False),
    ],
)
def test_which_failures_point_at_the_request(error: RouterError, *, points: bool) -> None:
    """Not those of an engine that is away, busy or slow."""
    assert points_at_request(error) is points
