"""Memory that all clients share: bodies that come in, and answers that wait to be read; each has one budget (I9).

When a budget is spent, the client that holds most loses first. Read next: ``limits.py``.
"""

from collections import Counter
from collections.abc import Collection
from typing import Protocol

from pdrouter.errors import BodyBudgetSpent, RouterError

_KEPT_SHARE = 7 / 8
"""Share of the write budget that is left after a cut, so that the next cut is some time away; chosen."""


class Reader(Protocol):
    """A client with an answer to read."""

    def measure(self) -> int:
        """Return how many bytes wait to be sent now."""
        ...

    def abort(self) -> None:
        """Close at once."""


class WriteBudget:
    """Bytes that wait to be sent, by reader; ``counts["write_budget"]`` are readers that were cut."""

    def __init__(self, limit_bytes: int, counts: Counter[str]) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self._counts = counts
        self._readers: dict[Reader, int] = {}

    def hold(self, reader: Reader, unsent_bytes: int) -> None:
        """Set how many bytes wait for a reader; when the budget is spent, readers are cut, perhaps this one."""
        self.held_bytes += unsent_bytes - self._readers.get(reader, 0)
        self._readers[reader] = unsent_bytes
        if self.held_bytes > self.limit_bytes:  # I9
            self._cut()

    def release(self, reader: Reader) -> None:
        """Nothing waits for a reader any more."""
        self.held_bytes -= self._readers.pop(reader, 0)

    def _cut(self) -> None:
        readers = self._readers = {reader: reader.measure() for reader in self._readers}
        self.held_bytes = sum(readers.values())
        if self.held_bytes <= self.limit_bytes:
            return
        for reader in sorted(readers, key=readers.__getitem__, reverse=True):
            if self.held_bytes <= self.limit_bytes * _KEPT_SHARE:
                return
            self._counts["write_budget"] += 1
            self.release(reader)
            reader.abort()


class Sender(Protocol):
    """A client with a body to send."""

    @property
    def incoming_bytes(self) -> int:
        """How much has come of a body that isn't whole yet."""
        ...

    def refuse(self, error: RouterError) -> None:
        """Answer the request that isn't whole yet with an error."""


class BodyBudget:
    """Bytes of bodies that are coming in, wait, or are being served."""

    def __init__(self, limit_bytes: int, senders: Collection[Sender]) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self._senders = senders

    def hold(self, sender: Sender, more_bytes: int) -> bool:
        """Count more bytes in; return whether there is room for them.

        When the budget is spent, the largest body that isn't whole yet is refused; if that is this sender's own, there
        is no room.
        """
        self.held_bytes += more_bytes
        while self.held_bytes > self.limit_bytes:  # I9
            largest = max(self._senders, key=_incoming_bytes, default=sender)
            if largest is sender or not largest.incoming_bytes:
                return False
            largest.refuse(self.spent())
        return True

    def release(self, held_bytes: int) -> None:
        """Count bytes out."""
        self.held_bytes -= held_bytes

    def spent(self) -> BodyBudgetSpent:
        """Return what to tell a sender for whose body there is no room."""
        return BodyBudgetSpent(
            f"all request bodies together exceed {self.limit_bytes} bytes (client_body_budget_bytes)"
        )


def _incoming_bytes(sender: Sender) -> int:
    return sender.incoming_bytes
