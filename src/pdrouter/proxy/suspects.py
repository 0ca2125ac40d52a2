"""[5] Requests that failed on two engines: it may be they that are at fault, so the same are refused for a while.

An outage of engines fails many different requests; one that breaks its reader fails alone. So when many are suspected
at once, none is. It knows requests by a hash of path and body only. Read next: ``flight.py``.
"""

import secrets
from collections import Counter
from collections.abc import Callable

import msgspec
import xxhash

from pdrouter.engines.base import Inbound
from pdrouter.errors import EmptyStream, RouterError, SuspectRequest, UpstreamClosed, UpstreamProtocol
from pdrouter.proxy.legs import EngineReply

MOST_RESETS = 2
"""Connections that one request may lose without any reply: what kills an engine must not be given to a third."""

ENGINES = 2
"""So many engines must have failed on a request."""

_BREAKS = (UpstreamClosed, UpstreamProtocol, EmptyStream)
_INTERNAL_ERROR = 500


class SuspectOptions(msgspec.Struct, frozen=True):
    """Settings; ``config.py`` says what they mean."""

    ttl_s: float
    most: int


class Suspects:
    """Hashes of the requests that are refused, the oldest first, with the moment until which they are."""

    def __init__(self, options: SuspectOptions, clock: Callable[[], float]) -> None:
        self.options = options
        self.counts: Counter[str] = Counter()
        self._clock = clock
        self._key = secrets.randbits(64)  # so that nobody can make two requests of one hash
        self._until_s: dict[int, float] = {}
        self._calm_s = 0.0

    def check(self, inbound: Inbound) -> None:
        """Refuse a request that is suspected.

        Raises: SuspectRequest.
        """
        if not self._until_s:
            return
        hashed, now_s = self._hash(inbound), self._clock()
        until_s = self._until_s.get(hashed, 0.0)
        if until_s > now_s:
            self.counts["refused"] += 1
            raise SuspectRequest(
                f"this request has failed on {ENGINES} engines, so that the same one is refused for "
                f"{until_s - now_s:.0f} s more (suspect_ttl_secs)"
            )
        if until_s:
            del self._until_s[hashed]

    def note(self, inbound: Inbound) -> None:
        """Suspect a request, unless so many are that it must be the engines."""
        now_s, ttl_s = self._clock(), self.options.ttl_s
        if not ttl_s or now_s < self._calm_s:
            return
        for hashed in [hashed for hashed, until_s in self._until_s.items() if until_s <= now_s]:
            del self._until_s[hashed]
        self._until_s[self._hash(inbound)] = now_s + ttl_s
        self.counts["suspected"] += 1
        if len(self._until_s) > self.options.most:  # I9
            self._until_s.clear()
            self._calm_s = now_s + ttl_s
            self.counts["outages"] += 1

    def _hash(self, inbound: Inbound) -> int:
        return xxhash.xxh3_64_intdigest(inbound.path.encode() + inbound.body, self._key)


def points_at_request(error: RouterError) -> bool:
    """Whether a failure may be the request's doing: not that of an engine that is away, busy or slow."""
    return error.reply_status == _INTERNAL_ERROR if isinstance(error, EngineReply) else isinstance(error, _BREAKS)
