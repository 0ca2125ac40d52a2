"""Whatever ends a request early ends its legs, at the engines too, and returns its load (I12, I2)."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from pdrouter.proxy import abort
from tests.lab import (
    CHAT,
    GENERATE,
    Asked,
    Lab,
    Reply,
    ScriptedEngine,
    always,
    chat,
    connect,
    fault,
    hang,
    http,
    make_lab,
    mute_port,
    route_to,
    start,
    until,
)

pytestmark = [pytest.mark.invariant("I12"), pytest.mark.invariant("I2")]

SLOW = {"speed": 2.0}
"""Engines so slow that a long answer takes minutes."""

LONG = 20_000
"""Tokens of an answer that no test waits for."""


def busy(lab: Lab) -> bool:
    """Tell whether both legs run at their engines."""
    return all(emulator.snapshot().requests for emulator in lab.emulators)


async def test_client_gone_before_its_request_is_whole() -> None:
    """Half a body reaches no engine and reserves nothing."""
    async with make_lab() as lab:
        async with await connect(lab.url) as call:
            call.send("POST", CHAT, b'{"messages":', {"content-length": "1000"}, framing=False)
            await until(lambda: "pdrouter_requests_in_flight 1.0" in lab.router.service.metrics.render().decode())
        await until(lambda: "pdrouter_requests_in_flight 0.0" in lab.router.service.metrics.render().decode())
        assert [e.snapshot().total_requests for e in lab.emulators] == [0, 0]
        assert lab.is_ledger_zero
        assert lab.core.decided == 0


@pytest.mark.parametrize("is_stream", [False, True])
async def test_client_gone_during_prefill(is_stream: bool) -> None:
    """A client that leaves while its prompt is read frees both engines within a second."""
    async with make_lab(engine={"speed": 0.2}) as lab:
        async with await lab.start(CHAT, chat("word " * 10_000, stream=is_stream)):
            await until(lambda: busy(lab))
            assert not lab.is_ledger_zero
        await lab.settled(within_s=1.0)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_client_gone_before_the_first_token(side: str) -> None:
    """A client that leaves while an engine is silent frees the other one within a second."""
    async with make_lab() as lab:
        silent, waiting = lab.emulators if side == "prefill" else lab.emulators[::-1]
        await fault(silent, "hang")
        async with await lab.start(CHAT, chat("x", stream=True)):
            await until(lambda: waiting.snapshot().requests == 1)
        await lab.settled(within_s=1.0)


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_client_gone_in_mid_stream(path: str) -> None:
    """A client that leaves in the middle of a stream frees the engine within a second."""
    async with make_lab(engine=SLOW) as lab:
        body = chat("x", LONG, stream=True)
        if path == GENERATE:
            body = {"text": "x", "sampling_params": {"max_new_tokens": LONG}, "stream": True}
        async with await lab.start(path, body) as call:
            assert await call.head() == 200
            await call.some()
            assert lab.decodes[0].snapshot().requests == 1
        await lab.settled(within_s=1.0)


async def test_client_gone_from_a_plain_reply() -> None:
    """A client that leaves while its whole answer is being made frees the engine within a second."""
    async with make_lab(engine=SLOW) as lab:
        async with await lab.start(CHAT, chat("x", LONG)):
            await until(lambda: any(r.running for r in lab.decodes[0].snapshot().ranks))
        await lab.settled(within_s=1.0)


@pytest.mark.parametrize("fields", [{"n": 3}, {"n": 3, "stream": True}])
async def test_client_gone_from_several_samples(fields: dict[str, object]) -> None:
    """All samples of a request end when its client leaves."""
    async with make_lab(engine=SLOW) as lab:
        async with await lab.start(CHAT, chat("x", LONG, **fields)):
            await until(lambda: lab.decodes[0].snapshot().requests == 3)
        await lab.settled(within_s=1.0)


@pytest.mark.parametrize("rid", [None, "mine", ["one", "two", "three"]])
async def test_each_prompt_of_a_list_is_ended(rid: object) -> None:
    """An engine knows a list's prompts by ids of their own, and ignores one that it doesn't know exactly."""
    async with (
        ScriptedEngine("prefill", {GENERATE: hang}).listen() as prefill,
        ScriptedEngine("decode", {GENERATE: hang}).listen() as decode,
        route_to([prefill], [decode], abort_retry_delay_secs=0.01) as lab,
    ):
        body = {"text": ["a", "b", "c"]} | ({} if rid is None else {"rid": rid})
        async with await lab.start(GENERATE, body):
            await until(lambda: bool(prefill.asked_for(GENERATE) and decode.asked_for(GENERATE)))
        for engine in (prefill, decode):
            sent = json.loads(engine.asked_for(GENERATE)[0].body)["rid"]
            parts = sent if isinstance(rid, list) else [f"{sent}_{index}" for index in range(3)]
            await until(lambda engine=engine: len(engine.asked_for("/abort_request")) == 6)  # type: ignore[misc]
            ended = [json.loads(asked.body)["rid"] for asked in engine.asked_for("/abort_request")]
            assert ended == 2 * parts
            assert len(set(parts)) == 3
        await until(lambda: lab.is_ledger_zero and lab.is_quiet)
        assert lab.router.service.aborter.counters() == {"sent": 12, "failed": 0, "dropped": 0}


async def test_an_endpoint_that_fails_an_abort_is_not_sent_the_rest() -> None:
    """A list of thousands of prompts doesn't wait out as many time limits."""
    async with make_lab() as lab:
        endpoint = next(iter(lab.core.fleet))
        aborter = abort.Aborter(lab.router.service.pools, 0.0)
        gone = msgspec.structs.replace(endpoint, address="127.0.0.1:1", host="127.0.0.1", port=1)
        aborter.abort(gone, [b"x"] * 5000)
        await until(lambda: aborter.failed == 2)
        assert aborter.sent == 2
        await aborter.aclose()


async def test_a_client_that_closes_its_side() -> None:
    """A client that ends its side of the connection counts as gone."""
    async with make_lab(engine=SLOW) as lab, await lab.start(CHAT, chat("x", LONG)) as call:
        await until(lambda: busy(lab))
        call.writer.write_eof()
        await lab.settled(within_s=1.0)


async def test_client_gone_from_merged_logprobs() -> None:
    """A client that leaves while logprobs are awaited or merged frees both engines within a second."""
    body = {"text": "x", "sampling_params": {"max_new_tokens": LONG}, "stream": True, "return_logprob": True}
    async with make_lab(engine=SLOW) as lab:
        async with await lab.start(GENERATE, body) as call:
            assert await call.head() == 200
            await call.some()
        await lab.settled(within_s=1.0)


async def endless(asked: Asked) -> bytes | None:
    """Stream for ever, as fast as the caller reads."""
    asked.writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
    while True:
        asked.writer.write(b"data: %s\n\n" % (b"x" * 10_000))
        await asked.writer.drain()


@contextlib.asynccontextmanager
async def slow_reader(**flags: Any) -> AsyncIterator[tuple[Lab, ScriptedEngine]]:
    """Let a client ask for an endless stream and not read it, until its engine is held back; then let it leave."""
    async with (
        ScriptedEngine("prefill", {CHAT: always(200, {})}).listen() as prefill,
        ScriptedEngine("decode", {CHAT: endless}).listen() as decode,
        route_to([prefill], [decode], **flags) as lab,
    ):
        async with await start(lab.url, CHAT, chat("x", stream=True), receive_bytes=4096) as call:
            assert await call.head() == 200
            pool = lab.router.service.pools.get(next(e for e in lab.core.fleet if e.role == "decode"))
            await until(lambda: any(c._exchange and c._exchange.is_paused for c in pool._connections))
            assert not lab.is_ledger_zero
            yield lab, decode
        await until(lambda: lab.is_ledger_zero and lab.is_quiet, 1.0)


async def test_a_slow_reader_leaves() -> None:
    """A client that doesn't read holds its engine back; when it leaves, the engine is told within a second."""
    async with slow_reader() as (_, decode):
        pass
    await until(lambda: len(decode.asked_for("/abort_request")) >= 1, 1.0)


async def test_a_slow_reader_meets_the_time_limit() -> None:
    """The time limit of a request holds also for a client that doesn't read its answer."""
    async with slow_reader(request_timeout_secs=1.0) as (lab, decode):
        await until(lambda: lab.is_ledger_zero and lab.is_quiet, 3.0)
        await until(lambda: len(decode.asked_for("/abort_request")) >= 1, 1.0)


@pytest.mark.parametrize("status", [400, 500])
async def test_prefill_fails_while_decode_waits(status: int) -> None:
    """The client gets the prefill's error at once, and decode's slot is free within a second."""
    async with make_lab() as lab:
        body = {"detail": "no prefill"}
        await fault(lab.prefills[0], "slow", seconds=0.1)
        await fault(lab.prefills[0], "status", status=status, body=body)
        async with asyncio.timeout(1.0):
            reply = await lab.post(CHAT, chat("x", stream=True))
        assert (reply.status, reply.json()) == (status, body)
        await lab.settled(within_s=1.0)
        assert lab.router.service.aborter.sent >= 1


@pytest.mark.parametrize("is_stream", [False, True])
async def test_prefill_resets_while_decode_waits(is_stream: bool) -> None:
    """A prefill that resets its connection is a 502 at once, and decode's slot is free within a second."""
    async with make_lab() as lab:
        await fault(lab.prefills[0], "slow", seconds=0.1)
        await fault(lab.prefills[0], "reset")
        async with asyncio.timeout(1.0):
            reply = await lab.post(CHAT, chat("x", stream=is_stream))
        assert (reply.status, reply.error["code"]) == (502, "upstream_closed")
        await lab.settled(within_s=1.0)


async def broken_off(asked: Asked) -> bytes:
    """Answer half of what was promised, and close."""
    asked.writer.write(http(200, b"x" * 100)[:-50])
    await asked.writer.drain()
    raise asyncio.IncompleteReadError(b"", None)


async def test_prefill_answers_by_half() -> None:
    """Half a reply of the prefill, while decode waits, is a 502 at once."""
    async with (
        ScriptedEngine("prefill", {CHAT: broken_off}).listen() as prefill,
        ScriptedEngine("decode", {CHAT: hang}).listen() as decode,
        route_to([prefill], [decode]) as lab,
    ):
        async with asyncio.timeout(1.0):
            reply = await lab.post(CHAT, chat("x"))
        assert (reply.status, reply.error["code"]) == (502, "upstream_closed")
        await until(lambda: lab.is_ledger_zero and lab.is_quiet, 1.0)
        await until(lambda: len(decode.asked_for("/abort_request")) == 2)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_decode_fails_before_its_first_byte(is_stream: bool) -> None:
    """A decode that resets before it answers is a 502, and the prefill is ended."""
    async with make_lab() as lab:
        await fault(lab.decodes[0], "reset")
        await fault(lab.prefills[0], "slow", seconds=0.5)
        async with asyncio.timeout(1.0):
            reply = await lab.post(CHAT, chat("x", stream=is_stream))
        assert (reply.status, reply.error["code"]) == (502, "upstream_closed")
        await lab.settled(within_s=1.0)


@pytest.mark.parametrize("kind", ["reset", "half_stream"])
@pytest.mark.invariant("I7")
async def test_decode_fails_in_mid_stream(kind: str) -> None:
    """The client is told by an error event, its connection closes without a proper end, nothing is tried again."""
    async with make_lab(decode=2, engine=SLOW) as lab:
        for emulator in lab.decodes:
            await fault(emulator, kind, after_chunks=3)
        reply = await lab.post(CHAT, chat("x", LONG, stream=True))
        assert (reply.status, reply.is_whole) == (200, False)
        assert "[DONE]" not in reply.pieces
        assert json.loads(reply.pieces[-1])["error"]["code"] == "upstream_closed"
        await lab.settled(within_s=1.0)
        assert sum(e.snapshot().total_requests for e in lab.decodes) == 1


async def test_decode_fails_in_the_middle_of_a_plain_reply() -> None:
    """Half of a plain reply is never made to look whole."""
    async with (
        ScriptedEngine("prefill", {CHAT: always(200, {})}).listen() as prefill,
        ScriptedEngine("decode", {CHAT: broken_off}).listen() as decode,
        route_to([prefill], [decode]) as lab,
    ):
        reply = await lab.post(CHAT, chat("x"))
        assert (reply.status, reply.is_whole, reply.body) == (200, False, b"x" * 50)
        await until(lambda: lab.is_ledger_zero and lab.is_quiet, 1.0)


async def test_an_engines_own_error_in_mid_stream() -> None:
    """An error event of the engine is passed on as it came, and the stream ends properly."""
    async with make_lab(engine=SLOW) as lab:
        async with await lab.start(CHAT, chat("x", LONG, stream=True)) as call:
            await call.head()
            await call.some()
            engine = lab.decodes[0].engine
            for ticket in engine.live():
                engine.abort(ticket)
            reply = await call.finish()
        assert reply.is_whole
        assert reply.pieces[-1] == "[DONE]"
        await lab.settled(within_s=1.0)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_connect_refused(side: str, is_stream: bool) -> None:
    """A leg whose engine is gone is a 502 that names it, and the other leg is ended."""
    async with make_lab(disable_health_check=True) as lab:
        gone = lab.prefills[0] if side == "prefill" else lab.decodes[0]
        await gone.stop()
        async with asyncio.timeout(1.0):
            reply = await lab.post(CHAT, chat("x", stream=is_stream))
        assert (reply.status, reply.error["code"]) == (502, "upstream_unreachable")
        assert gone.url[7:] in reply.error["message"]
        await lab.settled(within_s=1.0)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_client_gone_while_connecting(side: str) -> None:
    """A client that leaves while a connection to an engine is being opened is forgotten within a second."""
    async with make_lab(disable_health_check=True, worker_load_check_interval=60) as lab:
        mute, other = lab.emulators if side == "prefill" else lab.emulators[::-1]
        await fault(other, "hang")
        (address,) = [e for e in lab.core.fleet if e.url == other.url]
        async with mute_port(mute):
            async with await lab.start(CHAT, chat("x")):
                await until(lambda: lab.router.service.pools.get(address).statistics().active == 1)
            await lab.settled(within_s=1.0)


async def test_prefill_fails_while_decode_is_being_connected() -> None:
    """The client doesn't wait for decode's connection to learn of the prefill's error."""
    async with make_lab(disable_health_check=True, worker_load_check_interval=60) as lab:
        await fault(lab.prefills[0], "status", status=500)
        async with mute_port(lab.decodes[0]):
            async with asyncio.timeout(1.0):
                reply = await lab.post(CHAT, chat("x"))
            assert reply.json()["message"] == "fault on demand"
            await lab.settled(within_s=1.0)


async def test_connect_timeout() -> None:
    """An engine that takes no connection in time is a 502."""
    async with (
        make_lab(disable_health_check=True, connect_timeout_secs=0.2, worker_load_check_interval=60) as lab,
        mute_port(lab.decodes[0]),
    ):
        reply = await lab.post(CHAT, chat("x"))
        assert (reply.status, reply.error["code"]) == (502, "upstream_unreachable")
        await lab.settled(within_s=1.0)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_request_timeout(side: str) -> None:
    """A request that takes longer than allowed is a 504, and both legs are ended."""
    async with make_lab(request_timeout_secs=0.3) as lab:
        await fault(lab.prefills[0] if side == "prefill" else lab.decodes[0], "hang")
        reply = await lab.post(CHAT, chat("x"))
        assert (reply.status, reply.error["code"]) == (504, "upstream_timeout")
        await lab.settled(within_s=1.0)


async def test_request_timeout_in_mid_stream() -> None:
    """A stream that takes longer than allowed ends with an error event, and without a proper end."""
    async with make_lab(engine=SLOW, request_timeout_secs=0.5) as lab:
        reply = await lab.post(CHAT, chat("x", LONG, stream=True))
        assert (reply.status, reply.is_whole) == (200, False)
        assert json.loads(reply.pieces[-1])["error"]["code"] == "upstream_timeout"
        await lab.settled(within_s=1.0)


async def test_aborts_are_sent_and_sent_again() -> None:
    """Each leg is aborted by the id that it was sent with, now and once more after the delay."""
    async with (
        ScriptedEngine("prefill", {CHAT: hang}).listen() as prefill,
        ScriptedEngine("decode", {CHAT: hang}).listen() as decode,
        route_to([prefill], [decode]) as lab,
    ):
        async with await lab.start(CHAT, chat("x"), headers={"x-request-id": "mine"}):
            await until(lambda: bool(prefill.asked_for(CHAT) and decode.asked_for(CHAT)))
        for engine in (prefill, decode):
            await until(lambda engine=engine: len(engine.asked_for("/abort_request")) == 2)  # type: ignore[misc]
            (sent,) = engine.asked_for(CHAT)
            assert sent.json()["rid"].startswith("mine-")
            assert [a.json() for a in engine.asked_for("/abort_request")] == [{"rid": sent.json()["rid"]}] * 2
        assert lab.router.service.aborter.counters() == {"sent": 4, "failed": 0, "dropped": 0}


async def test_a_failed_abort_is_counted() -> None:
    """An engine that takes no abort is counted, and nothing else happens."""
    async with make_lab(disable_health_check=True) as lab:
        await fault(lab.decodes[0], "hang")
        async with await lab.start(CHAT, chat("x")):
            await until(lambda: lab.prefills[0].snapshot().requests == 1)
            await lab.decodes[0].stop()
        await until(lambda: lab.router.service.aborter.failed >= 1)
        await lab.settled(within_s=1.0)


@pytest.mark.invariant("I9")
async def test_aborts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Aborts beyond the limit are dropped and counted; the closed connection ends the leg all the same."""
    monkeypatch.setattr(abort, "MAX_PENDING", 1)
    async with make_lab(engine=SLOW, abort_retry_delay_secs=5.0) as lab:
        calls = [await lab.start(CHAT, chat(f"x {i}", LONG, stream=True)) for i in range(3)]
        for call in calls:
            await call.head()
            await call.leave()
        await lab.settled(within_s=1.0)
        assert lab.router.service.aborter.counters() == {"sent": 1, "failed": 0, "dropped": 2}


async def test_what_has_ended_is_not_aborted() -> None:
    """A request that went well leaves no abort behind."""
    async with make_lab() as lab:
        for is_stream in (False, True):
            assert (await lab.post(CHAT, chat("x", stream=is_stream))).status == 200
        await lab.settled()
        assert lab.router.service.aborter.sent == 0


async def test_the_next_request_of_a_connection_is_watched_too() -> None:
    """A prefill that answers after its decode leaves the client's next request watched for its going."""
    released = asyncio.Event()

    async def late(asked: Asked) -> bytes | None:
        if len(prefill.asked_for(CHAT)) > 1:
            return None
        await released.wait()
        return http(200, {})

    async def first_only(asked: Asked) -> bytes | None:
        return http(200, {"text": "done"}) if len(decode.asked_for(CHAT)) == 1 else None

    async with (
        ScriptedEngine("prefill", {CHAT: late}).listen() as prefill,
        ScriptedEngine("decode", {CHAT: first_only}).listen() as decode,
        route_to([prefill], [decode]) as lab,
    ):
        async with await connect(lab.url) as call:
            body = json.dumps(chat("x")).encode()
            call.send("POST", CHAT, body, {})
            assert (await call.finish()).json() == {"text": "done"}
            call.send("POST", CHAT, body, {})
            await until(lambda: len(decode.asked_for(CHAT)) == 2 == len(prefill.asked_for(CHAT)))
            released.set()
            await until(lambda: len(lab.core.live) == 1)
        await until(lambda: lab.is_ledger_zero and lab.is_quiet, 1.0)


async def test_a_prefill_that_never_answers_after_its_decode_did() -> None:
    """Once the client has its answer, decode's load is returned, though the prefill is still silent."""
    async with (
        ScriptedEngine("prefill", {CHAT: hang}).listen() as prefill,
        ScriptedEngine("decode", {CHAT: always(200, {"text": "done"})}).listen() as decode,
        route_to([prefill], [decode]) as lab,
    ):
        reply: Reply = await lab.post(CHAT, chat("x"))
        assert reply.json() == {"text": "done"}
        await until(lambda: lab.is_ledger_zero, 1.0)


@pytest.mark.invariant("I3")
async def test_a_late_prefill_is_not_sent_again() -> None:
    """A prefill that loses its kept connection after the answer was whole isn't sent again: its load has gone."""
    lost = asyncio.Event()

    async def second_is_lost(asked: Asked) -> bytes:
        if len(prefill.asked_for(CHAT)) == 2:
            await lost.wait()
            raise asyncio.IncompleteReadError(b"", None)
        return http(200, {})

    async with (
        ScriptedEngine("prefill", {CHAT: second_is_lost}).listen() as prefill,
        ScriptedEngine("decode", {CHAT: always(200, {"text": "done"})}).listen() as decode,
        route_to([prefill], [decode]) as lab,
    ):
        for _ in range(2):
            assert (await lab.post(CHAT, chat("x"))).status == 200
        await until(lambda: lab.is_ledger_zero)
        assert not lab.is_quiet
        lost.set()
        await until(lambda: lab.is_quiet)
        assert len(prefill.asked_for(CHAT)) == 2
