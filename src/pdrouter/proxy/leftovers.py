"""[6] What engines send behind the end mark of an answer is read and dropped, so that the connection can be kept.

Mostly that is nothing but the last chunk. The request is over by then, and its load returned.
"""

from collections.abc import Mapping
from functools import partial

from pdrouter.errors import RouterError
from pdrouter.proxy.deadlines import Deadlines
from pdrouter.upstream.exchange import Exchange

_MOST_S = 1.0
_MOST_BYTES = 65_536
"""An engine that takes longer, or sends more, loses the connection (I9). Chosen: the last chunk comes at once."""


class Leftovers:
    """The exchanges that are drained now, each with the bytes that it may still have."""

    def __init__(self) -> None:
        self._left_bytes: dict[Exchange, int] = {}
        self._deadlines: Deadlines[Exchange] = Deadlines(_MOST_S, self._cut)
        self._counters = dict.fromkeys(("drained", "cut"), 0)

    def counters(self) -> Mapping[str, int]:
        """Return how many came to their end, and how many were cut."""
        return self._counters

    def drain(self, exchange: Exchange) -> None:
        """Read the rest of a reply whose answer is over, and drop it."""
        exchange.forget_request()  # I3
        self._left_bytes[exchange] = _MOST_BYTES
        self._deadlines.put(exchange)
        exchange.listen(partial(self._read, exchange))
        self._read(exchange)

    def _read(self, exchange: Exchange) -> None:
        try:
            piece = exchange.read_nowait()
        except RouterError:
            self._cut(exchange)
            return
        left_bytes = self._left_bytes[exchange] = self._left_bytes[exchange] - len(piece or b"")
        if exchange.is_complete:
            self._end(exchange, "drained")
        elif left_bytes < 0:
            self._cut(exchange)

    def _cut(self, exchange: Exchange) -> None:
        self._end(exchange, "cut")
        exchange.close()

    def _end(self, exchange: Exchange, event: str) -> None:
        exchange.listen(None)  # nor is a cycle left for the collector
        self._deadlines.take_out(exchange)
        del self._left_bytes[exchange]
        self._counters[event] += 1
