"""Streams of several samples joined: however they are cut and whichever comes first, each sample says the same."""

import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pdrouter.engines.samples import StreamJoiner, join_replies

LIMIT_BYTES = 1 << 20

TEXT = st.text(max_size=6)
CHUNK = st.builds(lambda index, text: {"choices": [{"index": index, "text": text}]}, st.integers(0, 3), TEXT)
ANSWER = st.builds(lambda index, text: {"index": index, "text": text, "meta_info": {}}, st.integers(0, 3), TEXT)
USAGE = st.builds(
    lambda tokens: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": 0}},
    st.integers(0, 9),
)
EVENT = st.one_of(
    st.one_of(CHUNK, ANSWER).map(lambda value: b"data: " + json.dumps(value).encode()),
    st.sampled_from([b": ping", b"data: 5", b'data: {"x":1.0}', b"data:{]"]),
)


@st.composite
def streams(draw: st.DrawFn) -> list[list[bytes]]:
    """Return the events of one to four samples, each with its usage and its end."""
    samples = draw(st.lists(st.lists(EVENT, max_size=5), min_size=1, max_size=4))
    ends = [[b"data: " + json.dumps(draw(USAGE)).encode(), b"data: [DONE]"] for _ in samples]
    return [events + end for events, end in zip(samples, ends, strict=True)]


@st.composite
def deliveries(draw: st.DrawFn, samples: list[list[bytes]]) -> list[tuple[int, bytes]]:
    """Return all samples' bytes in pieces, each sample's in order."""
    left: list[list[tuple[int, bytes]]] = []
    for number, events in enumerate(samples):
        raw = b"".join(event + b"\n\n" for event in events)
        cuts = sorted(draw(st.sets(st.integers(1, max(1, len(raw) - 1)), max_size=6)))
        edges = [0, *cuts, len(raw)]
        left.append([(number, raw[a:b]) for a, b in pairwise(edges) if a < b])
    order = []
    while any(left):
        pieces = draw(st.sampled_from([pieces for pieces in left if pieces]))
        order.append(pieces.pop(0))
    return order


def joined(count: int, order: list[tuple[int, bytes]]) -> tuple[list[list[bytes]], bytes]:
    """Return what is said of each sample, and at the end."""
    joiner = StreamJoiner(count, LIMIT_BYTES)
    said = [b""] * count
    for number, piece in order:
        said[number] += joiner.feed(number, piece)
    for number in range(count):
        said[number] += joiner.end(number)
    return [text.split(b"\n\n") for text in said], joiner.finish()


@given(st.data())
def test_streams_are_joined_the_same_however_they_come(data: st.DataObject) -> None:
    """Nothing is lost, doubled or moved to another sample; usage is summed, and there is one end."""
    samples = data.draw(streams())
    count = len(samples)
    whole = joined(count, [(k, b"".join(e + b"\n\n" for e in events)) for k, events in enumerate(samples)])
    assert joined(count, data.draw(deliveries(samples))) == whole
    said, end = whole
    for number, events in enumerate(samples):
        expected = [renumbered(event, number, count) for event in events[:-2]]
        assert [_read(event) for event in said[number] if event] == expected
    usage, done, rest = end.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    tokens = sum(_read(events[-2])["usage"]["completion_tokens"] for events in samples)
    assert _read(usage)["usage"] == {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": 3 + tokens}


def renumbered(event: bytes, sample: int, count: int) -> Any:
    """Return what becomes of an event."""
    value = _read(event)
    if isinstance(value, bytes):
        return value
    for told in value.get("choices", [value] if "meta_info" in value else []):
        told["index"] = told["index"] * count + sample
    return value


def _read(event: bytes) -> Any:
    data = event.removeprefix(b"data: ")
    return json.loads(data) if data.startswith(b"{") else event


@given(st.lists(st.lists(TEXT, min_size=2, max_size=2), min_size=1, max_size=5))
def test_whole_replies_lose_nothing(texts: list[list[str]]) -> None:
    """Each text of each sample and prompt stands once, at its number."""
    replies = [
        json.dumps({"choices": [{"index": j, "text": text} for j, text in enumerate(said)]}).encode() for said in texts
    ]
    choices = json.loads(join_replies(replies))["choices"]
    assert [c["index"] for c in choices] == list(range(2 * len(texts)))
    assert [c["text"] for c in choices] == [texts[k][j] for j in range(2) for k in range(len(texts))]
