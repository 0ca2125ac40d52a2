"""A client's HTTP/1.1 connection: from bytes to requests, one after the other, and their replies back in that order.

It stands where uvicorn's own protocol would, without ASGI between, for scope, events and task cost more than all the
rest of a small request (``benchmarks/proxy.py``). Framing is judged by httptools alone, and ``head.py`` refuses what it
is lenient about; when a request is whole, the application is called at once, in the same turn of the loop. It knows no
paths and no engines.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn import Config
from uvicorn.server import ServerState

from pdrouter.errors import ClientGone, InvalidHttp, PayloadTooLarge, RouterError, SenderTimeout, TooManyConnections
from pdrouter.proxy import head
from pdrouter.proxy.backlog import AT_ONCE_BYTES, Backlog
from pdrouter.proxy.client import Client
from pdrouter.proxy.limits import NEVER_S, Clients, group_of, is_loopback
from pdrouter.proxy.outgoing import Outgoing
from pdrouter.proxy.throttle import Throttle

_LINGER_S = 2.0
"""Time that a client which is still sending has to read a last reply."""


class Application(Protocol):
    """Whoever answers requests."""

    clients: Clients

    def opened(self, client: Client) -> bool:
        """Take note of a request's head; return whether its body will be read.

        Raises: RouterError if the head is enough to refuse it.
        """
        ...

    def __call__(self, client: Client) -> None:
        """Serve a request that is whole, or that has an ``error``; the reply may come later."""
        ...


class Connection(asyncio.Protocol):
    """A client's connection. ``_current`` is being answered; ``_waiting`` came behind it, by pipelining.

    While a whole request waits, no more are read. By ``deadline_s`` the client must have sent, or taken, what is next.
    While its client is behind (``outgoing.py``) nothing more of it is parsed or served.
    """

    _transport: asyncio.Transport  # these four are there as soon as anything happens
    _out: Outgoing
    _throttle: Throttle
    write: Callable[[bytes], None]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, object],  # noqa: ARG002
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        # For the life of the connection.
        self.deadline_s = NEVER_S
        self._app = cast("Application", config.app)
        self._clients = self._app.clients
        self._limits = self._clients.limits
        self._state = server_state
        self._loop = _loop or asyncio.get_running_loop()
        self._parser = HttpRequestParser(self)
        self._address = ""
        self._backlog = Backlog(self._clients.bodies)
        self._is_deaf = False
        self._is_draining = False
        self._is_parting = False
        self._lost: asyncio.Event | None = None
        self._piece_bytes = 0
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

    @property
    def is_local(self) -> bool:
        """Whether the client is on this machine."""
        return is_loopback(self._transport.get_extra_info("peername"))

    @property
    def is_idle(self) -> bool:
        """Whether it is open, and its client has asked nothing."""
        asks = self._current or self._incoming or self._waiting or self._backlog or self._is_in_head
        return not asks and not self._out.is_behind and not self._transport.is_closing()

    @property
    def is_full(self) -> bool:
        """Whether nothing more of a reply should be written now."""
        return self._out.is_full

    def replied(self, client: Client) -> None:
        """Go on behind a reply that is whole."""
        self._current = None
        self._let_go(client)
        if not client.keeps_alive or self._is_draining:
            self._part(client)
            return
        if self._waiting or self._backlog:
            self._loop.call_soon(self._go_on)
        elif not self._out.is_behind:
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
        self._throttle = Throttle(self._transport, self._loop)
        clients, limits = self._clients, self._limits
        self._out = Outgoing(self._transport, limits.write_buffer_bytes, clients.unsent, clients.counts)
        self.write = self._out.write
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
        self._out.clear()
        self._backlog.drop()
        if self._lost is not None:
            self._lost.set()
        current, self._current = self._current, None
        if current is not None:
            self._let_go(current)
        if current is not None and current.listener is not None:
            current.listener.client_gone()
        unserved = [*self._waiting, *([] if self._incoming is None else [self._incoming])]
        self._waiting.clear()
        self._incoming = None
        for client in unserved:
            self._let_go(client)
            client.error = ClientGone("the client left before its turn")
            self._app(client)
        del self._parser  # no cycle is left for the collector

    def data_received(self, data: bytes) -> None:
        """Parse, and serve what is whole."""
        self._throttle.count(len(data))
        if self._is_deaf:
            return
        if self._out.is_behind or len(data) > AT_ONCE_BYTES:
            self._backlog.put(data)
            self._parse_on()
        else:
            self._parse(data)
        if self._waiting:
            self._serve_next()
        if (self._waiting or self._backlog) and not self._throttle.is_paused:  # I9
            self._throttle.pause()
            self._watch()
            if not self._backlog.hold(self):  # I9
                self._refuse(self._clients.bodies.spent())

    def pause_writing(self) -> None:
        """Take note that the client is behind."""
        self._out.is_behind = True
        self._watch_unsent()
        self._out.count()

    def resume_writing(self) -> None:
        """Let the reply go on, or the next request: the client has all that was written."""
        was_full = self._out.is_full
        self._out.clear()
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
            self._expect(client)

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        client = self._incoming
        if client is None:
            return
        client.take(body)
        if client.takes_body:
            self._check_size(client, client.body_bytes)
            if not self._clients.bodies.hold(self, len(body)):  # I9
                raise self._clients.bodies.spent()

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
        """Parse what has come until a request is whole."""
        backlog = self._backlog
        while backlog and not (self._waiting or self._out.is_behind or self._is_deaf):
            self._parse(backlog.take(self._incoming))
        if self._is_deaf:
            backlog.drop()

    def _let_go(self, client: Client) -> None:
        """Count a request's body out."""
        if client.takes_body:
            client.takes_body = False
            self._clients.bodies.release(client.body_bytes)

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
        if self._current is not None or self._out.is_behind:
            return
        if not self._waiting:
            self._parse_on()
        if self._waiting:
            self._serve_next()
        elif not self._is_deaf:
            self._read_on()

    def _serve_next(self) -> None:
        if self._current is None and self._waiting and not self._out.is_behind:
            if self._incoming is None and not self._is_in_head:
                self.deadline_s = NEVER_S
            client = self._current = self._waiting.popleft()
            self._app(client)

    def _read_on(self) -> None:
        if self._throttle.is_paused:
            self._throttle.resume()
            self._since_s = 0.0
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
            is_framing = later_bytes > head.most_framed(client.body_bytes, limits)  # I9
            if is_framing:
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
        self._let_go(client)
        client.drop_body()
        self._answer_unread(client)

    def _answer_unread(self, client: Client) -> None:
        """Let a request be answered that isn't whole, and hear no more."""
        client.keeps_alive = False
        self._waiting.append(client)
        self._backlog.drop()
        self._is_deaf = True
        self._is_in_head = False

    @property
    def incoming_bytes(self) -> int:
        """How much there is of a body that isn't whole yet."""
        client = self._incoming
        return client.body_bytes if client is not None and client.takes_body else 0

    def refuse(self, error: RouterError) -> None:
        """Answer the request that isn't whole yet with an error."""
        self._refuse(error)
        self._serve_next()

    def _expect(self, client: Client) -> None:
        """Invite a body that will be read, when its turn comes; to any other the answer comes at once."""
        if client.takes_body or not (b"content-length" in client.header or b"transfer-encoding" in client.header):
            client.is_expectant = True
            self._invite(client)
        else:
            self._incoming = None
            self._answer_unread(client)

    def _invite(self, client: Client) -> None:
        """Tell a client that waits for it to send its body; not before its turn."""
        if client.is_expectant and self._current is None and not self._waiting:
            client.is_expectant = False
            self._since_s = 0.0
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    # Time.

    def _watch(self) -> None:
        """Say by when the client must have sent what is next: a head, a body, or another request."""
        if self._out.is_behind or self._transport.is_closing():
            return
        client, limits = self._incoming, self._limits
        now_s = self._loop.time()
        self._since_s = self._since_s or now_s
        if self._is_parting:
            self.deadline_s = now_s + _LINGER_S
        elif self._throttle.is_paused or (client is not None and client.is_expectant):
            self.deadline_s = NEVER_S
        elif self._is_in_head:
            self.deadline_s = self._since_s + limits.head_timeout_s
        elif client is not None:
            allowed_s = limits.body_timeout_s + client.body_bytes / limits.body_bytes_per_s
            self.deadline_s = min(self._since_s + allowed_s, now_s + limits.body_timeout_s)
        elif self._current is not None or self._waiting:
            self.deadline_s = NEVER_S
        else:
            self.deadline_s = now_s + limits.idle_timeout_s

    def _watch_unsent(self) -> None:
        """Say by when the client must have taken some of what was written."""
        self._out.mark()
        self.deadline_s = self._loop.time() + self._limits.write_timeout_s

    def expire(self) -> None:
        """The client's time is over."""
        self.deadline_s = NEVER_S
        if self._out.is_behind or self._transport.is_closing():
            if self._out.has_moved:
                self._watch_unsent()
            else:
                self._clients.counts["write_timeout"] += 1
                self._transport.abort()
        elif self._is_deaf:
            self.close()
        elif self._is_in_head or self._incoming is not None:
            what = "head" if self._is_in_head else "body"
            self.refuse(SenderTimeout(f"the request's {what} didn't come in time (client_{what}_timeout_secs)"))
        else:
            self._clients.counts["idle_timeout"] += 1
            self.close()

    def _part(self, client: Client) -> None:
        """Close behind a last reply; from a client that is still sending, so that the reply isn't lost to a reset."""
        self._is_deaf = True
        self._backlog.drop()
        if client.is_whole or self._transport.is_closing():
            self.close()
        else:
            self._is_parting = True
            self._transport.write_eof()
            self._read_on()
