"""What clients may take of the router: connections, time and bytes; each limit is counted when it is met (I9).

One timer looks after all connections: each says until when its client must have moved on. It knows no HTTP.
Read next: ``connection.py``.
"""

import asyncio
import ipaddress
import math
from collections import Counter
from heapq import nsmallest
from typing import Final, Protocol

import msgspec

from pdrouter.errors import RouterError, TooManyConnections
from pdrouter.proxy.budgets import BodyBudget, Sender, WriteBudget

NEVER_S: Final = math.inf

_LOOKS = 4
"""Looks within the shortest time limit: how late one is noticed, against what looking costs."""

_MAX_LOOK_S = 1.0

_EXPIRED_AT_ONCE = 8
_EXPIRY_PAUSE_S = 0.005
"""Connections ended in one turn of the loop, and the time until the next; chosen by ``benchmarks/slow_senders.py``."""

_MAX_PARTING = 256
"""Connections beyond the limit that are told so; more are closed without a word (I9)."""

_FILES_OF_OWN = 64
_FILES_PER_CLIENT = 3
_PARTING_SHARE = 8
"""Open files that the router itself needs (probes, logs, threads), those of one client (its connection and those of two
legs), and the part of all clients, one in so many, that are only told to leave; chosen."""

_CLOSED_SHARE = 32
"""Of all clients, one in so many is closed at once when room is needed, as looking for them takes time; chosen."""


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
    body_budget_bytes: int


class Watched(Sender, Protocol):
    """A connection; ``deadline_s`` is by the loop's clock."""

    deadline_s: float

    @property
    def is_idle(self) -> bool:
        """Whether it is open, and its client has asked nothing."""
        ...

    def close(self) -> None:
        """Close behind what was written."""

    def expire(self) -> None:
        """The deadline has passed; set another, or end."""


class Clients:
    """All connections of clients: how many there are, how many of whom, and which have lost their time.

    ``counts`` are events since the start, by name. Once it ``is_draining``, each reply is the last of its connection.
    ``bodies`` and ``unsent`` are the memory that they share. There is ``room`` for so many that each can be served with
    the open files that there are; to make room, those that have been idle longest are closed.
    """

    def __init__(self, limits: ClientLimits) -> None:
        self.counts: Counter[str] = Counter()
        self.is_draining = False
        self.room = math.inf
        self._all: set[Watched] = set()
        self.bodies = BodyBudget(limits.body_budget_bytes, self._all)
        self.unsent = WriteBudget(limits.write_budget_bytes, self.counts)
        self.set_limits(limits)
        self._by_address: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def set_limits(self, limits: ClientLimits) -> None:
        """Use other limits; connections that are there keep theirs, but count."""
        self.limits = limits
        self.bodies.limit_bytes = limits.body_budget_bytes
        self.unsent.limit_bytes = limits.write_budget_bytes
        times_s = (limits.head_timeout_s, limits.body_timeout_s, limits.idle_timeout_s, limits.write_timeout_s)
        self._look_s = min(_MAX_LOOK_S, min(times_s) / _LOOKS)

    def counters(self) -> Counter[str]:
        """Return the events counted since the start."""
        return self.counts

    def held(self) -> dict[str, int]:
        """Return the bytes that count in each budget now."""
        return {"bodies": self.bodies.held_bytes, "unsent": self.unsent.held_bytes}

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
        if len(self._all) > self.room and not self._make_room(connection):  # I9
            raise TooManyConnections(f"the router's open files allow {self.room} connections, and all are in use")
        if len(self._all) > limits.max_connections:  # I9
            raise TooManyConnections(f"the router has {limits.max_connections} connections, its limit")
        most = limits.max_connections_per_address
        if most is not None and self._by_address[address] > most:  # I9
            raise TooManyConnections(f"your address has {most} connections, its limit")

    def leave(self, connection: Watched, address: str) -> None:
        """Let go of a connection."""
        self._all.discard(connection)
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]
        self.counts["closed"] += 1

    @property
    def are_far_too_many(self) -> bool:
        """Whether there isn't even room for telling so."""
        most = min(self.limits.max_connections + _MAX_PARTING, self.room + self.room // _PARTING_SHARE)
        return len(self._all) > most  # I9

    def _make_room(self, newcomer: Watched) -> bool:
        """Close some of those that have been idle longest; return whether there were any."""
        idle = [one for one in self._all if one.is_idle and one is not newcomer]
        longest = nsmallest(1 + int(self.room) // _CLOSED_SHARE, idle, key=_deadline_s)
        for one in longest:
            self.counts["idle_closed"] += 1
            one.close()
        return bool(longest)

    def refused(self, error: RouterError) -> None:
        """Count a refusal."""
        self.counts[error.code] += 1

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


def room_for(files: int) -> int:
    """Return how many clients can be served with so many open files."""
    return max(1, (files - _FILES_OF_OWN) * _PARTING_SHARE // (_FILES_PER_CLIENT * _PARTING_SHARE + 1))


def _deadline_s(connection: Watched) -> float:
    return connection.deadline_s


def is_loopback(peer: object) -> bool:
    """Whether a connection comes from this machine itself."""
    host = str(peer[0]) if isinstance(peer, tuple) else ""
    address = ipaddress.ip_address(host.partition("%")[0]) if host else None
    mapped = getattr(address, "ipv4_mapped", None)
    return address is not None and (mapped or address).is_loopback


def group_of(peer: object) -> str:
    """Return what counts as one client's address: of IPv6 the first 64 bits, which one host has for itself."""
    host = str(peer[0]) if isinstance(peer, tuple) else ""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
