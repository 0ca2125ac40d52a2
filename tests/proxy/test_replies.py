"""Failures as replies, in OpenAI's shape; and an engine's headers on their way to the client."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrouter import errors
from pdrouter.errors import RouterError
from pdrouter.proxy.replies import error_body, error_event, error_headers, passed_on

CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, RouterError)]


def make(kind: type[RouterError], message: str, param: str | None) -> RouterError:
    """Make an error; those that tell when to come again have no parameter to name."""
    if issubclass(kind, errors.QueueFull | errors.RateLimited):
        return kind(message, retry_after_s=7)
    return kind(message, param=param)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("param", [None, "messages"])
def test_every_failure_has_openais_shape(kind: type[RouterError], param: str | None) -> None:
    """One object with message, type, code and param, whatever failed."""
    error = make(kind, 'it\'s "broken"\r\n\u4f60', param)
    assert json.loads(error_body(error)) == {
        "error": {"message": 'it\'s "broken"\r\n\u4f60', "type": kind.type, "code": kind.code, "param": error.param}
    }


@pytest.mark.parametrize("kind", CLASSES)
def test_headers_of_a_failure(kind: type[RouterError]) -> None:
    """JSON; when to come again where waiting helps; and what is allowed."""
    headers = error_headers(make(kind, "x", "GET, HEAD"))
    expected = {b"content-type": b"application/json"}
    if kind.status == 503:
        expected[b"retry-after"] = b"1"
    if kind.status == 429:
        expected[b"retry-after"] = b"7"
    if kind is errors.MethodNotAllowed:
        expected[b"allow"] = b"GET, HEAD"
    assert len(headers) == len(expected)
    assert dict(headers) == expected


def test_headers_are_a_new_list_each_time() -> None:
    """Whoever adds to them adds for itself."""
    error = errors.NoReadyPair("x")
    error_headers(error).append((b"a", b"b"))
    assert (b"a", b"b") not in error_headers(error)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_failure_in_a_stream_is_one_event(message: str) -> None:
    """Whatever its message holds, no line of it ends the event early."""
    event = error_event(errors.UpstreamClosed(message))
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    assert event.count(b"\n") == 2
    assert b"\r" not in event
    assert json.loads(event[6:])["error"]["message"] == message


def test_what_belongs_to_a_connection_stays_there() -> None:
    """Hop-by-hop headers and the engine's request id are dropped; all others pass in order, repeated ones too."""
    ours = [
        (b"connection", b"keep-alive, X-Inner"),
        (b"x-inner", b"1"),
        (b"keep-alive", b"timeout=5"),
        (b"transfer-encoding", b"chunked"),
        (b"te", b"trailers"),
        (b"trailer", b"x-sum"),
        (b"upgrade", b"h2c"),
        (b"proxy-connection", b"close"),
        (b"proxy-authenticate", b"Basic"),
        (b"proxy-authorization", b"Basic eA=="),
        (b"x-request-id", b"the engine's"),
    ]
    theirs = [
        (b"content-type", b"text/event-stream"),
        (b"set-cookie", b"a=1"),
        (b"set-cookie", b"b=2"),
        (b"x-worker-id", b"7"),
        (b"content-length", b"12"),
        (b"retry-after", b"3"),
        (b"x-empty", b""),
    ]
    mixed = [pair for pairs in zip(theirs, ours, strict=False) for pair in pairs] + ours[len(theirs) :]
    assert passed_on(mixed) == theirs
    assert passed_on([]) == []
