"""A client's HTTP/1.1 connection: from bytes to requests, one after the other, and their replies back in that order.

It stands where uvicorn's own protocol would, without ASGI between, for scope, events and task cost more than all the
rest of a small request (``benchmarks/proxy.py``). Framing is judged by httptools alone, and ``head.py`` refuses what it
is lenient about; when a request is whole, the application is called at once, in the same turn of the loop. It knows no
paths and no engines.
"""

import asyncio
import time
from collections import deque
from typing import Protocol, cast

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn import Config
from uvicorn.server import ServerState

from pdrouter.errors import ClientGone, InvalidHttp, PayloadTooLarge, RouterError, SenderTimeout, TooManyConnections
from pdrouter.proxy import head
from pdrouter.proxy.client import Client
from pdrouter.proxy.limits import NEVER_S, Clients, group_of

_LINGER_S = 2.0
"""Time that a client which is still sending has to read a last reply."""

_FRAMING_BYTES = 16_384
_FRAMING_PER_BODY_BYTE = 8
"""What chunk sizes, chunk extensions and trailers may take together (I9), by far the most for chunks of one byte."""

_AT_ONCE_BYTES = 1024
"""Of pipelined requests no more than this is parsed ahead of their turn (I9): some forty at most; chosen."""

_END_OF_HEAD = b"\r\n\r\n"


class Application(Protocol):
    """Whoever answers requests."""

    clients: Clients

    def opened(self, client: Client) -> bool:
        """Take note of a request's head; return whether its body will be read."""
        ...

    def __call__(self, client: Client) -> None:
        """Serve a request that is whole, or that has an ``error``; the reply may come later."""
        ...


class Connection(asyncio.Protocol):
    """A client's connection. ``_current`` is being answered; ``_waiting`` came behind it, by pipelining.

    While a whole request waits, no more are read. By ``deadline_s`` the client must have sent, or taken, what is next.
    The connection is *behind* while the kernel holds all that it takes for the client: then no more requests are
    parsed or served. It ``is_full`` when ``write_buffer_bytes`` wait here as well: then no more of a reply is written.
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
        self.deadline_s = NEVER_S
        self.unsent_bytes = 0
        self._app = cast("Application", config.app)
        self._clients = self._app.clients
        self._limits = self._clients.limits
        self._state = server_state
        self._loop = _loop or asyncio.get_running_loop()
        self._parser = HttpRequestParser(self)
        self._address = ""
        self._is_behind = False
        self._is_deaf = False
        self._is_draining = False
        self._is_parting = False
        self._is_paused = False
        self._lost: asyncio.Event | None = None
        self._parsed_bytes = 0  # of what is unparsed
        self._piece_bytes = 0
        self._unparsed = b""
        self._untaken_bytes = 0
        # For one request.
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._offer = b""
        self._first_bytes = 0
        self._read_bytes = 0
        self._since_s = 0.0
        self._is_in_head = False
        self._incoming: Client | None = None
        self._waiting: deque[Client] = deque()
        self._current: Client | None = None

    # Called by the client's reply.

    def write(self, data: bytes) -> None:
        """Send bytes, unless nobody is there any more."""
        if self._transport.is_closing():
            return
        if self._is_behind:
            self._untaken_bytes += len(data)
        self._transport.write(data)  # this may call pause_writing(), and that may cut the connection
        if self._is_behind and not self._transport.is_closing():
            self._count_unsent()

    def replied(self, client: Client) -> None:
        """Go on behind a reply that is whole."""
        self._current = None
        if not client.keeps_alive or self._is_draining:
            self._part(client)
            return
        if self._waiting or self._unparsed:
            self._loop.call_soon(self._go_on)
        elif not self._is_behind:
            self._read_on()

    def close(self) -> None:
        """Close behind what was written."""
        self._transport.close()
        self._watch_unsent()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    # Called by the server.

    def shutdown(self) -> None:
        """Take no more requests; what runs may end, as long as the server waits."""
        if self._current is None and self._incoming is None:
            self.close()
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
        """Take the transport, unless there are too many."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(0)  # each byte that the kernel doesn't take is told of
        self._state.connections.add(self)  # type: ignore[arg-type]  # of uvicorn's protocols it needs shutdown()
        self._address = group_of(transport.get_extra_info("peername"))
        try:
            self._clients.join(self, self._address)
        except TooManyConnections as error:
            self._refuse(error)
            self._serve_next()
            if self._clients.are_far_too_many:
                self._transport.abort()
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Tell whoever serves a request, or would have."""
        self._state.connections.discard(self)
        self._clients.leave(self, self._address)
        self._is_deaf = True
        self._unparsed = b""
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
        del self._parser  # no cycle is left for the collector

    def data_received(self, data: bytes) -> None:
        """Parse, and serve what is whole."""
        if self._is_deaf:
            return
        if self._is_behind or len(data) > _AT_ONCE_BYTES:
            self._unparsed, self._parsed_bytes = data, 0
            self._parse_on()
        else:
            self._parse(data)
        if self._waiting:
            self._serve_next()
        if (self._waiting or self._unparsed) and not self._is_paused:  # I9
            self._is_paused = True
            self._transport.pause_reading()
            self._watch()

    def pause_writing(self) -> None:
        """Take note that the client is behind."""
        self._is_behind = True
        self._watch_unsent()
        self._count_unsent()

    def resume_writing(self) -> None:
        """Let the reply go on, or the next request: the client has all that was written."""
        was_full, self.is_full, self._is_behind = self.is_full, False, False
        self._clients.hold_unsent(self, 0)
        self._watch()
        if self._current is None:
            self._go_on()
        elif was_full and self._current.listener is not None:
            self._current.listener.client_drained()

    # Called by the parser, inside ``data_received``; whatever they raise ends the parsing.

    def on_message_begin(self) -> None:
        """Begin a request, unless the last one has been."""
        if self._is_deaf:
            raise InvalidHttp("nothing more is read here")
        self._is_in_head = True
        self._first_bytes = self._piece_bytes
        self._read_bytes = 0
        self._since_s = 0.0
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
        parser, target, headers = self._parser, self._target, self._headers
        method, version = parser.get_method(), parser.get_http_version()
        self._headers = []
        self._is_in_head = False
        self._since_s = 0.0
        if parser.should_upgrade() and method != b"CONNECT":
            self._offer = head.without_offer(method, target, version, headers)
            return
        is_1_1, header = version == "1.1", dict(headers)
        client = self._incoming = Client(
            self,
            method,
            head.path_of(target),
            head.end_to_end(headers, header),
            header,
            time.monotonic(),
            takes_chunks=is_1_1,
            keeps_alive=is_1_1 and parser.should_keep_alive() and not (self._is_draining or self._clients.is_draining),
        )
        if b"?" in target:
            client.query = target.partition(b"?")[2]
        client.takes_body = self._app.opened(client)
        head.check(method, target, version, headers, header, self._limits)
        if self._read_bytes + self._piece_bytes > self._limits.max_head_bytes:
            head.check_size(target, headers, self._limits)
        declared = header.get(b"content-length")
        if declared is not None:
            self._check_size(client, int(declared))  # the parser takes nothing but digits
        if is_1_1 and b"expect" in header:
            client.is_expectant = True
            self._invite(client)

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        client = self._incoming
        if client is not None:
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

    def _parse_on(self) -> None:
        """Parse what has come until a request is whole; the rest waits, for a Client is larger than a small request."""
        data = self._unparsed
        while self._parsed_bytes < len(data) and not (self._waiting or self._is_behind or self._is_deaf):
            start = self._parsed_bytes
            end = self._parsed_bytes = self._end_of_piece(data, start)
            self._parse(memoryview(data)[start:end])
        if self._is_deaf or self._parsed_bytes >= len(data):
            self._unparsed = b""

    def _end_of_piece(self, data: bytes, start: int) -> int:
        """Return up to where to parse at once: a head, a body whose length is known, or not much."""
        client = self._incoming
        if client is not None and b"content-length" in client.header:
            return start + max(int(client.header[b"content-length"]) - client.body_bytes, 1)
        end = start + _AT_ONCE_BYTES
        end_of_head = data.find(_END_OF_HEAD, start, end) if client is None else -1
        return end if end_of_head < 0 else end_of_head + len(_END_OF_HEAD)

    def _parse(self, data: bytes | memoryview) -> None:
        self._piece_bytes = len(data)
        try:
            self._feed(data)
        except HttpParserCallbackError as error:
            if not isinstance(error.__context__, RouterError):
                raise
            self._refuse(error.__context__)
        except HttpParserError as error:
            self._refuse(head.unparsable(error, data))
        if self._is_in_head or self._incoming is not None:
            self._check_pending()
            self._watch()

    def _feed(self, data: bytes | memoryview) -> None:
        """Parse; a request that offers another protocol is parsed anew without the offer, for its body's sake."""
        while True:
            try:
                self._parser.feed_data(data)
            except HttpParserUpgrade as offer:
                end = offer.args[0]
            else:
                return
            data = memoryview(data)[end:]
            self._parser = HttpRequestParser(self)
            self._parser.feed_data(self._offer)

    def _go_on(self) -> None:
        """Serve the next request, which may have to be parsed first, or read on."""
        if self._current is not None or self._is_behind:
            return
        if not self._waiting:
            self._parse_on()
        if self._waiting:
            self._serve_next()
        elif not self._is_deaf:
            self._read_on()

    def _serve_next(self) -> None:
        if self._current is None and self._waiting and not self._is_behind:
            if self._incoming is None and not self._is_in_head:
                self.deadline_s = NEVER_S
            client = self._current = self._waiting.popleft()
            self._app(client)

    def _read_on(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._since_s = 0.0
            self._transport.resume_reading()
        if self._incoming is not None:
            self._invite(self._incoming)
        self._watch()

    def _check_size(self, client: Client, size_bytes: int) -> None:
        limit_bytes = self._limits.max_payload_bytes
        if size_bytes > limit_bytes and client.takes_body:  # I9
            raise PayloadTooLarge(f"the body of {size_bytes} bytes exceeds {limit_bytes} (max_payload_size)")

    def _check_pending(self) -> None:
        """Refuse what comes in pieces and has no end."""
        self._read_bytes += self._piece_bytes
        later_bytes = self._read_bytes - self._first_bytes  # the rest may be of the request before
        client, limits = self._incoming, self._limits
        if self._is_in_head:
            if len(self._target) > limits.max_target_bytes:  # I9
                self._refuse(head.target_too_long(limits))
            elif later_bytes > limits.max_head_bytes:  # I9
                self._refuse(head.head_too_large(limits))
        elif client is not None and b"transfer-encoding" in client.header and client.takes_body:
            most = limits.max_head_bytes + _FRAMING_BYTES + (_FRAMING_PER_BODY_BYTE + 1) * client.body_bytes
            if later_bytes > most:  # I9
                self._refuse(InvalidHttp("the body's chunks are nearly all framing"))

    def _refuse(self, error: RouterError) -> None:
        """Let a request be answered with an error when its turn comes, and hear no more."""
        if self._is_deaf:
            return
        client, self._incoming = self._incoming, None
        if client is None:
            client = Client(self, b"", b"", [], {}, time.monotonic(), takes_chunks=False, keeps_alive=False)
        self._clients.refused(error)
        client.error = error.with_traceback(None)  # or the error and its frames would hold each other
        client.keeps_alive = False
        self._waiting.append(client)
        self._is_deaf = True
        self._is_in_head = False

    def _invite(self, client: Client) -> None:
        """Tell a client that waits for it to send its body; not before its turn."""
        if client.is_expectant and self._current is None and not self._waiting:
            client.is_expectant = False
            self._since_s = 0.0
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    # Time.

    def _watch(self) -> None:
        """Say by when the client must have sent what is next: a head, a body, or another request."""
        if self._is_behind or self._transport.is_closing():
            return
        client, limits = self._incoming, self._limits
        now_s = self._loop.time()
        self._since_s = self._since_s or now_s
        if self._is_parting:
            self.deadline_s = now_s + _LINGER_S
        elif self._is_paused or (client is not None and client.is_expectant):
            self.deadline_s = NEVER_S
        elif self._is_in_head:
            self.deadline_s = self._since_s + limits.head_timeout_s
        elif client is not None:
            self.deadline_s = self._since_s + limits.body_timeout_s + client.body_bytes / limits.body_bytes_per_s
        elif self._current is not None or self._waiting:
            self.deadline_s = NEVER_S
        else:
            self.deadline_s = now_s + limits.idle_timeout_s

    def _watch_unsent(self) -> None:
        """Say by when the client must have taken some of what was written."""
        self._untaken_bytes = self.measure()
        self.deadline_s = self._loop.time() + self._limits.write_timeout_s

    def measure(self) -> int:
        """Return how many bytes wait to be sent."""
        return self._transport.get_write_buffer_size()

    def _count_unsent(self) -> None:
        unsent_bytes = self.measure()
        if unsent_bytes > self._limits.write_buffer_bytes and not self.is_full:  # I9
            self.is_full = True
            self._clients.counts["write_buffer_full"] += 1
        self._clients.hold_unsent(self, unsent_bytes)

    def expire(self) -> None:
        """The client's time is over."""
        self.deadline_s = NEVER_S
        if self._is_behind or self._transport.is_closing():
            if self.measure() < self._untaken_bytes:
                self._watch_unsent()
            else:
                self._clients.counts["write_timeout"] += 1
                self._transport.abort()
        elif self._is_deaf:
            self.close()
        elif self._is_in_head or self._incoming is not None:
            what = "head" if self._is_in_head else "body"
            self._refuse(SenderTimeout(f"the request's {what} didn't come in time (client_{what}_timeout_secs)"))
            self._serve_next()
        else:
            self._clients.counts["idle_timeout"] += 1
            self.close()

    def _part(self, client: Client) -> None:
        """Close behind a last reply; from a client that is still sending, so that the reply isn't lost to a reset."""
        self._is_deaf = True
        self._unparsed = b""
        if client.is_whole or self._transport.is_closing():
            self.close()
        else:
            self._is_parting = True
            self._transport.write_eof()
            self._read_on()
