"""A client's connection: where requests end, what is refused, in which order replies go, and when it closes."""

import asyncio
import gc
import json
from collections import Counter
from collections.abc import AsyncIterator
from itertools import product

import pytest
import uvloop

from pdrouter.proxy import connection
from pdrouter.proxy.client import Client
from pdrouter.proxy.flight import Flight
from pdrouter.proxy.legs import PrefillLeg
from pdrouter.upstream.exchange import Exchange
from tests.lab import CHAT, COMPLETIONS, GENERATE, Call, Lab, chat, connect, fault, make_lab, until

IDLE_S = 0.1
SLOW_BODY = b'{"text":"x","sampling_params":{"max_new_tokens":400}}'
BODY = b'{"text":"x","sampling_params":{"max_new_tokens":2}}'


@pytest.fixture
async def lab() -> AsyncIterator[Lab]:
    """One pair, and a small limit for bodies."""
    async with make_lab(max_payload_size=4096) as lab:
        yield lab


async def ended(call: Call) -> None:
    """Wait until the router has closed the connection, and has said no more."""
    async with asyncio.timeout(8):
        assert await call.reader.read() == b""


def asked(lab: Lab) -> int:
    """Return how many requests the engines have had."""
    return sum(len(emulator.received) for emulator in lab.emulators)


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: 4\r\ncontent-length: 5\r\n",
        b"content-length: 4\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: chunked, identity\r\n",
        b"content-length: +4\r\n",
        b"content-length: 4 4\r\n",
        b"content-length: 99999999999999999999999\r\n",
        b"a b: c\r\n",
        b"a: b\rc: d\r\n",
        b"a: \0\r\n",
    ],
)
async def test_heads_of_two_minds(lab: Lab, head: bytes) -> None:
    """A head whose body could end in two places, or that isn't one, is 400, and nothing behind it is served."""
    async with await connect(lab.url) as call:
        smuggled = b"POST /generate HTTP/1.1\r\nhost: lab\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
        call.writer.write(b"POST /generate HTTP/1.1\r\nhost: lab\r\n" + head + b"\r\n0\r\n\r\n" + smuggled)
        reply = await call.finish()
        assert (reply.status, reply.error["code"], reply.headers["connection"]) == (400, "invalid_http", "close")
        await ended(call)
    assert asked(lab) == 0
    assert "pdrouter_requests_in_flight 0.0" in (await lab.get("/metrics")).body.decode()


async def test_what_isnt_http(lab: Lab) -> None:
    """Bytes of another protocol are 400, and the connection closes."""
    for junk in (
        b"\x16\x03\x01\x02\0\x01\0",
        b"hello\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ):
        async with await connect(lab.url) as call:
            call.writer.write(junk)
            assert (await call.finish()).status == 400
            await ended(call)


async def test_a_bad_request_behind_good_ones(lab: Lab) -> None:
    """Requests before a bad one are answered first and whole, then the bad one, and no more."""
    async with await connect(lab.url) as call:
        for _ in range(2):
            call.send("POST", GENERATE, BODY, {})
        call.writer.write(b"nonsense\r\n\r\n")
        call.send("POST", GENERATE, BODY, {})
        assert [(await call.finish()).status for _ in range(3)] == [200, 200, 400]
        await ended(call)
    await lab.settled()
    assert asked(lab) == 4


async def test_trailers_are_no_headers(lab: Lab) -> None:
    """What comes behind a chunked body can't name a request, a rank, or the size of the next body."""
    async with await connect(lab.url) as call:
        for _ in range(2):
            call.writer.write(
                b"POST /generate HTTP/1.1\r\nhost: lab\r\nx-request-id: true\r\ntransfer-encoding: chunked\r\n\r\n"
                b"%x\r\n%b\r\n0\r\nx-request-id: false\r\nx-data-parallel-rank: 9\r\n\r\n" % (len(BODY), BODY)
            )
            reply = await call.finish()
            assert (reply.status, reply.headers["x-request-id"]) == (200, "true")


@pytest.mark.parametrize("cut_after", [1, 25, 60, 100, 140])
async def test_requests_in_pieces(lab: Lab, cut_after: int) -> None:
    """Wherever the network cuts a request, it is the same request."""
    raw = b"POST /generate?x=1 HTTP/1.1\r\nhost: lab\r\nx-request-id: mine\r\ncontent-length: %d\r\n\r\n%b" % (
        len(BODY),
        BODY,
    )
    async with await connect(lab.url) as call:
        for start in range(0, len(raw), cut_after):
            call.writer.write(raw[start : start + cut_after])
            await call.writer.drain()
            await asyncio.sleep(0)
        reply = await call.finish()
        assert (reply.status, reply.headers["x-request-id"]) == (200, "mine")


async def test_absolute_targets(lab: Lab) -> None:
    """A target with scheme and host is the same as its path."""
    async with await connect(lab.url) as call:
        for method, target, status in (
            ("GET", "http://lab/health", 200),
            ("GET", "http://lab:80/health?x=1", 200),
            ("GET", "http://lab", 404),
            ("POST", f"http://lab{GENERATE}", 200),
            ("OPTIONS", "*", 404),
        ):
            call.send(method, target, BODY if method == "POST" else b"", {})
            assert (await call.finish()).status == status, target


@pytest.mark.invariant("I9")
async def test_many_pipelined_requests_wait_in_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests are written at once, the router reads on only when those it has are answered."""
    most = 0
    take_in = connection.Connection.data_received

    def data_received(self: connection.Connection, data: bytes) -> None:
        nonlocal most
        take_in(self, data)
        most = max(most, len(self._waiting))

    monkeypatch.setattr(connection.Connection, "data_received", data_received)
    async with make_lab(engine={"speed": 200.0}) as lab, await connect(lab.url) as call:
        filler, total = {"x-filler": "x" * 8000}, 400
        for _ in range(total):
            call.send("GET", "/nothing", b"", filler)
        call.send("POST", GENERATE, BODY, filler)
        for _ in range(total):
            call.send("GET", "/nothing", b"", filler)
        served = [(await call.finish()).status for _ in range(2 * total + 1)]
        assert served == [*[404] * total, 200, *[404] * total]
        assert most < total / 4


@pytest.mark.invariant("I9")
def test_a_fast_sender_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that comes as fast as it is read takes one read in each turn of the loop, so that others have theirs."""
    turn, reads, size = 0, Counter[int](), 32 << 20
    take_in = connection.Connection.data_received

    def data_received(self: connection.Connection, data: bytes) -> None:
        reads[turn] += 1
        take_in(self, data)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def send() -> int:
        async with make_lab(max_payload_size=size) as lab, await connect(lab.url) as call:
            counting = asyncio.create_task(count_turns())
            call.send("POST", GENERATE, b"x" * size, {})
            status = (await call.finish()).status
            counting.cancel()
            return status

    monkeypatch.setattr(connection.Connection, "data_received", data_received)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(send()) == 400
    assert reads.total() > 50
    assert max(reads[turn] for turn in reads if turn) == 1


@pytest.mark.parametrize("cut_after", [7, 10_000])
async def test_an_offer_of_another_protocol(lab: Lab, cut_after: int) -> None:
    """A client that would rather speak HTTP/2 or WebSocket is served in HTTP/1.1, body and all, and may go on."""
    framings = (
        b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY),
        b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
    )
    async with await connect(lab.url) as call:
        for number, (offer, framing) in enumerate(product((b"h2c", b"websocket"), framings)):
            raw = (
                b"POST /generate HTTP/1.1\r\nhost: lab\r\nx-request-id: %d\r\nconnection: Upgrade, HTTP2-Settings\r\n"
                b"upgrade: %b\r\nhttp2-settings: AAMAAABk\r\n%b"
                b"GET /health HTTP/1.1\r\nhost: lab\r\nconnection: upgrade\r\nupgrade: %b\r\n\r\n"
            ) % (number, offer, framing, offer)
            for start in range(0, len(raw), cut_after):
                call.writer.write(raw[start : start + cut_after])
                await call.writer.drain()
                await asyncio.sleep(0)
            reply = await call.finish()
            assert (reply.status, reply.headers["x-request-id"]) == (200, str(number))
            assert (await call.finish()).body == b"OK"


async def test_a_tunnel_is_refused(lab: Lab) -> None:
    """CONNECT opens nothing, and what comes behind it isn't read."""
    for target in (b"lab:443", b"/generate"):
        async with await connect(lab.url) as call:
            call.writer.write(
                b"CONNECT %b HTTP/1.1\r\nhost: lab\r\n\r\nGET /health HTTP/1.1\r\nhost: lab\r\n\r\n" % target
            )
            reply = await call.finish()
            assert (reply.status, reply.error["code"]) == (501, "not_implemented")
            await ended(call)


async def test_nothing_is_served_behind_a_close(lab: Lab) -> None:
    """After ``Connection: close`` no more requests are read."""
    async with await connect(lab.url) as call:
        call.send("POST", GENERATE, BODY, {"connection": "close"})
        call.send("POST", GENERATE, BODY, {})
        assert (await call.finish()).headers["connection"] == "close"
        await ended(call)
    await lab.settled()
    assert asked(lab) == 2


async def test_an_invitation_waits_for_its_turn(lab: Lab) -> None:
    """100 Continue to a pipelined request comes behind the reply before it, never inside."""
    async with await connect(lab.url) as call:
        call.send("POST", COMPLETIONS, b'{"prompt":"x","max_tokens":40,"stream":true}', {})
        call.send("POST", GENERATE, b"", {"expect": "100-continue", "content-length": str(len(BODY))}, framing=False)
        assert len((await call.finish()).events) >= 40
        assert await call.head() == 100
        call.status = 0
        call.writer.write(BODY)
        assert (await call.finish()).status == 200


async def test_idle_connections_are_closed() -> None:
    """A connection that has been idle for long is closed; one that is used goes on."""
    async with (
        make_lab(engine={"speed": 20.0}, client_idle_timeout_secs=IDLE_S) as lab,
        await connect(lab.url) as call,
    ):
        for _ in range(3):
            call.send("POST", GENERATE, SLOW_BODY, {})
            began_s = asyncio.get_running_loop().time()
            assert (await call.finish()).status == 200
            assert asyncio.get_running_loop().time() - began_s > IDLE_S
        await ended(call)


async def test_a_pipelined_client_leaves() -> None:
    """When its client leaves, what waits behind a running request is dropped and counted out."""
    async with make_lab(engine={"speed": 2.0}) as lab:
        async with await connect(lab.url) as call:
            call.send("POST", CHAT, json.dumps(chat("x", 20_000, stream=True)).encode(), {})
            for _ in range(3):
                call.send("POST", CHAT, json.dumps(chat("x")).encode(), {})
            call.send("POST", CHAT, b"{", {"content-length": "100"}, framing=False)
            assert await call.head() == 200
        await lab.settled()
        text = (await lab.get("/metrics")).body.decode()
        assert "pdrouter_requests_in_flight 0.0" in text
        assert lab.core.decided == 1


async def test_requests_leave_no_cycles(lab: Lab) -> None:
    """What a request was made of is freed when it ends, without the garbage collector."""

    def left() -> int:
        return sum(type(item) in (Client, Flight, Exchange, PrefillLeg) for item in gc.get_objects())

    async def ask() -> None:
        for is_stream in (False, True):
            assert (await lab.post(CHAT, chat("x", stream=is_stream))).status == 200
        assert (await lab.post(GENERATE, {"text": "x", "stream": True, "return_logprob": True})).status == 200
        await fault(lab.prefills[0], "status", times=1, status=400)
        assert (await lab.post(CHAT, chat("x"))).status == 400
        await lab.settled()

    await ask()
    gc.disable()
    try:
        before = left()
        for _ in range(5):
            await ask()
        await until(lambda: left() <= before)
    finally:
        gc.enable()
