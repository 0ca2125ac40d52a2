"""Time limits under one timer, of requests as a whole and of each stage."""

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pdrouter.proxy.deadlines import Deadlines, Sweep, TimeLimits
from tests.lab import CHAT, Asked, ScriptedEngine, always, chat, fault, hang, make_lab, route_to, until

SLOW: dict[str, Any] = {"speed": 2.0}
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def test_whatever_waits_too_long_expires_in_order() -> None:
    """Items expire in the order in which they came, each once, and none that was taken out."""
    expired: list[int] = []
    deadlines = Deadlines(0.05, expired.append)
    for item in range(6):
        deadlines.put(item)
    for item in (0, 3, 5, 7):
        deadlines.take_out(item)
    await until(lambda: len(expired) == 3)
    assert expired == [1, 2, 4]


async def test_never_too_early() -> None:
    """Whatever came later has its whole time, though the timer was set for another."""
    loop = asyncio.get_running_loop()
    expired: dict[str, float] = {}
    deadlines: Deadlines[str] = Deadlines(0.1, lambda item: expired.update({item: loop.time()}))
    deadlines.put("first")
    deadlines.take_out("first")
    await asyncio.sleep(0.06)
    began_s = loop.time()
    deadlines.put("second")
    await until(lambda: "second" in expired)
    assert set(expired) == {"second"}
    assert expired["second"] - began_s >= 0.098


async def test_expiring_may_change_what_waits() -> None:
    """An item that ends others takes them out; one that comes back waits again."""
    expired: list[str] = []

    def expire(item: str) -> None:
        expired.append(item)
        deadlines.take_out("friend")
        if len(expired) == 1:
            deadlines.put("again")

    deadlines = Deadlines(0.02, expire)
    deadlines.put("one")
    deadlines.put("friend")
    await until(lambda: len(expired) == 2)
    assert expired == ["one", "again"]


def pace(seconds: float) -> TimeLimits:
    """Return limits that make a sweep look so often."""
    limits = TimeLimits(60.0, 4 * seconds, 4 * seconds, 4 * seconds, 0.0)
    assert limits.patience_s == seconds
    return limits


class Item:
    """Something that is under way until ``due_s``."""

    def __init__(self, sweep: Sweep["Item"], seconds: float) -> None:
        self.due_s = time.monotonic() + seconds
        self.looks = 0
        self.ended_s = math.nan
        self._sweep = sweep
        sweep.put(self, self.due_s)

    def check_time(self, now_s: float) -> float:
        """End when it is due."""
        self.looks += 1
        if now_s >= self.due_s:
            self.ended_s = now_s
            self._sweep.take_out(self)
        return self.due_s


async def test_a_sweep_is_exact_for_those_that_are_due() -> None:
    """Whoever is due between two looks is looked at then, in whatever order they came; the others wait for the look."""
    sweep: Sweep[Item] = Sweep(lambda: pace(10.0))
    items = [Item(sweep, seconds) for seconds in (0.2, 0.05, 0.1)]
    patient = Item(sweep, 60.0)
    await until(lambda: list(sweep) == [patient])
    assert all(0 <= item.ended_s - item.due_s < 0.05 for item in items)
    await until(lambda: patient.looks > 0)
    await asyncio.sleep(0.05)
    assert patient.looks == 1  # after a second
    sweep.take_out(patient)


async def test_a_sweep_looks_now_and_then() -> None:
    """Also at those that aren't due, at its own pace, and not once all are gone."""
    sweep: Sweep[Item] = Sweep(lambda: pace(0.02))
    item = Item(sweep, 60.0)
    await until(lambda: item.looks >= 3)
    sweep.take_out(item)
    looks = item.looks
    await asyncio.sleep(0.05)
    assert (item.looks, list(sweep)) == (looks, [])
    again = Item(sweep, 60.0)
    await until(lambda: again.looks >= 1)
    sweep.take_out(again)


async def test_a_sweep_is_exact_after_a_first_look() -> None:
    """Whoever is due soon after a look isn't left for the next."""
    sweep: Sweep[Item] = Sweep(lambda: pace(0.5))
    item = Item(sweep, 0.6)
    await until(lambda: not list(sweep))
    assert item.looks == 2
    assert 0 <= item.ended_s - item.due_s < 0.25


@contextlib.contextmanager
def faults_of_the_loop() -> Iterator[list[str]]:
    """Collect what callbacks fail with."""
    told: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, fault: told.append(str(fault["exception"])))
    yield told
    loop.set_exception_handler(None)


async def test_a_look_that_fails_isnt_the_last() -> None:
    """One that can't be looked at costs the others nothing, is looked at again in due time, and is told of."""

    class Broken(Item):
        def check_time(self, now_s: float) -> float:
            looks_s.append(now_s)
            raise ValueError("broken")

    looks_s: list[float] = []
    sweep: Sweep[Item] = Sweep(lambda: pace(0.02))
    with faults_of_the_loop() as told:
        broken, other = Broken(sweep, 0.0), Item(sweep, 60.0)
        await until(lambda: len(looks_s) >= 3 and other.looks >= 3)
        for item in (broken, other):
            sweep.take_out(item)
    assert told[:2] == ["broken"] * 2
    assert looks_s[1] - looks_s[0] >= pace(0.02).patience_s


async def test_an_expiry_that_fails_isnt_the_last() -> None:
    """All others expire nevertheless."""
    expired: list[int] = []

    def expire(item: int) -> None:
        expired.append(item)
        if item % 2:
            raise ValueError(f"broken {item}")

    deadlines = Deadlines(0.02, expire)
    with faults_of_the_loop() as told:
        for item in range(6):
            deadlines.put(item)
        await until(lambda: len(expired) == 6)
    assert told == ["broken 1", "broken 3", "broken 5"]


async def test_many_that_are_due_are_few_looks() -> None:
    """However closely they follow each other."""
    looks = 0

    def counted() -> TimeLimits:
        nonlocal looks
        looks += 1
        return pace(10.0)

    sweep: Sweep[Item] = Sweep(counted)
    for n in range(500):
        Item(sweep, 0.05 + n / 10_000)
    await until(lambda: not list(sweep))
    assert looks <= 20


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_prefill_that_takes_too_long(is_stream: bool) -> None:
    """Is 504 with a code of its own; it is the prefill engine's failure, and both legs are ended."""
    async with make_lab(prefill_timeout_secs=0.2) as lab:
        await fault(lab.prefills[0], "hang")
        reply = await lab.post(CHAT, chat("x", stream=is_stream))
        assert (reply.status, reply.error["code"]) == (504, "prefill_timeout")
        assert lab.prefills[0].url[7:] in reply.error["message"]
        await lab.settled()


async def test_a_decode_that_never_starts() -> None:
    """Is told as such: the prompt was read, the answer didn't begin."""
    async with (
        ScriptedEngine("prefill", {CHAT: always(200, {})}).listen() as prefill,
        ScriptedEngine("decode", {CHAT: hang}).listen() as decode,
        route_to([prefill], [decode], first_token_timeout_secs=0.3) as lab,
    ):
        reply = await lab.post(CHAT, chat("x", stream=True))
        assert (reply.status, reply.error["code"]) == (504, "decode_never_started")
        assert decode.url[7:] in reply.error["message"]
        await until(lambda: lab.is_ledger_zero and lab.is_quiet and bool(decode.asked_for("/abort_request")))


async def test_the_first_token_bounds_the_prefill_too() -> None:
    """Of a stream; without one there is no first token to be seen."""
    async with make_lab(first_token_timeout_secs=0.2, request_timeout_secs=0.5) as lab:
        await fault(lab.decodes[0], "hang")
        streamed, whole = await asyncio.gather(lab.post(CHAT, chat("x", stream=True)), lab.post(CHAT, chat("x")))
        assert (streamed.status, streamed.error["code"]) == (504, "prefill_timeout")
        assert (whole.status, whole.error["code"]) == (504, "upstream_timeout")
        await lab.settled()


async def test_a_regular_engine_that_never_starts() -> None:
    """Is 504 as well; without a stream its first token can't be seen."""
    async with make_lab(0, 0, 1, first_token_timeout_secs=0.2, request_timeout_secs=0.5) as lab:
        await fault(lab.workers[0], "hang")
        streamed, whole = await asyncio.gather(lab.post(CHAT, chat("x", stream=True)), lab.post(CHAT, chat("x")))
        assert (streamed.status, streamed.error["code"]) == (504, "first_token_timeout")
        assert (whole.status, whole.error["code"]) == (504, "upstream_timeout")
        await lab.settled()


async def stall(asked: Asked) -> bytes | None:
    """Begin a stream, and say no more."""
    asked.writer.write(STREAM + b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
    return None


async def test_a_stream_that_stalls() -> None:
    """Ends with an error event that has a code of its own, and without a proper end."""
    async with (
        ScriptedEngine(None, {CHAT: stall}).listen() as engine,
        route_to((), (), [engine], stream_idle_timeout_secs=0.2) as lab,
    ):
        began_s = time.monotonic()
        reply = await lab.post(CHAT, chat("x", stream=True))
        assert 0.2 <= time.monotonic() - began_s < 2.0
        assert (reply.status, reply.is_whole) == (200, False)
        assert json.loads(reply.pieces[-1])["error"]["code"] == "stream_stalled"
        await until(lambda: lab.is_ledger_zero and engine.open_connections <= 2)


async def test_a_stream_that_goes_on() -> None:
    """However long it takes in all, each token gives it time anew."""

    async def trickle(asked: Asked) -> bytes | None:
        asked.writer.write(STREAM)
        for _ in range(12):
            asked.writer.write(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
            await asyncio.sleep(0.1)
        return b"0\r\n\r\n"

    async with (
        ScriptedEngine(None, {CHAT: trickle}).listen() as engine,
        route_to((), (), [engine], stream_idle_timeout_secs=0.5, first_token_timeout_secs=0.5) as lab,
    ):
        reply = await lab.post(CHAT, chat("x", stream=True))
        assert (reply.is_whole, len(reply.pieces)) == (True, 12)


async def test_a_client_that_is_behind_isnt_the_engines_fault() -> None:
    """While a client doesn't read, its engine isn't expected to go on."""

    async def flood(asked: Asked) -> bytes | None:
        asked.writer.write(STREAM)
        for _ in range(2000):
            asked.writer.write(b"%x\r\n%b\r\n" % (len(EVENT) * 100, EVENT * 100))
            await asked.writer.drain()
        return b"0\r\n\r\n"

    async with (
        ScriptedEngine(None, {CHAT: flood}).listen() as engine,
        route_to((), (), [engine], stream_idle_timeout_secs=0.2) as lab,
    ):
        async with await lab.start(CHAT, chat("x", stream=True), receive_bytes=4096) as call:
            await call.head()
            await until(lambda: lab.router.service.clients.counts["write_buffer_full"] > 0)
            await asyncio.sleep(0.8)
            assert len(lab.core.live) == 1
        await until(lambda: lab.is_ledger_zero)


async def test_a_stage_that_failed_is_tried_elsewhere() -> None:
    """Before the answer has begun, another engine may do better; the deadline of all stays."""
    async with make_lab(
        2, 1, prefill_timeout_secs=0.2, disable_retries=False, retry_initial_backoff_ms=1, policy="round_robin"
    ) as lab:
        await fault(lab.prefills[0], "hang")
        for n in range(2):
            reply = await lab.post(CHAT, chat(f"{n}", stream=True))
            assert (reply.status, reply.is_whole) == (200, True)
            assert reply.headers["x-pdrouter-prefill"].startswith(lab.prefills[1].url[7:])
        assert lab.core.decided > 2
        await lab.settled()


async def test_the_clients_own_limit() -> None:
    """Counts if it is the smaller one, to the millisecond, and has a code of its own."""
    async with make_lab(request_timeout_secs=5.0) as lab:
        await fault(lab.decodes[0], "hang")
        began_s = time.monotonic()
        reply = await lab.post(CHAT, chat("x"), {"x-request-timeout-ms": "150"})
        assert 0.15 <= time.monotonic() - began_s < 0.5
        assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
        await lab.settled()


async def test_a_clients_limit_beyond_ours() -> None:
    """Doesn't count."""
    async with make_lab(request_timeout_secs=0.2) as lab:
        await fault(lab.decodes[0], "hang")
        reply = await lab.post(CHAT, chat("x"), {"x-request-timeout-ms": "60000"})
        assert (reply.status, reply.error["code"]) == (504, "upstream_timeout")


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "1e3", "soon", "", "9" * 13, "\u00b2"])
async def test_a_limit_that_is_none(text: str) -> None:
    """Is refused, and nothing is placed."""
    async with make_lab() as lab:
        reply = await lab.post(CHAT, chat("x"), {"x-request-timeout-ms": text})
        assert (reply.status, reply.error["code"]) == (400, "invalid_request")
        assert (lab.core.decided, list(lab.router.service.dispatcher.under_way)) == (0, [])


async def test_nothing_is_looked_after_once_it_is_over() -> None:
    """However it ends."""
    async with make_lab(engine=SLOW) as lab:
        under_way = lab.router.service.dispatcher.under_way
        assert (await lab.post(CHAT, chat("x", 4))).status == 200
        async with await lab.start(CHAT, chat("x", 10_000, stream=True)) as call:
            await call.head()
            assert len(list(under_way)) == 1
        await until(lambda: not list(under_way))
        await lab.settled()


async def test_hanging_engines_are_ended_in_any_case() -> None:
    """Nothing waits longer than the request's time, whatever hangs."""
    async with (
        ScriptedEngine("prefill", {CHAT: hang}).listen() as prefill,
        ScriptedEngine("decode", {CHAT: hang}).listen() as decode,
        route_to([prefill], [decode], request_timeout_secs=0.2) as lab,
    ):
        assert (await lab.post(CHAT, chat("x", stream=True))).error["code"] == "upstream_timeout"
        await until(lambda: lab.is_ledger_zero and lab.is_quiet)
