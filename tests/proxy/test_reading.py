"""Long bodies are read in threads: with the same result, in order, and without harm if the client leaves or errs."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pdrouter.config import Settings
from pdrouter.core.request import RequestFacts
from pdrouter.engines.base import Inbound
from pdrouter.options import intake_options
from pdrouter.proxy import intake as intake_module
from pdrouter.proxy.bodies import Api
from pdrouter.proxy.dispatch import Dispatcher
from pdrouter.proxy.reading import MAX_INLINE_OBJECTS, read_body, takes_long
from pdrouter.server import running
from tests.lab import CHAT, COMPLETIONS, Lab, chat, connect, get, make_lab, make_settings, start, until

OPTIONS = intake_options(Settings()).reading


class Gate:
    """Holds up the threads that read, until it is opened."""

    def __init__(self) -> None:
        self.reached = 0
        self._opened = threading.Event()

    def open(self) -> None:
        """Let all go on."""
        self._opened.set()

    def read(self, *args: Any) -> Any:
        """Read a body once the gate is open."""
        self.reached += 1
        assert self._opened.wait(10)
        return read_body(*args)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Put a gate before the reading."""
    gate = Gate()
    monkeypatch.setattr(intake_module, "read_body", gate.read)
    yield gate
    gate.open()


def in_threads(**flags: Any) -> Any:
    """Return a lab whose router reads every body in a thread."""
    return make_lab(0, 0, 1, body_inline_bytes=0, **flags)


def counted(lab: Lab) -> dict[str, int]:
    """Return what was read in threads."""
    return dict(lab.router.service.intake.counters())


def test_what_takes_long() -> None:
    """A long body, and one of many objects; braces in a short one don't matter."""
    most = OPTIONS.inline_bytes
    assert not takes_long(b"x" * most, OPTIONS)
    assert takes_long(b"x" * (most + 1), OPTIONS)
    assert not takes_long(b"{}" * MAX_INLINE_OBJECTS, OPTIONS)
    assert takes_long(b"{}" * (MAX_INLINE_OBJECTS + 1), OPTIONS)


async def test_the_request_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in the loop or in a thread: the same is known of it."""
    started: list[object] = []
    dispatch = Dispatcher.start

    def start_it(self: Dispatcher, facts: RequestFacts, inbound: Inbound, *args: Any) -> None:
        started.append((facts, inbound))
        dispatch(self, facts, inbound, *args)

    monkeypatch.setattr(Dispatcher, "start", start_it)
    bodies = ((CHAT, chat("x " * 500)), (COMPLETIONS, {"model": "emulated", "prompt": ["a", "b"], "max_tokens": 1}))
    for inline_bytes in (0, OPTIONS.inline_bytes):
        async with make_lab(0, 0, 1, body_inline_bytes=inline_bytes) as lab:
            for path, body in bodies:
                assert (await lab.post(path, body, {"x-request-id": "same"})).status == 200
            assert bool(counted(lab)) == (inline_bytes == 0)
    assert started[:2] == started[2:]


async def test_what_is_wrong_with_it_is_told() -> None:
    """A client's mistake is 400 as ever, and whatever else happens is 500 and no more."""
    async with in_threads() as lab:
        for body, code in ((b"{", "invalid_json"), (b'{"messages":[]}', "invalid_request")):
            reply = await lab.post(CHAT, body)
            assert (reply.status, reply.error["code"]) == (400, code)
        assert (await lab.post(CHAT, chat("x"))).status == 200
        await lab.settled()


async def test_a_failure_of_the_reading_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told as such, by its type alone."""

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(intake_module, "read_body", fail)
    async with in_threads() as lab:
        reply = await lab.post(CHAT, chat("x"))
        assert (reply.status, reply.error["message"]) == (500, "internal error: MemoryError")


async def test_the_loop_runs_on(gate: Gate) -> None:
    """While a body is read others are served; then its own request is."""
    async with in_threads() as lab, await lab.start(CHAT, chat("x")) as call:
        await until(lambda: gate.reached == 1)
        assert (await lab.get("/health")).status == 200
        gate.open()
        assert (await call.finish()).status == 200


async def test_requests_of_one_connection_stay_in_order(gate: Gate) -> None:
    """What came behind waits, and is answered behind."""
    async with in_threads() as lab, await connect(lab.url) as call:
        call.send("POST", CHAT, json.dumps(chat("x")).encode(), {"x-request-id": "one"})
        call.send("GET", "/health", b"", {})
        call.send("POST", CHAT, json.dumps(chat("x")).encode(), {"x-request-id": "three"})
        await until(lambda: gate.reached == 1)
        gate.open()
        replies = [await call.finish() for _ in range(3)]
        assert [reply.status for reply in replies] == [200] * 3
        assert [reply.headers.get("x-request-id") for reply in replies] == ["one", None, "three"]


async def test_a_client_that_leaves(gate: Gate) -> None:
    """Its request is over, read or not, and nothing is placed for it."""
    async with in_threads() as lab:
        calls = [await lab.start(CHAT, chat("x")) for _ in range(4)]  # two are being read, two wait
        await until(lambda: gate.reached == 2)
        for call in calls:
            await call.leave()
        await until(lambda: lab.router.service.metrics.in_flight == 0)
        gate.open()
        assert (await lab.post(CHAT, chat("x"))).status == 200
        assert lab.core.decided == 1
        await lab.settled()


async def test_time_goes_on(gate: Gate) -> None:
    """A client's own limit counts from the head on."""
    async with in_threads() as lab:
        async with await lab.start(CHAT, chat("x"), headers={"x-request-timeout-ms": "50"}) as call:
            await until(lambda: gate.reached == 1)
            await asyncio.sleep(0.06)
            gate.open()
            reply = await call.finish()
            assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
        await lab.settled()


@pytest.mark.invariant("I9")
async def test_too_many(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit a long body is turned away at once, and counted."""
    monkeypatch.setattr(intake_module, "_MAX_WAITING", 3)
    async with in_threads() as lab:
        calls = [await lab.start(CHAT, chat("x")) for _ in range(3)]
        await until(lambda: counted(lab).get("read") == 3)
        reply = await lab.post(CHAT, chat("x"))
        assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (429, "queue_full", "1")
        assert counted(lab) == {"read": 3, "refused": 1}
        gate.open()
        for call in calls:
            assert (await call.finish()).status == 200
            await call.leave()
        assert (await lab.post(CHAT, chat("x"))).status == 200


async def test_a_router_that_stops(gate: Gate) -> None:
    """It doesn't wait for a body that is being read."""
    async with running(make_settings({"body_inline_bytes": 0})) as router:
        call = await start(router.url, CHAT, chat("x"))
        await until(lambda: gate.reached == 1)
        assert (await get(router.url, "/health")).status == 200
    await call.leave()


def test_a_body_may_be_read_in_any_thread() -> None:
    """Nothing that it uses is changed."""
    body = json.dumps(chat("x " * 1000)).encode()
    readings: list[object] = []
    threads = [
        threading.Thread(target=lambda: readings.append(read_body(Api.CHAT, [], body, OPTIONS).blocks))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert readings == [readings[0]] * 4
