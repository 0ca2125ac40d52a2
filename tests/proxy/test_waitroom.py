"""Requests that wait in the router: in order, bounded, and gone without a trace."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from tests.lab import CHAT, Lab, Reply, chat, fault, gather, make_lab, mend, until

ONE_AT_A_TIME: dict[str, Any] = {"max_concurrent_requests": 1, "admission": False}


def waiting(lab: Lab) -> int:
    """Return how many wait."""
    entrance = lab.core.entrance
    return 0 if entrance is None else len(entrance.admission)


async def occupy(lab: Lab, stack: AsyncExitStack) -> None:
    """Let one request run until the engine is mended."""
    await fault(lab.decodes[0], "hang", times=1)
    await stack.enter_async_context(await lab.start(CHAT, chat("first")))
    await until(lambda: len(lab.core.live) == 1)


async def queue_up(lab: Lab, number: int, **fields: Any) -> "asyncio.Task[Reply]":
    """Let one more request wait."""
    headers = fields.pop("headers", None)
    task = asyncio.ensure_future(lab.post(CHAT, chat(f"{number}", 2, **fields), headers))
    await until(lambda: waiting(lab) == number)
    return task


def order_of(lab: Lab) -> list[int]:
    """Return the prompts in the order in which the engine got them, by their tokens."""
    return [received.prompt_tokens for received in lab.decodes[0].received]


async def test_they_go_when_there_is_room() -> None:
    """However many come at once, the limit holds, and all are answered."""
    async with make_lab(max_concurrent_requests=3) as lab:
        peak = 0
        tasks = [asyncio.ensure_future(lab.post(CHAT, chat(f"{n}", 3))) for n in range(20)]
        while not all(task.done() for task in tasks):
            peak = max(peak, len(lab.core.live))
            await asyncio.sleep(0)
        assert [task.result().status for task in tasks] == [200] * 20
        assert peak <= 3
        assert lab.router.service.dispatcher.waitroom is not None
        assert lab.router.service.dispatcher.waitroom.counters()["released"] > 0
        await lab.settled()


async def test_priority_goes_first() -> None:
    """By header, or by the body; of equals the one that came first."""
    flags = ONE_AT_A_TIME | {"max_client_priority": 9}
    async with make_lab(engine={"dp_size": 1}, **flags) as lab, AsyncExitStack() as stack:
        await occupy(lab, stack)
        tasks = [
            await queue_up(lab, 1),
            await queue_up(lab, 2, priority=5),
            await queue_up(lab, 3, headers={"x-request-priority": "9"}),
        ]
        await stack.aclose()
        replies = await gather(*tasks)
        assert [reply.status for reply in replies] == [200] * 3
        assert [received.rid for received in lab.decodes[0].received][-3:]
        ends = [reply.headers["x-request-id"] for reply in replies]
        rids = [received.rid for received in lab.decodes[0].received]
        order = sorted(ends, key=lambda name: next(i for i, rid in enumerate(rids) if rid.startswith(name)))
        assert order == [ends[2], ends[1], ends[0]]
        await lab.settled()


async def test_a_full_queue() -> None:
    """The one too many gets 429 and is told when to come again."""
    async with make_lab(queue_size=2, **ONE_AT_A_TIME) as lab, AsyncExitStack() as stack:
        await occupy(lab, stack)
        tasks = [await queue_up(lab, 1), await queue_up(lab, 2)]
        refused = await lab.post(CHAT, chat("three"))
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        await stack.aclose()
        assert [reply.status for reply in await gather(*tasks)] == [200] * 2
        await lab.settled()


async def test_it_waited_too_long() -> None:
    """408, and it takes nobody's place any more."""
    async with make_lab(queue_timeout_secs=0.1, **ONE_AT_A_TIME) as lab, AsyncExitStack() as stack:
        await occupy(lab, stack)
        reply = await lab.post(CHAT, chat("late"))
        assert (reply.status, reply.error["code"]) == (408, "queue_timeout")
        assert waiting(lab) == 0
        await stack.aclose()
        await lab.settled()


async def test_a_client_that_leaves_the_queue() -> None:
    """Its place is free at once; no engine hears of it."""
    async with make_lab(**ONE_AT_A_TIME) as lab, AsyncExitStack() as stack:
        await occupy(lab, stack)
        async with await lab.start(CHAT, chat("gone")):
            await until(lambda: waiting(lab) == 1)
        await until(lambda: waiting(lab) == 0)
        await stack.aclose()
        await lab.settled()
        assert lab.core.decided == 1


async def test_the_deadline_of_a_request_that_waits() -> None:
    """The time in the queue counts."""
    async with make_lab(request_timeout_secs=0.2, **ONE_AT_A_TIME) as lab:
        await fault(lab.decodes[0], "hang")
        first = asyncio.ensure_future(lab.post(CHAT, chat("first")))
        await until(lambda: len(lab.core.live) == 1)
        second = await lab.post(CHAT, chat("second"))
        assert second.status in (408, 504)
        assert (await first).status == 504
        await mend(lab.decodes[0])
        await until(lambda: lab.is_ledger_zero and lab.is_quiet)


async def test_short_ones_overtake_while_all_ranks_are_busy() -> None:
    """With the watermark at nothing, one prompt runs on each rank; the shortest of the others goes next."""
    async with make_lab(engine={"dp_size": 1, "speed": 1.0}, admission_max_queue_secs=0) as lab:
        long = "word " * 12_000
        first = asyncio.ensure_future(lab.post(CHAT, chat(long, 1)))
        await until(lambda: len(lab.core.live) == 1)
        second = asyncio.ensure_future(lab.post(CHAT, chat("b" + long, 1)))
        await until(lambda: waiting(lab) == 1)
        third = asyncio.ensure_future(lab.post(CHAT, chat("short", 1)))
        await until(lambda: waiting(lab) == 2)
        assert [reply.status for reply in await gather(first, second, third)] == [200] * 3
        assert order_of(lab)[1] < order_of(lab)[2]
        await lab.settled()


async def test_off_by_a_setting() -> None:
    """Then nobody ever waits here."""
    async with make_lab(admission=False) as lab:
        assert lab.core.entrance is None
        assert lab.router.service.dispatcher.waitroom is None
        assert (await lab.post(CHAT, chat("x"))).status == 200
