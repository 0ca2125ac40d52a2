"""Clients that leave at each stage, send slowly or read slowly: nothing is left, others are right."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.faults.checks import NEIGHBOURS, VLLM, is_right, neighbours, nothing_left
from tests.lab import CHAT, Call, Lab, chat, connect, fault, make_lab, mute_port, until

pytestmark = [pytest.mark.invariant("I2"), pytest.mark.invariant("I12")]

LONG = 20_000
"""Tokens of an answer that no test waits for."""

STAGES = ("in its head", "in its body", "in prefill", "before the first token", "in mid-stream", "after the end")


@contextlib.asynccontextmanager
async def lab_of(engine: str, **options: Any) -> AsyncIterator[Lab]:
    """Run a router over one pair of such engines."""
    settings = {"speed": 20.0} | options.pop("engine", {})
    if engine == "vllm":
        settings = settings | VLLM | {"kv_hold_timeout_s": 40.0}
        options = {"disaggregation": "always"} | options
    async with make_lab(engine=settings, **options) as lab:
        yield lab


async def go_to(stage: str, lab: Lab, call: Call) -> None:
    """Bring a request to the stage at which its client leaves."""
    body = json.dumps(chat("leaver " * 2000, 3 if stage == "after the end" else LONG, stream=True)).encode()
    if stage == "in its head":
        call.writer.write(b"POST " + CHAT.encode())
        return
    if stage == "in its body":
        call.send("POST", CHAT, body[:-50], {"content-length": str(len(body))}, framing=False)
        return
    silent = (lab.prefills if stage == "in prefill" else lab.decodes)[0]
    if stage in ("in prefill", "before the first token"):
        await fault(silent, "hang", times=1)
    call.send("POST", CHAT, body, {})
    if stage == "in mid-stream":
        await call.head()
        await call.some()
    elif stage == "after the end":
        assert (await call.finish()).pieces[-1] == "[DONE]"
    else:
        await until(lambda: not silent.faults.rules)


def leave_by(way: str, call: Call) -> None:
    """End the connection."""
    if way == "reset":
        raw = call.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        call.writer.transport.abort()
    elif way == "half":
        call.writer.write_eof()
    else:
        call.writer.close()


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("end", ["answered", "left", "one fails", "the router gives up"])
async def test_several_samples(end: str, is_stream: bool) -> None:
    """However a request of three samples ends, all of it is gone."""
    timeout_s = 2 if end == "the router gives up" else 600
    async with lab_of("sglang", request_timeout_secs=timeout_s) as lab, nothing_left(lab):
        if end == "one fails":
            await fault(lab.decodes[0], "status", status=500, times=1)
        tokens = 5 if end == "answered" else LONG
        async with await lab.start(CHAT, chat("several", tokens, n=3, stream=is_stream)) as call:
            if end == "left":
                await until(lambda: lab.decodes[0].snapshot().requests == 3)
                return
            reply = await call.finish()
        statuses = {"answered": {200}, "one fails": {500, 200}, "the router gives up": {504, 200}}
        assert reply.status in statuses[end]
        assert reply.is_whole is (end == "answered" or not is_stream or reply.status != 200)


@pytest.mark.parametrize(
    ("engine", "way"), [("sglang", "close"), ("sglang", "reset"), ("sglang", "half"), ("vllm", "close")]
)
@pytest.mark.parametrize("stage", STAGES)
async def test_a_client_leaves(stage: str, way: str, engine: str) -> None:
    """However and whenever a client leaves, its load, its legs and what it held are gone; eight others are right."""
    async with lab_of(engine) as lab, nothing_left(lab), await connect(lab.url) as call:
        await go_to(stage, lab, call)
        leave_by(way, call)
        await neighbours(lab)
        await lab.settled(within_s=4.0)
        assert not [message for emulator in lab.emulators for message in emulator.snapshot().error_messages]


@contextlib.asynccontextmanager
async def mute_decode(lab: Lab) -> AsyncIterator[None]:
    """Put in the decode engine's place a port that takes no connection and refuses none."""
    (emulator,) = lab.decodes
    lab.decodes = []
    async with mute_port(emulator):
        yield


async def test_a_client_leaves_between_the_legs() -> None:
    """Its prompt was read, and its decode leg is still being connected: nothing is left but KV that is counted."""
    flags = {"disable_health_check": True, "worker_load_check_interval": 60}
    async with lab_of("vllm", **flags) as lab, mute_decode(lab):
        pools = lab.router.service.pools
        decode = next(endpoint for endpoint in lab.core.fleet if endpoint.role == "decode")
        async with await lab.start(CHAT, chat("between", stream=True)):
            await until(lambda: pools.get(decode).statistics().active == 1)
            assert lab.prefills[0].snapshot().held_requests == 1
        await until(lambda: lab.is_ledger_zero and lab.is_quiet, 1.0)
        assert lab.router.service.dispatcher.hand_overs.stranded == 1


@pytest.mark.parametrize("way", ["close", "reset", "half"])
async def test_a_client_leaves_the_queue(way: str) -> None:
    """Whoever waits in the router and leaves takes its place along: no leg was sent, and others have their turn."""
    async with lab_of("sglang", max_concurrent_requests=1) as lab, nothing_left(lab):
        waiting = lab.core.entrance.admission if lab.core.entrance else None
        assert waiting is not None
        async with await lab.start(CHAT, chat("first", LONG, stream=True)) as first:
            await first.some()
            decided = lab.core.decided
            async with await lab.start(CHAT, chat("waits", LONG, stream=True)) as call:
                await until(lambda: len(waiting) == 1)
                leave_by(way, call)
                await until(lambda: not len(waiting) and not waiting.waiting_bytes)
            assert lab.core.decided == decided
            behind = asyncio.ensure_future(lab.post(CHAT, chat("behind", 4, stream=True)))
            await until(lambda: len(waiting) == 1)
        assert is_right(await behind, "behind", 4)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
async def test_slow_senders_and_readers(engine: str) -> None:
    """Clients that send or read a few bytes at a time get the right answer, and others don't wait for them."""
    async with lab_of(engine) as lab, nothing_left(lab):
        done = asyncio.Event()

        async def slow(number: int) -> None:
            text = f"slow {number}"
            body = json.dumps(chat(text, 60, stream=True)).encode()
            async with await connect(lab.url, receive_bytes=2048) as call:
                call.send("POST", CHAT, b"", {"content-length": str(len(body))}, framing=False)
                for start in range(0, len(body), 40):
                    await done.wait()
                    call.writer.write(body[start : start + 40])
                    await asyncio.sleep(0.002)
                await call.head()
                reply = await call.finish()
                assert is_right(reply, text, 60)

        slow_ones = [asyncio.ensure_future(slow(number)) for number in range(NEIGHBOURS)]
        await neighbours(lab)
        assert not any(one.done() for one in slow_ones)
        done.set()
        await asyncio.gather(*slow_ones)
