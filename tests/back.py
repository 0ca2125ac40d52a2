"""An engine's connection without a network: bytes that it says, and what an exchange makes of them."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from pdrouter.errors import RouterError
from pdrouter.upstream.connection import Connection
from pdrouter.upstream.exchange import Exchange, Headers


class Keeper:
    """Keeps what it is told to, and repeats nothing."""

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self.kept: list[Connection] = []

    def repeat(self, exchange: Exchange, request: object) -> Any:
        """Fail: nothing here may be sent twice."""
        raise AssertionError

    def keep(self, connection: Connection) -> bool:
        """Take a connection that can be used again, or refuse."""
        if self._keeps:
            self.kept.append(connection)
        return self._keeps

    def forget(self, connection: Connection) -> None:
        """Take note of nothing."""


class Transport(asyncio.Transport):
    """Takes whatever is written."""

    def __init__(self) -> None:
        super().__init__()
        self.is_paused = False

    def write(self, data: Any) -> None:
        """Drop it."""

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        """Drop them."""

    def abort(self) -> None:
        """End."""

    close = abort

    def get_write_buffer_size(self) -> int:
        """Nothing waits."""
        return 0

    def pause_reading(self) -> None:
        """Take note."""
        self.is_paused = True

    def resume_reading(self) -> None:
        """Take note."""
        self.is_paused = False


class Engine:
    """An engine on one connection."""

    def __init__(self, most_bytes: int, *, keeps: bool) -> None:
        self.keeper: Any = Keeper(keeps=keeps)
        self.transport = Transport()
        self.exchange: Exchange | None = None
        self.connection = Connection(
            self.keeper, "engine:1", idle_timeout_s=1.0, read_buffer_bytes=most_bytes, max_header_bytes=most_bytes
        )
        self.connection.connection_made(self.transport)

    def ask(self, request: tuple[bytes | memoryview, ...]) -> Exchange:
        """Send it a request."""
        exchange = self.exchange = Exchange(self.keeper, (), 0.0)
        self.connection.start(exchange, request)
        return exchange

    def say(self, piece: bytes) -> None:
        """Let bytes arrive, as many at once as the connection takes, if anybody listens."""
        while piece and not self.connection.is_closed:
            buffer = self.connection.get_buffer(len(piece))
            taken = min(len(buffer), len(piece))
            buffer[:taken] = piece[:taken]
            self.connection.buffer_updated(taken)
            piece = piece[taken:]

    def close(self) -> None:
        """Say no more."""
        if not self.connection.is_closed:
            self.connection.eof_received()


class Heard(NamedTuple):
    """What an exchange came to: ``code`` is that of its failure, ``is_kept`` whether its connection can go on."""

    status: int
    body: bytes
    is_whole: bool
    code: str
    headers: Headers
    is_kept: bool


def heard(pieces: Sequence[bytes], most_bytes: int, *, keeps: bool = False) -> Heard:
    """Return what an exchange makes of these pieces, and of the end behind them unless it keeps its connection."""

    async def run() -> Heard:
        engine = Engine(most_bytes, keeps=keeps)
        body: list[bytes] = []
        codes: list[str] = []
        exchange = Exchange(engine.keeper, (), 0.0)
        exchange.listen(_reading(exchange, body, codes))
        engine.connection.start(exchange, (b"GET / HTTP/1.1\r\n\r\n",))
        for piece in pieces:
            engine.say(piece)
        is_kept = not engine.connection.is_closed and engine.connection.is_idle
        if not is_kept:
            engine.close()
        await asyncio.sleep(0)
        assert exchange.is_complete or codes
        return Heard(
            exchange.status, b"".join(body), exchange.is_complete, "".join(codes[:1]), exchange.headers, is_kept
        )

    return asyncio.run(run())


def _reading(exchange: Exchange, body: list[bytes], codes: list[str]) -> Callable[[], None]:
    """Return a listener that reads once each time it is called, as the relay does."""

    def arrived() -> None:
        try:
            body.append(exchange.read_nowait() or b"")
        except RouterError as error:
            codes.append(error.code)

    return arrived
