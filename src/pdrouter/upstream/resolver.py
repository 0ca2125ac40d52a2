"""Addresses of engines' host names: looked up in threads of their own, kept for a while, used on while a lookup hangs.

A nameserver that doesn't answer holds one thread for each of its names, and nothing else: the event loop's executor,
other names and the end of the process don't wait for it. Read next: ``pool.py``.
"""

import asyncio
import ipaddress
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from pdrouter.errors import NameNotResolved

_MAX_LOOKUPS = 256
"""Lookups at once (I9), one for each name; chosen."""

_RETRY_AFTER_S = 1.0
"""A name that can't be resolved isn't looked up again sooner; chosen."""

_MAX_ADDRESSES = 16


class _Name:
    """What is known of a name: ``addresses`` may be old; ``lookup`` is under way."""

    __slots__ = ("addresses", "due_s", "error", "lookup")

    def __init__(self) -> None:
        self.addresses: Sequence[str] = ()
        self.due_s = 0.0
        self.error = ""
        self.lookup: asyncio.Future[None] | None = None


class Resolver:
    """Resolves names; ``counts`` are lookups ``begun`` and ``failed``, and old answers that were used (``stale``)."""

    def __init__(self, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.ttl_s = ttl_s
        self.counts: Counter[str] = Counter()
        self._clock = clock
        self._names: dict[str, _Name] = {}
        self.lookups = 0

    async def addresses(self, host: str) -> Sequence[str]:
        """Return the addresses of a host, at least one, in the order in which they should be tried.

        Raises: NameNotResolved. The caller limits the time.
        """
        if is_address(host):
            return (host,)
        name = self._names.get(host)
        if name is None:
            name = self._names[host] = _Name()
        if self._clock() >= name.due_s and name.lookup is None:
            self._look_up(host, name)
        if name.addresses:
            self.counts["stale"] += name.lookup is not None
            return name.addresses
        if name.lookup is not None:
            await asyncio.shield(name.lookup)
        if not name.addresses:
            raise NameNotResolved(f"the name {host} isn't resolved: {name.error}")
        return name.addresses

    def expire(self, host: str) -> None:
        """Look a host up at the next question: its addresses take no connection."""
        name = self._names.get(host)
        if name is not None:
            name.due_s = 0.0

    def forget(self, host: str) -> None:
        """Keep nothing of a host, unless it is being looked up."""
        name = self._names.get(host)
        if name is not None and name.lookup is None:
            del self._names[host]

    def _look_up(self, host: str, name: _Name) -> None:
        if self.lookups >= _MAX_LOOKUPS:  # I9
            name.error = f"{_MAX_LOOKUPS} names are being looked up"
            return
        loop = asyncio.get_running_loop()
        # Not an executor's: those are joined at exit, and a lookup may take minutes.
        thread = threading.Thread(target=self._run, args=(loop, host, name), name=f"resolve {host}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # there is no thread left
            name.error = str(error)
            return
        self.lookups += 1
        self.counts["begun"] += 1
        name.lookup = loop.create_future()  # before the thread's answer, which comes by this loop

    def _run(self, loop: asyncio.AbstractEventLoop, host: str, name: _Name) -> None:
        found: Sequence[str] = ()
        error = "it has no address"
        try:
            infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found = tuple(dict.fromkeys(str(info[4][0]) for info in infos))[:_MAX_ADDRESSES]
        except (OSError, UnicodeError) as failure:  # UnicodeError: a name that can't be encoded
            error = str(failure)
        try:
            loop.call_soon_threadsafe(self._told, name, found, error)
        except RuntimeError:  # the loop is closed
            return

    def _told(self, name: _Name, found: Sequence[str], error: str) -> None:
        self.lookups -= 1
        lookup, name.lookup = name.lookup, None
        if found:
            name.addresses, name.due_s = found, self._clock() + self.ttl_s
        else:
            self.counts["failed"] += 1
            name.error, name.due_s = error, self._clock() + _RETRY_AFTER_S
        if lookup is not None and not lookup.done():
            lookup.set_result(None)


def is_address(host: str) -> bool:
    """Whether a host is an address already."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
