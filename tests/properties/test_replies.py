"""Whatever an engine says: it is read, left or refused by a RouterError; what isn't ours comes through as it came."""

import json
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdrouter.engines.base import Described, Engine, HandOver, LoadReply, Plan, rest_without, splice
from pdrouter.engines.logprobs import MERGED_FIELDS, StreamMerger, merge_reply, prompt_logprobs
from pdrouter.engines.openai import OpenAi
from pdrouter.engines.sglang import OWNED_FIELDS, Sglang
from pdrouter.engines.sglang_ranks import RankFields
from pdrouter.engines.trtllm import Trtllm
from pdrouter.engines.usage import CACHED_TOKENS, prompt_count, with_cached_tokens
from pdrouter.engines.vllm import Vllm
from pdrouter.errors import InvalidJson, RouterError
from tests.back import heard
from tests.engines.builders import make_attempt, make_inbound, make_pair

SGLANG, VLLM, TRTLLM, OPENAI = Sglang(RankFields.AUTO), Vllm(), Trtllm(), OpenAi()
ENGINES: Sequence[tuple[str, Engine]] = (("sglang", SGLANG), ("vllm", VLLM), ("trtllm", TRTLLM), ("openai", OPENAI))
SERIAL: Sequence[tuple[str, Engine, str]] = (("vllm", VLLM, "nixl"), ("trtllm", TRTLLM, "native"))
MOST_BYTES = 2000

NAMES = st.sampled_from(
    [
        *("dp_rank", "num_running_reqs", "num_waiting_reqs", "num_used_tokens", "timestamp", "loads", "token_usage"),
        *("model_path", "served_model_name", "dp_size", "disaggregation_mode", "version", "data", "id"),
        *("kv_transfer_params", "usage", "prompt_tokens", "cached_tokens", "prompt_tokens_details", "choices"),
        *("disaggregated_params", "prompt_token_ids", "finish_reason", "meta_info", "index", "text", "engine_id", "0"),
        *MERGED_FIELDS,
    ]
)
NUMBERS = st.one_of(
    st.integers(-(10**25), 10**25),
    st.floats(),
    st.sampled_from([0, -1, 2**53 + 1, 2**63, 10**400, 1e308, float("nan"), float("inf")]),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=5), NAMES),
    lambda values: st.one_of(st.lists(values, max_size=3), st.dictionaries(NAMES, values, max_size=5)),
    max_leaves=15,
)
JSON = VALUES.map(lambda value: json.dumps(value).encode())
SERIES = st.tuples(
    st.sampled_from(
        [
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
            "vllm:cache_config_info",
            "trtllm_num_requests_running",
            "trtllm_kv_cache_utilization",
        ]
    ),
    st.sampled_from(
        [
            "",
            '{engine="0"}',
            '{engine="-1"}',
            '{engine="٣"}',
            '{engine="9999999999"}',
            '{block_size="16",num_gpu_blocks="²"}',
            '{block_size="16",num_gpu_blocks="100"}',
            '{block_size="%s",num_gpu_blocks="9"}' % ("9" * 5000),
            "{",
        ]
    ),
    st.sampled_from(["1", "-1", "NaN", "+Inf", "1e999", "x", "0.5", "1_0", ""]),
).map(lambda parts: f"{parts[0]}{parts[1]} {parts[2]}\n".encode())
PAGES = st.lists(SERIES, max_size=8).map(b"".join)


@st.composite
def spoilt(draw: st.DrawFn, good: st.SearchStrategy[bytes]) -> bytes:
    """Return bytes that were good before something was cut, put in or turned over."""
    raw = draw(good)
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(raw)))
        raw = raw[:at] + draw(st.binary(max_size=4)) + raw[draw(st.integers(at, min(len(raw), at + 5))) :]
    return raw


REPLIES = st.one_of(JSON, PAGES, spoilt(JSON), spoilt(PAGES), st.binary(max_size=40), st.just(b"[" * 100_000))


@pytest.mark.parametrize(("name", "engine"), ENGINES, ids=[name for name, _ in ENGINES])
@given(reply=REPLIES)
@example(reply=b'vllm:cache_config_info{block_size="%b",num_gpu_blocks="9"} 1\n' % (b"9" * 5000))
def test_what_engines_tell(name: str, engine: Engine, reply: bytes) -> None:
    """Of itself and of its load: it is understood, or it isn't."""
    for path in [path for paths in engine.info_paths for path in paths] + ["/query"]:
        assert isinstance(engine.describe(path, reply), Described | None)
    if engine.load_paths:
        load = engine.read_load(reply)
        assert isinstance(load, LoadReply | None)
        for report in load.ranks if load else ():
            assert isinstance(report.rank, int)
            assert all(value is None or isinstance(value, int | float) for value in (report.tokens, report.requests))


def planned(name: str, engine: Engine, transport: str, body: bytes) -> tuple[Any, Any, Plan]:
    """Return a decision, a request, and its plan."""
    decision = make_pair(engine=name, kv_transport=transport)
    inbound = make_inbound(body[1:], path="/v1/chat/completions")
    return decision, inbound, engine.plan(decision, inbound, make_attempt())


@pytest.mark.parametrize(("name", "engine", "transport"), SERIAL, ids=[name for name, _, _ in SERIAL])
@given(reply=REPLIES)
@example(reply=b"")
@example(reply=b'{"kv_transfer_params":1,"choices":[{"finish_reason":"length","disaggregated_params":1}]}')
def test_hand_over(name: str, engine: Engine, transport: str, reply: bytes) -> None:
    """What follows a prefill's answer is a leg with a valid body, an answer, or a RouterError; its KV can be freed."""
    decision, inbound, plan = planned(name, engine, transport, b'{"messages":[],"seed":12345678901234567890}')
    with suppress(RouterError):
        hand_over = engine.hand_over(decision, inbound, plan, reply)
        assert isinstance(hand_over, HandOver)
        if hand_over.decode is not None:
            told = msgspec.json.decode(b"".join(hand_over.decode.body), type=dict[str, msgspec.Raw])
            assert bytes(told["seed"]) == b"12345678901234567890"
    released = engine.release(decision, reply)
    assert released is None or released[1].endswith(b"}")


@given(prompt=REPLIES, answer=REPLIES, is_stream=st.booleans())
def test_merged_replies(prompt: bytes, answer: bytes, is_stream: bool) -> None:
    """An answer that isn't understood comes through as it came, and one that is stays JSON."""
    found = prompt_logprobs(prompt, is_stream=is_stream)
    merged = merge_reply(answer, found)
    if merged != answer:
        before, after = msgspec.json.decode(answer), msgspec.json.decode(merged)
        assert without(before) == without(after)


def without(value: Any) -> Any:
    """Return an answer without what is merged, in a form that can be compared."""
    samples = value if isinstance(value, list) else [value]
    for sample in samples:
        for field in MERGED_FIELDS:
            sample.get("meta_info", {}).pop(field, None)
    return repr(samples)


@pytest.mark.invariant("I10")
@given(prompt=REPLIES, events=st.lists(REPLIES, max_size=4), cuts=st.lists(st.integers(0, 400), max_size=5))
def test_merged_streams(prompt: bytes, events: Sequence[bytes], cuts: Sequence[int]) -> None:
    """However a stream is cut, it comes out the same, and as it came where there is nothing to merge."""
    stream = b"".join(b"data: " + event + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    found = prompt_logprobs(b"data: " + prompt + b"\n\n", is_stream=True)
    with suppress(RouterError):
        whole = fed(StreamMerger(found, MOST_BYTES), [stream])
        assert fed(StreamMerger({}, MOST_BYTES), pieces_of(stream, cuts)) == stream
        assert fed(StreamMerger(found, MOST_BYTES), pieces_of(stream, cuts)) == whole


def fed(merger: StreamMerger, pieces: Sequence[bytes]) -> bytes:
    """Return what comes out."""
    return b"".join([merger.feed(piece) for piece in pieces] + [merger.finish()])


def pieces_of(raw: bytes, cuts: Sequence[int]) -> Sequence[bytes]:
    """Return bytes in pieces."""
    edges = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    return [raw[start:end] for start, end in pairwise(edges)]


@given(tail=st.one_of(REPLIES, REPLIES.map(lambda raw: b'"cached_tokens" : ' + raw)), cached=st.integers(0, 10**9))
def test_counts_in_any_bytes(tail: bytes, cached: int) -> None:
    """What was cached is told by a number of at most nine digits, and writing it anew changes nothing else."""
    count = prompt_count(tail)
    assert count is None or (0 <= count.cached_tokens < 10**9 and 0 <= count.prompt_tokens < 10**9)
    written = with_cached_tokens(tail, cached)
    assert written.count(CACHED_TOKENS) == tail.count(CACHED_TOKENS)
    assert (written == tail) or prompt_count(written) is None or b"%d" % cached in written


@pytest.mark.invariant("I10")
@given(raw=st.one_of(JSON.filter(lambda body: body.startswith(b"{")), spoilt(JSON), st.binary(max_size=60)))
def test_a_splice_is_what_parsing_and_editing_gives(raw: bytes) -> None:
    """Our fields in front of the client's without those that we own; what isn't JSON is refused."""
    owned = OWNED_FIELDS | {"kv_transfer_params", "usage"}
    try:
        rest = rest_without(raw, owned)
    except InvalidJson:
        with pytest.raises((ValueError, RecursionError, AssertionError)):
            assert isinstance(msgspec.json.decode(raw), dict)
        return
    except RouterError:
        return  # a field of ours twice
    ours = b'"rid":"r","bootstrap_room":9007199254740993'
    edited = {k: v for k, v in msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).items() if k not in owned}
    spliced = msgspec.json.decode(b"".join(splice(rest, ours)), type=dict[str, msgspec.Raw])
    assert {k: bytes(v) for k, v in spliced.items()} == {
        "rid": b'"r"',
        "bootstrap_room": b"9007199254740993",
        **{k: bytes(v) for k, v in edited.items()},
    }


HEADS = st.sampled_from(
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.0 500 No\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 204 None\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
    ]
)
BODIES = st.sampled_from([b"hello", b"5\r\nhello\r\n", b"0\r\n\r\n", b"ffffffffffffffff\r\n", b"data: x\n\n", b""])
WIRE = st.lists(st.one_of(HEADS, BODIES, st.binary(max_size=10)), max_size=6).map(b"".join)


@given(raw=WIRE, cuts=st.lists(st.integers(0, 100), max_size=5))
@example(raw=b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\nZZ\r\n", cuts=[])
def test_any_bytes_on_the_wire(raw: bytes, cuts: Sequence[int]) -> None:
    """They are a whole reply, or a failure that is told to whoever reads once for each call; so cut in any way."""
    status, body, is_whole, code, *_ = heard([raw] if raw else [], MOST_BYTES)
    assert is_whole or code in ("upstream_closed", "upstream_protocol")
    pieces = [piece for piece in pieces_of(raw, cuts) if piece]
    if is_whole and len(raw) < MOST_BYTES:
        assert heard(pieces, MOST_BYTES)[:2] == (status, body)
