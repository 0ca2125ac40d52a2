"""A client's HTTP/1.1 connection: from bytes to requests, one after the other, and their replies back in that order.

It stands where uvicorn's own protocol would, without ASGI between, for scope, events and task cost more than all the
rest of a small request (``benchmarks/proxy.py``). Framing is judged by httptools alone; when a request is whole, the
application is called at once, in the same turn of the loop. It knows no paths and no engines.
"""

import asyncio
import time
from collections import deque
from typing import Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser, parse_url
from uvicorn import Config
from uvicorn.server import ServerState

from pdrouter.errors import ClientGone, InvalidRequest, PayloadTooLarge, RouterError
from pdrouter.proxy.client import Client

_MAX_HEAD_BYTES = 262_144
"""Of a request's line and headers (I9); chosen as what one read may bring anyhow."""


class Application(Protocol):
    """Whoever answers requests."""

    max_payload_bytes: int

    def opened(self, client: Client) -> bool:
        """Take note of a request's head; return whether its body will be read."""
        ...

    def __call__(self, client: Client) -> None:
        """Serve a request that is whole, or that has an ``error``; the reply may come later."""
        ...


class Connection(asyncio.Protocol):
    """A client's connection. ``_current`` is being answered; ``_waiting`` came behind it, by pipelining.

    While a whole request waits, no more are read.
    """

    _transport: asyncio.Transport  # there as soon as anything happens

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, object],  # noqa: ARG002
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        # For the life of the connection.
        self.is_full = False
        self._app = cast("Application", config.app)
        self._state = server_state
        self._keep_alive_s: float = config.timeout_keep_alive
        self._loop = _loop or asyncio.get_running_loop()
        self._parser = HttpRequestParser(self)
        self._is_deaf = False
        self._is_draining = False
        self._is_paused = False
        self._lost: asyncio.Event | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._resting_since_s = 0.0
        # For one request.
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._is_in_head = False
        self._incoming: Client | None = None
        self._waiting: deque[Client] = deque()
        self._current: Client | None = None

    # Called by the client's reply.

    def write(self, data: bytes) -> None:
        """Send bytes, unless nobody is there any more."""
        if not self._transport.is_closing():
            self._transport.write(data)

    def replied(self, client: Client) -> None:
        """Go on behind a reply that is whole."""
        self._current = None
        if not client.keeps_alive or self._is_draining:
            self._part(client)
            return
        if self._waiting:
            self._loop.call_soon(self._serve_next)
            return
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        if self._incoming is not None:
            self._invite(self._incoming)
        self._rest()

    def close(self) -> None:
        """Close behind what was written."""
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    # Called by the server.

    def shutdown(self) -> None:
        """Take no more requests; what runs may end, as long as the server waits."""
        if self._current is None and self._incoming is None:
            self._transport.close()
            return
        self._is_draining = True
        for client in (self._current, self._incoming):
            if client is not None and not client.is_started:
                client.keeps_alive = False
        task = self._loop.create_task(self._drain())
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)

    async def _drain(self) -> None:
        lost = self._lost = asyncio.Event()
        try:
            await lost.wait()
        finally:
            self._transport.abort()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self._transport = cast("asyncio.Transport", transport)
        self._state.connections.add(self)  # type: ignore[arg-type]  # of uvicorn's protocols it needs shutdown()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Tell whoever serves a request, or would have."""
        self._state.connections.discard(self)
        self._is_deaf = True
        if self._timer is not None:
            self._timer.cancel()
        if self._lost is not None:
            self._lost.set()
        current, self._current = self._current, None
        if current is not None and current.listener is not None:
            current.listener.client_gone()
        unserved = [*self._waiting, *([] if self._incoming is None else [self._incoming])]
        self._waiting.clear()
        self._incoming = None
        for client in unserved:
            client.error = ClientGone("the client left before its turn")
            self._app(client)

    def data_received(self, data: bytes) -> None:
        """Parse, and serve what is whole."""
        if self._is_deaf:
            return
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:
            self._is_deaf = True  # the request is served as if it hadn't asked for another protocol
        except HttpParserError:
            self._refuse(InvalidRequest("this isn't a valid HTTP/1.1 request"))
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:  # I9
                self._refuse(InvalidRequest(f"the head exceeds {_MAX_HEAD_BYTES} bytes"))
        if self._waiting:
            self._serve_next()
            if self._waiting and not self._is_paused:  # I9
                self._is_paused = True
                self._transport.pause_reading()

    def pause_writing(self) -> None:
        """Take note that the client is behind."""
        self.is_full = True

    def resume_writing(self) -> None:
        """Let the reply go on."""
        self.is_full = False
        if self._current is not None and self._current.listener is not None:
            self._current.listener.client_drained()

    # Called by the parser, inside ``data_received``.

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._is_in_head = True
        self._head_bytes = 0
        self._target = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        """Take the request's target, or a part of it."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header or, behind the body, a trailer, which nobody reads."""
        if self._is_in_head:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Take the head."""
        parser, headers = self._parser, self._headers
        self._headers = []
        self._is_in_head = False
        is_1_1 = parser.get_http_version() == "1.1"
        keeps_alive = is_1_1 and parser.should_keep_alive() and not self._is_draining and not parser.should_upgrade()
        client = self._incoming = Client(
            self,
            parser.get_method(),
            _path(self._target),
            headers,
            time.monotonic(),
            takes_chunks=is_1_1,
            keeps_alive=keeps_alive,
        )
        client.takes_body = self._app.opened(client)
        declared = client.header.get(b"content-length")
        if declared is not None:
            self._check_size(client, int(declared))  # the parser takes nothing but digits
        if b"expect" in client.header:
            client.is_expectant = client.header[b"expect"].lower() == b"100-continue"
            self._invite(client)

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        client = self._incoming
        if client is not None and client.takes_body:
            client.take(body)
            self._check_size(client, client.body_bytes)

    def on_message_complete(self) -> None:
        """Let the request be served when its turn comes."""
        client, self._incoming = self._incoming, None
        if client is not None:
            client.is_whole = True
            self._waiting.append(client)
            if not client.keeps_alive:
                self._is_deaf = True

    # Requests in, one after the other.

    def _serve_next(self) -> None:
        if self._current is None and self._waiting:
            client = self._current = self._waiting.popleft()
            self._app(client)

    def _check_size(self, client: Client, size_bytes: int) -> None:
        limit_bytes = self._app.max_payload_bytes
        if size_bytes > limit_bytes and client.takes_body:  # I9
            self._refuse(PayloadTooLarge(f"the body of {size_bytes} bytes exceeds {limit_bytes} (max_payload_size)"))

    def _refuse(self, error: RouterError) -> None:
        """Let a request be answered with an error when its turn comes, and hear no more."""
        if self._is_deaf:
            return
        client, self._incoming = self._incoming, None
        if client is None:
            client = Client(self, b"", b"", [], time.monotonic(), takes_chunks=False, keeps_alive=False)
        client.error = error
        client.keeps_alive = False
        self._waiting.append(client)
        self._is_deaf = True
        self._is_in_head = False

    def _invite(self, client: Client) -> None:
        """Tell a client that waits for it to send its body; not before its turn."""
        if client.is_expectant and self._current is None and not self._waiting:
            client.is_expectant = False
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    # Between requests.

    def _part(self, client: Client) -> None:
        """Close behind a last reply; from a client that is still sending, so that the reply isn't lost to a reset."""
        self._is_deaf = True
        if client.is_whole or self._transport.is_closing():
            self._transport.close()
        else:
            self._transport.write_eof()
            self._rest()

    def _rest(self) -> None:
        """Close the connection if nothing more comes for a while; the timer is set again only when it has run out."""
        self._resting_since_s = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._keep_alive_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._current is not None or self._incoming is not None or self._waiting or self._is_in_head:
            return
        left_s = self._resting_since_s + self._keep_alive_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._on_timer)
        else:
            self._transport.close()


def _path(target: bytes) -> bytes:
    """Return the path of a request's target, without its query."""
    if target.startswith(b"/"):
        return target.partition(b"?")[0]
    try:
        return parse_url(target).path or b"/"
    except HttpParserError:
        return target
