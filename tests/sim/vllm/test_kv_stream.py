"""Connections over which KV would move: nothing stays open when an engine ends, however early it does."""

import asyncio
from typing import Any

from pdrouter.sim.vllm.kv_stream import Answer, Done, KvStream, KvTasks, connect


class Transport(asyncio.Transport):
    """A transport that only knows whether it was ended."""

    is_ended = False

    def abort(self) -> None:
        self.is_ended = True

    def close(self) -> None:
        self.is_ended = True

    def is_closing(self) -> bool:
        return self.is_ended


async def hang(stream: KvStream) -> None:
    """Serve nothing, for ever."""
    await asyncio.Event().wait()


async def test_a_connection_whose_task_never_ran_is_ended() -> None:
    """The engine ends in the turn in which it accepted."""
    tasks, transport = KvTasks(), Transport()
    tasks.server(hang)().connection_made(transport)
    await tasks.shut()
    assert transport.is_ended


async def test_a_connection_that_comes_after_the_end_is_ended() -> None:
    """It was accepted by the kernel before the port was closed."""
    tasks, transport = KvTasks(), Transport()
    await tasks.shut()
    tasks.server(hang)().connection_made(transport)
    assert transport.is_ended


async def test_messages_and_the_end(until: Any) -> None:
    """What comes is told by its kind; another kind, nonsense and the end of the stream are none."""
    seen: list[object] = []

    async def serve(stream: KvStream) -> None:
        seen.append(await stream.receive(Answer))
        stream.send(Done())

    tasks = KvTasks()
    server = await asyncio.get_running_loop().create_server(tasks.server(serve), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for code, kind in (("a", Done), ("b", int)):
        stream = await connect("127.0.0.1", port)
        stream.send(Answer(code))
        assert await stream.receive(kind) == (Done() if kind is Done else None)
        assert await stream.receive(Done) is None
        await stream.close()
    stream = await connect("127.0.0.1", port)
    stream.abort()
    await until(lambda: len(seen) == 3)
    assert seen == [Answer("a"), Answer("b"), None]
    server.close()
    await tasks.shut()
