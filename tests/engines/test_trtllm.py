"""TensorRT-LLM: both legs, ids of 64 bits, answers that end with the first token, its pages and its load."""

import json
from typing import Any

import pytest

from pdrouter.core.decision import Decision
from pdrouter.core.fleet import Role
from pdrouter.core.load import RankReport
from pdrouter.core.names import Card
from pdrouter.engines.base import Described, HandOver, Inbound, Leg, LoadReply, Plan
from pdrouter.engines.trtllm import Trtllm
from pdrouter.engines.usage import PromptCount
from pdrouter.errors import DuplicateField, UpstreamProtocol

from .builders import (
    ROOMS,
    body_of,
    lines_of,
    make_attempt,
    make_decision,
    make_endpoint,
    make_inbound,
    make_pair,
    place,
    prefill_leg,
)

ENGINE = Trtllm()
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BIG = 9_007_199_254_740_993
"""One above 2^53: a float would make another number of it."""
PARAMS = (
    b'{"request_type":"context_only","first_gen_tokens":[7],"ctx_request_id":9007199254740993,'
    b'"encoded_opaque_state":"AQID","draft_tokens":null,"disagg_request_id":%b,"new_in_some_version":1e400}'
)
USAGE = b'{"prompt_tokens":3,"total_tokens":4,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":2}}'
ANSWER = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":5,"model":"m","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"Hi","tool_calls":%b},"logprobs":null,"finish_reason":"%b","stop_reason":null,'
    b'"disaggregated_params":%b}],"usage":%b,"prompt_token_ids":[1,2,12345678901234567890]}'
)


def pair() -> Decision:
    """Return a decision for a pair."""
    return make_pair(0, 0, engine="trtllm", kv_transport="native", dp_size=1)


def chat(body: dict[str, object] | None = None, **fields: object) -> Inbound:
    """Return a chat request."""
    rest = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **(body or {})})[1:].encode()
    return make_inbound(rest, path=CHAT, **fields)


def answer(finish: bytes = b"length", params: bytes = PARAMS % b"5", calls: bytes = b"[]") -> bytes:
    """Return a context engine's answer."""
    return ANSWER % (calls, finish, params, USAGE)


def hand_over(inbound: Inbound, reply: bytes) -> HandOver:
    """Plan, and go on with an answer."""
    plan = ENGINE.plan(pair(), inbound, make_attempt())
    return ENGINE.hand_over(pair(), inbound, plan, reply)


def read(leg: Leg | None) -> dict[str, Any]:
    """Return a leg's body as the engine reads it."""
    assert leg is not None
    loaded: dict[str, Any] = json.loads(body_of(leg), object_pairs_hook=_once)
    return loaded


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def test_a_context_leg_makes_one_token_for_nobody() -> None:
    """Neither streamed nor longer; ``min_tokens`` stays, or the first token might end what must go on."""
    body = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 60,
        "min_tokens": 5,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "disaggregated_params": {"request_type": "generation_only"},
    }
    plan = ENGINE.plan(pair(), chat(body, is_stream=True), make_attempt())
    assert plan.decode is None
    assert read(plan.prefill) == {
        "stream": False,
        "max_tokens": 1,
        "disaggregated_params": {"request_type": "context_only", "disagg_request_id": int(plan.rid)},
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "min_tokens": 5,
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }


@pytest.mark.parametrize("room", [0, 1, 1 << 41, (1 << 63) - 1, *ROOMS])
def test_ids_are_those_of_legs(room: int) -> None:
    """At least 2^42, below 2^63, another for another room."""
    plan = ENGINE.plan(pair(), chat(), make_attempt((room,)))
    number = int(plan.rid)
    assert 1 << 42 <= number < 1 << 63
    assert number | 1 << 42 == number == room | 1 << 42


@pytest.mark.invariant("I10")
def test_a_generation_leg_gets_what_the_context_engine_said() -> None:
    """The object byte for byte but for its type, the prompt's ids likewise; what the client asked for stays."""
    inbound = chat(
        {"stream": True, "max_tokens": 9, "prompt_token_ids": [4], "disaggregated_params": {"evil": 1}},
        fields=("disaggregated_params",),
        is_stream=True,
    )
    after = hand_over(inbound, answer())
    assert after.decode is not None
    body = body_of(after.decode)
    params = (PARAMS % b"5").replace(b"context_only", b"generation_only")
    assert body.startswith(
        b'{"disaggregated_params":' + params + b',"prompt_token_ids":[1,2,12345678901234567890],"model"'
    )
    assert str(BIG).encode() in body
    assert read(after.decode) | {"disaggregated_params": None} == {
        "disaggregated_params": None,
        "prompt_token_ids": [1, 2, 12345678901234567890],
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "max_tokens": 9,
    }
    assert after.has_kv
    assert after.count == PromptCount(3, 2)


def test_both_legs_have_the_client_s_request_id() -> None:
    """And no rank: the engine chooses it."""
    plan = ENGINE.plan(pair(), chat(), make_attempt())
    after = ENGINE.hand_over(pair(), chat(), plan, answer())
    assert after.decode is not None
    for leg in (prefill_leg(plan), after.decode):
        names = [line.partition(":")[0] for line in lines_of(leg.head)][1:]
        assert names == ["host", "content-type", "x-request-id", "content-length"]
        assert "x-request-id: r-1" in lines_of(leg.head)


@pytest.mark.parametrize("ids", [b"[1,2]", b"[[1,2]]"])
def test_a_completion_s_prompt_is_replaced(ids: bytes) -> None:
    """By the ids as they came, a list or a list of lists."""
    inbound = make_inbound(b'"model":"m","prompt":"x","max_tokens":4}', path=TEXT)
    reply = b'{"choices":[{"text":"a","finish_reason":"not_finished","disaggregated_params":{"ctx_request_id":1}}],'
    after = hand_over(inbound, reply + b'"prompt_token_ids":%b}' % ids)
    number = ROOMS[0] | 1 << 42
    assert after.decode is not None
    assert body_of(after.decode) == (
        b'{"disaggregated_params":{"ctx_request_id":1,"request_type":"generation_only","disagg_request_id":%d},'
        b'"prompt":%b,"model":"m","max_tokens":4}' % (number, ids)
    )
    assert after.count is None


def test_older_versions_put_the_object_at_the_top() -> None:
    """And may leave out the prompt's ids and their count of it; then the client's prompt stays."""
    reply = b'{"choices":[{"finish_reason":"length"}],"disaggregated_params":{"ctx_request_id":9007199254740993}}'
    after = hand_over(chat(), reply)
    body = read(after.decode)
    assert body["disaggregated_params"]["ctx_request_id"] == BIG
    assert "prompt_token_ids" not in body
    assert after.has_kv


@pytest.mark.parametrize("params", [b"null", b" null "])
def test_an_answer_that_doesnt_say_where_the_kv_is(params: bytes) -> None:
    """The generation engine gets the client's own request, and that is told."""
    after = hand_over(chat({"max_tokens": 3}), answer(params=params))
    assert not after.has_kv
    assert read(after.decode) == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 3,
    }


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"[]",
        b"<html>",
        b"{}",
        b'{"choices":[]}',
        b'{"choices":[5]}',
        b'{"choices":[{"finish_reason":"stop","message":5}]}',
        b'{"choices":[{"finish_reason":"stop","message":{"tool_calls":5}}]}',
        b'{"choices":[{"finish_reason":"length","disaggregated_params":5}]}',
        b'{"choices":[{"finish_reason":"\xff"}]}',
        b"{" * 100_000,
    ],
)
def test_an_answer_that_isnt_one(reply: bytes) -> None:
    """Nobody guesses."""
    with pytest.raises(UpstreamProtocol):
        hand_over(chat(is_stream=True), reply)


def test_a_field_of_ours_twice_is_refused() -> None:
    """Which of them counts depends on who reads."""
    inbound = make_inbound(b'"prompt":"x","max_tokens":5,"max_tokens":6}', path=TEXT)
    with pytest.raises(DuplicateField):
        ENGINE.plan(pair(), inbound, make_attempt())


@pytest.mark.parametrize("finish", [b"stop", b"tool_calls", b"content_filter"])
def test_an_answer_that_ended_with_its_first_token_is_the_client_s(finish: bytes) -> None:
    """Without what was for the other leg; all else is as it came."""
    after = hand_over(chat(), answer(finish))
    assert after.decode is None
    told = answer(finish)
    for part in (b',"disaggregated_params":' + PARAMS % b"5", b',"prompt_token_ids":[1,2,12345678901234567890]'):
        assert part in told
        told = told.replace(part, b"")
    assert after.answer == told
    assert after.count == PromptCount(3, 2)


def test_it_is_streamed_to_a_client_that_streams() -> None:
    """One chunk, the usage if it was asked for, and the end."""
    wants = {"stream": True, "stream_options": {"include_usage": True}}
    stream = hand_over(chat(wants, is_stream=True), answer(b"stop")).answer
    first, last, end = stream.removesuffix(b"\n\n").split(b"\n\n")
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 5, "model": "m"}
    choice = {
        "delta": {"role": "assistant", "content": "Hi"},
        "index": 0,
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert json.loads(first.removeprefix(b"data: ")) == {**head, "choices": [choice]}
    assert json.loads(last.removeprefix(b"data: ")) == {**head, "choices": [], "usage": json.loads(USAGE)}
    assert end == b"data: [DONE]"


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": 3}, "all"])
def test_usage_is_streamed_only_if_asked_for(options: object) -> None:
    """Whatever else stands there."""
    wants = {"stream": True, "stream_options": options}
    stream = hand_over(chat(wants, is_stream=True), answer(b"stop")).answer
    assert stream.count(b"data: ") == 2
    assert b"usage" not in stream


def test_calls_of_tools_are_numbered_in_a_stream() -> None:
    """As chunks have them."""
    calls = b'[{"id":"a","function":{"name":"f","arguments":"{}"}},{"id":"b"}]'
    stream = hand_over(chat(is_stream=True), answer(b"tool_calls", calls=calls)).answer
    choice = json.loads(stream.split(b"\n\n")[0].removeprefix(b"data: "))["choices"][0]
    assert [(call["index"], call["id"]) for call in choice["delta"]["tool_calls"]] == [(0, "a"), (1, "b")]


def test_a_streamed_completion() -> None:
    """Its choices are the same in a chunk."""
    inbound = make_inbound(b'"model":"m","prompt":"x","stream":true}', path=TEXT, is_stream=True)
    reply = b'{"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":"a","finish_reason":"stop"}]}'
    assert hand_over(inbound, reply).answer == b"data: " + reply + b"\n\ndata: [DONE]\n\n"


def test_one_endpoint_alone() -> None:
    """The client's own body, without anybody else's KV."""
    decision = make_decision(None, place(make_endpoint(Role.REGULAR, dp_size=1), 0))
    inbound = chat({"n": 2, "disaggregated_params": {"x": 1}}, fields=("disaggregated_params",))
    plan = ENGINE.plan(decision, inbound, make_attempt())
    assert plan.prefill is None
    assert read(plan.decode) == {"model": "m", "messages": [{"role": "user", "content": "hi"}], "n": 2}


def test_what_it_can_t_do() -> None:
    """Several prompts or answers aren't done in two legs; nothing is aborted, released or asked elsewhere."""
    endpoint = make_endpoint(Role.PREFILL)
    traits = ENGINE.traits(endpoint)
    assert (traits.pairs_lists, traits.pairs_copies, traits.reads_prompts) == (False, False, True)
    abort = ENGINE.abort(endpoint, Plan("1", None, None))  # type: ignore[func-returns-value]
    for nothing in (abort, ENGINE.release(pair(), b""), ENGINE.bootstrap_path(endpoint)):  # type: ignore[func-returns-value]
        assert nothing is None


def test_what_it_tells_of_itself() -> None:
    """Model and version."""
    assert ENGINE.describe("/v1/models", b'{"data":[{"id":"m"}]}') == Described(model="m", cards=(Card("m"),))
    assert ENGINE.describe("/version", b'{"version":"1.2.0"}') == Described(version="1.2.0")
    for path in ("/v1/models", "/version"):
        for body in (b"", b"{}", b"null", b"\xff", b"[" * 100_000, b'{"data":[]}'):
            assert ENGINE.describe(path, body) is None


GAUGES = b"""# HELP trtllm_num_requests_running Running
trtllm_num_requests_running{engine_type="undefined",model_name="undefined",pid="1"} 3.0
trtllm_num_requests_waiting{engine_type="undefined",model_name="undefined",pid="1"} 2.0
trtllm_kv_cache_utilization{engine_type="undefined",model_name="undefined",pid="1"} 0.25
"""
ITERATIONS = b"""[
{"iter":1,"numActiveRequests":99,"numQueuedRequests":99},
{"iter":2,"numActiveRequests":3,"numQueuedRequests":2,"kvCacheStats":{"maxNumBlocks":100,"usedNumBlocks":25}},
{"iter":2,"numActiveRequests":1,"attentionDpRank":1,"kvCacheStats":{"maxNumBlocks":100,"usedNumBlocks":75}}]"""


def test_its_load() -> None:
    """Requests and the share of KV, of all its ranks together; tokens aren't told."""
    assert ENGINE.read_load(GAUGES) == LoadReply(
        [RankReport(0, None, 5.0, None, 0.25, 2.0)],
    )
    assert ENGINE.read_load(ITERATIONS) == LoadReply([RankReport(0, None, 6.0, None, 0.5, 2.0)])
    assert ENGINE.read_load(b"trtllm_num_requests_running 1\n") == LoadReply([RankReport(0, None, 1.0)])
    assert ENGINE.read_load(b'[{"numActiveRequests":1}]') == LoadReply([RankReport(0, None, 1.0, None, None, 0)])
    for body in (b"", b"{}", b"[]", b"[5]", b"[" * 100_000, b"trtllm_num_requests_waiting 3\n"):
        assert ENGINE.read_load(body) is None
