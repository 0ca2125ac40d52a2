"""Events of a stream, however it is cut."""

import pytest

from pdrouter.engines.sse import EventSplitter, split_data
from pdrouter.errors import UpstreamProtocol

LIMIT_BYTES = 64


@pytest.mark.parametrize("cut", [1, 2, 3, 100])
def test_events_are_the_same_however_they_are_cut(cut: int) -> None:
    """Whole ones come at once, the rest at the end."""
    stream = b"data: a\n\n: ping\n\nevent: x\ndata: b\n\ndata: half"
    splitter = EventSplitter(LIMIT_BYTES)
    events = [event for at in range(0, len(stream), cut) for event in splitter.feed(stream[at : at + cut])]
    assert events == [b"data: a", b": ping", b"event: x\ndata: b"]
    assert (splitter.held_bytes, splitter.finish(), splitter.held_bytes) == (10, b"data: half", 0)


@pytest.mark.invariant("I9")
def test_an_event_without_an_end_has_a_limit() -> None:
    """One more byte is too many."""
    splitter = EventSplitter(LIMIT_BYTES)
    assert splitter.feed(b"x" * LIMIT_BYTES) == []
    with pytest.raises(UpstreamProtocol, match="64 bytes"):
        splitter.feed(b"x")


@pytest.mark.parametrize(
    ("event", "parts"),
    [
        (b"data: {}", (b"", b"{}")),
        (b"data:{} ", (b"", b"{}")),
        (b"event: x\ndata: {}", (b"event: x\n", b"{}")),
        (b": ping", (b": ping", b"")),
        (b"", (b"", b"")),
        (b"no data: {}", (b"no data: {}", b"")),
    ],
)
def test_the_data_of_an_event(event: bytes, parts: tuple[bytes, bytes]) -> None:
    """It stands behind the lines before it; a comment has none."""
    assert split_data(event) == parts
