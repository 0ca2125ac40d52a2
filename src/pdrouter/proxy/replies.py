"""Errors to HTTP replies: the one table, in OpenAI's shape."""

from collections.abc import Iterable

import msgspec

from pdrouter.errors import MethodNotAllowed, RouterError

JSON_HEADERS = ((b"content-type", b"application/json"),)

_NOT_PASSED_ON = frozenset(
    b"connection keep-alive transfer-encoding te trailer upgrade"
    b" proxy-connection proxy-authenticate proxy-authorization x-request-id".split()
)

_UNAVAILABLE = 503
_RETRY_AFTER_S = b"1"


def error_body(error: RouterError) -> bytes:
    """Return the OpenAI-shaped body of an error."""
    return msgspec.json.encode(
        {"error": {"message": error.message, "type": error.type, "code": error.code, "param": error.param}}
    )


def error_headers(error: RouterError) -> list[tuple[bytes, bytes]]:
    """Return the headers that go with an error."""
    headers = list(JSON_HEADERS)
    if error.status == _UNAVAILABLE:
        headers.append((b"retry-after", _RETRY_AFTER_S))
    if isinstance(error, MethodNotAllowed) and error.param:
        headers.append((b"allow", error.param.encode()))
    return headers


def error_event(error: RouterError) -> bytes:
    """Return the event that tells of a failure in a stream that has begun."""
    return b"data: " + error_body(error) + b"\n\n"


def passed_on(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return an engine's headers without those that belong to its connection, and without its request id.

    Names come out in lower case; behind the values the parser may have left white space.
    """
    return [(low, value.rstrip()) for name, value in headers if (low := name.lower()) not in _NOT_PASSED_ON]
