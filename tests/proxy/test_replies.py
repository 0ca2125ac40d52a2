"""Failures as replies, in OpenAI's shape; and an engine's headers on their way to the client."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrouter import errors
from pdrouter.errors import RouterError
from pdrouter.proxy.bodies import Api
from pdrouter.proxy.replies import ANTHROPIC, error_body, error_event, error_headers, passed_on
from tests.lab import CHAT, Script, ScriptedEngine, always, chat, fault, make_lab, route_to

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
    """JSON, and what HTTP says goes with the status: when to retry, what is allowed, how to authenticate."""
    headers = error_headers(make(kind, "x", "GET, HEAD"))
    expected = {b"content-type": b"application/json"}
    if kind.status == 503:
        expected[b"retry-after"] = b"1"
    if kind.status == 429:
        expected[b"retry-after"] = b"7"
    if kind is errors.MethodNotAllowed:
        expected[b"allow"] = b"GET, HEAD"
    if kind is errors.Unauthorized:
        expected[b"www-authenticate"] = b"Bearer"
    if kind is errors.UnsupportedEncoding:
        expected[b"accept-encoding"] = b"identity"
    assert len(headers) == len(expected)
    assert dict(headers) == expected


def test_headers_are_a_new_list_each_time() -> None:
    """Whoever adds to them adds for itself."""
    error = errors.NoReadyPair("x")
    error_headers(error).append((b"a", b"b"))
    assert (b"a", b"b") not in error_headers(error)


@pytest.mark.parametrize("kind", CLASSES)
def test_anthropics_path_has_anthropics_shape(kind: type[RouterError]) -> None:
    """Its type is one that Anthropic's API has for such a status; our code is kept beside it."""
    body = json.loads(error_body(make(kind, "x", None), "/v1/messages"))
    expected = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
    expected |= {408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error"}
    expected |= {500: "api_error", 502: "api_error", 503: "overloaded_error", 504: "timeout_error"}
    other = "invalid_request_error" if kind.status < 500 else "api_error"
    error_type = expected.get(kind.status, other)
    assert body == {"type": "error", "error": {"type": error_type, "message": "x", "code": kind.code}}


@given(st.text(st.characters(exclude_categories=["Cs"])), st.sampled_from(Api))
def test_a_failure_in_a_stream_is_one_event(message: str, path: Api) -> None:
    """Whatever its message holds, no line of it ends the event early; where events have names, so has this."""
    event = error_event(errors.UpstreamClosed(message), path, b'data: {"sequence_number":6,"n":1}\n\n')
    name, data, body = event.partition(b"data: ")
    assert (name, data) == (b"event: error\n" if path in (Api.MESSAGES, Api.RESPONSES) else b"", b"data: ")
    assert body.endswith(b"}\n\n")
    assert body.count(b"\n") == 2
    assert b"\r" not in event
    told = json.loads(body)
    if path is Api.RESPONSES:
        assert told == {"type": "error", "code": "upstream_closed", "message": message, "param": None} | {
            "sequence_number": 7
        }
    else:
        assert told == json.loads(error_body(errors.UpstreamClosed(message), path))
        assert told["error"]["message"] == message


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
        (b"X-PDRouter-Decode", b"evil:1; rank=0"),
    ]
    theirs = [
        (b"content-type", b"text/event-stream"),
        (b"set-cookie", b"a=1"),
        (b"set-cookie", b"b=2"),
        (b"x-worker-id", b"7"),
        (b"content-length", b"12"),
        (b"retry-after", b"3"),
        (b"x-empty", b""),
        (b"x-pdrouters", b""),
    ]
    mixed = [pair for pairs in zip(theirs, ours, strict=False) for pair in pairs] + ours[len(theirs) :]
    assert passed_on(mixed) == theirs
    assert passed_on([]) == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (Api.MESSAGES, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 500}),
        (Api.RESPONSES, {"input": "x", "max_output_tokens": 500}),
    ],
)
async def test_a_stream_that_breaks_is_told_in_its_own_form(path: Api, body: dict[str, object]) -> None:
    """The last event has the name and the shape that clients of this API know; behind it there is no proper end."""
    async with make_lab(0, 0, 1, engine={"engine": "vllm"}) as lab:
        await fault(lab.workers[0], "reset", path, after_chunks=2)
        reply = await lab.post(path, {"model": "emulated", "stream": True, **body})
        assert (reply.status, reply.is_whole) == (200, False)
        name, told = reply.body.decode().strip().rsplit("\n\n", 1)[1].split("\ndata: ")
        told = json.loads(told)
        assert (name, told["type"]) == ("event: error", "error")
        assert told.get("code", told.get("error", {}).get("code")) == "upstream_closed"
        assert ("error" in told) is (path is Api.MESSAGES)
        await lab.settled()


async def test_an_error_before_the_answer_is_told_in_its_own_form() -> None:
    """Anthropic's clients get Anthropic's shape, whoever else OpenAI's."""
    async with route_to(waits=False) as lab:
        for path in Api:
            reply = await lab.post(path, {})
            kind = reply.json().get("type")
            assert (reply.status >= 400, kind) == (True, "error" if path in ANTHROPIC else None)


SECRET = "my password is swordfish"


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    "script",
    [
        always(500, {"error": {"message": SECRET, "code": 500}}),
        always(400, {"error": {"message": SECRET, "code": 400}}),
        always(200, {"error": {"message": SECRET, "code": 500}}),
        always(503, SECRET.encode(), f"x-reason: {SECRET}"),
    ],
)
async def test_an_engines_words_stay_with_the_request(script: Script, *, is_stream: bool) -> None:
    """An error may echo the prompt: the request's own client reads it, and no page has it afterwards."""
    async with (
        ScriptedEngine(None, {CHAT: script}).listen() as engine,
        route_to((), (), [engine], cb_failure_threshold=1, healthy_panic_threshold=0, retry_max_retries=1) as lab,
    ):
        reply = await lab.post(CHAT, chat(SECRET, stream=is_stream), {"x-request-id": "mine"})
        assert SECRET in reply.body.decode()
        other = await lab.post(CHAT, chat("another"), {"x-request-id": "other"})
        pages = ("/debug/story/mine", "/debug/fleet", "/workers", "/readiness", "/metrics", "/get_loads")
        for page in [other, *[await lab.get(page) for page in pages]]:
            if other.status == 503 or page is not other:
                assert SECRET not in page.body.decode()
