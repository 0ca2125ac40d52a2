"""Failures inside a good status, in the forms in which SGLang and vLLM write them; and what isn't one."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from pdrouter.engines.failures import Dialect, Failure, Kind, dialect, read_event, reply_failure, true_status

CHAT = dialect("/v1/chat/completions", "sglang")
GENERATE = dialect("/generate", "sglang")
MESSAGES = dialect("/v1/messages", "sglang")
RESPONSES = dialect("/v1/responses", "sglang")
OTHERS_RESPONSES = dialect("/v1/responses", "vllm")

KV_LOST = {"object": "error", "message": "Decode transfer failed", "type": "INTERNAL_SERVER_ERROR", "param": None}
TOO_LONG = "The input (3001 tokens) is longer than the model's context length (2048 tokens)."


def chunk(delta: Mapping[str, Any], reason: str | None = None, **fields: Any) -> dict[str, Any]:
    """Return a chunk of a chat."""
    return {"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": reason} | fields]}


def sample(reason: Mapping[str, Any] | None, text: str = "", **fields: Any) -> dict[str, Any]:
    """Return a chunk of ``/generate``."""
    return {"text": text, "output_ids": [], "meta_info": {"id": "x", "finish_reason": reason}} | fields


def failed(error: Mapping[str, Any] | None, usage: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the event of a failed response."""
    return {"type": "response.failed", "response": {"status": "failed", "error": error, "usage": usage}}


def read(event: object, spoken: Dialect = CHAT) -> Kind | Failure:
    """Read an event that is written as JSON."""
    return read_event(json.dumps(event).encode(), spoken)


@pytest.mark.parametrize(
    ("event", "spoken", "status"),
    [
        ({"error": KV_LOST | {"code": 500}}, CHAT, 500),
        ({"error": {"message": "x", "type": "BadRequestError", "param": None, "code": 400}}, CHAT, 400),
        ({"error": {"message": "x", "type": "InternalServerError", "code": 500}}, CHAT, 500),
        ({"error": {"message": "x", "code": "503"}}, CHAT, 503),
        ({"error": {"message": "x", "code": "rate_limit_exceeded"}}, CHAT, 429),
        ({"error": {"message": "x", "code": "nothing known", "type": "BadRequestError"}}, CHAT, 400),
        ({"error": {"message": "x", "code": 200}}, CHAT, 500),
        ({"error": {"message": "x", "code": True}}, CHAT, 500),
        ({"error": {"message": "x"}}, CHAT, 500),
        ({"error": "it broke"}, CHAT, 500),
        ({"object": "error", "message": "x", "type": "NotFoundError", "param": None, "code": 404}, CHAT, 404),
        ({"object": "error", "message": "x", "type": "made up"}, CHAT, 500),
        ({"error": {"message": TOO_LONG, "type": "invalid_request_error", "code": 400}}, GENERATE, 400),
        ({"error": {"message": TOO_LONG}}, GENERATE, 400),
        (sample({"type": "abort", "message": "x", "status_code": 500, "err_type": None}), GENERATE, 500),
        (sample({"type": "abort", "message": "x", "status_code": 400, "err_type": "x"}, index=1), GENERATE, 400),
        ({"type": "error", "error": {"type": "api_error", "message": "x"}}, MESSAGES, 500),
        ({"type": "error", "error": {"type": "overloaded_error", "message": "x"}}, MESSAGES, 503),
        ({"type": "error", "error": {"type": "internal_error", "message": "x"}}, MESSAGES, 500),
        ({"type": "error", "error": {"type": "invalid_request_error", "message": TOO_LONG}}, MESSAGES, 400),
        ({"type": "error", "code": "server_error", "message": "x", "param": None}, RESPONSES, 500),
        ({"type": "error", "code": None, "message": "x"}, RESPONSES, 500),
        ({"type": "error", "code": "invalid_prompt", "message": "x"}, RESPONSES, 400),
        (failed({"code": "server_error", "message": "x"}, {"input_tokens": 31}), RESPONSES, 500),
        (failed({"code": "server_error", "message": TOO_LONG}, None), RESPONSES, 400),
        (failed({"code": "server_error", "message": "x"}, None), OTHERS_RESPONSES, 500),
        (failed({"code": "rate_limit_exceeded", "message": "x"}, None), OTHERS_RESPONSES, 429),
        (failed(None, {"input_tokens": 31}), RESPONSES, 500),
        ({"type": "response.failed"}, OTHERS_RESPONSES, 500),
    ],
)
def test_failures_in_streams(event: object, spoken: Dialect, status: int) -> None:
    """Each is known with the status that it would have had, and with a body that has an error in it."""
    failure = read(event, spoken)
    assert isinstance(failure, Failure)
    assert failure.status == status
    body = json.loads(failure.body)
    error = body if body.get("object") == "error" else body["error"]
    assert error == "it broke" or isinstance(error["message"], str)


def test_the_engines_words_are_kept() -> None:
    """An error object is passed on as it came; of others its message, type and code."""
    raw = b'{"error" : {"message":"x","big":18446744073709551617, "code":500}}'
    assert read_event(raw, CHAT) == Failure(500, raw)
    failure = read(sample({"type": "abort", "message": "KV is lost", "status_code": 500}), GENERATE)
    assert isinstance(failure, Failure)
    told = {"message": "KV is lost", "type": "server_error", "code": 500}
    assert json.loads(failure.body) == {"error": told}
    failure = read(failed({"code": "server_error", "message": TOO_LONG}, None), RESPONSES)
    assert isinstance(failure, Failure)
    told = {"message": TOO_LONG, "type": "invalid_request_error", "code": 400}
    assert json.loads(failure.body) == {"error": told}
    hostile = {"type": "error", "code": 10**30, "message": ["no text"]}
    assert isinstance(read(hostile, RESPONSES), Failure)


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (chunk({"role": "assistant", "content": ""}), Kind.NOTHING),
        (chunk({"role": "assistant", "content": None, "tool_calls": None}), Kind.NOTHING),
        (chunk({"role": "assistant", "content": "a"}), Kind.PART),
        (chunk({"reasoning_content": "a"}), Kind.PART),
        (chunk({"tool_calls": [{"index": 0}]}), Kind.PART),
        (chunk({"content": ""}, logprobs={"content": []}), Kind.PART),
        (chunk({"content": ""}, token_ids=[5]), Kind.PART),
        (chunk({"content": "a"}, "stop"), Kind.PART),
        (chunk({"content": ""}, "stop"), Kind.FINISH),
        (chunk({}, "abort"), Kind.ABORT),
        (chunk({}, "error"), Kind.ABORT),
        ({"choices": [{"index": 0, "text": "a"}]}, Kind.PART),
        ({"choices": [{"index": 0, "text": ""}]}, Kind.NOTHING),
        ({"choices": [], "usage": {"prompt_tokens": 1}}, Kind.NOTHING),
        (chunk({"content": "error"}) | {"error": None}, Kind.PART),
        (chunk({"content": "abort"}), Kind.PART),
        (chunk({"role": "assistant"}) | {"error": {}}, Kind.NOTHING),
        (sample(None, "a"), Kind.PART),
        (sample(None, output_ids=[5]), Kind.PART),
        (sample(None), Kind.NOTHING),
        (sample({"type": "length", "length": 3}), Kind.PART),
        (sample({"type": "abort", "message": "x"}), Kind.ABORT),
        ({"type": "response.created", "response": {"error": None, "usage": None}}, Kind.NOTHING),
        ({"type": "response.output_item.added"}, Kind.NOTHING),
        ({"type": "response.output_text.delta", "delta": "a"}, Kind.PART),
        ({"type": "response.completed", "response": {"error": None}}, Kind.END),
        ({"type": "response.incomplete", "response": {"error": None}}, Kind.END),
        ({"type": "message_start", "message": {"id": "x"}}, Kind.NOTHING),
        ({"type": "ping"}, Kind.NOTHING),
        ({"type": "content_block_start"}, Kind.NOTHING),
        ({"type": "content_block_delta", "delta": {"text": "a"}}, Kind.PART),
        ({"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, Kind.FINISH),
        ({"type": "message_stop"}, Kind.END),
        ({"type": "transcript.text.delta"}, Kind.PART),
        ({"type": ["odd"]}, Kind.PART),
        ({}, Kind.PART),
        ([], Kind.PART),
        ({"choices": 5}, Kind.PART),
        ({"choices": [{"delta": 5}]}, Kind.PART),
    ],
)
def test_what_events_are(event: object, kind: Kind) -> None:
    """Openings and the like are nothing of the answer; what isn't known is taken for a part of it."""
    assert read(event) is kind


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"null", b"[" * 100_000, b'{"error":' + b"[" * 100_000])
def test_what_is_no_event(data: bytes) -> None:
    """It is passed on."""
    assert read_event(data, CHAT) is Kind.PART


def test_the_end() -> None:
    """Is told by a word that isn't JSON."""
    assert read_event(b"[DONE]", CHAT) is Kind.END


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"error":{"message":"x","code":500}}', 500),
        (b' {"object":"error","message":"\\"error\\"","code":400}', 400),
        (b'{"object":"response","status":"failed","error":{"code":"server_error","message":"x"}}', 500),
        (b'{"error":null,"choices":[{"message":{"content":"error"}}]}', None),
        (b'{"choices":[{"message":{"content":"\\"error\\""}}]}', None),
        (b'{"error":"' + b"x" * 70_000 + b'"}', None),
        (b'{"error":', None),
        (b"error", None),
        (b"", None),
    ],
)
def test_whole_replies(body: bytes, status: int | None) -> None:
    """A whole reply is an error by its own fields, not by what a model writes in it."""
    failure = reply_failure(body, CHAT)
    assert (None if failure is None else failure.status) == status


@pytest.mark.parametrize(
    ("status", "body", "meant"),
    [
        (400, b'{"error":{"message":"500: Decode transfer failed","code":400}}', 500),
        (400, b'{"error":{"message" : "503: x"}}', 503),
        (400, b'{"error":{"message":"400: x"}}', 400),
        (400, b'{"error":{"message":"the limit is 500: x"}}', 400),
        (422, b'{"error":{"message":"500: x"}}', 422),
        (400, b"", 400),
    ],
)
def test_statuses_that_hide_another(status: int, body: bytes, meant: int) -> None:
    """A 400 whose text begins with the 5xx that was meant is one."""
    assert true_status(status, body) == meant
