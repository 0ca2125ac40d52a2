"""When a client's connection is read: not while requests of it wait, and one buffer in each turn of the loop."""

import asyncio

_FULL_READ_BYTES = 256_000
"""What uvloop reads at most at once (0.23, UV_STREAM_RECV_BUF_SIZE); it reads up to 32 times in a turn of the loop."""


class Throttle:
    """Pauses and resumes reading. ``is_paused``: until ``resume``, whatever else would read on."""

    __slots__ = ("_loop", "_transport", "is_paused")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self.is_paused = False

    def pause(self) -> None:
        """Read no more."""
        self.is_paused = True
        self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        self.is_paused = False
        self._transport.resume_reading()

    def count(self, read_bytes: int) -> None:
        """Take note of a read: a fast sender, who fills the buffer, must not keep the others waiting (I9)."""
        if read_bytes >= _FULL_READ_BYTES:
            self._transport.pause_reading()
            self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        if not (self.is_paused or self._transport.is_closing()):
            self._transport.resume_reading()
