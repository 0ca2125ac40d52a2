"""An engine that is right but for the requests that a test spoils: it stands in front of an emulator.

Bytes pass through both ways; a request whose body holds the mark of a fault is answered by the fault's script instead,
byte for byte, and the emulator never sees it.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from typing import Self
from urllib.parse import urlsplit

from pdrouter.sim.emulator import Emulator
from tests.lab import Asked, Script, http

SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"bad "}}]}\n\n'
ENGINES_OWN = b'{"object":"error","message":"out of memory","code":500}'
LINE_BYTES = 1_000_000


class Left(Exception):
    """The connection is over."""


class Saboteur:
    """Listens in front of an emulator. ``scripts`` answer requests by a mark in their body, ``paths`` by path."""

    def __init__(self, emulator: Emulator) -> None:
        self.emulator = emulator
        self.scripts: dict[bytes, Script] = {}
        self.paths: dict[str, Script] = {}
        self.spoilt: list[Asked] = []
        self.url = ""
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def listen(self) -> AsyncIterator[Self]:
        """Listen inside the ``with`` block."""
        server = await asyncio.start_server(self._handle, "127.0.0.1", 0, limit=2**20)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            while self._tasks:
                for task in self._tasks:
                    task.cancel()
                await asyncio.wait(self._tasks)
            await asyncio.sleep(0)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._keep(asyncio.current_task())
        parts = urlsplit(self.emulator.url)
        back: asyncio.Task[None] | None = None
        behind: asyncio.StreamWriter | None = None
        try:
            answers, behind = await asyncio.open_connection(parts.hostname, parts.port)
            back = self._keep(asyncio.get_running_loop().create_task(_pump(answers, writer)))
            while True:
                await self._one(reader, writer, behind)
        except (OSError, asyncio.IncompleteReadError, Left, asyncio.CancelledError):
            pass  # either side has left, or the test is over
        finally:
            if back is not None:
                back.cancel()
            if behind is not None:
                behind.transport.abort()
            writer.transport.abort()

    def _keep(self, task: asyncio.Task[None] | None) -> asyncio.Task[None]:
        """Remember a task until it is done."""
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _one(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, behind: asyncio.StreamWriter
    ) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        method, path, _ = head.split(b"\r\n")[0].decode().split(" ")
        lengths = (line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        body = await reader.readexactly(int(next(lengths, b"0")))
        asked = Asked(method, path.partition("?")[0], head, body, writer)
        script = self._script(asked)
        if script is None:
            behind.write(head + body)
            await behind.drain()
            return
        self.spoilt.append(asked)
        reply = await script(asked)
        if reply is None:
            await reader.read()  # until the caller leaves
            raise Left
        writer.write(reply)
        await writer.drain()

    def _script(self, asked: Asked) -> Script | None:
        if asked.path in self.paths:
            return self.paths[asked.path]
        return next((script for mark, script in self.scripts.items() if mark in asked.body), None)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on what the emulator says, and its end."""
    with contextlib.suppress(OSError, asyncio.CancelledError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()


def chunk(data: bytes) -> bytes:
    """Return a chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def end(asked: Asked, *, resets: bool = False) -> None:
    """Close the connection behind what was written, or reset it. Raises: Left."""
    if resets:
        raw = asked.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        asked.writer.transport.abort()
    else:
        asked.writer.close()
    raise Left


def says(raw: bytes) -> Script:
    """Return a script that says these bytes and goes on."""

    async def script(asked: Asked) -> bytes:
        return raw

    return script


def ends_after(raw: bytes, *, resets: bool = False) -> Script:
    """Return a script that says these bytes and ends the connection."""

    async def script(asked: Asked) -> bytes:
        asked.writer.write(raw)
        await asked.writer.drain()
        end(asked, resets=resets)
        raise AssertionError

    return script


def stalls_after(raw: bytes) -> Script:
    """Return a script that says these bytes and then nothing."""

    async def script(asked: Asked) -> None:
        asked.writer.write(raw)
        await asked.writer.drain()

    return script


def repeats(raw: bytes, piece: bytes) -> Script:
    """Return a script that goes on for ever."""

    async def script(asked: Asked) -> bytes:
        asked.writer.write(raw)
        while True:
            asked.writer.write(piece)
            await asked.writer.drain()

    return script


def late(status: int, after_s: float = 0.05) -> Script:
    """Return a script that answers an error of its own after a while."""

    async def script(asked: Asked) -> bytes:
        await asyncio.sleep(after_s)
        return http(status, ENGINES_OWN, "content-type: application/json")

    return script
