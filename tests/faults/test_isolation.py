"""A fault stays where it happened: other requests are untouched, and nothing is left behind."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from pdrouter.sim.emulator import Emulator
from tests.faults.checks import NEIGHBOURS, is_right, neighbours, nothing_left
from tests.lab import CHAT, Lab, chat, fault, gather, make_lab, mend, route_to, until

pytestmark = [pytest.mark.invariant("I2"), pytest.mark.invariant("I12")]


FAULTS: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("status", {"status": 400}, (400,)),
    ("status", {"status": 500}, (500,)),
    ("status", {"status": 429}, (429,)),
    ("reset", {}, (502, 200)),
    ("reset", {"after_chunks": 2}, (502, 200)),
    ("half_stream", {"after_chunks": 2}, (502, 200)),
    ("half_stream", {"after_chunks": 0}, (502, 200)),
]


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize(("kind", "fields", "statuses"), FAULTS)
async def test_one_fault_among_neighbours(
    side: str, kind: str, fields: dict[str, Any], statuses: tuple[int, ...]
) -> None:
    """One request meets a fault of its engine while eight others run; they are right, and nothing is left."""
    async with make_lab(engine={"dp_size": 2, "speed": 20.0}) as lab, nothing_left(lab):
        running = asyncio.ensure_future(neighbours(lab))
        await until(lambda: lab.decodes[0].snapshot().total_requests == 2 * NEIGHBOURS)
        await fault(lab.prefills[0] if side == "prefill" else lab.decodes[0], kind, times=1, **fields)
        reply = await lab.post(CHAT, chat("faulty", 50, stream=True))
        assert reply.status in statuses
        if reply.status == 200:  # told in the stream; or met by nobody: sent again, or the prefill's answer was over
            assert is_right(reply, "faulty", 50) or "[DONE]" not in reply.pieces
        await running


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("leaves_when", ["at_once", "silent", "running"])
async def test_a_client_that_leaves_among_neighbours(side: str, leaves_when: str) -> None:
    """One client leaves, at any moment, while eight others run; they are right, and nothing is left."""
    async with make_lab(engine={"dp_size": 2, "speed": 20.0}) as lab, nothing_left(lab):
        running = asyncio.ensure_future(neighbours(lab))
        await until(lambda: lab.decodes[0].snapshot().total_requests == 2 * NEIGHBOURS)
        if leaves_when == "silent":
            await fault(lab.prefills[0] if side == "prefill" else lab.decodes[0], "hang", times=1)
        async with await lab.start(CHAT, chat("leaver", 100_000, stream=True)) as call:
            if leaves_when == "running":
                await call.head()
                await call.some()
            elif leaves_when == "silent":
                await until(lambda: len(lab.core.live) > NEIGHBOURS or running.done())
        await running


async def _die(lab: Lab, side: str) -> Emulator:
    emulator = (lab.prefills if side == "prefill" else lab.decodes)[0]
    await emulator.stop()
    return emulator


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_an_engine_dies(side: str) -> None:
    """When one of two engines of a role dies, its requests fail at once, the other's are right, and it is taken out."""
    flags: dict[str, Any] = {"health_failure_threshold": 1, "policy": "round_robin"}
    async with make_lab(2, 2, engine={"speed": 1.0}, **flags) as lab:
        calls = [await lab.start(CHAT, chat(f"dying {i}", 60, stream=True)) for i in range(NEIGHBOURS)]
        await until(lambda: sum(len(e.received) for e in lab.decodes) == NEIGHBOURS)
        dead = await _die(lab, side)
        lab.prefills = [e for e in lab.prefills if e is not dead]
        lab.decodes = [e for e in lab.decodes if e is not dead]
        replies = [await call.finish() for call in calls]
        for number, reply in enumerate(replies):
            leg = reply.headers.get(f"x-pdrouter-{side}", "")
            if leg.startswith(dead.url[7:]):
                continue  # it may have been past the dead engine, or not
            assert reply.status == 502 or is_right(reply, f"dying {number}", 60), reply.body
        assert sum(r.status == 200 and is_right(r, f"dying {i}", 60) for i, r in enumerate(replies)) >= 4
        for call in calls:
            await call.leave()
        await lab.settled()
        await until(lambda: not lab.core.fleet.is_ready(dead.url[7:]))
        await neighbours(lab)
        await lab.settled()


async def test_many_faults_in_a_row() -> None:
    """A hundred requests, a third of them faulty, leave no load, no task and no connection behind."""
    async with make_lab(2, 2, engine={"speed": 100.0}) as lab, nothing_left(lab):
        for emulator, kind in zip(lab.emulators, ("status", "reset", "half_stream", "hang"), strict=True):
            await fault(emulator, kind, times=8, after_chunks=1 if kind == "half_stream" else None)

        async def one(number: int) -> None:
            async with await lab.start(CHAT, chat(f"many {number}", 10, stream=bool(number % 2))) as call:
                with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError):
                    async with asyncio.timeout(1.0):
                        await call.finish()

        await asyncio.gather(*(one(number) for number in range(100)))
        for emulator in lab.emulators:
            await mend(emulator)


async def test_many_clients_leave() -> None:
    """Clients that leave at all moments leave no load, no task, no busy connection and no error at an engine."""
    async with make_lab(2, 2, engine={"speed": 20.0}) as lab, nothing_left(lab):

        async def leave(number: int) -> None:
            async with await lab.start(CHAT, chat(f"leave {number}", 500, stream=bool(number % 2))):
                await asyncio.sleep(0.002 * (number % 50))

        for _ in range(2):
            await asyncio.gather(*(leave(number) for number in range(100)))
        await lab.settled(within_s=2.0)
        assert not [m for emulator in lab.emulators for m in emulator.snapshot().error_messages]


async def test_a_full_pool() -> None:
    """Requests beyond an engine's connection limit are 503 with a code, and cost the others nothing."""
    async with make_lab(upstream_max_connections=2, engine={"speed": 2.0}) as lab:
        calls = [await lab.start(CHAT, chat(f"fill {i}", 10_000, stream=True)) for i in range(2)]
        for call in calls:
            assert await call.head() == 200
        reply = await lab.post(CHAT, chat("one more"))
        assert (reply.status, reply.error["code"]) == (503, "connection_limit")
        await until(lambda: len(lab.core.live) == 2)
        for call in calls:
            await call.some()
            await call.leave()
        await lab.settled()
        assert (await lab.post(CHAT, chat("now there is room"))).status == 200


@pytest.mark.invariant("I3")
async def test_no_upstream_byte_without_a_reservation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever a request is written to an engine, a reservation for it is live."""
    async with make_lab(2, 2, engine={"speed": 50.0}) as lab:
        pools = lab.router.service.pools
        unreserved: list[bytes] = []
        sends = 0
        for endpoint in lab.core.fleet:
            pool = pools.get(endpoint)
            account = lab.core.load.endpoints[endpoint.address].ranks

            def watched(send: Callable[..., Any], ranks: list[Any] = account) -> Callable[..., Any]:
                def call(head: bytes, *body: bytes) -> Any:
                    nonlocal sends
                    if head.startswith(b"POST /v1/"):
                        sends += 1
                        if not any(rank.account.requests for rank in ranks):
                            unreserved.append(head)
                    return send(head, *body)

                return call

            monkeypatch.setattr(pool, "send", watched(pool.send))
            monkeypatch.setattr(pool, "start", watched(pool.start))
        await fault(lab.decodes[0], "reset", times=2)
        await gather(*(lab.post(CHAT, chat(f"watched {i}", 5, stream=bool(i % 2))) for i in range(20)))
        assert sends >= 40
        assert not unreserved
        await lab.settled()


async def test_cancelled_by_shutdown() -> None:
    """Streams that outlast the grace period are cut, and their load and legs end with them."""
    async with make_lab(engine={"speed": 2.0}) as engines:
        async with route_to(engines.prefills, engines.decodes) as lab:
            calls = [await lab.start(CHAT, chat(f"cut {i}", 10_000, stream=True)) for i in range(3)]
            for call in calls:
                await call.head()
            core = lab.core
        assert not core.live
        core.validate()
        await until(lambda: engines.are_engines_idle, 2.0)
        for call in calls:
            assert not (await call.finish()).is_whole
            await call.leave()
