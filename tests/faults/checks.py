"""What holds around every fault: others are right, and nothing is left behind."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Mapping
from typing import Any

from pdrouter.proxy.answer import Answer
from pdrouter.proxy.client import Client
from pdrouter.proxy.connection import Connection as ClientConnection
from pdrouter.proxy.flight import Flight
from pdrouter.proxy.legs import PrefillLeg
from pdrouter.proxy.relay import Observer
from pdrouter.proxy.samples import SampleClient, Samples
from pdrouter.sim.emulator import expected_text, render_chat
from pdrouter.upstream.connection import Connection
from pdrouter.upstream.exchange import Exchange
from tests.lab import CHAT, Lab, Reply, chat, gather, until

NEIGHBOURS = 8
VLLM: Mapping[str, Any] = {"engine": "vllm", "kv_connector": "nixl", "kv_hold_timeout_s": 120.0}
"""Emulators that run their legs in turn; KV that a failed decode didn't fetch is let go within seconds."""

OF_A_REQUEST = (
    Flight,
    PrefillLeg,
    Answer,
    Observer,
    Exchange,
    Client,
    ClientConnection,
    Connection,
    Samples,
    SampleClient,
)
"""What a request is made of; it goes when the request does."""

_NOT_OF_REQUESTS = ("Supervisor", "Saboteur", "_pump")


def is_right(reply: Reply, text: str, tokens: int) -> bool:
    """Tell whether a chat was answered well and whole."""
    if not reply.is_whole:
        return False
    expected = expected_text(render_chat([{"role": "user", "content": text}]), tokens)
    if reply.headers["content-type"] == "application/json":
        return bool(reply.json()["choices"][0]["message"]["content"] == expected)
    said = "".join(e["choices"][0]["delta"].get("content") or "" for e in reply.events if e["choices"])
    return said == expected


async def neighbours(lab: Lab) -> None:
    """Run eight requests at once, half of them streamed, and check every answer."""
    asked = [(f"neighbour {i}", 40, bool(i % 2)) for i in range(NEIGHBOURS)]
    replies = await gather(*(lab.post(CHAT, chat(text, tokens, stream=s)) for text, tokens, s in asked))
    for reply, (text, tokens, _) in zip(replies, asked, strict=True):
        assert reply.status == 200, reply.body
        assert is_right(reply, text, tokens), reply.body


@contextlib.asynccontextmanager
async def nothing_left(lab: Lab, within_s: float = 4.0) -> AsyncIterator[None]:
    """Check that no load, task, connection in use, work at an engine or object of a request is left behind."""
    await neighbours(lab)
    await lab.settled()
    gc.collect()
    tasks, parts = _tasks(), objects()
    yield
    await lab.settled(within_s)
    await until(lambda: not _tasks() - tasks, within_s)
    async with asyncio.timeout(within_s):
        while objects() > parts:
            await asyncio.sleep(0.02)
            gc.collect()


def _tasks() -> set[str]:
    """Return the names of coroutines that tasks of the router run, as often as they run."""
    counted: dict[str, int] = {}
    for task in asyncio.all_tasks():
        name = getattr(task.get_coro(), "__qualname__", "?")
        if not name.startswith(_NOT_OF_REQUESTS):
            counted[name] = counted.get(name, 0) + 1
    return {f"{name} {i}" for name, count in counted.items() for i in range(count)}


def objects() -> int:
    """Return how many parts of requests are in memory, without the connections that are kept."""
    found = [thing for thing in gc.get_objects() if type(thing) in OF_A_REQUEST]
    return sum(not (isinstance(thing, Connection) and thing.is_idle) for thing in found)
