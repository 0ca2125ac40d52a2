"""The HTTP surface: paths, methods, limits, bad bodies, ids and headers."""

import gzip
from collections.abc import AsyncIterator

import pytest

from pdrouter import __version__
from tests.lab import CHAT, COMPLETIONS, GENERATE, Lab, chat, connect, make_lab, route_to

MAX_BYTES = 4096


@pytest.fixture
async def lab() -> AsyncIterator[Lab]:
    """One pair, and a small limit for bodies."""
    async with make_lab(max_payload_size=MAX_BYTES) as lab:
        yield lab


async def test_pages(lab: Lab) -> None:
    """Each page answers with its kind of content, also to HEAD."""
    for path, content_type in (
        ("/v1/models", "application/json"),
        ("/workers", "application/json"),
        ("/get_loads", "application/json"),
        ("/debug/fleet", "application/json"),
        ("/readiness", "application/json"),
        ("/health", "text/plain"),
        ("/liveness", "text/plain"),
        ("/ping", "text/plain"),
        ("/version", "application/json"),
        ("/health_generate", "application/json"),
        ("/metrics", "text/plain; version=0.0.4; charset=utf-8"),
    ):
        page = await lab.get(path)
        assert (page.status, page.headers["content-type"]) == (200, content_type), path
        assert page.body
        assert (await lab.get(path, "HEAD")).status == 200, path


async def test_unknown_paths(lab: Lab) -> None:
    """A path that isn't there is 404 in OpenAI's shape, whatever the method."""
    for path in ("/", "//", "/v1", "/v1/chat/", "/v1/chat/completions//", "/generate/x", "/nothing?x=1"):
        for reply in (await lab.get(path), await lab.post(path, chat("x"))):
            assert (reply.status, reply.error["code"]) == (404, "not_found")


async def test_a_slash_at_the_end(lab: Lab) -> None:
    """Clients put it behind a path that has none: it is the same path."""
    for path in ("/v1/models/", "/health/?x=1", "/workers/"):
        assert (await lab.get(path)).status == 200, path
    for path in (f"{CHAT}/", f"{CHAT}/?x=1"):
        assert (await lab.post(path, chat("x"))).status == 200
    assert {len(e.received) for e in lab.emulators} == {2}


async def test_the_version(lab: Lab) -> None:
    """The router's own, as vLLM tells its."""
    assert (await lab.get("/version")).json() == {"version": __version__}


@pytest.mark.parametrize("coding", ["gzip", "GZIP", "br", "gzip, identity", "zstd"])
async def test_compressed_bodies(lab: Lab, coding: str) -> None:
    """Nothing can be read of them: 415, on inference paths and the workers API."""
    for path in (CHAT, "/tokenize", "/workers"):
        reply = await lab.post(path, gzip.compress(b"{}"), {"content-encoding": coding})
        assert (reply.status, reply.headers["accept-encoding"]) == (415, "identity")
        assert coding in reply.body.decode()
    for plain in ("", "identity", "Identity"):
        assert (await lab.post(CHAT, chat("x"), {"content-encoding": plain})).status == 200


async def test_wrong_methods(lab: Lab) -> None:
    """A wrong method is 405 and says which are right."""
    for path in (CHAT, COMPLETIONS, GENERATE):
        for method in ("GET", "PUT", "DELETE"):
            reply = await lab.get(path, method)
            assert (reply.status, reply.error["code"], reply.headers["allow"]) == (405, "method_not_allowed", "POST")
    for path in ("/health", "/metrics", "/get_loads", "/v1/models"):
        reply = await lab.post(path, {})
        assert (reply.status, reply.headers["allow"]) == (405, "GET, HEAD")


async def test_query_strings_are_ignored(lab: Lab) -> None:
    """A query string changes neither pages nor inference."""
    assert (await lab.get("/health?verbose=1")).status == 200
    assert (await lab.post(f"{CHAT}?api-version=1", chat("x"))).status == 200


def _of_size(size_bytes: int) -> bytes:
    empty = b'{"prompt":"","max_tokens":2}'
    return b'{"prompt":"%s","max_tokens":2}' % (b"x" * (size_bytes - len(empty)))


async def test_declared_size(lab: Lab) -> None:
    """A body of the limit passes, one byte more is 413."""
    assert (await lab.post(COMPLETIONS, _of_size(MAX_BYTES))).status == 200
    reply = await lab.post(COMPLETIONS, _of_size(MAX_BYTES + 1))
    assert (reply.status, reply.error["code"], reply.headers["connection"]) == (413, "payload_too_large", "close")


@pytest.mark.parametrize(("extra_bytes", "status"), [(0, 200), (1, 413)])
async def test_chunked_size(lab: Lab, extra_bytes: int, status: int) -> None:
    """A chunked body of the limit passes, one byte more is 413."""
    body = _of_size(MAX_BYTES + extra_bytes)
    async with await connect(lab.url) as call:
        head = {"transfer-encoding": "chunked", "content-type": "application/json"}
        call.send("POST", COMPLETIONS, b"", head, framing=False)
        for piece in (body[:1000], body[1000:]):
            call.writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await call.writer.drain()
        call.writer.write(b"0\r\n\r\n")
        assert (await call.finish()).status == status


async def test_413_before_the_body(lab: Lab) -> None:
    """A declared size above the limit is refused before any of the body is sent."""
    async with await connect(lab.url) as call:
        head = {"content-length": str(10**12), "expect": "100-continue"}
        call.send("POST", CHAT, b"", head, framing=False)
        assert (await call.finish()).status == 413


MALFORMED = (
    (CHAT, b"", "invalid_json", None),
    (CHAT, b"{", "invalid_json", None),
    (CHAT, b'{"messages": [}', "invalid_json", None),
    (CHAT, b'{"messages": []} x', "invalid_json", None),
    (CHAT, b'\xff\xfe{"messages":[]}', "invalid_json", None),
    (CHAT, b'{"messages":' + b"[" * 4000, "invalid_request", "messages"),
    (CHAT, b"[]", "invalid_request", None),
    (CHAT, b"null", "invalid_request", None),
    (CHAT, b'"text"', "invalid_request", None),
    (CHAT, b"{}", "invalid_request", "messages"),
    (CHAT, b'{"messages": []}', "invalid_request", "messages"),
    (CHAT, b'{"messages": "hello"}', "invalid_request", "messages"),
    (CHAT, b'{"messages": [1]}', "invalid_request", "messages"),
    (CHAT, b'{"messages": [{"role":"user","content":"x"}], "stream": "maybe"}', "invalid_request", "stream"),
    (CHAT, b'{"messages": [{"role":"user","content":"x"}], "n": 0}', "invalid_request", "n"),
    (CHAT, b'{"messages": [{"role":"user","content":"x"}], "n": "two"}', "invalid_request", "n"),
    (CHAT, b'{"messages": [{"role":"user","content":"x"}], "max_tokens": -1}', "invalid_request", "max_tokens"),
    (CHAT, b'{"messages": [{"role":"user","content":"x"}], "max_tokens": 1%b}' % (b"0" * 400), "invalid_request", None),
    (CHAT, b'{"messages": [{"role":"user","content":"x"}], "model": 1}', "invalid_request", "model"),
    (COMPLETIONS, b"{}", "invalid_request", "prompt"),
    (COMPLETIONS, b'{"prompt": null}', "invalid_request", "prompt"),
    (COMPLETIONS, b'{"prompt": {}}', "invalid_request", "prompt"),
    (COMPLETIONS, b'{"prompt": []}', "invalid_request", "prompt"),
    (GENERATE, b"{}", "invalid_request", "text"),
    (GENERATE, b'{"text": "a", "input_ids": [1]}', "invalid_request", "text"),
    (GENERATE, b'{"text": "a", "sampling_params": 3}', "invalid_request", "sampling_params"),
    (GENERATE, b'{"text":"a","bootstrap_room":1,"bootstrap_room":2}', "duplicate_field", "bootstrap_room"),
    (GENERATE, b'{"text":"a","rid":"1","rid":"2"}', "duplicate_field", "rid"),
    (GENERATE, b'{"text":"a","rid":"1","\\u0072id":"2"}', "duplicate_field", "rid"),
    (GENERATE, b'{"text":"a","routed_dp_rank":"0"}', "invalid_request", "routed_dp_rank"),
    (GENERATE, b'{"text":"a","routed_dp_rank":2}', "invalid_rank", None),
    (GENERATE, b'{"text":"a","data_parallel_rank":-1}', "invalid_rank", None),
    (GENERATE, b'{"text":"a","decode_dp_rank":99999999999999999999}', "invalid_rank", None),
    (GENERATE, b'{"text":"a","x":' + b"[" * 100_000, "invalid_json", None),
    (GENERATE, b'{"text":"a","bootstrap_room":' + b"[" * 100_000, "invalid_json", None),
)


async def test_malformed_bodies() -> None:
    """What can't be understood is 400 with a stable code, and no engine hears of it."""
    async with make_lab() as lab:
        for path, body, code, param in MALFORMED:
            reply = await lab.post(path, body)
            assert (reply.status, reply.error["code"]) == (400, code), (body[:80], reply.body)
            assert reply.error["param"] == param or param is None, (body[:80], reply.body)
            assert reply.error["type"] == "invalid_request_error"
        assert [e.snapshot().total_requests for e in lab.emulators] == [0, 0]
        assert lab.is_ledger_zero


async def test_a_rank_by_header_that_isnt_there(lab: Lab) -> None:
    """A rank asked for by header is honoured if it exists, else 400."""
    for rank, status, code in (("1", 200, None), ("2", 400, "invalid_rank"), ("-1", 400, "invalid_request")):
        reply = await lab.post(CHAT, chat("x"), {"x-data-parallel-rank": rank})
        assert reply.status == status
        assert code is None or reply.error["code"] == code
    assert {e.received[0].rank for e in lab.emulators} == {1}


async def test_request_ids_are_echoed_and_sent_on(lab: Lab) -> None:
    """The client's id comes back and leads the ids at the engines; an error carries it too."""
    for name in ("x-request-id", "x-correlation-id", "x-trace-id", "request-id"):
        reply = await lab.post(CHAT, chat("x"), {name: f"my-{name}"})
        assert reply.headers["x-request-id"] == f"my-{name}"
        assert all(e.received[-1].rid.startswith(f"my-{name}-") for e in lab.emulators)
        assert (await lab.post(CHAT, b"{", {name: "mine-43"})).headers["x-request-id"] == "mine-43"


async def test_made_request_ids(lab: Lab) -> None:
    """Without an id of the client's there is a new one each time, with the prefix of its path."""
    seen = set()
    for path, body, prefix in (
        (CHAT, chat("x"), "chatcmpl-"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 2}, "cmpl-"),
        (GENERATE, {"text": "x", "sampling_params": {"max_new_tokens": 2}}, "gnt-"),
    ):
        for _ in range(2):
            made = (await lab.post(path, body)).headers["x-request-id"]
            assert made.startswith(prefix)
            assert len(made) == len(prefix) + 24
            seen.add(made)
    assert len(seen) == 6


async def test_the_same_request_id_twice_at_once(lab: Lab) -> None:
    """An id is a label: two requests with one id at once are two requests."""
    calls = [await lab.start(CHAT, chat(f"twin {i}"), headers={"x-request-id": "same"}) for i in range(2)]
    assert [(await call.finish()).status for call in calls] == [200, 200]
    for call in calls:
        await call.leave()
    assert len({r.rid for e in lab.emulators for r in e.received}) == 2
    await lab.settled()


async def test_decision_headers(lab: Lab) -> None:
    """The reply says which address and rank read and wrote; it can be switched off."""
    reply = await lab.post(CHAT, chat("x"))
    assert reply.headers["x-pdrouter-prefill"] == f"{lab.prefills[0].url[7:]}; rank={lab.prefills[0].received[0].rank}"
    assert reply.headers["x-pdrouter-decode"] == f"{lab.decodes[0].url[7:]}; rank={lab.decodes[0].received[0].rank}"
    async with route_to(lab.prefills, lab.decodes, decision_headers=False) as silent:
        headers = (await silent.post(CHAT, chat("x"))).headers
        assert not [name for name in headers if name.startswith("x-pdrouter")]
        assert headers["x-request-id"]


async def test_keep_alive(lab: Lab) -> None:
    """One connection serves one request after the other, good and bad."""
    async with await connect(lab.url) as call:
        for path, body, status in ((CHAT, b"{", 400), (CHAT, b'{"messages":[{"content":"x"}],"max_tokens":2}', 200)):
            for _ in range(2):
                call.send("POST", path, body, {})
                assert (await call.finish()).status == status


async def test_pipelined_requests(lab: Lab) -> None:
    """Requests written at once on one connection are answered in their order."""
    async with await connect(lab.url) as call:
        for i in range(4):
            call.send("POST", COMPLETIONS, b'{"prompt":"x","max_tokens":2}', {"x-request-id": f"pipe-{i}"})
        assert [(await call.finish()).headers["x-request-id"] for _ in range(4)] == [f"pipe-{i}" for i in range(4)]
    await lab.settled()


@pytest.mark.parametrize(("method", "path", "status"), [("POST", "/nothing", 404), ("PUT", CHAT, 405)])
async def test_an_unread_body_doesnt_block_its_connection(lab: Lab, method: str, path: str, status: int) -> None:
    """A refusal before a large body was read leaves its connection good for the next request."""
    async with await connect(lab.url) as call:
        call.send(method, path, b"x" * 2_000_000, {})
        assert (await call.finish()).status == status
        call.send("POST", COMPLETIONS, b'{"prompt":"x","max_tokens":2}', {})
        assert (await call.finish()).status == 200


@pytest.mark.parametrize("is_declared", [True, False])
async def test_413_reaches_a_client_that_goes_on_sending(lab: Lab, is_declared: bool) -> None:
    """A client that sends megabytes too much still gets its 413, not a reset."""
    size_bytes = 4_000_000
    async with await connect(lab.url) as call:
        if is_declared:
            call.send("POST", CHAT, b"x" * size_bytes, {})
        else:
            call.send("POST", CHAT, b"", {"transfer-encoding": "chunked"}, framing=False)
            call.writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (size_bytes, b"x" * size_bytes))
        assert (await call.finish()).status == 413


async def test_an_internal_error(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the router's own is a 500 in the same shape, names no secrets, and returns its load."""

    def fail(*args: object) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(lab.router.service.engines["sglang"], "plan", fail)
    reply = await lab.post(CHAT, chat("x"))
    assert (reply.status, reply.error["code"], reply.error["type"]) == (500, "invariant_violation", "server_error")
    assert "secret" not in reply.error["message"]
    monkeypatch.undo()
    assert (await lab.post(CHAT, chat("x"))).status == 200
    await lab.settled()


async def test_metrics_count_requests(lab: Lab) -> None:
    """/metrics counts requests by path and status, failures by code, and shows the load of every rank."""
    await lab.post(CHAT, chat("x"))
    await lab.post(CHAT, b"{")
    await lab.settled()
    text = (await lab.get("/metrics")).body.decode()
    assert f'pdrouter_requests_total{{path="{CHAT}",status="200"}} 1.0' in text
    assert f'pdrouter_requests_total{{path="{CHAT}",status="400"}} 1.0' in text
    assert 'pdrouter_failures_total{code="invalid_json"} 1.0' in text
    assert "pdrouter_requests_in_flight 0.0" in text
    for phase in ("prefilling", "decoding"):
        assert f'pdrouter_requests_live{{phase="{phase}"}} 0.0' in text
    for phase in ("time_to_first_token", "decode", "request_duration"):
        assert f'pdrouter_{phase}_seconds_bucket{{le="+Inf"}}' in text
    address = lab.decodes[0].url[7:]
    assert f'pdrouter_rank_tokens{{endpoint="{address}",rank="1",role="decode",source="ledger"}} 0.0' in text
