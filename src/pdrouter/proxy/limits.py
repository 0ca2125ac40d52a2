"""What clients may take of the router: connections, time and bytes; each limit is counted when it is met (I9).

One timer looks after all connections: each says until when its client must have moved on. It knows no HTTP.
Read next: ``connection.py``.
"""

import asyncio
import ipaddress
import math
from collections import Counter
from typing import Final, Protocol

import msgspec

from pdrouter.errors import RouterError, TooManyConnections

NEVER_S: Final = math.inf

_LOOKS = 4
"""Looks within the shortest time limit: how late one is noticed, against what looking costs."""

_MAX_LOOK_S = 1.0

_EXPIRED_AT_ONCE = 8
_EXPIRY_PAUSE_S = 0.005
"""Connections ended in one turn of the loop, and the time until the next; chosen by ``benchmarks/slow_senders.py``."""

_KEPT_SHARE = 7 / 8
"""Of a budget that is spent, what is left to its holders: a look at all of them makes that much room; chosen."""

_MAX_PARTING = 256
"""Connections beyond the limit that are told so; more are closed without a word (I9)."""


class ClientLimits(msgspec.Struct, frozen=True):
    """Limits of one client's connection and of all; ``config.py`` says what they mean."""

    max_payload_bytes: int
    max_connections: int
    max_connections_per_address: int | None
    max_head_bytes: int
    max_headers: int
    max_target_bytes: int
    head_timeout_s: float
    body_timeout_s: float
    body_bytes_per_s: int
    idle_timeout_s: float
    write_timeout_s: float
    write_buffer_bytes: int
    write_budget_bytes: int


class Watched(Protocol):
    """A connection; ``deadline_s`` is by the loop's clock, ``unsent_bytes`` is what ``hold_unsent()`` was told last."""

    deadline_s: float
    unsent_bytes: int

    def measure(self) -> int:
        """Return how many bytes wait to be sent; ``unsent_bytes`` is what was counted last."""
        ...

    def abort(self) -> None:
        """Close at once."""

    def expire(self) -> None:
        """The deadline has passed; set another, or end."""


class Clients:
    """All connections of clients: how many there are, of whom, what they hold, and which have lost their time.

    ``counts`` are events since the start, by name. Once it ``is_draining``, each reply is the last of its connection.
    ``unsent_bytes`` wait to be sent, on all connections.
    """

    def __init__(self, limits: ClientLimits) -> None:
        self.set_limits(limits)
        self.counts: Counter[str] = Counter()
        self.is_draining = False
        self.unsent_bytes = 0
        self._all: set[Watched] = set()
        self._by_address: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def set_limits(self, limits: ClientLimits) -> None:
        """Use other limits; connections that are there keep theirs, but count."""
        self.limits = limits
        times_s = (limits.head_timeout_s, limits.body_timeout_s, limits.idle_timeout_s, limits.write_timeout_s)
        self._look_s = min(_MAX_LOOK_S, min(times_s) / _LOOKS)

    def counters(self) -> Counter[str]:
        """Return the events counted since the start."""
        return self.counts

    def join(self, connection: Watched, address: str) -> None:
        """Take in a connection, and look after it until it has left; its address is as ``group_of()`` says.

        Raises: TooManyConnections; it has joined nevertheless, to be told so.
        """
        limits = self.limits
        self._all.add(connection)
        self._by_address[address] += 1
        self.counts["opened"] += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._look_s, self._look)
        if len(self._all) > limits.max_connections:  # I9
            raise TooManyConnections(f"the router has {limits.max_connections} connections, its limit")
        most = limits.max_connections_per_address
        if most is not None and self._by_address[address] > most:  # I9
            raise TooManyConnections(f"your address has {most} connections, its limit")

    def leave(self, connection: Watched, address: str) -> None:
        """Let go of a connection."""
        self.hold_unsent(connection, 0)
        self._all.discard(connection)
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]
        self.counts["closed"] += 1

    @property
    def are_far_too_many(self) -> bool:
        """Whether there isn't even room for telling so."""
        return len(self._all) > self.limits.max_connections + _MAX_PARTING  # I9

    def refused(self, error: RouterError) -> None:
        """Count a refusal."""
        self.counts[error.code] += 1

    def hold_unsent(self, connection: Watched, unsent_bytes: int) -> None:
        """Take note of how many bytes wait to be sent on a connection; with too many in all, some are cut."""
        self.unsent_bytes += unsent_bytes - connection.unsent_bytes
        connection.unsent_bytes = unsent_bytes
        if unsent_bytes and self.unsent_bytes > self.limits.write_budget_bytes:  # I9
            self._cut_unsent()

    def _cut_unsent(self) -> None:
        """End the connections with most unsent bytes, so many that the next look is some time away."""
        behind = [one for one in self._all if one.unsent_bytes]
        for one in behind:
            measured = one.measure()
            self.unsent_bytes += measured - one.unsent_bytes
            one.unsent_bytes = measured
        budget = self.limits.write_budget_bytes
        if self.unsent_bytes <= budget:
            return
        behind.sort(key=_unsent_bytes)
        while behind and self.unsent_bytes > budget * _KEPT_SHARE:
            one = behind.pop()
            self.counts["write_budget"] += 1
            self.hold_unsent(one, 0)
            one.abort()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._look_s, self._look) if self._all else None
        now_s = loop.time()
        self._expire([one for one in self._all if one.deadline_s <= now_s])

    def _expire(self, late: list[Watched]) -> None:
        """Tell a few of those who are late, and the others a little later: nobody else is to wait for them."""
        loop = asyncio.get_running_loop()
        for _ in range(min(_EXPIRED_AT_ONCE, len(late))):
            connection = late.pop()
            if connection.deadline_s <= loop.time():
                connection.expire()
        if late:
            loop.call_later(_EXPIRY_PAUSE_S, self._expire, late)


def _unsent_bytes(connection: Watched) -> int:
    return connection.unsent_bytes


def group_of(peer: object) -> str:
    """Return what counts as one client's address: of IPv6 the first 64 bits, which one host has for itself."""
    host = str(peer[0]) if isinstance(peer, tuple) else ""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
