"""Streams of events as they pass, however they are cut: when they begin, their tokens, their end, their failures."""

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrouter.engines.failures import dialect
from pdrouter.engines.streams import StreamReader, are_events, event_data, leg_failure, trailing_events

SPOKEN = dialect("/v1/chat/completions", "sglang")
MESSAGES = dialect("/v1/messages", "sglang")
RESPONSES = dialect("/v1/responses", "sglang")

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
ABORT = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
ERROR = b'data: {"error": {"object": "error", "message": "KV is lost", "code": 500}}\n\n'
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


def named(name: str, **fields: object) -> bytes:
    """Return an event that has a name."""
    return f"event: {name}\ndata: {json.dumps({'type': name} | fields)}\n\n".encode()


def read(pieces: Iterable[bytes], spoken: object = SPOKEN) -> StreamReader:
    """Return what is known of a stream at its end; behind the end mark nothing is read."""
    reader = StreamReader(spoken)  # type: ignore[arg-type]
    for piece in pieces:
        if not reader.is_over:
            reader.feed(piece)
    reader.finish()
    return reader


def known(reader: StreamReader) -> Sequence[object]:
    """Return all that a reader says."""
    status = None if reader.failure is None else reader.failure.status
    return reader.has_events, reader.has_begun, reader.is_over, reader.events, status


STREAMS = {
    "chat": (ROLE + TOKEN + TOKEN + FINISH + USAGE + DONE, (True, True, True, 4, None)),
    "comments": (PING + PING, (False, False, False, 0, None)),
    "opening": (PING + ROLE, (True, False, False, 0, None)),
    "nothing": (b"", (False, False, False, 0, None)),
    "end": (DONE, (False, False, True, 0, None)),
    "empty": (ROLE + FINISH + DONE, (True, True, True, 1, None)),
    "error": (ERROR + DONE, (True, False, True, 0, 500)),
    "error_later": (ROLE + TOKEN + ERROR + DONE, (True, True, True, 1, 500)),
    "abort": (ROLE + ABORT + DONE, (True, False, True, 0, 500)),
    "abort_later": (TOKEN + ABORT + DONE, (True, True, True, 2, None)),
    "two_errors": (ERROR.replace(b"500", b"400") + ERROR, (True, False, False, 0, 400)),
    "error_first": (ERROR + TOKEN + FINISH, (True, False, False, 0, 500)),
    "more_behind": (TOKEN + DONE + TOKEN + ERROR, (True, True, True, 1, None)),
    "no_blank_line": (TOKEN + DONE.rstrip(), (True, True, True, 1, None)),
    "no_data": (b"event: x\nid: 5\n\n" + TOKEN, (True, True, False, 1, None)),
    "many_lines": (b'data: {"choices":\ndata: []}\n\n' + TOKEN, (True, True, False, 1, None)),
    "bytes": (b"data: \x00\xff\n\n", (True, True, False, 1, None)),
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@given(cuts=st.lists(st.integers(0, 600), max_size=12))
def test_streams_in_pieces(name: str, line_end: bytes, cuts: Sequence[int]) -> None:
    """However a stream is cut, and whatever ends its lines, the same is known of it."""
    stream, told = STREAMS[name]
    stream = stream.replace(b"\n", line_end)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    assert known(read(stream[a:b] for a, b in pairwise(edges))) == told


BLOCKS = [
    TOKEN,
    PING,
    b"data: {}\n\n",
    b'data: {"a":1}\ndata: {}\n\n',
    b"data: \n\n",
    b"data: {}\r\n\r\n",
    b"event: x\ndata: {}\n\n",
    b"data: {}\n\n\n",
    ERROR,
    FINISH,
    DONE,
]


@given(blocks=st.lists(st.sampled_from(BLOCKS), max_size=12), data=st.data())
def test_many_events_at_once(blocks: Sequence[bytes], data: st.DataObject) -> None:
    """Several events in one piece, as a slow engine sends them, are the same as one by one."""
    edges = [0, *sorted(data.draw(st.lists(st.integers(0, len(blocks)), max_size=3))), len(blocks)]
    assert known(read(b"".join(blocks[a:b]) for a, b in pairwise(edges))) == known(read(blocks))


@pytest.mark.parametrize("name", STREAMS)
def test_streams_by_bytes_and_by_events(name: str) -> None:
    """As above, in the smallest pieces and as engines send them."""
    stream, told = STREAMS[name]
    assert known(read(bytes([byte]) for byte in stream)) == told
    assert known(read(part + b"\n\n" for part in stream.split(b"\n\n")[:-1])) == told or name == "no_blank_line"


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ([named("message_start"), named("ping"), named("content_block_start")], (True, False, False, 0, None)),
        ([named("message_start"), named("content_block_delta")], (True, True, False, 1, None)),
        ([named("content_block_delta"), named("message_delta"), named("message_stop")], (True, True, True, 2, None)),
        (
            [named("message_start"), named("error", error={"type": "api_error"}), named("message_stop")],
            (True, False, True, 0, 500),
        ),
    ],
)
def test_messages(events: Sequence[bytes], told: Sequence[object]) -> None:
    """On ``/v1/messages`` several events open a stream, and ``message_stop`` ends it."""
    assert known(read(events, MESSAGES)) == told


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ([named("response.created", response={"error": None})], (True, False, False, 0, None)),
        (
            [named("response.output_text.delta", delta="response.failed"), named("response.completed", response={})],
            (True, True, True, 1, None),
        ),
        ([named("response.output_text.delta"), named("response.incomplete", response={})], (True, True, True, 1, None)),
        ([named("response.completed", response={})], (True, False, True, 0, None)),
        ([named("response.failed", response={"usage": {}})], (True, False, True, 0, 500)),
        (
            [
                named("response.output_text.delta"),
                named("response.failed", response={"error": {"code": "x"}, "usage": {}}),
            ],
            (True, True, True, 1, 500),
        ),
    ],
)
def test_responses(events: Sequence[bytes], told: Sequence[object]) -> None:
    """On ``/v1/responses`` the end is one of three events, and one of them a failure."""
    assert known(read(events, RESPONSES)) == told


def test_what_comes_behind_the_end() -> None:
    """How much of the last piece it is, is known."""
    reader = StreamReader(SPOKEN)
    reader.feed(TOKEN + DONE[:9])
    reader.feed(DONE[9:] + b": more")
    assert (reader.is_over, reader.surplus_bytes) == (True, 6)


@pytest.mark.invariant("I9")
def test_an_event_without_end() -> None:
    """No more than a part of it is kept, however small its pieces are; behind it all is as before."""
    reader = StreamReader(SPOKEN)
    reader.feed(b"data: {")
    for _ in range(100):
        reader.feed(b"x" * 1000)
        assert len(reader._rest) <= 20_000
    assert known(reader) == (True, True, False, 1, None)
    reader.feed(b"\r")
    reader.feed(b"\n\r\n" + TOKEN + ERROR)
    reader.feed(DONE)
    assert known(reader) == (True, True, True, 2, 500)
    endless = StreamReader(SPOKEN)
    endless.feed(b"x" * 100_000)
    endless.finish()
    assert known(endless) == (False, False, False, 0, None)


@pytest.mark.invariant("I9")
@pytest.mark.parametrize("size", [16_380, 16_384, 16_385, 16_388, 16_400, 40_000])
@pytest.mark.parametrize("start", [b"data: {", b": ping", b"no field"])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_a_long_event_is_the_same_in_any_pieces(start: bytes, size: int, line_end: bytes) -> None:
    """A part of the answer if it has data, and nothing if it is a comment, whether it comes whole or cut."""
    event = start + b"x" * (size - len(start)) + 2 * line_end
    told = known(read([event, DONE]))
    assert told[3] == start.startswith(b"data")
    for cut in (1, 16_383, 16_384, 16_387, 16_388, len(event) - 3, len(event) - 1):
        assert known(read([event[:cut], event[cut:], DONE])) == told, cut


@pytest.mark.parametrize(
    ("block", "data"),
    [
        (b"data: x", b"x"),
        (b"data:x", b"x"),
        (b"data:  x", b" x"),
        (b"event: y\r\ndata: x\r\nid: 5", b"x"),
        (b"data: a\ndata: b", b"a\nb"),
        (b": data: x", b""),
        (b"data", b""),
        (b"", b""),
    ],
)
def test_the_data_of_an_event(block: bytes, data: bytes) -> None:
    """By the standard: one space behind the colon isn't of it, several lines are joined."""
    assert event_data(block) == data


@pytest.mark.parametrize(
    ("start", "are"),
    [
        *[(start, True) for start in (b"data:", b"data: {", b":", b": ping", b"\n\nevent: x", b"id: 5", b"retry:")],
        *[(start, None) for start in (b"", b"\r\n", b"d", b"data", b"\nevent", b"i", b"retr")],
        *[(start, False) for start in (b"{", b"[1]", b"no: x", b"datum", b"data; x", b"events: x", b"\xff\xfb", b" x")],
    ],
)
def test_what_is_a_stream_of_events(start: bytes, are: bool | None) -> None:
    """It begins with a comment or a field, which is known by the colon."""
    assert are_events(start) is are


@pytest.mark.parametrize(
    ("tail", "count"),
    [
        (TOKEN + FINISH + USAGE + DONE, 2),
        (TOKEN + DONE, 0),
        (TOKEN + PING, 0),
        (TOKEN + ABORT + ERROR + DONE, 1),
        (FINISH[20:] + USAGE, 1),
        (b"", 0),
    ],
)
def test_events_behind_the_last_token(tail: bytes, count: int) -> None:
    """Those that were counted and had no token."""
    assert trailing_events(tail, SPOKEN) == count


@pytest.mark.parametrize(
    ("tail", "status"),
    [
        (ROLE + TOKEN + FINISH + DONE, None),
        (ROLE + ERROR + DONE, 500),
        (ERROR[:-2], 500),
        (ROLE + ABORT + DONE, 500),
        (b'{"error":{"message":"x","code":503}}', 503),
        (b'{"choices":[{"message":{"content":"error"}}]}', None),
        (b'x"error"}\n\n' + TOKEN, None),
        (b"", None),
    ],
)
def test_failures_of_a_prefill(tail: bytes, status: int | None) -> None:
    """They stand in the end of its reply, streamed or not."""
    failure = leg_failure(tail, SPOKEN)
    assert (None if failure is None else failure.status) == status
