"""Further attempts: where they help, and where there must be none."""

import asyncio
import json
from typing import Any

import pytest

from tests.lab import CHAT, Lab, ScriptedEngine, always, chat, fault, gather, make_lab, mend, route_to, until

RETRIES: dict[str, Any] = {"disable_retries": False, "retry_initial_backoff_ms": 1}


def attempts(lab: Lab) -> int:
    """Return how many decisions were made."""
    return lab.core.decided


@pytest.mark.invariant("I8")
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
async def test_another_engine_serves(side: str, status: int) -> None:
    """A failure of one engine isn't the client's; the one that failed isn't asked again while another is ready."""
    async with make_lab(2, 2, **RETRIES) as lab:
        engines = lab.prefills if side == "prefill" else lab.decodes
        await fault(engines[0], "status", status=status)
        replies = await gather(*(lab.post(CHAT, chat(f"{n}", 4)) for n in range(6)))
        assert [reply.status for reply in replies] == [200] * 6
        other = engines[1].url.removeprefix("http://")
        assert {reply.headers[f"x-pdrouter-{side}"].split(";")[0] for reply in replies} == {other}
        await lab.settled()


@pytest.mark.invariant("I8")
async def test_the_limit_of_attempts() -> None:
    """With one pair only it is asked again, so many times in all; then the client gets the engine's own error."""
    async with make_lab(retry_max_retries=3, **RETRIES) as lab:
        await fault(lab.decodes[0], "status", status=503, body={"mine": 1})
        reply = await lab.post(CHAT, chat("x", 4))
        assert (reply.status, reply.json(), attempts(lab)) == (503, {"mine": 1}, 3)
        await lab.settled()


@pytest.mark.invariant("I8")
async def test_a_back_off_beyond_the_deadline() -> None:
    """There is no waiting for an attempt that can't be: the client gets the engine's own error at once."""
    flags = RETRIES | {"retry_initial_backoff_ms": 60_000, "retry_max_backoff_ms": 60_000, "request_timeout_secs": 20}
    async with make_lab(1, 2, **flags) as lab:
        for engine in lab.decodes:
            await fault(engine, "status", status=503, body={"mine": 1})
        async with asyncio.timeout(10.0):
            reply = await lab.post(CHAT, chat("x", 4))
        assert (reply.status, reply.json(), attempts(lab)) == (503, {"mine": 1}, 1)
        assert lab.router.service.dispatcher.retries.counters() == {"made": 0, "refused": 0}
        await lab.settled()


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
async def test_the_clients_fault_is_told_at_once(status: int) -> None:
    """Another engine would say the same."""
    async with make_lab(2, 2, **RETRIES) as lab:
        for engine in lab.decodes:
            await fault(engine, "status", status=status)
        assert (await lab.post(CHAT, chat("x", 4))).status == status
        assert attempts(lab) == 1
        await lab.settled()


@pytest.mark.invariant("I7")
async def test_nothing_is_tried_again_once_the_answer_has_begun() -> None:
    """A stream that breaks ends with an error event."""
    async with make_lab(1, 2, **RETRIES) as lab:
        for engine in lab.decodes:
            await fault(engine, "reset", after_chunks=2)
        reply = await lab.post(CHAT, chat("x", 40, stream=True))
        assert (reply.status, reply.is_whole, attempts(lab)) == (200, False, 1)
        assert json.loads(reply.pieces[-1])["error"]["code"] == "upstream_closed"
        await lab.settled()


async def test_each_attempt_has_ids_of_its_own() -> None:
    """A room used twice would break an engine; the client's id stays what it is."""
    async with (
        ScriptedEngine("prefill", {CHAT: always(200, {})}).listen() as prefill,
        ScriptedEngine("decode", {CHAT: always(500, {})}).listen() as decode,
        route_to([prefill], [decode], retry_max_retries=3, **RETRIES) as lab,
    ):
        reply = await lab.post(CHAT, chat("x"), {"x-request-id": "mine"})
        assert (reply.status, reply.headers["x-request-id"]) == (500, "mine")
        bodies = [asked.json() for asked in decode.asked_for(CHAT)]
        assert len({body["bootstrap_room"] for body in bodies}) == len({body["rid"] for body in bodies}) == 3
        assert all(b"x-request-id: mine" in asked.head for asked in decode.asked_for(CHAT))
        await until(lambda: lab.is_ledger_zero and lab.is_quiet)


async def test_an_engine_that_is_gone() -> None:
    """A refused connection is no answer; the whole endpoint is avoided, and later it is out."""
    async with make_lab(1, 2, **RETRIES) as lab:
        await lab.decodes[0].stop()
        replies = [await lab.post(CHAT, chat(f"{n}", 4)) for n in range(4)]
        assert [reply.status for reply in replies] == [200] * 4
        await until(lambda: lab.is_ledger_zero)


async def test_the_budget_of_all() -> None:
    """When everything fails, requests aren't multiplied: beyond the budget the first failure is told."""
    async with make_lab(retry_budget_share=0, retry_budget_per_sec=0.1, **RETRIES) as lab:
        await fault(lab.decodes[0], "status", status=500)
        replies = await gather(*(lab.post(CHAT, chat(f"{n}", 4)) for n in range(10)))
        assert {reply.status for reply in replies} == {500}
        assert attempts(lab) == 11
        assert b'pdrouter_retries_total{event="refused"} 10.0' in (await lab.get("/metrics")).body
        await lab.settled()


async def test_a_client_that_leaves_before_the_next_attempt() -> None:
    """There is none, and nothing is left."""
    slow = {"retry_initial_backoff_ms": 60_000, "retry_max_backoff_ms": 60_000, "request_timeout_secs": 600}
    async with make_lab(**RETRIES | slow) as lab:
        await fault(lab.decodes[0], "status", status=500)
        async with await lab.start(CHAT, chat("x")):
            await until(lambda: lab.router.service.dispatcher.retries.counters()["made"] == 1)
            await until(lambda: lab.is_ledger_zero)
        await mend(lab.decodes[0])
        await until(lambda: lab.router.service.metrics.in_flight == 0)
        assert attempts(lab) == 1
        await lab.settled()


async def test_the_deadline_holds_over_all_attempts() -> None:
    """The last one has what the others left of it."""
    async with make_lab(request_timeout_secs=0.3, **RETRIES) as lab:
        await fault(lab.decodes[0], "status", status=500, times=1)
        await fault(lab.decodes[0], "hang")
        reply = await lab.post(CHAT, chat("x"))
        assert (reply.status, reply.error["code"], attempts(lab)) == (504, "upstream_timeout", 2)
        await lab.settled()


async def test_a_good_answer_costs_no_retry() -> None:
    """Nothing is counted where nothing failed."""
    async with make_lab(**RETRIES) as lab:
        assert (await lab.post(CHAT, chat("x", 4))).status == 200
        assert lab.router.service.dispatcher.retries.counters() == {"made": 0, "refused": 0}
