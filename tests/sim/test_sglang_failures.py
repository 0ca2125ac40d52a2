"""How an emulated SGLang tells what failed: on each endpoint, whole and streamed, by version.

Source: SGLang 0.5.6 to 0.5.23 (docs/engines.md, "Handshake rules"); the forms of 0.5.23 were seen on a real engine.
"""

import json
from typing import Any

import pytest

from pdrouter.engines.failures import Failure, Kind, dialect, read_event
from pdrouter.sim.emulator import EmulatorSettings, start_emulator

NEW = "0.5.23"
GENERATE, CHAT, TEXT = "/generate", "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TURN = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    GENERATE: {"text": "hello", "sampling_params": {"max_new_tokens": 2}},
    CHAT: {"messages": TURN, "max_tokens": 2},
    TEXT: {"prompt": "hello", "max_tokens": 2},
    RESPONSES: {"input": "hello", "max_output_tokens": 2, "request_id": "resp_mine"},
    MESSAGES: {"messages": TURN, "max_tokens": 2},
}
LOST = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 7}
"""Where no prefill is: the decode engine fails the request."""


def names(reply: Any) -> list[str]:
    """Return the names of a stream's events, and its end mark."""
    pieces = [piece for piece in reply.body.decode().split("\n\n") if piece]
    return [piece.partition("\n")[0].removeprefix("event: ") for piece in pieces]


def events(reply: Any) -> list[Any]:
    """Return what the events of a stream say."""
    lines = [line[6:] for line in reply.body.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def ask(client: Any, path: str, fields: dict[str, Any], version: str = NEW) -> Any:
    """Ask a small decode engine of two ranks."""
    settings = EmulatorSettings(
        role="decode", dp_size=2, server_version=version, speed=200.0, kv_capacity_tokens=640, dp_attention=True
    )
    async with start_emulator(settings) as emulator:
        reply = await client.send(emulator.url, path, BODIES[path] | LOST | fields)
        assert sum(emulator.snapshot().errors.values()) == 1
        assert emulator.snapshot().is_idle
        return reply


@pytest.mark.parametrize(
    ("path", "status", "told"),
    [
        (GENERATE, 500, {"object": "error", "type": "500", "param": None, "code": 500}),
        (CHAT, 500, {"object": "error", "type": "500", "param": None, "code": 500}),
        (TEXT, 500, {"object": "error", "type": "500", "param": None, "code": 500}),
        (RESPONSES, 400, {"error": {"type": "invalid_request_error", "param": None, "code": 400}}),
        (MESSAGES, 500, {"type": "error", "error": {"type": "api_error"}}),
    ],
)
async def test_a_failure_of_the_engine_as_a_status(client: Any, path: str, status: int, told: dict[str, Any]) -> None:
    """A response makes a 400 of it, whose text begins with the status that was meant."""
    reply = await ask(client, path, {})
    body = reply.json()
    message = body.get("error", body).pop("message")
    assert (reply.status, body) == (status, told)
    assert message.startswith("500: ") == (path == RESPONSES)
    assert ("bootstrap" in message) == (path != MESSAGES)


@pytest.mark.parametrize("path", BODIES)
async def test_a_failure_of_the_engine_inside_a_200(client: Any, path: str) -> None:
    """The router reads what the engine writes: no token, then a failure with status 500."""
    reply = await ask(client, path, {"stream": True})
    assert reply.status == 200
    found = [read_event(json.dumps(event).encode(), dialect(path, "sglang")) for event in events(reply)]
    failures = [kind.status for kind in found if isinstance(kind, Failure)]
    assert failures == [500]
    assert Kind.PART not in found
    expected = {
        GENERATE: 2,
        CHAT: 2,
        TEXT: 2,
        RESPONSES: ["response.created", "response.in_progress", "response.failed"],
        MESSAGES: ["message_start", "error", "message_stop"],
    }[path]
    if isinstance(expected, int):
        assert len(names(reply)) == expected
        assert names(reply)[-1] == "data: [DONE]"
    else:
        assert names(reply) == expected


async def test_what_a_failed_stream_says(client: Any) -> None:
    """Word by word as the real one."""
    event = (await ask(client, CHAT, {"stream": True})).body.partition(b"\n")[0]
    assert event.startswith(b'data: {"error": {"object": "error", "message": "')
    assert event.endswith(b'"type": "INTERNAL_SERVER_ERROR", "param": null, "code": 500}}')
    (sample,) = events(await ask(client, GENERATE, {"stream": True}))
    assert (sample["text"], sample["output_ids"]) == ("", [])
    reason = sample["meta_info"]["finish_reason"]
    assert (reason["type"], reason["status_code"], reason["err_type"]) == ("abort", 500, None)
    response = events(await ask(client, RESPONSES, {"stream": True}))[-1]["response"]
    assert (response["id"], response["status"], response["error"]["code"]) == ("resp_mine", "failed", "server_error")
    assert response["usage"]["output_tokens"] == 0


async def test_each_part_of_a_list_fails_alone(client: Any) -> None:
    """On ``/generate`` each has a chunk of its own; a list of completions ends with the first failure."""
    rooms = {"bootstrap_host": ["127.0.0.1"] * 2, "bootstrap_port": [1, 1], "bootstrap_room": [7, 8], "stream": True}
    settings = EmulatorSettings(role="decode", speed=200.0)
    async with start_emulator(settings) as emulator:
        reply = await client.send(emulator.url, GENERATE, BODIES[GENERATE] | rooms | {"text": ["one", "two"]})
        assert sorted(sample["index"] for sample in events(reply)) == [0, 1]
        rooms["bootstrap_room"] = [9, 10]
        reply = await client.send(emulator.url, TEXT, BODIES[TEXT] | rooms | {"prompt": ["one", "two"]})
        assert [list(event) for event in events(reply)] == [["error"]]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_before_0_5_10_a_failed_stream_has_an_ordinary_end(client: Any, path: str) -> None:
    """A chunk with the finish reason abort, and no word of an error."""
    reply = await ask(client, path, {"stream": True}, "0.5.9")
    assert [event["choices"][0]["finish_reason"] for event in events(reply)][-1] == "abort"
    assert all("error" not in event for event in events(reply))
    assert names(reply)[-1] == "data: [DONE]"
    assert (await ask(client, path, {}, "0.5.9")).status == 500


LONG = "word " * 1000


@pytest.mark.parametrize(
    "fields", [{"text": LONG, "prompt": LONG, "messages": [{"role": "user", "content": LONG}], "input": LONG}, None]
)
@pytest.mark.parametrize("path", BODIES)
async def test_the_clients_fault(client: Any, path: str, fields: dict[str, Any] | None) -> None:
    """Too long, or a rank that isn't there: a 400 whole, and streamed inside a 200 on three endpoints."""
    fields = {name: value for name, value in fields.items() if name in BODIES[path]} if fields else {}
    fields = fields or {"routed_dp_rank": 7}
    whole = await ask(client, path, fields)
    assert whole.status == 400
    streamed = await ask(client, path, fields | {"stream": True})
    if path in (CHAT, TEXT):
        assert (streamed.status, streamed.json()) == (400, whole.json())
        return
    assert streamed.status == 200
    found = [read_event(json.dumps(event).encode(), dialect(path, "sglang")) for event in events(streamed)]
    assert [kind.status for kind in found if isinstance(kind, Failure)] == [400]
    assert names(streamed)[-1] in ("data: [DONE]", "message_stop", "response.failed")


@pytest.mark.parametrize(
    ("version", "path", "told"),
    [
        ("0.5.12", GENERATE, {"error": {}}),
        ("0.5.13", GENERATE, {"error": {"type": "invalid_request_error", "code": 400, "retryable": False}}),
        ("0.5.9", CHAT, {"error": {"object": "error", "type": "BadRequestError", "param": None, "code": 400}}),
        ("0.5.9", TEXT, {"error": {"object": "error", "type": "BadRequestError", "param": None, "code": 400}}),
        ("0.5.10", CHAT, None),
        ("0.5.10", TEXT, None),
    ],
)
async def test_the_clients_fault_by_version(client: Any, version: str, path: str, told: dict[str, Any] | None) -> None:
    """Since 0.5.10 chats and completions are refused before the stream begins."""
    field = {GENERATE: "text", TEXT: "prompt"}.get(path, "messages")
    long: Any = LONG if field != "messages" else [{"role": "user", "content": LONG}]
    reply = await ask(client, path, {field: long, "stream": True}, version)
    if told is None:
        assert reply.status == 400
        return
    assert reply.status == 200
    (event,) = events(reply)
    assert event["error"].pop("message")
    assert event == told


@pytest.mark.parametrize(
    ("path", "version", "status"),
    [
        (RESPONSES, "0.5.20", 200),
        (RESPONSES, "0.5.19", 400),
        (MESSAGES, "0.5.22", 200),
        (MESSAGES, "0.5.21", 400),
        (MESSAGES, "0.5.8", 404),
    ],
)
async def test_which_versions_pair(new_pair: Any, path: str, version: str, status: int) -> None:
    """Older ones pass over the room, and refuse a leg that has none."""
    async with new_pair(server_version=version) as pair:
        legs = await pair.send(path, BODIES[path])
        assert [reply.status for reply in legs] == [status] * 2


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_responses_and_messages_in_a_pair(new_pair: Any, path: str, is_stream: bool) -> None:
    """Room and ranks are read; the answer is the format's, without a mark behind it."""
    async with new_pair() as pair:
        fields = {"routed_dp_rank": 2, "disagg_prefill_dp_rank": 2, "bootstrap_room": 2, "stream": is_stream}
        prefill, decode = await pair.send(path, BODIES[path], prefill=fields, decode=fields | {"routed_dp_rank": 3})
        assert (prefill.status, decode.status) == (200, 200)
        assert (pair.prefill.received[0].rank, pair.decode.received[0].rank) == (2, 3)
        assert pair.decode.received[0].prefill_rank == 2
        if path == RESPONSES:
            assert pair.decode.received[0].rid == "resp_mine"
        if is_stream:
            assert names(decode)[-1] == ("message_stop" if path == MESSAGES else "response.incomplete")
        else:
            usage = decode.json()["usage"]
            assert (pair.prefill.received[0].output_tokens, usage["output_tokens"]) == (1, 2)
        assert pair.is_idle
