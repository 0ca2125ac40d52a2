"""Errors to HTTP replies: the one table, in the shape of the API that was asked, which is mostly OpenAI's."""

from collections.abc import Iterable, Mapping
from functools import lru_cache

import msgspec

from pdrouter.core.decision import Decision
from pdrouter.engines.usage import last_number
from pdrouter.errors import MethodNotAllowed, QueueFull, RateLimited, RouterError, Unauthorized, UnsupportedEncoding
from pdrouter.proxy.bodies import Api
from pdrouter.proxy.head import end_to_end
from pdrouter.proxy.pages import AnthropicError, AnthropicFailure, ErrorReply, Failure, ResponsesError

JSON_HEADERS = ((b"content-type", b"application/json"),)
STREAM_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"),)

_NOT_PASSED_ON = frozenset(
    b"connection keep-alive transfer-encoding te trailer upgrade"
    b" proxy-connection proxy-authenticate proxy-authorization x-request-id".split()
)

_OWN = b"x-pdrouter-"
"""How the names of the router's own headers begin: a client must be able to believe them."""

_ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Source: Anthropic's API reference, errors; all others are ``invalid_request_error`` below 500, else ``api_error``."""

_SEQUENCE_NUMBER = b'"sequence_number"'
ANTHROPIC = frozenset((Api.MESSAGES, Api.COUNT_TOKENS))
"""The paths of Anthropic's API, whose errors have its shape."""

_NAMED_EVENTS = frozenset((Api.MESSAGES, Api.RESPONSES))

_SERVER_ERROR = 500
_UNAVAILABLE = 503
_RETRY_AFTER_S = b"1"


def error_body(error: RouterError, path: str = "") -> bytes:
    """Return the body of an error: in Anthropic's shape on its own paths, else in OpenAI's."""
    message = _message(error)
    if path in ANTHROPIC:
        other = "api_error" if error.status >= _SERVER_ERROR else "invalid_request_error"
        failure = AnthropicFailure(_ANTHROPIC_TYPES.get(error.status, other), message, error.code)
        return msgspec.json.encode(AnthropicError("error", failure))
    return msgspec.json.encode(ErrorReply(Failure(message, error.type, error.code, error.param)))


def _message(error: RouterError) -> str:
    """Return what the client of the failed request is told."""
    return f"{error.message}: {error.detail}" if error.detail else error.message


def error_headers(error: RouterError) -> list[tuple[bytes, bytes]]:
    """Return the headers that go with an error."""
    headers = list(JSON_HEADERS)
    if error.status == _UNAVAILABLE:
        headers.append((b"retry-after", _RETRY_AFTER_S))
    if isinstance(error, QueueFull | RateLimited):
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    if isinstance(error, MethodNotAllowed) and error.param:
        headers.append((b"allow", error.param.encode()))
    if isinstance(error, UnsupportedEncoding):
        headers.append((b"accept-encoding", b"identity"))  # RFC 9110, 15.5.16
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))  # RFC 9110, 15.5.2
    return headers


def error_event(error: RouterError, path: str, tail: bytes) -> bytes:
    """Return the event that tells of a failure in a stream that has begun, in the form of its API.

    ``tail`` is the end of the stream so far; events of ``/v1/responses`` are numbered.

    Source: Anthropic's and OpenAI's API references, streaming.
    """
    if path == Api.RESPONSES:
        number = (last_number(_SEQUENCE_NUMBER, tail) or 0) + 1
        body = msgspec.json.encode(ResponsesError("error", error.code, _message(error), error.param, number))
    else:
        body = error_body(error, path)
    name = b"event: error\n" if path in _NAMED_EVENTS else b""
    return name + b"data: " + body + b"\n\n"


def passed_on(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return an engine's headers without those that belong to its connection, and those that are the router's.

    Names come out in lower case; behind the values the parser may have left white space.
    """
    pairs = [(name.lower(), value.rstrip()) for name, value in headers]
    kept = [pair for pair in pairs if _is_passed_on(pair[0])]
    if len(kept) == len(pairs):  # the connection says nothing of itself, as most often
        return kept
    return [pair for pair in end_to_end(pairs, dict(pairs)) if _is_passed_on(pair[0])]


def _is_passed_on(name: bytes) -> bool:
    return name not in _NOT_PASSED_ON and not name.startswith(_OWN)


def unsized(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return headers without the length of a body that will have another."""
    return [pair for pair in headers if pair[0] != b"content-length"]


def own_lines(request_id: str, decision: Decision | None) -> bytes:
    """Return the header lines that the router adds: the request's id and, of a decision, who serves it."""
    lines = b"x-request-id: %b\r\n" % request_id.encode("latin-1", "replace")
    if decision is not None:
        prefill, decode = decision.prefill, decision.decode
        if prefill is not None:
            lines += _place_line("prefill", prefill.endpoint.address, prefill.rank)
        lines += _place_line("decode", decode.endpoint.address, decode.rank)
    return lines


@lru_cache(maxsize=65536)
def _place_line(leg: str, address: str, rank: int | None) -> bytes:
    """Return a header line with address and rank."""
    return f"x-pdrouter-{leg}: {address}; rank={'engine' if rank is None else rank}\r\n".encode()
