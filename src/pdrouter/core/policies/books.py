"""Books: what a policy keeps of its own about all that is placed, as another router would keep it.

The router tells every book what it does; a policy reads its book and never writes it. So the policy that chooses
endpoints, the one that chooses ranks, and one that looks on see the same. Where a policy has no book, load is the
ledger's (``core/ledger.py``).
"""

from typing import Protocol, TypeVar, cast

from pdrouter.core.decision import Decision


class Book(Protocol):
    """Hears of each decision: ``placed``, ``prefill_ended`` if it gets so far, ``ended``, each at most once."""

    def placed(self, decision: Decision) -> None:
        """A request was placed."""
        ...

    def prefill_ended(self, decision: Decision) -> None:
        """Its prompt is read."""
        ...

    def ended(self, decision: Decision) -> None:
        """It is over, however it ended."""
        ...

    def left(self, address: str) -> None:
        """An endpoint is gone."""
        ...


B = TypeVar("B", bound=Book)


class Books:
    """The books of the policies in use, one of each kind; a book of them all."""

    def __init__(self) -> None:
        self._books: dict[type[Book], Book] = {}

    def of(self, kind: type[B]) -> B:
        """Return the one book of a kind, opened when it is first asked for."""
        return cast("B", self._books.setdefault(kind, kind()))

    def placed(self, decision: Decision) -> None:
        """Tell all."""
        for book in self._books.values():
            book.placed(decision)

    def prefill_ended(self, decision: Decision) -> None:
        """Tell all."""
        for book in self._books.values():
            book.prefill_ended(decision)

    def ended(self, decision: Decision) -> None:
        """Tell all."""
        for book in self._books.values():
            book.ended(decision)

    def left(self, address: str) -> None:
        """Tell all."""
        for book in self._books.values():
            book.left(address)
