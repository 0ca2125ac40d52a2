"""How SGLang tells what failed: by endpoint, by version, whole and inside a stream.

Source: SGLang 0.5.6 to 0.5.23, ``entrypoints/http_server.py``, ``openai/serving_base.py``, ``openai/serving_chat.py``,
``openai/serving_responses.py``, ``anthropic/serving.py``; seen on 0.5.23.
"""

import json
import uuid
from collections.abc import Mapping
from http import HTTPStatus

import msgspec

from pdrouter.sim.emulator_events import named_event
from pdrouter.sim.emulator_replies import DONE, event
from pdrouter.sim.emulator_settings import EngineError
from pdrouter.sim.sglang_version import SglangVersion

GENERATE, RESPONSES, MESSAGES = "/generate", "/v1/responses", "/v1/messages"

_LATE = frozenset({"too_long", "rank_out_of_range"})
"""Found by the tokenizer manager, when the status of a stream may have been sent."""

_ANTHROPIC: Mapping[int, str] = {400: "invalid_request_error", 503: "overloaded_error"}


class _Asked(msgspec.Struct):
    """What a refusal repeats of the request."""

    stream: bool | None = None
    model: str | None = None
    request_id: str | None = None


def failed_reply(path: str, error: EngineError) -> tuple[int, object]:
    """Return status and body of a request that failed as a whole. ``/v1/responses`` makes a 400 of any failure."""
    if path == MESSAGES:
        kind = "BadRequestError" if error.code in _LATE else _ANTHROPIC.get(error.status, "api_error")
        text = error.message if error.status < 500 else "Internal server error"
        return error.status, {"type": "error", "error": {"type": kind, "message": text}}
    if path == RESPONSES:
        text = error.message if error.status < 500 else f"{error.status}: {error.message}"
        told = {"message": text, "type": "invalid_request_error", "param": None, "code": 400}
        return 400, {"error": told}
    if path == GENERATE and error.code in _LATE:
        return error.status, {"error": {"message": error.message}}
    kind = "BadRequestError" if error.status == 400 else str(error.status)
    return error.status, _body(error, kind)


def refused_stream(path: str, raw: bytes, error: EngineError, version: SglangVersion) -> bytes | None:
    """Return the stream that tells a refusal inside a 200; None: it is a status."""
    if error.code not in _LATE:
        return None
    asked = msgspec.json.decode(raw, type=_Asked)  # it has been read before
    if not asked.stream:
        return None
    if path == GENERATE:
        more = {"type": "invalid_request_error", "code": 400, "retryable": False} if version.codes_errors else {}
        return event({"error": {"message": error.message, **more}}) + DONE
    if path == RESPONSES:
        return _failed_response(asked, error.message)
    if path == MESSAGES:
        usage = {"input_tokens": 0, "output_tokens": 0}
        message: dict[str, object] = {
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": asked.model,
            "usage": usage,
        }
        started = {"id": f"msg_{uuid.uuid4().hex}", **message}
        return named_event("message_start", message=started) + messages_error(error) + named_event("message_stop")
    return None if version.refuses_streams else stream_error(error) + DONE


def stream_error(error: EngineError) -> bytes:
    """Return the error event of a chat or a completion."""
    kind = "BadRequestError" if error.status == 400 else HTTPStatus(error.status).name
    return b"data: " + json.dumps({"error": _body(error, kind)}).encode() + b"\n\n"


def messages_error(error: EngineError) -> bytes:
    """Return the error event of a message: unlike that of a whole reply it says what happened."""
    told = {"type": _ANTHROPIC.get(error.status, "api_error"), "message": error.message}
    return named_event("error", error=told)


def response_error(message: str) -> dict[str, object]:
    """Return the error of a failed response, which has the same code whoever is at fault."""
    return {"error": {"code": "server_error", "message": message}}


def _failed_response(asked: _Asked, message: str) -> bytes:
    """Return the events of a response that was refused: nothing was counted, so there is no usage."""
    response: dict[str, object] = {
        "id": asked.request_id or f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "model": asked.model,
        "output": [],
        "usage": None,
    }
    begun = response | {"status": "in_progress"}
    events = [named_event(f"response.{name}", response=begun) for name in ("created", "in_progress")]
    failed = response | {"status": "failed"} | response_error(message)
    return b"".join(events) + named_event("response.failed", response=failed)


def _body(error: EngineError, kind: str) -> dict[str, object]:
    return {"object": "error", "message": error.message, "type": kind, "param": None, "code": error.status}
