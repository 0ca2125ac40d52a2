"""What engines tell of themselves, of their load and of a prefill: it is read, left or refused, and works."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec
from prometheus_client import generate_latest

from pdrouter.core import events
from pdrouter.core.decision import Decision
from pdrouter.core.fleet import Role
from pdrouter.core.request import RequestFacts
from pdrouter.core.router import Router
from pdrouter.engines.base import Described, Engine, LoadReply
from pdrouter.engines.logprobs import MERGED_FIELDS, merge_reply, prompt_logprobs
from pdrouter.engines.openai import OpenAi
from pdrouter.engines.sglang import Sglang
from pdrouter.engines.sglang_ranks import RankFields
from pdrouter.engines.trtllm import Trtllm
from pdrouter.engines.usage import prompt_count
from pdrouter.engines.vllm import Vllm
from pdrouter.errors import RouterError
from pdrouter.telemetry.metrics import Metrics
from tests.core.builders import make_options, make_router
from tests.engines.builders import make_attempt, make_endpoint, make_inbound, make_pair
from tests.fuzz.asked import fields_of, without
from tests.fuzz.source import Shape, Source, anything, array, either, number, record, text, word

MOST_RANKS = 4096
POLICIES = ("least_work", "minimum_tokens", "load_aware", "llm_d", "dynamo", "cache_aware", "bucket")

_COUNT = either(number, number, word(b"null", b"true", b"1e308", b"123456789", b"4095", b"8998", b"-1e308"))
_SERVER_INFO = record(
    model_path=text,
    served_model_name=text,
    dp_size=_COUNT,
    disaggregation_mode=word(b"null", b'"prefill"', b'"decode"', b'"null"'),
    disaggregation_bootstrap_port=_COUNT,
    version=word(b'"0.5.10"', b'"v1.2.3.4rc1"', b'"0.0.0"', b'""'),
    max_total_num_tokens=_COUNT,
    max_total_tokens=_COUNT,
)
_RANK_LOAD = record(
    dp_rank=either(word(b"0", b"1"), _COUNT),
    **dict.fromkeys(
        (
            *("num_running_reqs", "num_waiting_reqs", "num_reqs", "num_total_tokens", "num_used_tokens", "num_tokens"),
            *("gen_throughput", "token_usage", "total_prefill_uncached_tokens", "total_prefill_busy_us"),
        ),
        _COUNT,
    ),
)
_STAMP = either(
    _COUNT,
    word(b'"2025-01-01T00:00:00+00:00"', b'"2025-01-01T00:00:00"', b'"0001-01-01T00:00:00+23:59"', b'"9999-12-31"'),
)
_LOADS = either(array(_RANK_LOAD), record(loads=array(_RANK_LOAD), timestamp=_STAMP))
_MODELS = record(data=array(record(id=text)), version=text)
_QUERY = record(**{"0": record(engine_id=text), "1": record(engine_id=text)})
_ITERATIONS = array(
    record(
        numActiveRequests=_COUNT,
        numQueuedRequests=_COUNT,
        attentionDpRank=either(word(b"0", b"1"), _COUNT),
        kvCacheStats=record(usedNumBlocks=_COUNT, maxNumBlocks=_COUNT),
    )
)
_USAGE = record(
    prompt_tokens=_COUNT, input_tokens=_COUNT, prompt_tokens_details=record(cached_tokens=_COUNT, other=anything)
)
_PREFILL = record(
    id=text,
    kv_transfer_params=either(record(remote_prefill_cached_tokens=_COUNT, remote_block_ids=anything), anything),
    usage=_USAGE,
    choices=array(
        record(
            index=number,
            finish_reason=word(b'"length"', b'"not_finished"', b'"stop"', b"null"),
            message=record(role=text, content=text, tool_calls=array(record(id=text, type=text))),
            text=text,
            disaggregated_params=either(record(ctx_request_id=number, disagg_request_id=number), anything),
        )
    ),
    prompt_token_ids=either(array(number), anything),
    disaggregated_params=anything,
)
_LOGPROBS: Mapping[str, Shape] = dict.fromkeys(MERGED_FIELDS, either(array(array(number)), anything))
_SAMPLES = either(
    *(2 * [record(text=text, index=number, meta_info=record(**_LOGPROBS, cached_tokens=_COUNT))]), anything
)

_NAMES = (
    *(b"vllm:num_requests_running", b"vllm:num_requests_waiting", b"vllm:kv_cache_usage_perc"),
    *(b"vllm:gpu_cache_usage_perc", b"vllm:cache_config_info", b"vllm:num_requests_running_total"),
    *(b"trtllm_num_requests_running", b"trtllm_num_requests_waiting", b"trtllm_kv_cache_utilization"),
    b"# HELP vllm:num_requests_running",
)
_LABELS = (
    *(b"", b'{engine="0"}', b'{engine="1",model_name="m"}', b'{engine="-1"}', b'{engine="\xd9\xa3"}', b"{}"),
    *(b'{engine="999999"}', b'{engine="9999999999"}', b'{x="a\\"}",engine="1"}', b'{engine="1"', b"{,}"),
    b'{block_size="16",num_gpu_blocks="100",engine="0"}',
    b'{block_size="16",num_gpu_blocks="999999999999"}',
    b'{block_size="\xc2\xb2",num_gpu_blocks="None"}',
    b'{block_size="%b",num_gpu_blocks="9"}' % (b"9" * 5000),
)
_VALUES = (b"1", b"0", b"0.5", b"-1", b"NaN", b"+Inf", b"-Inf", b"1e308", b"1e999", b"x", b"1_0", b"", b"1 1700000000")


class Kind(NamedTuple):
    """An engine, its transport, and where it can be asked."""

    engine: Engine
    name: str
    transport: str
    paths: Sequence[str]


KINDS = (
    Kind(Sglang(RankFields.AUTO), "sglang", "bootstrap", ("/server_info",)),
    Kind(Vllm(), "vllm", "nixl", ("/metrics", "/version", "/v1/models", "/query")),
    Kind(Trtllm(), "trtllm", "native", ("/version", "/v1/models")),
    Kind(OpenAi(), "openai", "none", ("/v1/models",)),
)


def page(source: Source) -> bytes:
    """Write an exposition."""
    series = (
        source.pick(_NAMES) + source.pick(_LABELS) + b" " + source.pick(_VALUES) + b"\n"
        for _ in range(source.below(12))
    )
    return b"".join(series)


_SHAPES: Sequence[Shape] = (
    *(_SERVER_INFO, _LOADS, _MODELS, _QUERY, _ITERATIONS, _PREFILL, page, page, _SAMPLES, array(_SAMPLES), anything),
    Source.rest,
)


def one_input(raw: bytes) -> None:
    """Let engines say something, wherever it may be read."""
    source = Source(raw)
    kind, policy = source.pick(KINDS), source.pick(POLICIES)
    reply = source.spoilt(source.pick(_SHAPES)(source))
    hold_counts(reply)
    hold_hand_over(kind, reply)
    hold_merge(reply, source.spoilt(source.pick((_SAMPLES, array(_SAMPLES)))(source)))
    described = [told for path in kind.paths if (told := kind.engine.describe(path, reply)) is not None]
    load = kind.engine.read_load(reply) if kind.engine.load_paths else None
    for told in described:
        hold_described(told)
    if load is not None:
        hold_load(load)
    if described or load is not None:
        hold_fleet(kind, policy, described, load)


def hold_described(told: Described) -> None:
    """Hold that an engine can be as it says."""
    assert told.dp_size is None or 1 <= told.dp_size <= MOST_RANKS
    assert told.rank_base is None or told.rank_base >= 0
    assert told.bootstrap_port is None or 0 < told.bootstrap_port < 65_536
    assert told.kv_capacity_tokens is None or 0 < told.kv_capacity_tokens < 2**63


def hold_load(load: LoadReply) -> None:
    """Hold that numbers can be reckoned with."""
    assert load.unix_s is None or math.isfinite(load.unix_s)
    for report in load.ranks:
        assert isinstance(report.rank, int)
        for value in msgspec.structs.astuple(report)[1:]:
            assert value is None or isinstance(float(value), float)


def hold_fleet(kind: Kind, policy: str, described: Sequence[Described], load: LoadReply | None) -> None:
    """Let the core take in what was told, and decide, and hold that it can."""
    router = make_router([], make_options(policy=policy))
    endpoint = make_endpoint(Role.REGULAR, engine=kind.name, kv_transport=kind.transport, dp_size=2)
    for told in described:
        news = {name: value for name, value in msgspec.structs.asdict(told).items() if value is not None}
        endpoint = msgspec.structs.replace(endpoint, **{**news, "role": Role.REGULAR})
    router.observe(events.EndpointJoined(endpoint), 0.0)
    router.observe(events.EndpointJoined(make_endpoint(Role.REGULAR, address="other:1")), 0.0)
    if load is not None:
        router.observe(events.LoadReported(endpoint.address, load.ranks, 1.0), 1.0)
    decide(router)
    for rank in router.load.endpoints[endpoint.address].ranks:
        assert 0 <= rank.comparable_tokens < math.inf
        assert 0 <= rank.comparable_requests < math.inf
    router.validate()
    generate_latest(Metrics(router, lambda: 0.0).registry)


def decide(router: Router) -> None:
    """Place a few requests."""
    for number_of in range(3):
        decision = router.decide(RequestFacts(request_id="r", prompt_tokens=100), 10.0 + number_of)
        assert isinstance(decision, Decision), decision
        router.observe(events.FirstTokenSeen(decision), 11.0 + number_of)
        router.settle(decision, 12.0 + number_of)


def hold_counts(reply: bytes) -> None:
    """Hold that a count at the end of an answer is possible."""
    count = prompt_count(reply)
    assert count is None or count.is_possible


def hold_hand_over(kind: Kind, reply: bytes) -> None:
    """Hold that what follows a prefill's answer is whole, keeps the client's fields, and that its KV can be freed."""
    if kind.name not in ("vllm", "trtllm"):
        return
    decision = make_pair(engine=kind.name, kv_transport=kind.transport)
    for path, is_stream in (("/v1/chat/completions", True), ("/v1/completions", False)):
        inbound = make_inbound(b'"seed":12345678901234567890}', path=path, is_stream=is_stream)
        plan = kind.engine.plan(decision, inbound, make_attempt())
        with suppress(RouterError):
            follows = kind.engine.hand_over(decision, inbound, plan, reply)
            if follows.decode is not None:
                names = [name for name, _ in fields_of(b"".join(follows.decode.body))]
                assert names.count("seed") == 1
                assert len(set(names)) == len(names)
            elif is_stream:
                assert follows.answer.endswith(b"data: [DONE]\n\n")
            else:
                assert not {"disaggregated_params", "prompt_token_ids"} & {
                    name for name, _ in fields_of(follows.answer)
                }
    released = kind.engine.release(decision, reply)
    if released is not None:
        head, _, body = released[1].partition(b"\r\n\r\n")
        assert b"content-length: %d" % len(body) in head.split(b"\r\n")
        assert [name for name, _ in fields_of(body)] == ["prompt", "max_tokens", "kv_transfer_params"]


def hold_merge(prompt: bytes, answer: bytes) -> None:
    """Hold that an answer stays JSON, or as it came."""
    found = prompt_logprobs(prompt, is_stream=False)
    merged = merge_reply(answer, found)
    if merged != answer:
        assert without(MERGED_FIELDS, merged) == without(MERGED_FIELDS, answer)
