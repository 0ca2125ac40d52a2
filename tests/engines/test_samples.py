"""Several requests instead of one with ``n``: their bodies, and their answers joined."""

import json
from typing import Any

import pytest

from pdrouter.engines.samples import StreamJoiner, join_replies, one_sample_body
from pdrouter.errors import DuplicateField, UpstreamProtocol

LIMIT_BYTES = 4096


def chat(text: str, *, index: int = 0, **fields: object) -> dict[str, Any]:
    """Return a chat completion with one choice."""
    choice = {"index": index, "message": {"content": text}, "finish_reason": "stop"}
    return {"id": f"c-{text}", "created": len(text), "choices": [choice]} | fields


def event(value: object) -> bytes:
    """Return an event of a stream."""
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def told(stream: bytes) -> list[Any]:
    """Return the objects of a stream, and what else it says."""
    data = [part.removeprefix(b"data: ") for part in stream.split(b"\n\n") if part]
    return [json.loads(part) if part.startswith(b"{") else part for part in data]


# Bodies.


@pytest.mark.invariant("I10")
@pytest.mark.parametrize(
    ("body", "one"),
    [
        (b'{"n":3}', b"{}"),
        (b'{"n": 3, "seed" : 7, "x": 1e-05}', b'{"seed":7,"x":1e-05}'),
        (b' { "prompt":["a" , "b"],"n":"2","best_of":4}', b'{"prompt":["a" , "b"],"best_of":4}'),
        (b'{"messages":[{"n":2}],"n":2.0}', b'{"messages":[{"n":2}]}'),
    ],
)
def test_a_body_for_one_sample(body: bytes, one: bytes) -> None:
    """Only ``n`` is gone; the seed is the same for all, as in SGLang, and ``best_of``, which it ignores, stays."""
    assert one_sample_body(body, is_generate=False) == one


@pytest.mark.invariant("I10")
@pytest.mark.parametrize(
    ("body", "one"),
    [
        (b'{"text":"x","sampling_params":{"n":2}}', b'{"sampling_params":{},"text":"x"}'),
        (
            b'{"n":5,"sampling_params": {"top_p": 1.0, "n": 2,"stop":[ "n" ]} ,"text":"x"}',
            b'{"sampling_params":{"top_p":1.0,"stop":[ "n" ]},"n":5,"text":"x"}',
        ),
        (
            b'{"text":["a","b"],"sampling_params":[{"n":2,"seed":1},{"n":2}]}',
            b'{"sampling_params":[{"seed":1},{}],"text":["a","b"]}',
        ),
    ],
)
def test_a_generate_body_for_one_sample(body: bytes, one: bytes) -> None:
    """There ``n`` stands in the sampling parameters, or in each of a list of them."""
    assert one_sample_body(body, is_generate=True) == one


@pytest.mark.parametrize(
    ("body", "is_generate"),
    [
        (b'{"n":2,"n":3}', False),
        (b'{"sampling_params":{"n":2,"n":3},"text":"x"}', True),
        (b'{"sampling_params":{"n":3},"text":"x","sampling_params":{"n":2}}', True),
    ],
)
def test_a_field_that_stands_twice(body: bytes, is_generate: bool) -> None:
    """Which one an engine would take isn't known."""
    with pytest.raises(DuplicateField):
        one_sample_body(body, is_generate=is_generate)


# Whole replies.


def test_whole_completions() -> None:
    """Choices in order, and all else as the first one says it."""
    replies = [json.dumps(chat(text, metadata={"weight_version": text})).encode() for text in "abc"]
    joined = json.loads(join_replies(replies))
    assert [(c["index"], c["message"]["content"]) for c in joined["choices"]] == [(0, "a"), (1, "b"), (2, "c")]
    assert (joined["id"], joined["metadata"]) == ("c-a", {"weight_version": "a"})


def test_completions_of_a_list() -> None:
    """Sample k of prompt j is number j * n + k, as SGLang numbers them."""
    replies = [json.dumps({"choices": [{"index": j, "text": f"{j}{k}"} for j in range(3)]}).encode() for k in range(2)]
    choices = json.loads(join_replies(replies))["choices"]
    assert [choice["text"] for choice in choices] == ["00", "01", "10", "11", "20", "21"]
    assert [choice["index"] for choice in choices] == list(range(6))


@pytest.mark.invariant("I10")
def test_other_bytes_stay() -> None:
    """Numbers keep their digits, text its escapes, fields their order."""
    reply = b'{ "choices":[ {"index":0,"x":1e-05,"text":"\\u00e9"} ], "big":12345678901234567890}'
    assert join_replies([reply, reply]) == (
        b'{"choices":[{"index":0,"x":1e-05,"text":"\\u00e9"},{"index":1,"x":1e-05,"text":"\\u00e9"}],'
        b'"big":12345678901234567890}'
    )


USAGE = {"prompt_tokens": 5, "total_tokens": 8, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}


@pytest.mark.parametrize(
    ("usages", "joined"),
    [
        (
            [USAGE, USAGE | {"completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}}],
            USAGE | {"completion_tokens": 7, "total_tokens": 12},
        ),
        (
            [USAGE | {"reasoning_tokens": 1, "completion_tokens_details": None}] * 2,
            USAGE
            | {"completion_tokens": 6, "total_tokens": 11, "reasoning_tokens": 2, "completion_tokens_details": None},
        ),
        (
            [{"completion_tokens_details": details} for details in (None, {"a": 1}, {"a": 2, "b": 3})],
            {"completion_tokens_details": {"a": 3, "b": 3}},
        ),
        ([{"completion_tokens": "x", "total_tokens": None}] * 2, {"completion_tokens": 0, "total_tokens": 0}),
        ([None, None], None),
    ],
)
def test_usage_counts_prompts_once_and_all_answers(usages: list[object], joined: object) -> None:
    """As SGLang counts (``usage_processor.py``): the first sample's prompt, and the sum of what was written."""
    replies = [json.dumps(chat("x", usage=usage)).encode() for usage in usages]
    assert json.loads(join_replies(replies))["usage"] == joined


def test_sglangs_extensions() -> None:
    """What is told of each sample is told of all; the rest once."""
    replies = [
        json.dumps(chat("x", sglext={"input_ids": [1], "output_ids": [[k]], "spec_tokens_details": {"a": k}})).encode()
        for k in range(2)
    ]
    extensions = json.loads(join_replies(replies))["sglext"]
    assert extensions == {"input_ids": [1], "output_ids": [[0], [1]], "spec_tokens_details": [{"a": 0}, {"a": 1}]}


def test_whole_answers_of_generate() -> None:
    """A list, whether there is one prompt or more."""
    answers = [{"text": f"{j}{k}", "meta_info": {}} for k in range(2) for j in range(2)]
    one = [json.dumps(answer).encode() for answer in answers[:2]]
    assert [answer["text"] for answer in json.loads(join_replies(one))] == ["00", "10"]
    lists = [json.dumps(answers[:2]).encode(), json.dumps(answers[2:]).encode()]
    assert [answer["text"] for answer in json.loads(join_replies(lists))] == ["00", "01", "10", "11"]


@pytest.mark.parametrize(
    "second",
    [b"", b"oops", b"5", b"[]", b"{}", b'{"error":{"message":"x"}}', b'[{"choices":[]},{"choices":[]}]', b"\xff"],
)
@pytest.mark.parametrize("first", [b'{"choices":[]}', b'{"meta_info":{}}', b'[{"meta_info":{}}]'])
def test_a_reply_that_is_not_understood(first: bytes, second: bytes) -> None:
    """It can't be joined; the failure says whose it is."""
    with pytest.raises(UpstreamProtocol, match="sample 1 of 2"):
        join_replies([first, second])


# Streams.


def test_streams_of_chats() -> None:
    """Events come through at once with their index and one id; usage and the end come when all have ended."""
    joiner = StreamJoiner(2, LIMIT_BYTES)
    chunk = {"created": 7, "object": "chat.completion.chunk", "usage": None}
    role = {"index": 0, "delta": {"role": "assistant", "content": ""}}
    usage = {"choices": [], "usage": USAGE}
    second = joiner.feed(1, event({"id": "b", "choices": [role]} | chunk))
    first = joiner.feed(0, event({"id": "a", "choices": [role]} | chunk | {"created": 8}))
    assert told(second + first) == [
        {"id": "b", "choices": [role | {"index": 1}]} | chunk,
        {"id": "b", "choices": [role]} | chunk,
    ]
    assert joiner.feed(0, event({"id": "a"} | usage) + event(b"[DONE]")) == b""
    assert joiner.feed(1, event({"id": "b"} | usage) + event(b"[DONE]")) == b""
    assert told(joiner.end(0) + joiner.end(1)) == []
    assert told(joiner.finish()) == [
        {"id": "b", "choices": [], "usage": USAGE | {"completion_tokens": 6, "total_tokens": 11}},
        b"[DONE]",
    ]


def test_streams_of_generate() -> None:
    """Each event gets its index: there is none where a prompt stands alone."""
    joiner = StreamJoiner(3, LIMIT_BYTES)
    assert told(joiner.feed(2, event({"text": "x", "meta_info": {}}))) == [{"text": "x", "meta_info": {}, "index": 2}]
    assert told(joiner.feed(1, event({"index": 2, "text": "x", "meta_info": {}})))[0]["index"] == 7


@pytest.mark.invariant("I10")
@pytest.mark.parametrize(
    "other", [b": ping\n\n", b"data: 1e400\n\n", b'data: {"x":1.0}\n\n', b"oops\n\n", b'data: {"meta\n\n', b"\xff\n\n"]
)
def test_what_is_not_understood_passes(other: bytes) -> None:
    """As it is, at once; an unfinished end as an event of its own."""
    joiner = StreamJoiner(2, LIMIT_BYTES)
    assert joiner.feed(1, other) == other
    assert joiner.feed(0, other.rstrip(b"\n")) == b""
    assert joiner.end(0) == other
    assert joiner.finish() == b""


def test_events_with_names() -> None:
    """A name stays in front of its data."""
    joiner = StreamJoiner(2, LIMIT_BYTES)
    named = b'event: sglext_ids\ndata: {"choices":[],"sglext":{"output_ids":[[%d]]}}\n\n'
    assert joiner.feed(0, named % 0) + joiner.feed(1, named % 1) == b""
    assert joiner.finish() == b'event: sglext_ids\ndata: {"choices":[],"sglext":{"output_ids":[[0],[1]]}}\n\n'


def test_an_error_ends_it_all() -> None:
    """It passes as it came, and nothing is summed up behind it."""
    joiner = StreamJoiner(2, LIMIT_BYTES)
    joiner.feed(1, event({"choices": [], "usage": USAGE}))
    error = event(b'{"error": {"message":"x"}}')
    assert joiner.feed(0, error + event(b"[DONE]")) == error
    assert joiner.has_failed
    assert joiner.end(0) + joiner.finish() == event(b"[DONE]")


def test_an_error_that_is_null() -> None:
    """Is none."""
    joiner = StreamJoiner(2, LIMIT_BYTES)
    joiner.feed(0, event({"error": None, "choices": [{"index": 0}]}))
    assert not joiner.has_failed


@pytest.mark.invariant("I9")
def test_what_is_held_of_all_streams_together_has_a_limit() -> None:
    """Unfinished events and closing ones; what has gone counts no more."""
    joiner = StreamJoiner(2, 100)
    for _ in range(3):
        assert joiner.feed(0, b"x" * 60) == b""
        assert joiner.feed(0, b"\n\n") == b"x" * 60 + b"\n\n"
    closing = b'data: {"choices":[]}'
    joiner.feed(0, b"x" * 60)
    joiner.feed(1, closing + b"\n\n" + b"x" * (40 - len(closing)))
    with pytest.raises(UpstreamProtocol, match="100 bytes"):
        joiner.feed(1, b"x")
