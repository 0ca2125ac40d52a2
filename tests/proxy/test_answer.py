"""Where an answer begins and ends: failures inside a good status, comments, openings, end marks, clients that leave."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from pdrouter.core.breaker import Phase
from pdrouter.proxy import answer as proxy_answer
from tests.lab import (
    CHAT,
    GENERATE,
    Asked,
    Lab,
    Reply,
    Script,
    ScriptedEngine,
    always,
    chat,
    hang,
    route_to,
    until,
)

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
RETRIES: dict[str, Any] = {"disable_retries": False, "retry_initial_backoff_ms": 1, "policy": "round_robin"}

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'
KV_LOST = {"object": "error", "message": "Decode transfer failed", "type": "INTERNAL_SERVER_ERROR", "code": 500}
TOO_LONG = {"message": "the input is too long", "type": "BadRequestError", "param": None, "code": 400}


def event(data: object, name: str = "") -> bytes:
    """Return an event."""
    return (f"event: {name}\n" if name else "").encode() + b"data: " + json.dumps(data).encode() + b"\n\n"


def named(name: str, **fields: object) -> bytes:
    """Return an event that says its name twice, as those of two APIs do."""
    return event({"type": name} | fields, name)


def aborted(status: int, index: int = 0) -> bytes:
    """Return a chunk by which SGLang's ``/generate`` tells of a failure."""
    reason = {"type": "abort", "message": "Decode transfer failed", "status_code": status, "err_type": None}
    return event({"text": "", "output_ids": [], "index": index, "meta_info": {"id": "x", "finish_reason": reason}})


def response(status: str, usage: object) -> dict[str, Any]:
    """Return what an event of a response's end tells of it."""
    return {"status": status, "error": {"code": "server_error", "message": "KV is lost"}, "usage": usage}


def stream(*pieces: bytes, end: bytes | None = LAST) -> Script:
    """Return a script that writes a stream in pieces; without an ``end`` it stays open."""

    async def script(asked: Asked) -> bytes | None:
        asked.writer.write(HEAD)
        for piece in pieces:
            asked.writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await asked.writer.drain()
            await asyncio.sleep(0.01)
        return end

    return script


@contextlib.asynccontextmanager
async def engines(
    *decodes: Script, prefill: Script | None = None, path: str = CHAT, kind: str | None = None, **flags: Any
) -> AsyncIterator[tuple[Lab, Sequence[ScriptedEngine]]]:
    """Run a router over a prefill engine and some decode engines, or over regular ones of a kind."""
    async with contextlib.AsyncExitStack() as stack:

        async def run(role: str | None, script: Script) -> ScriptedEngine:
            engine = ScriptedEngine(role, {path: script})
            engine.scripts["/v1/models"] = always(200, {"data": [{"id": "emulated"}]})
            return await stack.enter_async_context(engine.listen())

        if kind is not None:
            workers = [await run(None, script) for script in decodes]
            lab = await stack.enter_async_context(route_to((), (), workers, engine=kind, **flags))
            yield lab, workers
            return
        first = await run("prefill", prefill or always(200, {}))
        others = [await run("decode", script) for script in decodes]
        yield await stack.enter_async_context(route_to([first], others, **flags)), [first, *others]


def asking(path: str = CHAT, **fields: Any) -> dict[str, Any]:
    """Return the body of a streamed request."""
    if path == GENERATE:
        return {"text": "x", "stream": True} | fields
    if path == RESPONSES:
        return {"model": "emulated", "input": "x", "stream": True} | fields
    return chat("x", stream=True) | fields


async def metric(lab: Lab, name: str) -> float:
    """Return a metric's value, 0 if it isn't there."""
    lines = (await lab.get("/metrics")).body.decode().splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + " ")), 0.0)


async def settled(lab: Lab) -> None:
    """Wait until nothing is held and no connection is in use."""
    await until(lambda: lab.is_ledger_zero and lab.is_quiet, 3.0)


FAILED: dict[str, tuple[str, Sequence[bytes]]] = {
    "chat": (CHAT, (event({"error": KV_LOST}), DONE)),
    "chat_behind_a_role": (CHAT, (PING, ROLE, event({"error": KV_LOST}) + DONE)),
    "chat_in_pieces": (CHAT, (ROLE + b'data: {"er', b'ror": {"message": "x", "code": 500}}\n', b"\n" + DONE)),
    "chat_aborted": (CHAT, (ROLE, event({"choices": [{"index": 0, "delta": {}, "finish_reason": "abort"}]}), DONE)),
    "flat": (CHAT, (event(KV_LOST), DONE)),
    "no_code": (CHAT, (event({"error": {"message": "x"}}), DONE)),
    "text": (CHAT, (event({"error": "it broke"}),)),
    "generate": (GENERATE, (aborted(500), DONE)),
    "generate_list": (GENERATE, (aborted(503, 1), aborted(503, 0), DONE)),
    "messages": (
        MESSAGES,
        (
            named("message_start", message={}),
            named("ping"),
            named("error", error={"type": "api_error", "message": "KV is lost"}),
            named("message_stop"),
        ),
    ),
    "responses": (
        RESPONSES,
        (
            named("response.created", response={"error": None}),
            named("response.in_progress", response={"error": None}),
            named("response.failed", response=response("failed", {"input_tokens": 3})),
        ),
    ),
    "responses_error": (
        RESPONSES,
        (named("response.created", response={}), named("error", code="server_error", message="x", param=None)),
    ),
    "nothing": (CHAT, ()),
    "only_comments": (CHAT, (PING, PING)),
    "only_the_end": (CHAT, (DONE,)),
}
"""Failures of an engine in a stream before its first token, by path."""

ANSWERS = {
    CHAT: (PING, ROLE, TOKEN, FINISH, DONE),
    GENERATE: (event({"text": "a", "meta_info": {"finish_reason": {"type": "length"}}}), DONE),
    MESSAGES: (named("message_start", message={}), named("content_block_delta"), named("message_stop")),
    RESPONSES: (
        named("response.created", response={"error": None}),
        named("response.output_text.delta", delta="a"),
        named("response.completed", response={"error": None}),
    ),
}


@pytest.mark.invariant("I12")
@pytest.mark.parametrize("name", FAILED)
async def test_a_failure_before_the_first_token_is_tried_elsewhere(name: str) -> None:
    """As one that is told by its status: the client sees the other engine's answer, the breaker counts it."""
    path, pieces = FAILED[name]
    whole = ANSWERS[path]
    kind = "vllm" if path in (MESSAGES, RESPONSES) else "sglang"
    async with engines(stream(*pieces), stream(*whole), path=path, kind=kind, **RETRIES) as (lab, (bad, good)):
        for _ in range(4):
            reply = await lab.post(path, asking(path))
            assert (reply.status, reply.body, reply.is_whole) == (200, b"".join(whole), True)
        assert bad.asked_for(path)
        assert len(good.asked_for(path)) == 4
        assert lab.core.outcomes.breakers.disturbed
        assert await metric(lab, 'pdrouter_retries_total{event="made"}') == len(bad.asked_for(path))
        await settled(lab)


@pytest.mark.parametrize("name", FAILED)
async def test_a_failure_that_is_told(name: str) -> None:
    """With no other engine the client gets a proper status, and an error in the shape of its API."""
    path, pieces = FAILED[name]
    kind = "vllm" if path in (MESSAGES, RESPONSES) else "sglang"
    async with engines(stream(*pieces), path=path, kind=kind, cb_failure_threshold=1) as (lab, _):
        reply = await lab.post(path, asking(path))
        empty = name in ("nothing", "only_comments", "only_the_end")
        assert reply.status == (502 if empty else 503 if name == "generate_list" else 500)
        assert reply.headers["content-type"] == "application/json"
        body = reply.json()
        assert body.get("object") == "error" or body["error"]
        assert body["error"]["code"] == "empty_stream" if empty else b"data:" not in reply.body
        assert lab.core.outcomes.breakers.counts["opened"] == 1
        await settled(lab)


CLIENTS_FAULT: dict[str, tuple[str, str, Sequence[bytes]]] = {
    "chat": (CHAT, "vllm", (ROLE, event({"error": TOO_LONG}), DONE)),
    "generate": (GENERATE, "sglang", (event({"error": TOO_LONG}), DONE)),
    "generate_older": (GENERATE, "sglang", (event({"error": {"message": "too long"}}), DONE)),
    "generate_aborted": (GENERATE, "sglang", (aborted(400), DONE)),
    "messages": (
        MESSAGES,
        "vllm",
        (
            named("message_start", message={}),
            named("error", error={"type": "invalid_request_error", "message": "too long"}),
            named("message_stop"),
        ),
    ),
}


@pytest.mark.parametrize("name", CLIENTS_FAULT)
async def test_the_clients_own_fault(name: str) -> None:
    """It reaches the client with its status, isn't tried again, and blames no engine."""
    path, kind, pieces = CLIENTS_FAULT[name]
    script = stream(*pieces)
    async with engines(script, script, path=path, kind=kind, cb_failure_threshold=1, **RETRIES) as (lab, workers):
        reply = await lab.post(path, asking(path))
        assert reply.status == 400
        assert "too long" in reply.json()["error"]["message"] or name == "generate_aborted"
        assert sum(len(worker.asked_for(path)) for worker in workers) == 1
        assert lab.core.outcomes.breakers.is_calm
        await settled(lab)


@pytest.mark.parametrize(
    ("body", "status"), [({"error": KV_LOST}, 500), (KV_LOST, 500), ({"error": TOO_LONG}, 400), ({"error": "x"}, 500)]
)
async def test_an_error_in_a_whole_reply(body: object, status: int) -> None:
    """A reply of 200 that is an error object has the status that it would have had."""
    async with engines(always(200, body), kind="sglang", cb_failure_threshold=1) as (lab, _):
        for is_stream in (False, True):
            if is_stream and status >= 500:
                break  # it is out by now
            reply = await lab.post(CHAT, chat("x", stream=is_stream))
            assert (reply.status, reply.json()) == (status, body)
        assert lab.core.outcomes.breakers.counts["opened"] == (status >= 500)
        await settled(lab)


async def test_an_error_in_a_reply_that_comes_in_pieces() -> None:
    """It is held until that is known; what can be no error isn't, however slowly it comes."""
    go_on = asyncio.Event()

    async def slow(asked: Asked) -> bytes | None:
        body = b' {"error": {"message": "x", "code": 503}}' if b"fail" in asked.body else b'["a", "b"]'
        asked.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body))
        for at in range(0, len(body), 7):
            asked.writer.write(body[at : at + 7])
            await asked.writer.drain()
            await asyncio.sleep(0.01)
            if b"wait" in asked.body:
                await go_on.wait()
        return b""

    async with engines(slow, kind="sglang") as (lab, _):
        reply = await lab.post(CHAT, chat("fail"))
        assert (reply.status, reply.json()) == (503, {"error": {"message": "x", "code": 503}})
        async with await lab.start(CHAT, chat("wait")) as call:
            assert await call.head() == 200
            go_on.set()
            assert (await call.finish()).body == b'["a", "b"]'
        await settled(lab)


async def test_a_400_that_hides_a_500() -> None:
    """SGLang tells of lost KV so on ``/v1/responses``: another engine is asked."""
    hidden = always(400, {"error": {"message": "500: Decode transfer failed", "code": 400}})
    good = always(200, {"object": "response", "status": "completed", "error": None})
    async with engines(hidden, good, path=RESPONSES, kind="vllm", **RETRIES) as (lab, (bad, _)):
        for _ in range(2):
            reply = await lab.post(RESPONSES, asking(RESPONSES, stream=False))
            assert (reply.status, reply.json()["status"]) == (200, "completed")
        assert bad.asked_for(RESPONSES)


@pytest.mark.parametrize("path", ANSWERS)
async def test_a_failure_behind_tokens(path: str) -> None:
    """What came is passed on as it came, the rest too; it is settled as failed, and counted."""
    failures = {
        CHAT: (ROLE, TOKEN, event({"error": KV_LOST}), DONE),
        GENERATE: (event({"text": "a", "meta_info": {"finish_reason": None}}), aborted(500), DONE),
        MESSAGES: (
            named("content_block_delta"),
            named("error", error={"type": "api_error", "message": "x"}),
            named("message_stop"),
        ),
        RESPONSES: (
            named("response.output_text.delta", delta="a"),
            named("response.failed", response=response("failed", {})),
        ),
    }
    pieces = failures[path]
    kind = "vllm" if path in (MESSAGES, RESPONSES) else "sglang"
    scripts = (stream(*pieces), stream(*pieces))
    async with engines(*scripts, path=path, kind=kind, cb_failure_threshold=1, **RETRIES) as (lab, workers):
        reply = await lab.post(path, asking(path))
        assert (reply.status, reply.body, reply.is_whole) == (200, b"".join(pieces), True)
        assert sum(len(worker.asked_for(path)) for worker in workers) == 1
        assert lab.core.outcomes.breakers.counts["opened"] == 1
        assert await metric(lab, 'pdrouter_failures_total{code="engine_failure"}') == 1
        await settled(lab)


async def test_a_model_that_writes_of_errors() -> None:
    """What it writes is its answer, whatever words are in it, and however it is cut."""
    texts = ["error", '"error"', '{"error": {"code": 500}}', "abort", '"abort"', "data: [DONE]\n\n", "response.failed"]
    events = [event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}) for text in texts]
    whole = b"".join([*events, FINISH, DONE])
    async with engines(stream(*(whole[at : at + 11] for at in range(0, len(whole), 11))), kind="sglang") as (lab, _):
        reply = await lab.post(CHAT, asking())
        assert (reply.status, reply.body) == (200, whole)
        assert await metric(lab, 'pdrouter_failures_total{code="engine_failure"}') == 0
        assert lab.core.outcomes.breakers.is_calm


@pytest.mark.invariant("I12")
@pytest.mark.parametrize(
    ("script", "status", "is_stream"),
    [
        (always(200, {"error": KV_LOST}), 500, False),
        (always(200, {"error": TOO_LONG}), 400, False),
        (stream(event({"error": KV_LOST}), DONE), 500, True),
        (stream(ROLE, event({"error": TOO_LONG}) + DONE), 400, True),
        (stream(event({"error": KV_LOST}), DONE, end=None), 500, True),
    ],
)
async def test_a_prefill_that_fails_inside_a_200(script: Script, status: int, is_stream: bool) -> None:
    """The decode engine, which waits for it, is ended at once, and the client is told."""
    async with engines(hang, prefill=script, cb_failure_threshold=1) as (lab, (_, decode)):
        async with asyncio.timeout(5.0):
            reply = await lab.post(CHAT, chat("x", stream=is_stream))
        assert reply.status == status
        await until(lambda: bool(decode.asked_for("/abort_request")))
        assert lab.core.outcomes.breakers.counts["opened"] == (status >= 500)
        await settled(lab)


async def test_a_prefill_that_fails_where_legs_run_in_turn() -> None:
    """Its answer isn't handed over."""
    flags: dict[str, Any] = {"engine": "vllm", "kv_transport": "nixl", "disaggregation": "always"}
    async with engines(hang, prefill=always(200, {"error": TOO_LONG}), **flags) as (lab, (_, decode)):
        reply = await lab.post(CHAT, chat("x"))
        assert (reply.status, reply.json()) == (400, {"error": TOO_LONG})
        assert not decode.asked_for(CHAT)
        await settled(lab)


async def test_a_broken_engine_draws_no_traffic() -> None:
    """One that answers each stream at once with an error goes out, as one that answers 500 does."""
    good = stream(ROLE, *[TOKEN] * 20, FINISH, DONE)
    flags = {**RETRIES, "policy": "least_work", "cb_failure_threshold": 3}
    async with engines(stream(event({"error": KV_LOST}), DONE), good, **flags) as (lab, (_, bad, _good)):
        replies: list[Reply] = []
        for start in range(0, 30, 5):
            replies += await asyncio.gather(*(lab.post(CHAT, chat(f"{start + n}", stream=True)) for n in range(5)))
        assert all(reply.status == 200 and reply.body.endswith(DONE) for reply in replies)
        assert not any(b"error" in reply.body for reply in replies)
        assert len(bad.asked_for(CHAT)) <= 8
        assert len(lab.core.outcomes.breakers.disturbed) > 0


async def test_an_answer_that_says_nothing_of_health_leaves_a_probe_open() -> None:
    """A refusal closes no half-open breaker, whether its status tells it or its stream; the next one is a probe too."""
    scripts: list[Script] = [
        always(500, {}),
        always(400, {"error": TOO_LONG}),
        stream(ROLE, event({"error": TOO_LONG}), DONE),
        always(200, {"error": TOO_LONG}),
        stream(ROLE, TOKEN, DONE),
    ]

    async def next_one(asked: Asked) -> bytes | None:
        return await scripts.pop(0)(asked)

    flags: dict[str, Any] = {"cb_failure_threshold": 1, "cb_success_threshold": 1, "cb_timeout_duration_secs": 1}
    async with engines(next_one, kind="sglang", **flags) as (lab, (worker,)):
        breakers, address = lab.core.outcomes.breakers, worker.url.removeprefix("http://")
        assert (await lab.post(CHAT, asking())).status == 500
        assert breakers.phase(address) is Phase.OPEN
        await asyncio.sleep(1.1)
        for probe in range(1, 4):
            assert (await lab.post(CHAT, asking())).status == 400
            assert (breakers.phase(address), breakers.counts["probes"]) == (Phase.HALF_OPEN, probe)
        assert (await lab.post(CHAT, asking())).status == 200
        assert (breakers.phase(address), breakers.counts["probes"]) == (Phase.CLOSED, 4)


# Comments and openings


@pytest.mark.parametrize("opening", [PING, ROLE, PING + ROLE, PING[:3]])
async def test_an_opening_is_no_first_token(opening: bytes) -> None:
    """Neither for the metric, nor for the limit of its time."""

    async def comments(asked: Asked) -> bytes | None:
        asked.writer.write(HEAD)
        while not asked.writer.is_closing():
            asked.writer.write(b"%x\r\n%b\r\n" % (len(opening), opening))
            await asyncio.sleep(0.02)
        return None

    async with engines(comments, kind="sglang", first_token_timeout_secs=0.3) as (lab, _):
        reply = await lab.post(CHAT, asking())
        assert (reply.status, reply.error["code"]) == (504, "first_token_timeout")
        assert await metric(lab, "pdrouter_time_to_first_token_seconds_count") == 0
        await settled(lab)


async def test_comments_are_no_sign_of_life() -> None:
    """A stream that had tokens and now has comments alone has stalled."""

    async def comments(asked: Asked) -> bytes | None:
        asked.writer.write(HEAD + b"%x\r\n%b\r\n" % (len(TOKEN), TOKEN))
        while not asked.writer.is_closing():
            asked.writer.write(b"%x\r\n%b\r\n" % (len(PING), PING))
            await asyncio.sleep(0.02)
        return None

    async with engines(comments, kind="sglang", stream_idle_timeout_secs=0.3) as (lab, _):
        reply = await lab.post(CHAT, asking())
        assert (reply.status, reply.is_whole) == (200, False)
        assert json.loads(reply.pieces[-1])["error"]["code"] == "stream_stalled"
        assert await metric(lab, "pdrouter_time_to_first_token_seconds_count") == 1


async def test_comments_before_a_long_prefill_is_over() -> None:
    """They take nothing of the time between two tokens; they come to the client with the first token."""

    async def slow(asked: Asked) -> bytes | None:
        asked.writer.write(HEAD)
        for _ in range(8):
            asked.writer.write(b"%x\r\n%b\r\n" % (len(PING), PING))
            await asyncio.sleep(0.1)
        return b"%x\r\n%b\r\n" % (len(TOKEN + DONE), TOKEN + DONE) + LAST

    async with engines(slow, kind="sglang", stream_idle_timeout_secs=0.3) as (lab, _):
        reply = await lab.post(CHAT, asking())
        assert (reply.status, reply.body) == (200, PING * 8 + TOKEN + DONE)


@pytest.mark.invariant("I7")
@pytest.mark.parametrize("opening", [PING, ROLE, PING + ROLE])
async def test_an_engine_that_dies_behind_an_opening(opening: bytes) -> None:
    """Nothing of an answer has been told: another engine may give it."""

    async def dies(asked: Asked) -> bytes | None:
        asked.writer.write(HEAD + b"%x\r\n%b\r\n" % (len(opening), opening))
        await asked.writer.drain()
        await asyncio.sleep(0.05)
        raise asyncio.IncompleteReadError(b"", None)

    whole = (ROLE, TOKEN, DONE)
    async with engines(dies, stream(*whole), kind="sglang", **RETRIES) as (lab, (bad, _)):
        for _ in range(2):
            reply = await lab.post(CHAT, asking())
            assert (reply.status, reply.body) == (200, b"".join(whole))
        assert bad.asked_for(CHAT)


@pytest.mark.invariant("I9")
async def test_an_opening_without_end() -> None:
    """No more than so much of it is held: then it is passed on, and has the limits of a stream that has begun."""

    async def comments(asked: Asked) -> bytes | None:
        asked.writer.write(HEAD)
        while not asked.writer.is_closing():
            asked.writer.write(b"%x\r\n%b\r\n" % (len(PING) * 1000, PING * 1000))
            await asked.writer.drain()
            await asyncio.sleep(0.01)
        return None

    async with engines(comments, kind="sglang", stream_idle_timeout_secs=0.5) as (lab, _):
        async with await lab.start(CHAT, asking()) as call:
            assert await call.head() == 200
            reply = await call.finish()
        assert len(reply.body) > proxy_answer._MOST_OPENING_BYTES
        assert json.loads(reply.pieces[-1])["error"]["code"] == "stream_stalled"
        await settled(lab)


async def test_an_empty_answer() -> None:
    """An answer without a token is one: it has a reason to end, or an end."""
    for pieces in ((ROLE, FINISH, DONE), (ROLE, DONE), (ROLE,)):
        async with engines(stream(*pieces), kind="sglang") as (lab, _):
            reply = await lab.post(CHAT, asking())
            assert (reply.status, reply.body, reply.is_whole) == (200, b"".join(pieces), True)


# End marks


@pytest.mark.parametrize("path", ANSWERS)
@pytest.mark.parametrize("behind", [b"", b": bye\n\n"])
async def test_an_answer_is_whole_at_its_end_mark(path: str, behind: bytes) -> None:
    """The client's reply ends and the load is returned there, though the engine says nothing more for a while."""
    pieces = ANSWERS[path]
    go_on = asyncio.Event()

    async def lingers(asked: Asked) -> bytes | None:
        await stream(*pieces, end=b"")(asked)
        await go_on.wait()
        return (b"%x\r\n%b\r\n" % (len(behind), behind) if behind else b"") + LAST

    kind = "vllm" if path in (MESSAGES, RESPONSES) else "sglang"
    async with engines(lingers, path=path, kind=kind) as (lab, (worker,)):
        for _ in range(2):
            go_on.clear()
            reply = await lab.post(path, asking(path))
            assert (reply.body, reply.is_whole) == (b"".join(pieces), True)
            await until(lambda: lab.is_ledger_zero)
            go_on.set()
            await settled(lab)
        assert lab.router.service.dispatcher.leftovers.counters() == {"drained": 2, "cut": 0}
        assert lab.router.service.pools.counters()["opened"] == 1
        assert not worker.asked_for("/abort_request")


@pytest.mark.invariant("I9")
@pytest.mark.parametrize("flood", [False, True])
async def test_what_comes_behind_an_end_mark_is_bounded(flood: bool) -> None:
    """An engine that says no more, or too much, loses the connection; the answer stands."""

    async def lingers(asked: Asked) -> bytes | None:
        await stream(ROLE, TOKEN, DONE, end=b"")(asked)
        while flood and not asked.writer.is_closing():
            asked.writer.write(b"%x\r\n%b\r\n" % (len(PING) * 1000, PING * 1000))
            await asyncio.sleep(0.001)
        return None

    async with engines(lingers, kind="sglang") as (lab, (worker,)):
        assert (await lab.post(CHAT, asking())).is_whole
        await until(lambda: lab.is_quiet, 4.0)
        assert lab.router.service.dispatcher.leftovers.counters() == {"drained": 0, "cut": 1}
        await until(lambda: worker.open_connections <= 2)


async def test_an_engine_that_breaks_behind_its_end_mark() -> None:
    """The answer stands."""

    async def breaks(asked: Asked) -> bytes | None:
        await stream(ROLE, TOKEN, DONE, end=b"")(asked)
        raise asyncio.IncompleteReadError(b"", None)

    async with engines(breaks, kind="sglang", cb_failure_threshold=1) as (lab, _):
        reply = await lab.post(CHAT, asking())
        assert (reply.body, reply.is_whole) == (ROLE + TOKEN + DONE, True)
        await settled(lab)
        assert lab.core.outcomes.breakers.is_calm


@pytest.mark.parametrize(
    ("pieces", "outcome"),
    [
        ((ROLE, TOKEN, DONE), "answered"),
        ((ROLE, TOKEN, DONE[:-2]), "answered"),
        ((ROLE, TOKEN, DONE[:-4]), "client_gone"),
        ((ROLE, TOKEN), "client_gone"),
    ],
)
async def test_a_client_that_closes_behind_the_end_mark(pieces: Sequence[bytes], outcome: str, tmp_path: Any) -> None:
    """As openai's does: it has its whole answer, and isn't one that left."""
    path = tmp_path / "journal.jsonl"
    async with engines(stream(*pieces, end=None), kind="sglang", journal_file=str(path)) as (lab, _):
        async with await lab.start(CHAT, asking()) as call:
            await call.head()
            got = b""
            while pieces[-1] not in got:
                got += await call.some()
        await settled(lab)
    assert json.loads(path.read_bytes())["outcome"] == outcome


# Tokens


@pytest.mark.parametrize(
    ("path", "pieces", "limit", "tokens"),
    [
        (CHAT, (ROLE, TOKEN, TOKEN, TOKEN, FINISH, DONE), 3, 3),
        (CHAT, (ROLE + TOKEN + TOKEN + TOKEN + FINISH + DONE,), 8, 3),
        (CHAT, (ROLE, TOKEN, TOKEN, TOKEN, TOKEN, FINISH, DONE), 3, 3),
        (CHAT, (ROLE, FINISH, event({"choices": [], "usage": None}), DONE), 3, 0),
        (
            RESPONSES,
            (
                named("response.created", response={}),
                named("response.output_item.added"),
                *[named("response.output_text.delta", delta="a")] * 3,
                named("response.output_text.done", text="aaa"),
                named("response.completed", response={"usage": None}),
            ),
            8,
            3,
        ),
        (
            RESPONSES,
            (
                named("response.output_text.delta", delta="a b c"),
                named("response.completed", response={"usage": {"input_tokens": 9, "output_tokens": 5}}),
            ),
            8,
            5,
        ),
        (
            MESSAGES,
            (
                named("message_start", message={"usage": {"input_tokens": 9, "output_tokens": 0}}),
                named("content_block_delta"),
                named("message_delta", usage={"output_tokens": 4}),
                named("message_stop"),
            ),
            8,
            4,
        ),
    ],
)
async def test_the_tokens_of_an_answer(
    path: str, pieces: Sequence[bytes], limit: int, tokens: int, tmp_path: Any
) -> None:
    """The journal has the engine's count, else the events that had tokens, never more than the request allows."""
    journal = tmp_path / "journal.jsonl"
    kind = "vllm" if path in (MESSAGES, RESPONSES) else "sglang"
    name = "max_output_tokens" if path == RESPONSES else "max_tokens"
    async with engines(stream(*pieces), path=path, kind=kind, journal_file=str(journal)) as (lab, _):
        assert (await lab.post(path, asking(path, **{name: limit}))).is_whole
        await settled(lab)
    assert json.loads(journal.read_bytes())["output_tokens"] == tokens


async def test_events_with_several_tokens_are_learned_by_endpoint(tmp_path: Any) -> None:
    """What one engine's events carry says nothing of another's."""
    usage = event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 12}})

    def script(*ends: bytes) -> Script:
        async def told(asked: Asked) -> bytes | None:
            told = ends if b"include_usage" in asked.body else ()
            return await stream(ROLE, TOKEN, TOKEN, TOKEN, FINISH, *told, DONE)(asked)

        return told

    journal = tmp_path / "journal.jsonl"
    flags: dict[str, Any] = {"policy": "round_robin", "journal_file": str(journal)}
    async with engines(script(usage), script(), kind="sglang", **flags) as (lab, _):
        for _ in range(60):
            await lab.post(CHAT, asking(stream_options={"include_usage": True}, max_tokens=20))
        for _ in range(2):
            await lab.post(CHAT, asking(max_tokens=20))
        await settled(lab)
    counts = [json.loads(line)["output_tokens"] for line in journal.read_bytes().splitlines()]
    assert sorted(counts[-2:]) == [3, pytest.approx(12, abs=1)]


async def test_a_stream_that_is_json_or_sound() -> None:
    """A reply that is no stream of events comes through as it is, at once."""
    go_on = asyncio.Event()

    async def sound(asked: Asked) -> bytes | None:
        asked.writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: audio/mpeg\r\ncontent-length: 6\r\n\r\n\xff\xfb\x90")
        await go_on.wait()
        return b"\n\n\x00"

    async with engines(sound, kind="sglang") as (lab, _), await lab.start(CHAT, asking()) as call:
        assert await call.head() == 200
        go_on.set()
        assert (await call.finish()).body == b"\xff\xfb\x90\n\n\x00"
    async with engines(always(200, {"choices": []}), kind="sglang") as (lab, _):
        assert (await lab.post(CHAT, asking())).json() == {"choices": []}
