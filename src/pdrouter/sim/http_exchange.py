"""One HTTP request of the emulator: body, reply, the caller's going, and the faults that break a reply.

Raw ASGI on uvicorn's protocol; the only place that reaches for a transport.
"""

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

import msgspec

from pdrouter.sim.emulator_settings import EngineError

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveCallable, ASGISendCallable, HTTPScope

    from pdrouter.sim.faults import FaultRule

_JSON = b"application/json"


class Broken(Exception):
    """A fault has ended the connection."""


class Exchange:
    """One request and its reply. ``transport`` finds the connection of this request, ``error_reply`` shapes errors."""

    def __init__(
        self,
        scope: "HTTPScope",
        receive: "ASGIReceiveCallable",
        send: "ASGISendCallable",
        transport: Callable[[], asyncio.Transport | None],
        error_reply: Callable[[str, EngineError], tuple[int, object]],
    ) -> None:
        self.method = scope["method"]
        self.path = scope["path"]
        self.query = parse_qs(scope["query_string"].decode("latin-1"))
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.breaking: FaultRule | None = None
        self.is_started = False
        self._chunks = 0
        self._receive = receive
        self._send = send
        self._transport = transport
        self._error_reply = error_reply

    async def read(self) -> bytes:
        """Whole body."""
        parts = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Broken
            if message["type"] == "http.request":
                parts.append(message.get("body", b""))
                if not message.get("more_body", False):
                    return b"".join(parts)

    async def gone(self) -> None:
        """Return when the caller has closed the connection (or has been answered)."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def reply(self, status: int, body: bytes, content_type: bytes = _JSON) -> None:
        """Answer with a whole body."""
        await self._start(status, [(b"content-type", content_type), (b"content-length", str(len(body)).encode())])
        await self._write(body, more=False)

    async def reply_json(self, status: int, value: object) -> None:
        """Answer with JSON."""
        await self.reply(status, msgspec.json.encode(value))

    async def fail(self, error: EngineError) -> None:
        """Answer with an error object."""
        await self.reply_json(*self._error_reply(self.path, error))

    async def stream(self, chunk: bytes) -> None:
        """Write a piece of an event stream, the head before the first."""
        if not self.is_started:
            await self._start(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
        await self._write(chunk, more=True)

    async def end(self) -> None:
        """End a stream."""
        await self._write(b"", more=False)

    def reset(self) -> None:
        """End the connection with a TCP reset."""
        transport = self._transport()
        if transport is not None:
            raw = transport.get_extra_info("socket")
            if raw is not None:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()
        raise Broken

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.is_started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _write(self, body: bytes, *, more: bool) -> None:
        rule = self.breaking
        if rule is not None and self._chunks >= (rule.after_chunks or 0):
            if rule.kind == "half_stream":
                half = body[: len(body) // 2]
                await self._send({"type": "http.response.body", "body": half, "more_body": True})
                transport = self._transport()
                if transport is not None:
                    transport.close()
                raise Broken
            self.reset()
        self._chunks += 1
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
