"""The connections to one endpoint: opened on demand, kept between exchanges, retired before the engine does.

It asks connections questions and never looks inside; it knows no HTTP, no ranks and no deadlines but the
one for connecting. Next: ``connection.py``.
"""

import asyncio
import errno
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from pdrouter.errors import ConnectFailed, ConnectTimeout, NameNotResolved, PoolExhausted, RouterError, UpstreamClosed
from pdrouter.upstream.connection import Connection
from pdrouter.upstream.exchange import Exchange, Request
from pdrouter.upstream.resolver import Resolver

_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Of files, memory or ports the router, or its machine, has none left: no engine is to blame (I9)."""


class Origin(msgspec.Struct, frozen=True):
    """Where an engine listens; an IPv6 literal stands without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PoolLimits(msgspec.Struct, frozen=True):
    """Bounds of one pool and of each of its connections.

    ``read_buffer_bytes``: unread reply bytes above which reading stops. ``max_header_bytes``: largest head of
    a reply. ``max_connections`` counts those that are connecting, active and idle.
    """

    connect_timeout_s: float
    idle_timeout_s: float
    max_idle: int
    max_connections: int
    read_buffer_bytes: int
    max_header_bytes: int


class PoolStatistics(msgspec.Struct, frozen=True):
    """Connections now (``active`` includes connecting ones) and events since the pool was made.

    ``retired``: kept connections dropped for their age, for want of room, or because the engine ended them.
    ``repeated``: requests sent again because a kept connection turned out closed. ``exhausted``: requests
    refused by ``max_connections``.
    """

    active: int
    idle: int
    opened: int
    reused: int
    retired: int
    repeated: int
    exhausted: int


class Pool:
    """The connections to one endpoint; the most recently used is reused first.

    ``make_room`` closes idle ones, of other endpoints too, when the process has no open file left for another.
    """

    def __init__(
        self, origin: Origin, limits: PoolLimits, resolver: Resolver, make_room: Callable[[], bool] | None = None
    ) -> None:
        self.origin = origin
        self._resolver = resolver
        self._make_room = make_room or self.retire_idle
        self.limits = limits
        self._connections: set[Connection] = set()
        self._idle: deque[Connection] = deque()  # longest idle at the left
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._opened = 0
        self._reused = 0
        self._retired = 0
        self._repeated = 0
        self._exhausted = 0

    def __repr__(self) -> str:
        now = self.statistics()
        return f"<Pool {self.origin}: {now.active} active, {now.idle} idle>"

    def statistics(self) -> PoolStatistics:
        """Take a snapshot."""
        idle = len(self._idle)
        return PoolStatistics(
            active=len(self._connections) - idle,
            idle=idle,
            opened=self._opened,
            reused=self._reused,
            retired=self._retired,
            repeated=self._repeated,
            exhausted=self._exhausted,
        )

    def start(self, head: bytes, *body: bytes | memoryview) -> Exchange:
        """Send a request, its head built by the caller up to the blank line; with a kept connection, at once.

        Otherwise a task opens a connection first; if that fails, so does the exchange.

        Raises: ConnectFailed, PoolExhausted, where there is no hope of a connection.
        """
        request = (head, *body)
        if self._idle:
            connection = self._idle[-1]
            now_s = connection.loop.time()
            if not connection.has_expired(now_s):
                self._idle.pop()
                self._reused += 1
                exchange = Exchange(self, request, now_s)
                connection.start(exchange, request)
                return exchange
            self._retire(now_s)  # it is the youngest, hence all
        self._check_room()
        exchange = Exchange(self, (), 0.0)
        exchange.wait_for(self._open_for(exchange, request))
        return exchange

    async def send(self, head: bytes, *body: bytes | memoryview) -> Exchange:
        """Send a request as ``start()`` does, and return when it has been written.

        Raises: ConnectFailed, ConnectTimeout, NameNotResolved, PoolExhausted, UpstreamClosed.
        """
        exchange = self.start(head, *body)
        try:
            await exchange.sent()
        except BaseException:
            exchange.close()
            raise
        return exchange

    async def aclose(self) -> None:
        """End all connections, and the exchanges on them; later requests fail."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for connection in tuple(self._connections):
            connection.fail(UpstreamClosed(f"the connections to {self.origin} have been closed"))
        await asyncio.sleep(0)  # an aborted transport lets go of its socket in the loop's next turn

    # Called by connections and exchanges.

    def repeat(self, exchange: Exchange, request: Request) -> "asyncio.Task[None]":
        """Send a request that a kept connection has lost once more, over a fresh one."""
        self._repeated += 1
        return self._open_for(exchange, request)

    def keep(self, connection: Connection) -> bool:
        """Take a connection whose exchange is over; False if there is no room for it."""
        if len(self._idle) >= self.limits.max_idle:  # I9
            self._retired += 1
            return False
        self._idle.append(connection)
        if self._timer is None:
            self._timer = connection.loop.call_at(connection.expires_at_s, self._on_timer)
        return True

    def forget(self, connection: Connection) -> None:
        """Drop a connection that is about to be CLOSED; it still has its last state."""
        self._connections.discard(connection)
        if connection.is_idle:
            self._idle.remove(connection)
            self._retired += 1

    def _open_for(self, exchange: Exchange, request: Request) -> "asyncio.Task[None]":
        return asyncio.get_running_loop().create_task(self._send_fresh(exchange, request))

    async def _send_fresh(self, exchange: Exchange, request: Request) -> None:
        try:
            connection = await self._open()
        except RouterError as error:
            exchange.fail(error.with_traceback(None))  # it would hold the exchange, which holds the error
        else:
            connection.start(exchange, request)

    async def _open(self) -> Connection:
        limits = self.limits
        self._check_room()
        connection = Connection(
            self,
            str(self.origin),
            idle_timeout_s=limits.idle_timeout_s,
            read_buffer_bytes=limits.read_buffer_bytes,
            max_header_bytes=limits.max_header_bytes,
        )
        self._connections.add(connection)
        try:
            await self._connect(connection)
        except BaseException:
            connection.abort()
            raise
        if connection.is_closed:
            raise UpstreamClosed(f"{self.origin} closed the connection before the request was sent")
        self._opened += 1
        return connection

    def _check_room(self) -> None:
        if self._is_closed:
            raise ConnectFailed(f"the connections to {self.origin} have been closed")
        if len(self._connections) >= self.limits.max_connections:  # I9
            self._exhausted += 1
            raise PoolExhausted(f"{self.origin} has {self.limits.max_connections} connections, its limit")

    async def _connect(self, connection: Connection) -> None:
        origin, timeout_s, addresses = self.origin, self.limits.connect_timeout_s, None
        try:
            async with asyncio.timeout(timeout_s):
                addresses = await self._resolver.addresses(origin.host)
                await self._create_at(addresses, connection)
        except TimeoutError as error:
            if addresses is None:
                raise NameNotResolved(f"the name {origin.host} isn't resolved within {timeout_s:g} s") from error
            self._resolver.expire(origin.host)
            raise ConnectTimeout(f"{origin} took no connection within {timeout_s:g} s") from error
        except OSError as error:
            if error.errno in _OURS:
                self._exhausted += 1
                raise PoolExhausted(f"the router itself can't open a connection to {origin}: {error}") from error
            self._resolver.expire(origin.host)
            raise ConnectFailed(f"{origin} took no connection: {error}") from error

    async def _create_at(self, addresses: Sequence[str], connection: Connection) -> None:
        """Connect to the first address that takes a connection."""
        for address in addresses[:-1]:
            try:
                await self._create(address, connection)
            except OSError as error:
                if error.errno in _OURS:
                    raise
            else:
                return
        await self._create(addresses[-1], connection)

    async def _create(self, address: str, connection: Connection) -> None:
        create = partial(connection.loop.create_connection, lambda: connection, address, self.origin.port)
        try:
            await create()
        except OSError as error:
            if error.errno not in _OURS or not self._make_room():
                raise
            await asyncio.sleep(0)  # an aborted transport lets go of its socket in the loop's next turn
            await create()

    def retire_idle(self) -> bool:
        """Close all idle connections; return whether there were any."""
        idle = list(self._idle)
        for connection in idle:
            connection.abort()
        return bool(idle)

    def _on_timer(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        self._retire(loop.time())
        if self._idle:
            self._timer = loop.call_at(self._idle[0].expires_at_s, self._on_timer)

    def _retire(self, now_s: float) -> None:
        while self._idle and self._idle[0].has_expired(now_s):
            self._idle[0].abort()
