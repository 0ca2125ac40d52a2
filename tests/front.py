"""A client's connection without a network, a loop or a clock: bytes in, requests served, bytes out.

What it must hold whatever comes in is in ``hold()``; hypothesis and the fuzzer look for bytes that break it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import h11
from uvicorn.server import ServerState

from pdrouter.errors import ClientGone, RouterError
from pdrouter.proxy.client import Client
from pdrouter.proxy.connection import Connection
from pdrouter.proxy.limits import NEVER_S, ClientLimits, Clients

LIMITS = ClientLimits(
    max_payload_bytes=2000,
    max_connections=10,
    max_connections_per_address=None,
    max_head_bytes=4000,
    max_headers=30,
    max_target_bytes=500,
    head_timeout_s=1.0,
    body_timeout_s=1.0,
    body_bytes_per_s=1000,
    idle_timeout_s=1.0,
    write_timeout_s=1.0,
    write_buffer_bytes=65_536,
    write_budget_bytes=1_000_000,
    body_budget_bytes=1_000_000,
)
AN_HOUR_S = 3600.0


class Served(NamedTuple):
    """A request that came through, whole."""

    method: bytes
    path: bytes
    body: bytes


class Transport(asyncio.Transport):
    """Takes whatever is written; where the client is slow, it holds it until ``drain()``."""

    connection: Connection

    def __init__(self, *, is_slow: bool = False) -> None:
        super().__init__()
        self.is_slow = is_slow
        self.written = bytearray()
        self.is_closed = False
        self.is_paused = False
        self.unsent_bytes = 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return where the client is."""
        return ("10.0.0.1", 1) if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """There is no limit."""

    def get_write_buffer_size(self) -> int:
        """Return what a test says."""
        return self.unsent_bytes

    def write(self, data: Any) -> None:
        """Keep it."""
        assert not self.is_closed
        self.written += data
        if self.is_slow:
            was_empty = not self.unsent_bytes
            self.unsent_bytes += len(data)
            if was_empty:
                self.connection.pause_writing()

    def drain(self) -> None:
        """Let the client read all."""
        if self.unsent_bytes and not self.is_closed:
            self.unsent_bytes = 0
            self.connection.resume_writing()

    def write_eof(self) -> None:
        """No more will be written."""

    def pause_reading(self) -> None:
        """Take note."""
        self.is_paused = True

    def resume_reading(self) -> None:
        """Take note."""
        self.is_paused = False

    def is_closing(self) -> bool:
        """Whether it has been closed."""
        return self.is_closed

    def close(self) -> None:
        """Close."""
        self.is_closed = True

    abort = close


class Loop:
    """A clock that stands still, and calls that wait."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.waiting: deque[Callable[[], None]] = deque()

    def time(self) -> float:
        """Return the time."""
        return self.now_s

    def call_soon(self, call: Callable[[], None]) -> None:
        """Put a call off."""
        self.waiting.append(call)

    def run(self) -> None:
        """Make the calls that wait."""
        while self.waiting:
            self.waiting.popleft()()


class App:
    """Takes POST bodies, and answers when it is told to."""

    def __init__(self) -> None:
        self.clients = Clients(LIMITS)
        self.clients._timer = asyncio.TimerHandle(0, print, (), SimpleNamespace(get_debug=bool))  # type: ignore[arg-type]
        self.methods: list[bytes] = []
        self.served: list[Served] = []
        self.refused: list[RouterError] = []
        self.unanswered: deque[Client] = deque()

    def opened(self, client: Client) -> bool:
        """Return whether its body is wanted."""
        return client.method == b"POST"

    def __call__(self, client: Client) -> None:
        """Take note of a request, unless nobody waits for its answer."""
        if isinstance(client.error, ClientGone):
            return
        self.methods.append(client.method)
        if client.error is not None:
            self.refused.append(client.error)
        else:
            self.served.append(Served(client.method, client.path, client.body()))
        self.unanswered.append(client)

    def answer(self) -> None:
        """Answer what has been asked; a POST as a stream every other time."""
        while self.unanswered:
            client = self.unanswered.popleft()
            status = client.error.status if client.error is not None else 200
            if client.method == b"POST" and len(self.served) % 2:
                client.start(status, [])
                client.write(b"in ")
                client.end(b"pieces")
            else:
                client.reply(status, [(b"x", b"y")], b"whole")


class Front:
    """A connection and its application."""

    def __init__(self, *, is_slow: bool = False) -> None:
        self.app = App()
        self.loop = Loop()
        self.transport = Transport(is_slow=is_slow)
        config: Any = SimpleNamespace(app=self.app)
        loop: Any = self.loop
        self.connection = Connection(config, ServerState(), {}, loop)
        self.transport.connection = self.connection
        self.connection.connection_made(self.transport)

    def receive(self, pieces: Iterable[bytes], *, answers_at_once: bool = True) -> None:
        """Let bytes come in, as long as the connection takes any."""
        waiting = deque(pieces)
        while waiting and not self.transport.is_closed:
            if not self.transport.is_paused:
                self.connection.data_received(waiting.popleft())
                self.check_deadline()
            if answers_at_once or self.transport.is_paused:
                self.answer()
                assert not self.is_stuck
        self.answer()

    @property
    def is_open(self) -> bool:
        """Whether it can go on."""
        return not self.transport.is_closed

    @property
    def is_stuck(self) -> bool:
        """Whether it reads nothing more and isn't closed."""
        return self.transport.is_paused and not self.transport.is_closed

    def answer(self) -> None:
        """Answer all that is whole; a client that has answers to read is asked nothing, and gets no other."""
        while self.app.unanswered or self.loop.waiting or (self.transport.unsent_bytes and self.is_open):
            served = len(self.app.methods)
            self.app.answer()
            self.loop.run()
            if self.transport.unsent_bytes:
                assert len(self.app.methods) == served
                self.transport.drain()
        self.check_deadline()

    def check_deadline(self) -> None:
        """Hold that the client's time is limited just while it is the client that must do something."""
        connection = self.connection
        if self.transport.unsent_bytes:
            assert connection.deadline_s < NEVER_S
            return
        is_waiting = bool(self.app.unanswered or self.loop.waiting)
        is_sending = connection._is_in_head or connection._incoming is not None
        if not self.transport.is_closed and (is_sending or not is_waiting):
            is_invited = connection._incoming is None or not connection._incoming.is_expectant
            assert (connection.deadline_s < NEVER_S) == (is_invited and not self.transport.is_paused)
        elif not self.transport.is_closed:
            assert connection.deadline_s == NEVER_S

    def run_out(self) -> None:
        """Let the time run out; then the connection must end, and whatever was begun must have an answer."""
        for _ in range(3):
            self.loop.now_s += AN_HOUR_S
            if self.connection.deadline_s <= self.loop.now_s and not self.transport.is_closed:
                self.connection.expire()
            self.answer()
        assert self.transport.is_closed
        self.connection.connection_lost(None)

    def statuses(self) -> list[int]:
        """Return the statuses of the replies, which another parser must take as they are."""
        reader = h11.Connection(h11.CLIENT)
        reader.receive_data(bytes(self.transport.written))
        reader.receive_data(b"")
        statuses = []
        for method in self.app.methods:
            asked = method.decode() if method in (b"HEAD", b"CONNECT") else "GET"
            reader.send(h11.Request(method=asked, target="/", headers=[("host", "x")]))
            reader.send(h11.EndOfMessage())
            event = reader.next_event()
            while isinstance(event, h11.InformationalResponse):
                event = reader.next_event()
            assert isinstance(event, h11.Response), event
            statuses.append(event.status_code)
            while not isinstance(event, h11.EndOfMessage):
                event = reader.next_event()
                assert isinstance(event, h11.Data | h11.EndOfMessage), event
            if reader.our_state is h11.DONE and reader.their_state is h11.DONE:
                reader.start_next_cycle()
        assert reader.trailing_data[0] == b""
        return statuses


def hold(pieces: Sequence[bytes], *, answers_at_once: bool = True, is_slow: bool = False) -> Front:
    """Send pieces, and hold what must be true of any: no failure, valid replies, an end; and one reading of them."""
    front = Front(is_slow=is_slow)
    front.receive(pieces, answers_at_once=answers_at_once)
    front.run_out()
    assert len(front.statuses()) == len(front.app.methods)
    assert len(front.app.refused) <= 1
    for served, other in zip(front.app.served, other_reading(b"".join(pieces)), strict=False):
        assert served.method == other.method
        assert served.method != b"POST" or served.body == other.body
    return front


def other_reading(raw: bytes) -> list[Served]:
    """Return the requests that another parser sees, up to the first that it doesn't take."""
    reader = h11.Connection(h11.SERVER)
    seen: list[Served] = []
    try:
        reader.receive_data(raw)
        while isinstance(request := reader.next_event(), h11.Request):
            body = b""
            while isinstance(event := reader.next_event(), h11.Data):
                body += event.data
            if not isinstance(event, h11.EndOfMessage):
                break
            seen.append(Served(request.method, request.target, body))
            reader.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
            reader.send(h11.EndOfMessage())
            reader.start_next_cycle()
    except h11.ProtocolError:
        pass
    return seen
