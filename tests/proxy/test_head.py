"""What a client's head may be, over real sockets: a refusal has a status and a code, and then the connection ends."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from pdrouter.proxy.head import end_to_end, path_of
from tests.lab import GENERATE, Lab, ScriptedEngine, connect, http, make_lab, route_to

BODY = b'{"text":"x","sampling_params":{"max_new_tokens":2}}'
SMUGGLED = b"POST /generate HTTP/1.1\r\nhost: lab\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)

GET = b"GET /health HTTP/1.1\r\nhost: lab\r\n"
POST = b"POST /generate HTTP/1.1\r\nhost: lab\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
ONE = b"1\r\nx\r\n0\r\n\r\n"


@pytest.fixture
async def lab() -> AsyncIterator[Lab]:
    """One pair, and small limits for heads."""
    async with make_lab(client_max_head_bytes=2000, client_max_headers=20, client_max_target_bytes=300) as lab:
        yield lab


async def refused(lab: Lab, raw: bytes, status: int, code: str) -> None:
    """Hold that this gets one answer, and that nothing behind it is served or reaches an engine."""
    async with await connect(lab.url) as call:
        call.writer.write(raw + SMUGGLED)
        reply = await call.finish()
        assert (reply.status, reply.error["code"], reply.headers["connection"]) == (status, code, "close"), raw
        assert await call.reader.read() == b""
    assert not any(emulator.received for emulator in lab.emulators)
    text = (await lab.get("/metrics")).body.decode()
    assert f'pdrouter_clients_total{{event="{code}"}}' in text
    assert "pdrouter_requests_in_flight 0.0" in text


BROKEN = {
    "length and chunks": POST + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n" + ONE,
    "chunks and length": POST + b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n" + ONE,
    "one length twice": POST + b"content-length: 1\r\ncontent-length: 1\r\n\r\nx",
    "list of lengths": POST + b"content-length: 1, 1\r\n\r\nx",
    "length in hex": POST + b"content-length: 0x1\r\n\r\nx",
    "length with a sign": POST + b"content-length: +1\r\n\r\nx",
    "length beyond 64 bits": POST + b"content-length: 18446744073709551617\r\n\r\nx",
    "no length in the length": POST + b"content-length:\r\n\r\n",
    "folded header": POST + b"a: b\r\n c\r\n\r\n",
    "folded framing": POST + b"transfer-encoding:\r\n chunked\r\n\r\n" + ONE,
    "fold behind the first line": b"POST /generate HTTP/1.1\r\n host: lab\r\n\r\n",
    "bare LF in the first line": b"POST /generate HTTP/1.1\nhost: lab\r\n\r\n",
    "bare LF between headers": POST + b"a: b\nc: d\r\n\r\n",
    "bare LF at the end": POST + b"a: b\r\n\n",
    "bare CR": POST + b"a: b\rc: d\r\n\r\n",
    "NUL in a value": POST + b"a: b\0c\r\n\r\n",
    "control character in a value": POST + b"a: b\x01c\r\n\r\n",
    "DEL in a value": POST + b"a: b\x7fc\r\n\r\n",
    "NUL in a name": POST + b"a\0: c\r\n\r\n",
    "space in a name": POST + b"a b: c\r\n\r\n",
    "space before the colon": POST + b"transfer-encoding : chunked\r\n\r\n" + ONE,
    "tab before the colon": POST + b"content-length\t: 3\r\n\r\nabc",
    "no name": POST + b": c\r\n\r\n",
    "no colon": POST + b"abc\r\n\r\n",
    "letters beyond ASCII in a name": POST + b"a\xff: c\r\n\r\n",
    "space in the target": b"GET /health /x HTTP/1.1\r\nhost: lab\r\n\r\n",
    "control character in the target": b"GET /hea\x01lth HTTP/1.1\r\nhost: lab\r\n\r\n",
    "no slash in the target": b"GET health HTTP/1.1\r\nhost: lab\r\n\r\n",
    "tab in the first line": b"GET\t/health HTTP/1.1\r\nhost: lab\r\n\r\n",
    "minor version beyond 1": b"GET /health HTTP/1.2\r\nhost: lab\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": GET + b"host: lab\r\n\r\n",
    "chunks in HTTP/1.0": b"POST /generate HTTP/1.0\r\nhost: lab\r\ntransfer-encoding: chunked\r\n\r\n" + ONE,
    "chunk size with 0x": CHUNKED + b"0x1\r\nx\r\n0\r\n\r\n",
    "chunk size with a sign": CHUNKED + b"+1\r\nx\r\n0\r\n\r\n",
    "chunk size beyond 64 bits": CHUNKED + b"fffffffffffffffff\r\nx",
    "chunk size with a space": CHUNKED + b"1 \r\nx\r\n0\r\n\r\n",
    "no chunk size": CHUNKED + b"\r\nx\r\n0\r\n\r\n",
    "LF behind a chunk size": CHUNKED + b"1\nx\r\n0\r\n\r\n",
    "LF behind a chunk": CHUNKED + b"1\r\nx\n0\r\n\r\n",
    "more than the chunk": CHUNKED + b"1\r\nxy\r\n0\r\n\r\n",
    "LF in a chunk extension": CHUNKED + b"1;a\nb\r\nx\r\n0\r\n\r\n",
    "NUL in a chunk extension": CHUNKED + b"1;a\0b\r\nx\r\n0\r\n\r\n",
    "length in a trailer": CHUNKED + b"1\r\nx\r\n0\r\ncontent-length: 7\r\n\r\n",
    "another protocol": b"\x16\x03\x01\x02\0\x01\0\r\n\r\n",
}


@pytest.mark.parametrize("name", BROKEN)
async def test_what_could_be_read_in_two_ways(lab: Lab, name: str) -> None:
    """Bytes that two readers could take differently are 400."""
    await refused(lab, BROKEN[name], 400, "invalid_http")


NOT_SERVED = {
    "unknown method": (b"FOO /health HTTP/1.1\r\nhost: lab\r\n\r\n", 501, "not_implemented"),
    "method in small letters": (b"get /health HTTP/1.1\r\nhost: lab\r\n\r\n", 501, "not_implemented"),
    "method of another world": (b"PROPFIND /health HTTP/1.1\r\nhost: lab\r\n\r\n", 501, "not_implemented"),
    "RTSP": (b"DESCRIBE /health RTSP/1.0\r\n\r\n", 501, "not_implemented"),
    "two codings": (POST + b"transfer-encoding: gzip, chunked\r\n\r\n" + ONE, 501, "not_implemented"),
    "codings in two headers": (
        POST + b"transfer-encoding: identity\r\ntransfer-encoding: chunked\r\n\r\n" + ONE,
        501,
        "not_implemented",
    ),
    "unknown coding": (POST + b"transfer-encoding: xchunked\r\n\r\n" + ONE, 501, "not_implemented"),
    "coding with parameters": (POST + b"transfer-encoding: chunked;q=1\r\n\r\n" + ONE, 501, "not_implemented"),
    "HTTP/0.9": (b"GET /health\r\n\r\n", 505, "http_version_not_supported"),
    "HTTP/2.0": (b"GET /health HTTP/2.0\r\nhost: lab\r\n\r\n", 505, "http_version_not_supported"),
    "unknown expectation": (GET + b"expect: wonders\r\n\r\n", 417, "expectation_failed"),
    "long target": (b"GET /%b HTTP/1.1\r\nhost: lab\r\n\r\n" % (b"x" * 300), 414, "target_too_long"),
    "large head": (GET + b"a: %b\r\n\r\n" % (b"x" * 2000), 431, "head_too_large"),
    "many headers": (GET + b"a: b\r\n" * 20 + b"\r\n", 431, "head_too_large"),
}


@pytest.mark.invariant("I9")
@pytest.mark.parametrize("name", NOT_SERVED)
async def test_what_isnt_served(lab: Lab, name: str) -> None:
    """What is HTTP, but not done here or beyond a limit, is told by a status of its own."""
    await refused(lab, *NOT_SERVED[name])


@pytest.mark.invariant("I9")
@pytest.mark.parametrize(
    ("begin", "more", "code"),
    [
        (b"GET /", b"x" * 64, "target_too_long"),
        (b"GET / HTTP/1.1\r\nhost: lab\r\n", b"a: b\r\n", "head_too_large"),
        (b"GET / HTTP/1.1\r\nhost: lab\r\na: ", b"x" * 64, "head_too_large"),
        (CHUNKED + b"1;", b"a" * 64, "invalid_http"),
        (CHUNKED + b"1\r\nx\r\n0\r\n", b"a: %b\r\n" % (b"x" * 64), "invalid_http"),
        (CHUNKED, b"00001;abcdefgh\r\nx\r\n", "invalid_http"),
    ],
    ids=["target", "headers", "header", "chunk extension", "trailers", "framing"],
)
async def test_what_has_no_end(lab: Lab, begin: bytes, more: bytes, code: str) -> None:
    """What comes in pieces and never ends is refused at its limit, and none of it is kept."""
    async with await connect(lab.url) as call:
        call.writer.write(begin)
        replying = asyncio.ensure_future(call.finish())
        for _ in range(200_000):
            call.writer.write(more)
            await call.writer.drain()
            await asyncio.sleep(0)
            if replying.done():
                break
        reply = await replying
        assert reply.error["code"] == code
        assert await call.reader.read() == b""


@pytest.mark.parametrize(
    "head",
    [
        b"transfer-encoding: Chunked\r\n\r\n",
        b"Transfer-Encoding:chunked\r\n\r\n",
        b"a: \xc3\xa4 \t b\r\ntransfer-encoding: chunked\r\n\r\n",
    ],
)
@pytest.mark.parametrize(
    "body",
    [
        b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
        b'%x;a=b;c="d"\r\n%b\r\n0;x\r\nx-sum: 7\r\n\r\n' % (len(BODY), BODY),
        b"".join(b"000001\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n",
    ],
)
async def test_what_is_unusual_but_right(lab: Lab, head: bytes, body: bytes) -> None:
    """Chunks with extensions, trailers and leading zeros are one body, and the next request is the next request."""
    async with await connect(lab.url) as call:
        for _ in range(2):
            call.writer.write(b"\r\n" + POST + head + body)
            assert (await call.finish()).status == 200


async def test_http_1_0(lab: Lab) -> None:
    """It needs no host, gets no chunks, and has its connection closed, whatever it asks."""
    length = b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)
    stream = b'{"text":"x","stream":true,"sampling_params":{"max_new_tokens":2}}'
    for raw, end in (
        (b"GET /health HTTP/1.0\r\n\r\n", b"OK"),
        (b"GET /health HTTP/1.0\r\nconnection: keep-alive\r\n\r\n", b"OK"),
        (b"POST /generate HTTP/1.0\r\n" + length, b"}"),
        (b"POST /generate HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (len(stream), stream), b"data: [DONE]\n\n"),
        (b"POST /generate HTTP/1.0\r\nexpect: 100-continue\r\n" + length, b"}"),
    ):
        async with await connect(lab.url) as call:
            call.writer.write(raw)
            reply = await call.finish()
            assert (reply.status, reply.headers["connection"]) == (200, "close")
            assert "transfer-encoding" not in reply.headers
            assert reply.body.endswith(end)
            assert await call.reader.read() == b""


async def test_head_and_options(lab: Lab) -> None:
    """HEAD gets what GET does without a body; OPTIONS and others are told what is allowed; the connection goes on."""
    async with await connect(lab.url) as call:
        for method, path, status, allowed in (
            ("HEAD", "/health", 200, None),
            ("HEAD", GENERATE, 405, "POST"),
            ("OPTIONS", GENERATE, 405, "POST"),
            ("DELETE", "/health", 405, "GET, HEAD"),
            ("OPTIONS", "*", 404, None),
            ("GET", "/health", 200, None),
        ):
            call.send(method, path, b"", {})
            await call.head()
            assert (call.status, call.headers.get("allow")) == (status, allowed)
            size = int(call.headers["content-length"])
            assert size
            if method != "HEAD":
                await call.reader.readexactly(size)


async def test_only_known_headers_go_upstream() -> None:
    """An engine sees of a client's headers those that the router knows; not those of a sidecar, nor cookies."""
    lies = {
        "x-override-rid": "1",
        "x-override-bootstrap-host": "evil",
        "x-prefiller-host-port": "evil:1",
        "x-data-parallel-host-port": "evil:1",
        "x-pdrouter-decode": "evil:1",
        "x-vllm-data-parallel-rank": "1",
        "cookie": "a=b",
        "proxy-authorization": "Basic eA==",
        "te": "trailers",
        "keep-alive": "timeout=9",
        "expect": "100-continue",
    }
    told = {"authorization": "Bearer x", "traceparent": "00-1-2-01", "accept": "text/plain"}
    answer = http(200, {"text": "y", "meta_info": {}}, "Connection: x-inner, keep-alive", "X-Inner: 1", "X-Outer: 2")

    async def speak(_: object) -> bytes:
        return answer

    async with (
        ScriptedEngine("prefill", {GENERATE: speak}, {"disaggregation_bootstrap_port": 1}).listen() as prefill,
        ScriptedEngine("decode", {GENERATE: speak}).listen() as decode,
        route_to([prefill], [decode]) as lab,
        await connect(lab.url) as call,
    ):
        named = {"connection": "traceparent, keep-alive", "x-correlation-id": "c"}
        call.send("POST", GENERATE, BODY, lies | told | named)
        assert await call.head() == 100
        reply = await call.finish() if await call.head() == 200 else None
        assert reply is not None
        assert "x-inner" not in reply.headers
        assert reply.headers["x-outer"] == "2"
        for engine in (prefill, decode):
            (asked,) = engine.asked_for(GENERATE)
            seen = {line.partition(":")[0].lower() for line in asked.head.decode().split("\r\n")[1:] if line}
            assert seen >= {"authorization", "accept", "x-correlation-id"}
            assert seen.isdisjoint({*lies, "traceparent", "connection"})


def test_headers_that_a_connection_names() -> None:
    """Whatever Connection names stays there, however it is written; options of its own name nothing."""
    kept = [(b"a", b"1"), (b"b", b"2"), (b"a", b"3")]
    for options in ([], [b"close"], [b"Keep-Alive"], [b"upgrade, keep-alive"], [b""], [b"c , d"]):
        headers = [*kept, *((b"connection", option) for option in options)]
        assert end_to_end(headers, dict(headers)) == headers
    for options in ([b"A"], [b" close ,\ta"], [b"a", b"close"], [b"close", b"x,a,,"]):
        headers = [*kept, *((b"connection", option) for option in options)]
        assert [pair for pair in end_to_end(headers, dict(headers)) if pair[0] != b"connection"] == [(b"b", b"2")]


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"/a/b?c=d", b"/a/b"),
        (b"http://h:80/a?b", b"/a"),
        (b"http://h", b"/"),
        (b"*", b"*"),
        (b"//h/a", b"//h/a"),
        (b"http://[", b"http://["),
    ],
)
def test_paths(target: bytes, path: bytes) -> None:
    """A target's path is what stands before its query, with or without scheme and host."""
    assert path_of(target) == path
