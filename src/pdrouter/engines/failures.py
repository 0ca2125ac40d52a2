"""Failures that engines report inside a good status: error objects, failed responses, aborted answers.

A stream's status is sent before the engine has read the prompt, so what goes wrong later stands in its events.
Pure functions; ``streams.py`` splits streams into events and asks here what each one is.

Source: SGLang 0.5.6 to 0.5.23 (``serving_base.py`` ``create_streaming_error_response``, ``http_server.py``
``stream_results``, ``serving_responses.py``, ``anthropic/serving.py``; the last version also run), vLLM 0.32
(``generate/base/serving.py``, ``responses/serving.py``, ``anthropic/serving.py``).
"""

import re
from collections.abc import Mapping
from enum import Enum
from functools import lru_cache

import msgspec
from msgspec import UNSET, Raw, UnsetType

from pdrouter.engines.sse import DONE

ERROR = b'"error"'
"""Stands in every error object, and in few other events."""

MOST_ERROR_BYTES = 16_384
"""A longer reply isn't an error object; chosen."""

_BAD_REQUEST, _SERVER_ERROR, _HIGHEST_STATUS = 400, 500, 599

_STATUS_OF: Mapping[str, int] = {
    "invalid_request_error": 400,
    "bad_request": 400,
    "badrequesterror": 400,
    "invalid_prompt": 400,
    "context_length_exceeded": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "notfounderror": 404,
    "model_not_found": 404,
    "request_timeout_error": 408,
    "request_too_large": 413,
    "unprocessableentityerror": 422,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "notimplementederror": 501,
    "overloaded_error": 503,
    "serviceunavailableerror": 503,
    "timeout_error": 504,
}
"""Types and codes that say whose fault it is; others are the engine's.

Source: Anthropic's and OpenAI's API references; SGLang's ``ERROR_TYPE_MAP``; vLLM's ``error_response.py``.
"""

_STATUS_IN_MESSAGE = re.compile(rb'"message"[ \t]{0,8}:[ \t]{0,8}"(5\d\d): ')
_HEAD_BYTES = 4096

_GENERATE, _MESSAGES, _RESPONSES = "/generate", "/v1/messages", "/v1/responses"
_SGLANG = "sglang"


class Dialect(msgspec.Struct, frozen=True):
    """How answers of one path tell their end and their failures.

    ``mark`` stands, beside ``ERROR``, in every event that has to be read. ``uncoded_status`` is meant by an error
    without code and type. ``fails_before_it_counts``: a failed response without ``usage`` is the client's fault.
    """

    mark: bytes
    uncoded_status: int
    fails_before_it_counts: bool


@lru_cache(maxsize=256)
def dialect(path: str, engine: str) -> Dialect:
    """Return the dialect of a path.

    Source: SGLang 0.5.6 to 0.5.12 reports a refused ``/generate`` stream as ``{"error": {"message"}}``; 0.5.23 raises
    what is wrong with a request before it has counted anything, so that the failed response has ``usage`` null, and
    has the usage in it when KV is lost (both with code ``server_error``).
    """
    mark = {_MESSAGES: b'"message_stop"', _RESPONSES: b'"response"'}.get(path, b'"abort"')
    return Dialect(mark, _BAD_REQUEST if path == _GENERATE else _SERVER_ERROR, engine == _SGLANG)


class Failure(msgspec.Struct, frozen=True):
    """What went wrong: the HTTP status that it would have had, and a body that says so in the shape of its API."""

    status: int
    body: bytes


class Kind(Enum):
    """What an event is to the answer: nothing of it, a part (tokens), a sample's end or abort, the end of all."""

    NOTHING = "nothing"
    PART = "part"
    FINISH = "finish"
    ABORT = "abort"
    END = "end"


class _Choice(msgspec.Struct):
    delta: dict[str, Raw] | None = None
    text: Raw | UnsetType = UNSET
    token_ids: Raw | UnsetType = UNSET
    logprobs: Raw | UnsetType = UNSET
    finish_reason: object = None


class _Meta(msgspec.Struct):
    finish_reason: object = None


class _Response(msgspec.Struct):
    error: object = None
    usage: object = None


class _Event(msgspec.Struct):
    type: object = None
    object_: object = msgspec.field(name="object", default=None)
    error: object = None
    code: object = None
    message: object = None
    choices: list[_Choice] | None = None
    meta_info: _Meta | None = None
    text: Raw | UnsetType = UNSET
    output_ids: Raw | UnsetType = UNSET
    response: _Response | None = None


_DECODER = msgspec.json.Decoder(_Event)
_EMPTY = frozenset({b'""', b"null", b"[]", b"{}"})

_LIFECYCLE = frozenset({"ping", "message_start", "content_block_start", "content_block_stop"})
_ENDS = frozenset({"message_stop", "response.completed", "response.incomplete"})


def read_event(data: bytes, spoken: Dialect) -> Kind | Failure:
    """Return what an event's data is; what isn't understood counts as a part of the answer."""
    if data == DONE:
        return Kind.END
    event = _decoded(data)
    if event is None:
        return Kind.PART
    failure = _failure(event, data, spoken)
    if failure is not None:
        return failure
    if event.choices is not None:
        return _of_choices(event.choices)
    if isinstance(event.type, str):
        return _of_type(event.type)
    if event.meta_info is not None:
        return _of_sample(event, event.meta_info)
    return Kind.PART


def reply_failure(body: bytes, spoken: Dialect) -> Failure | None:
    """Return the failure that a whole reply of a good status is, if it is one."""
    if len(body) > MOST_ERROR_BYTES or (ERROR not in body and spoken.mark not in body):
        return None
    event = _decoded(body)
    return None if event is None else _failure(event, body, spoken)


def true_status(status: int, body: bytes) -> int:
    """Return the status that an error reply means.

    Source: SGLang 0.5.23 answers 400 on ``/v1/responses`` when KV is lost, with the text of its own exception, which
    begins with the status that was meant: ``500: Decode transfer failed`` (seen).
    """
    found = _STATUS_IN_MESSAGE.search(body, 0, _HEAD_BYTES) if status == _BAD_REQUEST else None
    return status if found is None else int(found[1])


def aborted() -> Failure:
    """Return what an answer is that the engine has dropped without saying why."""
    return _wrapped({"message": "the engine aborted the request"}, _SERVER_ERROR)


def _decoded(data: bytes) -> _Event | None:
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _failure(event: _Event, data: bytes, spoken: Dialect) -> Failure | None:
    error = event.error
    if isinstance(error, str) and error:
        error = {"message": error}
    if isinstance(error, dict) and error:
        return Failure(_status(error, spoken), data)
    if event.object_ == "error":
        return Failure(_status({"code": event.code, "type": event.type}, spoken), data)
    if event.type == "error":
        told = {"message": event.message, "code": event.code}
        return _wrapped(told, _status(told, spoken))
    if event.type == "response.failed":
        return _failed_response(event.response or _Response(), spoken)
    reason = None if event.meta_info is None else event.meta_info.finish_reason
    if isinstance(reason, dict) and reason.get("type") == "abort" and _code(reason.get("status_code")) is not None:
        told = {"message": reason.get("message"), "type": reason.get("err_type"), "code": reason.get("status_code")}
        return _wrapped(told, _status(told, spoken))
    return None


def _failed_response(response: _Response, spoken: Dialect) -> Failure:
    told = response.error if isinstance(response.error, dict) else {}
    if spoken.fails_before_it_counts and response.usage is None:
        return _wrapped({"message": told.get("message")}, _BAD_REQUEST)
    return _wrapped(told, _status(told, spoken))


def _status(error: Mapping[str, object], spoken: Dialect) -> int:
    """Return the HTTP status that an error object means: its code, or what its code or type is called."""
    code, kind = error.get("code"), error.get("type")
    status = _code(code)
    if status is not None:
        return status
    words = [word.lower() for word in (code, kind) if isinstance(word, str)]
    if not words:
        return spoken.uncoded_status
    return next((_STATUS_OF[word] for word in words if word in _STATUS_OF), _SERVER_ERROR)


def _code(code: object) -> int | None:
    """Return a code that is an HTTP status of an error, as a number or in digits."""
    if isinstance(code, str) and len(code) == len("500") and code.isascii() and code.isdigit():
        code = int(code)
    return code if type(code) is int and _BAD_REQUEST <= code <= _HIGHEST_STATUS else None


def _wrapped(error: Mapping[str, object], status: int) -> Failure:
    """Return a failure whose error object is put into OpenAI's shape."""
    default = "server_error" if status >= _SERVER_ERROR else "invalid_request_error"
    message, kind, code = (error.get(name) for name in ("message", "type", "code"))
    told = {
        "message": message if isinstance(message, str) else "the engine says no more",
        "type": kind if isinstance(kind, str) else default,
        "code": code if isinstance(code, str) else status,
    }
    return Failure(status, msgspec.json.encode({"error": told}))


def _of_choices(choices: list[_Choice]) -> Kind:
    if any(_has_token(choice) for choice in choices):
        return Kind.PART
    reasons = [choice.finish_reason for choice in choices if choice.finish_reason is not None]
    if not reasons:
        return Kind.NOTHING
    return Kind.ABORT if "abort" in reasons or "error" in reasons else Kind.FINISH


def _has_token(choice: _Choice) -> bool:
    parts = [raw for name, raw in (choice.delta or {}).items() if name != "role"]
    return any(_is_told(raw) for raw in (*parts, choice.text, choice.token_ids, choice.logprobs))


def _is_told(raw: Raw | UnsetType) -> bool:
    return not isinstance(raw, UnsetType) and bytes(raw) not in _EMPTY


def _of_type(kind: str) -> Kind:
    if kind in _ENDS:
        return Kind.END
    if kind == "message_delta":
        return Kind.FINISH
    is_lifecycle = kind in _LIFECYCLE or (kind.startswith("response.") and not kind.endswith(".delta"))
    return Kind.NOTHING if is_lifecycle else Kind.PART


def _of_sample(event: _Event, meta: _Meta) -> Kind:
    """Return what a chunk of SGLang's ``/generate`` is: its last one has a token as well."""
    reason = meta.finish_reason
    if isinstance(reason, dict) and reason.get("type") == "abort":
        return Kind.ABORT
    is_empty = reason is None and not _is_told(event.text) and not _is_told(event.output_ids)
    return Kind.NOTHING if is_empty else Kind.PART
