"""Prompt logprobs: the prefill leg's go before the decode leg's, and nothing else changes."""

import json

import pytest

from pdrouter.engines.logprobs import MERGED_FIELDS, StreamMerger, merge_reply, prompt_logprobs
from pdrouter.errors import UpstreamProtocol

LIMIT_BYTES = 4096


def sample(logprobs: object, *, index: int | None = None, **meta: object) -> bytes:
    """Return a sample of a reply."""
    fields: dict[str, object] = {"text": "x", "meta_info": {"id": "r", "input_token_logprobs": logprobs, **meta}}
    if index is not None:
        fields["index"] = index
    return json.dumps(fields).encode()


def merged_meta(reply: bytes) -> dict[str, object]:
    """Return a sample's ``meta_info``."""
    meta = json.loads(reply)["meta_info"]
    assert isinstance(meta, dict)
    return meta


@pytest.mark.invariant("I10")
def test_a_whole_reply() -> None:
    """The prompt's come first; numbers keep their digits, other fields their bytes and order."""
    prompt = prompt_logprobs(b'{"meta_info":{"input_token_logprobs":[[-0.10, 5 ,null]]}}', is_stream=False)
    decode = (
        b'{"text":"\\u00e9","meta_info":{"id":"r","input_token_logprobs":[[-1e-05,7,null]],"n":12345678901234567890}}'
    )
    assert merge_reply(decode, prompt) == (
        b'{"text":"\\u00e9","meta_info":{"id":"r","input_token_logprobs":[[-0.10, 5 ,null],[-1e-05,7,null]],'
        b'"n":12345678901234567890}}'
    )


def test_every_merged_field() -> None:
    """Tokens, top lists and chosen ids; what the decode leg lacks is the prompt's alone."""
    fields = {field: [[n]] for n, field in enumerate(MERGED_FIELDS)}
    prompt = prompt_logprobs(json.dumps({"meta_info": fields}).encode(), is_stream=False)
    meta = merged_meta(merge_reply(sample([[9]]), prompt))
    assert [meta[field] for field in MERGED_FIELDS] == [[[0], [9]], [[1]], [[2]]]


@pytest.mark.parametrize(
    ("first", "second", "joined"),
    [
        ([[1]], [[2]], [[1], [2]]),
        ([], [[2]], [[2]]),
        ([[1]], [], [[1]]),
        ([[1]], None, [[1]]),
        ([], [], []),
        (None, [[2]], [[2]]),
        ("no", [[2]], [[2]]),
    ],
)
def test_lists_are_joined(first: object, second: object, joined: object) -> None:
    """Empty ones leave no comma; what isn't a list counts for nothing."""
    prompt = prompt_logprobs(sample(first), is_stream=False)
    assert merged_meta(merge_reply(sample(second), prompt))["input_token_logprobs"] == joined


def test_a_batch_is_joined_by_position() -> None:
    """Each sample has its own prompt; one that the prefill leg didn't tell stays as it is."""
    prompt = prompt_logprobs(b"[" + b",".join([sample([[1]]), sample([[2]])]) + b"]", is_stream=False)
    assert set(prompt) == {0, 1}
    reply = b"[" + b",".join([sample([[7]]), sample([[8]]), sample([[9]])]) + b"]"
    merged = [s["meta_info"]["input_token_logprobs"] for s in json.loads(merge_reply(reply, prompt))]
    assert merged == [[[1], [7]], [[2], [8]], [[9]]]


@pytest.mark.invariant("I10")
@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"oops",
        b"[]",
        b"[1]",
        b'{"text": "x"}',
        b'{"meta_info": 5}',
        b'{"meta_info": {} }',
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_what_is_not_understood_stays(reply: bytes) -> None:
    """A reply without samples or without ``meta_info`` goes through byte for byte; as a prompt's it says nothing."""
    assert merge_reply(reply, {0: {"input_token_logprobs": b"[[1]]"}}) == reply
    assert prompt_logprobs(reply, is_stream=False) == {}
    assert prompt_logprobs(b"data: " + reply + b"\n\n", is_stream=True) == {}


@pytest.mark.invariant("I10")
def test_without_prompt_logprobs_nothing_changes() -> None:
    """Neither a reply nor a stream, white space included."""
    reply = b' {"text": "x", "meta_info": {"a" : 1}} '
    assert merge_reply(reply, {}) == reply
    merger = StreamMerger({}, LIMIT_BYTES)
    assert merger.feed(b"data: " + reply + b"\n\n") == b"data: " + reply + b"\n\n"


def test_a_streams_prompt_is_its_longest_list() -> None:
    """Events may repeat it, begin without it, or say something else; samples are told apart by ``index``."""
    events = [sample([]), sample([[1], [2]]), sample([[1]]), sample([[5]], index=1), b"[DONE]"]
    stream = b"".join(b"data: " + event + b"\n\n" for event in events) + b": comment\n\ndata: {half"
    assert prompt_logprobs(stream, is_stream=True) == {
        0: {"input_token_logprobs": b"[[1], [2]]"},
        1: {"input_token_logprobs": b"[[5]]"},
    }


@pytest.mark.invariant("I10")
@pytest.mark.parametrize("cut", [1, 3, 7, 50, 10_000])
def test_a_stream_is_merged_however_it_is_cut(cut: int) -> None:
    """Each event of a sample gets its prompt's; comments, ``[DONE]`` and an unfinished end go through."""
    events = [sample([], index=0), b'{"text": "no meta"}', sample([[8]], index=1), b"[DONE]"]
    stream = b": hello\n\n" + b"".join(b"data: " + event + b"\n\n" for event in events) + b"data: {half"
    merger = StreamMerger({0: {"input_token_logprobs": b"[[1]]"}, 1: {"input_token_logprobs": b"[[2]]"}}, LIMIT_BYTES)
    merged = b"".join(merger.feed(stream[i : i + cut]) for i in range(0, len(stream), cut)) + merger.finish()
    first, second, third, fourth, fifth, last = merged.split(b"\n\n")
    assert merged_meta(second.removeprefix(b"data: "))["input_token_logprobs"] == [[1]]
    assert merged_meta(fourth.removeprefix(b"data: "))["input_token_logprobs"] == [[2], [8]]
    assert [first, third, fifth, last] == [b": hello", b'data: {"text": "no meta"}', b"data: [DONE]", b"data: {half"]
    assert merger.finish() == b""


@pytest.mark.parametrize("index", [b'"1"', b"-1", b"1.5", b"null", b"9" * 5000])
def test_an_index_that_is_none(index: bytes) -> None:
    """It stands for the first sample."""
    event = b'data: {"index":' + index + b',"meta_info":{"input_token_logprobs":[[3]]}}\n\n'
    assert prompt_logprobs(event, is_stream=True) == {0: {"input_token_logprobs": b"[[3]]"}}


ECHOED = (
    b'{"choices":[{"index":0,"text":"ab c","logprobs":{"text_offset":[-1,-1,-1],"token_logprobs":[null,-0.10,-9],'
    b'"tokens":["a","b","c"],"top_logprobs":[null,{"b":-0.10},{"c":-9}]},"finish_reason":"length"}]}'
)
"""A prefill's completion: two tokens of the prompt, and its own."""

ANSWERED = (
    b'{"id":"x", "choices":[{"index":0,"text":"ab\\u00e9","logprobs":{"text_offset":[-1],"token_logprobs":[-1e-05],'
    b'"tokens":["\\u00e9"],"top_logprobs":[{"d":-1e-05}]},"matched_stop":12345678901234567890}]}'
)
JOINED = (
    b'{"id":"x","choices":[{"index":0,"text":"ab\\u00e9","logprobs":{"text_offset":[-1,-1,-1],'
    b'"token_logprobs":[null,-0.10,-1e-05],"tokens":["a","b","\\u00e9"],"top_logprobs":[null,{"b":-0.10},{"d":-1e-05}]},'
    b'"matched_stop":12345678901234567890}]}'
)


@pytest.mark.invariant("I10")
def test_a_completion_that_echoes() -> None:
    """The prompt's tokens come first, without the one that the prefill made; all else keeps its bytes."""
    assert merge_reply(ANSWERED, prompt_logprobs(ECHOED, is_stream=False)) == JOINED


@pytest.mark.invariant("I10")
@pytest.mark.parametrize("cut", [1, 7, 10_000])
def test_a_streamed_completion_that_echoes(cut: int) -> None:
    """The prompt's go into the first event of their choice that has logprobs; later ones stay as they are."""
    prompt = prompt_logprobs(b"data: " + ECHOED + b"\n\ndata: [DONE]\n\n", is_stream=True)
    opening = b'{"choices":[{"index":0,"text":"","logprobs":null}]}'
    other = ANSWERED.replace(b'"index":0', b'"index":1')
    stream = b"".join(b"data: " + event + b"\n\n" for event in (opening, other, ANSWERED, ANSWERED, b"[DONE]"))
    merger = StreamMerger(prompt, LIMIT_BYTES)
    merged = b"".join(merger.feed(stream[i : i + cut]) for i in range(0, len(stream), cut)) + merger.finish()
    assert merged.split(b"\n\n")[:-1] == [b"data: " + event for event in (opening, other, JOINED, ANSWERED, b"[DONE]")]


@pytest.mark.parametrize(
    "choice",
    [b"1", b'{"logprobs":null}', b'{"logprobs":[]}', b'{"logprobs":{"tokens":5}}', b'{"logprobs":{"tokens":[]}}'],
)
def test_a_choice_without_logprobs(choice: bytes) -> None:
    """It adds nothing as a prompt's, and gets nothing as an answer."""
    reply = b'{"choices":[' + choice + b"]}"
    assert json.loads(merge_reply(ANSWERED, prompt_logprobs(reply, is_stream=False))) == json.loads(ANSWERED)
    if b"tokens" not in choice:
        assert merge_reply(reply, prompt_logprobs(ECHOED, is_stream=False)) == reply


@pytest.mark.invariant("I9")
def test_an_event_without_an_end_is_not_held_for_ever() -> None:
    """What is held has a limit."""
    merger = StreamMerger({}, LIMIT_BYTES)
    assert merger.feed(b"data: " + b"x" * (LIMIT_BYTES - 6)) == b""
    with pytest.raises(UpstreamProtocol, match="4096 bytes"):
        merger.feed(b"x")
