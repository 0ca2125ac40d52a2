"""Connections between emulated engines over which KV would move: JSON lines, one connection for each transfer.

Who serves has a task for each connection; who is gone is told by the end of the stream.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar

import msgspec

_MAX_LINE_BYTES = 1 << 23
M = TypeVar("M")


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whether KV may move; ``code`` says why it may not."""

    code: str = ""
    message: str = ""


class Done(msgspec.Struct, frozen=True):
    """The KV has arrived, or nobody wants it any more: let it go."""


class KvStream:
    """One side of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, message: msgspec.Struct) -> None:
        """Send; if the other side is gone it is lost."""
        self._writer.write(msgspec.json.encode(message) + b"\n")

    async def receive(self, kind: type[M]) -> M | None:
        """Return the next message, None if there is none or it is of another kind."""
        try:
            line = await self._reader.readline()
            return msgspec.json.decode(line, type=kind) if line else None
        except (OSError, ValueError, msgspec.MsgspecError):
            return None

    async def close(self) -> None:
        """Send what is left, and end."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def abort(self) -> None:
        """End at once."""
        self._writer.transport.abort()


async def connect(host: str, port: int) -> KvStream:
    """Connect. Raises: ``OSError`` or ``OverflowError``."""
    return KvStream(*await asyncio.open_connection(host.strip("[]"), port, limit=_MAX_LINE_BYTES))


class KvTasks:
    """The tasks of one engine's transfers, and the connections that it has accepted."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._streams: set[KvStream] = set()
        self._is_shut = False

    def start(self, work: Coroutine[None, None, None]) -> None:
        """Run beside the engine."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def shut(self) -> None:
        """End all; what is accepted later is ended at once."""
        self._is_shut = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in self._streams:  # their tasks may never have run
            stream.abort()

    def server(self, serve: Callable[[KvStream], Awaitable[None]]) -> Callable[[], asyncio.StreamReaderProtocol]:
        """Return the protocol factory of a port on which ``serve`` handles each connection."""

        async def run(stream: KvStream) -> None:
            try:
                await serve(stream)
                await stream.close()
            finally:
                stream.abort()
                self._streams.discard(stream)

        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            stream = KvStream(reader, writer)
            if self._is_shut:
                stream.abort()
                return
            self._streams.add(stream)
            self.start(run(stream))

        def accept() -> asyncio.StreamReaderProtocol:
            return asyncio.StreamReaderProtocol(asyncio.StreamReader(limit=_MAX_LINE_BYTES), accepted)

        return accept
