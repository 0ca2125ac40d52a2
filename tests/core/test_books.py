"""Books that policies keep: who opens them, and what the router tells them."""

from pdrouter.core import events
from pdrouter.core.decision import Decision
from pdrouter.core.policies.books import Books
from pdrouter.core.policies.dynamo_book import DynamoBook
from pdrouter.core.policies.llm_d_book import LlmDBook

from .builders import decide, decode, facts, make_router, prefill


class Diary:
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, object]] = []

    def placed(self, decision: Decision) -> None:
        """Write it down."""
        self.heard.append(("placed", decision))

    def prefill_ended(self, decision: Decision) -> None:
        """Write it down."""
        self.heard.append(("prefill ended", decision))

    def ended(self, decision: Decision) -> None:
        """Write it down."""
        self.heard.append(("ended", decision))

    def left(self, address: str) -> None:
        """Write it down."""
        self.heard.append(("left", address))


def test_one_book_of_each_kind() -> None:
    """Whoever asks gets the same, so that policies for endpoints, ranks and a shadow agree."""
    books = Books()
    assert books.of(DynamoBook) is books.of(DynamoBook)
    assert isinstance(books.of(LlmDBook), LlmDBook)


def test_the_router_tells_each_thing_once() -> None:
    """Placement, first token, end and departure, in their order; repeats and late tokens are not told."""
    router = make_router([prefill("p:1"), decode("d:1")])
    diary = router.books.of(Diary)
    first, second = decide(router, facts(), 1.0), decide(router, facts(), 1.0)
    for _ in range(2):
        router.observe(events.FirstTokenSeen(first), 2.0)
        router.settle(first, 3.0)
    router.settle(second, 4.0)
    router.observe(events.FirstTokenSeen(second), 5.0)
    router.observe(events.EndpointLeft("p:1"), 6.0)
    assert diary.heard == [
        ("placed", first),
        ("placed", second),
        ("prefill ended", first),
        ("ended", first),
        ("ended", second),
        ("left", "p:1"),
    ]
