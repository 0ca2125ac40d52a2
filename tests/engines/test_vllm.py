"""vLLM: legs by connector, what is read of its answers, its pages and its metrics."""

import json

import pytest

from pdrouter.core.decision import Decision
from pdrouter.core.fleet import Role
from pdrouter.core.load import RankReport
from pdrouter.core.names import Card
from pdrouter.engines.base import Described, HandOver, Inbound, Leg, Plan
from pdrouter.engines.usage import PromptCount
from pdrouter.engines.vllm import Vllm
from pdrouter.errors import DuplicateField, UpstreamProtocol

from .builders import body_of, lines_of, make_attempt, make_decision, make_endpoint, make_inbound, make_pair, place
from .builders import prefill_leg as prefill_of

ENGINE = Vllm()
PARAMS = (
    b'{"do_remote_prefill":true,"remote_block_ids":[[1,2]],"remote_engine_id":"e","big":12345678901234567890,'
    b'"remote_prefill_cached_tokens":128}'
)
P_ANSWER = b'{"id":"cmpl-1","usage":{"prompt_tokens":300,"prompt_tokens_details":null},"kv_transfer_params":%b}'


def pair(transport: str = "nixl", dp_size: int = 1, **fields: object) -> Decision:
    """Return a decision for a vLLM pair, rank 0 where there is one."""
    ranks = (1, 2) if dp_size > 1 else (0, 0)
    return make_pair(ranks[0], ranks[1], engine="vllm", kv_transport=transport, dp_size=dp_size, **fields)


def chat(body: dict[str, object], **fields: object) -> Inbound:
    """Return a chat request."""
    rest = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **body})[1:].encode()
    return make_inbound(rest, path="/v1/chat/completions", **fields)


def read(leg: Leg | None) -> dict[str, object]:
    """Return a leg's body as the engine reads it."""
    assert leg is not None
    loaded: dict[str, object] = json.loads(body_of(leg))
    return loaded


def hand_over(decision: Decision, inbound: Inbound, reply: bytes) -> tuple[Plan, HandOver]:
    """Plan, and go on with a prefill's answer."""
    plan = ENGINE.plan(decision, inbound, make_attempt())
    assert plan.decode is None
    return plan, ENGINE.hand_over(decision, inbound, plan, reply)


def test_a_nixl_prefill_makes_one_token_for_nobody() -> None:
    """Streaming, limits and copies are the decode leg's; all else goes through."""
    inbound = chat(
        {
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 50,
            "max_completion_tokens": 60,
            "min_tokens": 5,
            "n": 2,
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "logprobs": True,
        },
        is_stream=True,
    )
    plan = ENGINE.plan(pair(), inbound, make_attempt())
    assert plan.decode is None
    assert read(plan.prefill) == {
        "stream": False,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "logprobs": True,
    }


@pytest.mark.invariant("I10")
def test_a_nixl_decode_is_told_what_the_prefill_said() -> None:
    """Byte for byte; the client's own body stands behind it, but for such a field of its own."""
    inbound = chat({"stream": True, "kv_transfer_params": {"evil": 1}}, fields=("kv_transfer_params",), is_stream=True)
    plan, after = hand_over(pair(), inbound, P_ANSWER % PARAMS)
    assert after.decode is not None
    body = body_of(after.decode)
    assert body.startswith(b'{"kv_transfer_params":' + PARAMS + b",")
    assert b"evil" not in body
    assert read(after.decode)["stream"] is True
    assert after.has_kv
    assert after.count == PromptCount(300, 128)
    legs = (prefill_of(plan), after.decode)
    ids = {line for leg in legs for line in lines_of(leg.head.decode().encode()) if line.startswith("x-request-id")}
    assert ids == {"x-request-id: r-1-a1"}


def test_a_prefill_that_stopped_at_its_one_token() -> None:
    """The client asked for more than that: the decode leg runs."""
    answer = b'{"choices":[{"finish_reason":"stop"}],"kv_transfer_params":%b}' % PARAMS
    _, after = hand_over(pair(), chat({"max_tokens": 50}), answer)
    assert (read(after.decode)["max_tokens"], after.has_kv) == (50, True)


@pytest.mark.parametrize("answer", [P_ANSWER % b"null", b'{"usage":{"prompt_tokens":3}}', b"{}"])
def test_a_prefill_that_doesnt_say_where_its_kv_is(answer: bytes) -> None:
    """The decode engine reads the prompt itself; that is told."""
    _, after = hand_over(pair(), chat({}), answer)
    assert not after.has_kv
    assert "kv_transfer_params" not in read(after.decode)


@pytest.mark.parametrize("answer", [b"", b"[]", b"<html>", b'{"usage":5}', b"{" * 100_000])
def test_an_answer_that_isnt_one(answer: bytes) -> None:
    """Nobody guesses."""
    with pytest.raises(UpstreamProtocol):
        hand_over(pair(), chat({}), answer)


def test_responses_and_messages() -> None:
    """Their own names of the limit; nothing is stored."""
    body = {"model": "m", "input": "hi", "max_output_tokens": 9, "store": True, "background": False, "stream": True}
    inbound = make_inbound(json.dumps(body)[1:].encode(), path="/v1/responses", is_stream=True)
    leg = read(ENGINE.plan(pair(), inbound, make_attempt()).prefill)
    del leg["kv_transfer_params"]
    assert leg == {"stream": False, "store": False, "max_output_tokens": 1, "model": "m", "input": "hi"}
    body = {"model": "m", "messages": [], "max_tokens": 9, "thinking": {"type": "enabled"}}
    inbound = make_inbound(json.dumps(body)[1:].encode(), path="/v1/messages")
    leg = read(ENGINE.plan(pair(), inbound, make_attempt()).prefill)
    assert (leg["max_tokens"], leg["thinking"]) == (1, {"type": "enabled"})


def test_a_field_of_ours_twice_is_refused() -> None:
    """Which of them counts depends on who reads."""
    inbound = make_inbound(b'"prompt":"x","max_tokens":5,"max_tokens":6}', path="/v1/completions")
    with pytest.raises(DuplicateField):
        ENGINE.plan(pair(), inbound, make_attempt())


def test_mooncake_runs_both_at_once() -> None:
    """They meet by the transfer's id, and the decode side knows the engine id of the prefill's rank."""
    decision = pair("mooncake", 4, kv_engine_ids=("e0", "e1", "e2", "e3"))
    plan = ENGINE.plan(decision, chat({"max_tokens": 8}), make_attempt())
    prefill, decode = read(plan.prefill), read(plan.decode)
    assert (prefill["max_tokens"], decode["max_tokens"]) == (1, 8)
    assert prefill["kv_transfer_params"] == {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "transfer_id": "xfer-a1",
    }
    assert decode["kv_transfer_params"] == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": "xfer-a1",
        "remote_bootstrap_addr": "http://prefill:8998",
        "remote_engine_id": "e1",
    }
    with pytest.raises(UpstreamProtocol, match="hasn't named"):
        ENGINE.plan(pair("mooncake"), chat({}), make_attempt())


def test_p2p_nccl_speaks_by_request_ids() -> None:
    """Both sides' addresses in the id of both legs; nothing in the body."""
    prefill = place(make_endpoint(Role.PREFILL, kv_transport="p2p_nccl", kv_address="10.0.0.1:21001", dp_size=1), 0)
    decode = place(make_endpoint(Role.DECODE, kv_transport="p2p_nccl", kv_address="10.0.0.2:22001", dp_size=1), 0)
    decision = make_decision(prefill, decode)
    plan, after = hand_over(decision, chat({}), b"{}")
    assert after.decode is not None
    ids = [line for leg in (prefill_of(plan), after.decode) for line in lines_of(leg.head) if "x-request-id" in line]
    assert ids[0] == ids[1]
    name, _, request_id = ids[0].partition(": ")
    assert request_id.startswith("___prefill_addr_10.0.0.1:21001___decode_addr_10.0.0.2:22001_")
    assert "kv_transfer_params" not in read(plan.prefill)
    assert after.has_kv
    assert name == "x-request-id"
    with pytest.raises(UpstreamProtocol, match="kv_address"):
        ENGINE.plan(pair("p2p_nccl"), chat({}), make_attempt())


def test_shared_storage_needs_nothing() -> None:
    """One token here, the client's own request there."""
    plan, after = hand_over(pair("shared_storage"), chat({"max_tokens": 7}), b"{}")
    assert "kv_transfer_params" not in read(plan.prefill)
    assert (read(after.decode)["max_tokens"], after.has_kv) == (7, True)


def test_ranks_are_global_on_the_wire() -> None:
    """An endpoint that owns 4 to 7 of a deployment is told so; a single one gets no header."""
    plan, after = hand_over(pair(dp_size=4, rank_base=4), chat({}), P_ANSWER % PARAMS)
    assert after.decode is not None
    assert "x-data-parallel-rank: 5" in lines_of(prefill_of(plan).head)
    assert "x-data-parallel-rank: 6" in lines_of(after.decode.head)
    plan, _ = hand_over(pair(), chat({}), P_ANSWER % PARAMS)
    assert not any("parallel" in line for line in lines_of(prefill_of(plan).head))


def test_one_endpoint_alone() -> None:
    """The client's own body, without anybody else's KV."""
    decision = make_decision(None, place(make_endpoint(Role.REGULAR, dp_size=1), 0))
    inbound = chat({"max_tokens": 3, "kv_transfer_params": {"x": 1}}, fields=("kv_transfer_params",))
    plan = ENGINE.plan(decision, inbound, make_attempt())
    assert plan.prefill is None
    assert read(plan.decode) == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 3,
    }


def test_kv_that_nobody_fetches_is_released_by_the_decode_side() -> None:
    """It refuses the request and tells the prefill; without params, or by another connector, nothing can be done."""
    decision = pair()
    release = ENGINE.release(decision, P_ANSWER % PARAMS)
    assert release is not None
    endpoint, request = release
    head, _, body = request.partition(b"\r\n\r\n")
    assert endpoint is decision.decode.endpoint
    assert head.startswith(b"POST /v1/completions HTTP/1.1")
    assert json.loads(body)["max_tokens"] == 0
    assert b'"kv_transfer_params":' + PARAMS in body
    assert ENGINE.release(decision, b"{}") is None
    assert ENGINE.release(pair("shared_storage"), P_ANSWER % PARAMS) is None


METRICS = b"""# HELP vllm:num_requests_running Running
vllm:num_requests_running{engine="4",model_name="m"} 3.0
vllm:num_requests_running{engine="5",model_name="m"} 1.0
vllm:num_requests_waiting{engine="4",model_name="m"} 0.0
vllm:num_requests_waiting{engine="5",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="5",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="4",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="5",model_name="m"} 0.25
vllm:cache_config_info{block_size="128",engine="4",kv_cache_dtype_skip_layers="[]",num_gpu_blocks="364"} 1.0
vllm:cache_config_info{block_size="128",engine="5",kv_cache_dtype_skip_layers="[]",num_gpu_blocks="364"} 1.0
"""


def test_what_it_tells_of_itself() -> None:
    """Model, version, the ranks it owns, what one of them holds; Mooncake's engine ids by rank."""
    assert ENGINE.describe("/v1/models", b'{"data":[{"id":"m","max_model_len":2048}]}') == Described(
        model="m", cards=(Card("m", max_model_len=2048),)
    )
    assert ENGINE.describe("/version", b'{"version":"0.32.0"}') == Described(version="0.32.0")
    metrics = Described(dp_size=2, rank_base=4, kv_capacity_tokens=364 * 128)
    assert ENGINE.describe("/metrics", METRICS) == metrics
    query = b'{"1":{"engine_id":"b"},"0":{"engine_id":"a"}}'
    assert ENGINE.describe("/query", query) == Described(kv_engine_ids=("a", "b"))
    for path in ("/v1/models", "/version", "/metrics", "/query"):
        for body in (b"", b"{}", b"null", b"\xff", b"[" * 100_000):
            assert ENGINE.describe(path, body) is None


def test_its_load() -> None:
    """One report for each rank; tokens only while nothing waits, because what waits isn't told in tokens."""
    reply = ENGINE.read_load(METRICS)
    assert reply is not None
    assert list(reply.ranks) == [
        RankReport(4, 0.5 * 364 * 128, 3.0, None, 0.5),
        RankReport(5, None, 3.0, None, 0.25),
    ]
    assert reply.started_unix_s is None
    assert ENGINE.read_load(b"vllm:num_requests_waiting 3") is None
    old = b"vllm:num_requests_running 1\nvllm:gpu_cache_usage_perc 0.5\n"
    assert ENGINE.read_load(old) is not None
    anew = ENGINE.read_load(METRICS + b"process_start_time_seconds 1.7e+09\n")
    assert anew is not None
    assert anew.started_unix_s == 1.7e9


FRESH = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
# TYPE vllm:kv_cache_usage_perc gauge
vllm:cache_config_info{block_size="128",engine="0",model_name="m",num_gpu_blocks="728"} 1.0
vllm:cache_config_info{block_size="128",engine="1",model_name="m",num_gpu_blocks="728"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 0.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 0.0
"""
"""What vLLM 0.32 with two ranks and two API servers says before its first request, shortened."""


def test_ranks_that_have_no_gauges_yet() -> None:
    """They are known by their counters, and idle."""
    assert ENGINE.describe("/metrics", FRESH) == Described(dp_size=2, rank_base=0, kv_capacity_tokens=728 * 128)
    reply = ENGINE.read_load(FRESH)
    assert reply is not None
    assert list(reply.ranks) == [RankReport(rank, 0.0, 0.0, None, 0.0) for rank in (0, 1)]


def test_a_rank_that_works_before_the_others() -> None:
    """Its gauges don't hide the others, and its counter, which grows when a prompt has been read, doesn't hide it."""
    busy = (
        FRESH
        + b"""vllm:num_requests_running{engine="1",model_name="m"} 3.0
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
"""
    )
    assert ENGINE.describe("/metrics", busy) == Described(dp_size=2, rank_base=0, kv_capacity_tokens=728 * 128)
    reply = ENGINE.read_load(busy)
    assert reply is not None
    assert {report.rank: (report.requests, report.kv_use) for report in reply.ranks} == {0: (0.0, 0.0), 1: (3.0, 0.5)}


def test_a_rank_without_gauges_that_has_worked_is_not_idle() -> None:
    """Nothing is known of its load."""
    worked = FRESH.replace(b'{engine="1",model_name="m"} 0.0', b'{engine="1",model_name="m"} 9.0')
    reply = ENGINE.read_load(worked)
    assert reply is not None
    assert [report.rank for report in reply.ranks] == [0]
