"""Plans: what each engine is sent is what parsing the client's body and editing it gives, under a head that is true."""

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from pdrouter.core.decision import Decision
from pdrouter.core.fleet import Role
from pdrouter.engines.base import Engine, Inbound, Leg
from pdrouter.engines.openai import OpenAi
from pdrouter.engines.sglang import Sglang
from pdrouter.engines.sglang_ranks import RankFields
from pdrouter.engines.trtllm import Trtllm
from pdrouter.engines.vllm import Vllm
from pdrouter.errors import ClientError
from pdrouter.proxy.bodies import Api
from pdrouter.proxy.intake import Intake
from tests.core.builders import make_router
from tests.engines.builders import make_attempt, make_decision, make_endpoint, make_pair, place
from tests.fuzz.asked import PAIRED_APIS, Headers, Pairs, body, fields_of, headers
from tests.fuzz.intake import OPTIONS
from tests.fuzz.source import Source

ROUTER = make_router([])
KV_PARAMS = b'{ "remote_block_ids":[12345678901234567890,1],"x":1e400 }'
VLLM_PREFILL = b'{"id":"a","kv_transfer_params":' + KV_PARAMS + b"}"
TRTLLM_PREFILL = (
    b'{"choices":[{"finish_reason":"length","disaggregated_params":{"ctx_request_id":18446744073709551615,'
    b'"request_type":"context_only"}}],"prompt_token_ids":[1,2]}'
)
TRTLLM_PARAMS = b'{"ctx_request_id":18446744073709551615,"request_type":"generation_only","disagg_request_id":%b}'
RANKS = frozenset(
    {
        *("routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank"),
        *("data_parallel_rank_decode", "decode_dp_rank"),
    }
)
MEETING: frozenset[str] = frozenset({"rid", "bootstrap_host", "bootstrap_port", "bootstrap_room"})
KV = frozenset({"kv_transfer_params"})
LIMITS = frozenset({"stream", "stream_options", "max_tokens", "max_completion_tokens"})
VLLM_LIMITS = KV | LIMITS | {"max_output_tokens", "min_tokens", "background", "store"}
PARAMS = frozenset({"disaggregated_params"})


class Case(NamedTuple):
    """An engine in one of its ways, and what holds there."""

    engine: Engine
    decision: Decision
    edit: Callable[[Inbound, Leg], tuple[Collection[str], bytes]]
    """Return which of the client's fields a leg hasn't, and the JSON that it has before the others."""
    prefill_reply: bytes = b""


def meeting(inbound: Inbound) -> frozenset[str]:
    """Return what the router writes of a meeting; responses have another name for the id."""
    return MEETING | {"request_id"} if inbound.path == Api.RESPONSES else MEETING


def identity(inbound: Inbound) -> bytes:
    """Return the field that names a request, one new for each attempt; messages have none."""
    if inbound.path == Api.MESSAGES:
        return b""
    own = inbound.rid
    rid: object = [f"{one}-a1" for one in own] if isinstance(own, tuple) else f"{own or 'r'}-a1"
    return b'"%b":%b,' % (b"request_id" if inbound.path == Api.RESPONSES else b"rid", json.dumps(rid).encode())


def sglang(fields: RankFields, prefill_rank: bytes, decode_ranks: bytes) -> Case:
    """Return a pair of SGLang 0.5.10, which takes any room."""
    decision = make_pair()
    named = b"" if fields is RankFields.NONE else b',"disagg_prefill_dp_rank":1'

    def edit(inbound: Inbound, leg: Leg) -> tuple[Collection[str], bytes]:
        owned = meeting(inbound) if fields is RankFields.NONE else meeting(inbound) | RANKS
        each = [b'"prefill"', b"8998"]
        if inbound.batch is not None:
            each = [b"[" + b",".join([value] * inbound.batch) + b"]" for value in each]
        room = json.dumps(rooms(inbound)[0] if inbound.batch is None else rooms(inbound)).encode()
        ours = identity(inbound) + b'"bootstrap_host":%b,"bootstrap_port":%b,"bootstrap_room":%b' % (*each, room)
        is_prefill = leg.placement is decision.prefill
        ranks = prefill_rank if is_prefill else decode_ranks
        if fields is RankFields.HEADER and inbound.path == Api.GENERATE:  # which doesn't read the header
            ranks = b',"routed_dp_rank":1' if is_prefill else b',"routed_dp_rank":2'
        return owned, ours + ranks + named

    return Case(Sglang(fields), decision, edit)


def sglang_alone() -> Case:
    """Return a regular SGLang."""

    def edit(inbound: Inbound, leg: Leg) -> tuple[Collection[str], bytes]:
        return meeting(inbound) | RANKS, identity(inbound) + b'"routed_dp_rank":2'

    return Case(Sglang(RankFields.ROUTED), alone("sglang"), edit)


def vllm(connector: str, prefill_params: bytes, decode_params: bytes, **fields: Any) -> Case:
    """Return a pair of vLLM."""
    decision = make_pair(engine="vllm", kv_transport=connector, **fields)

    def edit(inbound: Inbound, leg: Leg) -> tuple[Collection[str], bytes]:
        if leg.placement is decision.decode:
            return KV, decode_params
        owned = VLLM_LIMITS if connector == "p2p_nccl" else VLLM_LIMITS | {"n", "best_of"}
        ours = b'"stream":false,"max_tokens":1'
        if inbound.path == Api.RESPONSES:
            ours = b'"stream":false,"store":false,"max_output_tokens":1'
        else:
            for name, value in ((b"max_completion_tokens", b"1"), (b"max_output_tokens", b"1"), (b"store", b"false")):
                if b'"' + name + b'"' in inbound.body:
                    ours += b',"' + name + b'":' + value
        return owned, ours + (b"," + prefill_params if prefill_params else b"")

    return Case(Vllm(), decision, edit, VLLM_PREFILL)


def trtllm() -> Case:
    """Return a pair of TensorRT-LLM."""
    decision = make_pair(engine="trtllm", kv_transport="native")

    def edit(inbound: Inbound, leg: Leg) -> tuple[Collection[str], bytes]:
        number = b"%d" % (rooms(inbound)[0] | 1 << 42)
        if leg.placement is decision.prefill:
            told = b'{"request_type":"context_only","disagg_request_id":%b}' % number
            return PARAMS | LIMITS, b'"stream":false,"max_tokens":1,"disaggregated_params":' + told
        name = "prompt" if inbound.path == Api.COMPLETIONS else "prompt_token_ids"
        owned = PARAMS | ({name} if name == "prompt" else {name, "prompt_token_ids_b64"})
        return owned, b'"disaggregated_params":%b,"%b":[1,2]' % (TRTLLM_PARAMS % number, name.encode())

    return Case(Trtllm(), decision, edit, TRTLLM_PREFILL)


def whole(engine: Engine, name: str, owned: Collection[str]) -> Case:
    """Return an engine that does both, and is told nothing in the body."""
    return Case(engine, alone(name), lambda _inbound, _leg: (owned, b""))


def alone(engine: str) -> Decision:
    """Return a decision for one endpoint."""
    return make_decision(None, place(make_endpoint(Role.DECODE, engine=engine), 2))


def rooms(inbound: Inbound) -> Sequence[int]:
    """Return a room for each sample, beyond what a float can tell apart."""
    return [2**62 + 1 + index for index in range(inbound.batch or 1)]


_NIXL = (
    b'"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
_XFER = b'"kv_transfer_params":{"do_remote_prefill":%b,"do_remote_decode":%b,"transfer_id":"xfer-a1"%b}'
_XFER_AT = b',"remote_bootstrap_addr":"http://prefill:8998","remote_engine_id":"e1"'
CASES = (
    sglang(RankFields.AUTO, b',"routed_dp_rank":1', b',"routed_dp_rank":2'),
    sglang(RankFields.LEGACY, b',"data_parallel_rank":1', b',"decode_dp_rank":2,"data_parallel_rank":1'),
    sglang(RankFields.HEADER, b"", b""),
    sglang(RankFields.NONE, b"", b""),
    sglang_alone(),
    vllm("nixl", _NIXL, b'"kv_transfer_params":' + KV_PARAMS),
    vllm(
        "mooncake", _XFER % (b"false", b"true", b""), _XFER % (b"true", b"false", _XFER_AT), kv_engine_ids=("e0", "e1")
    ),
    vllm("p2p_nccl", b"", b"", kv_address="10.0.0.1:7"),
    vllm("shared_storage", b"", b""),
    trtllm(),
    whole(Vllm(), "vllm", KV),
    whole(Trtllm(), "trtllm", PARAMS),
    whole(OpenAi(), "openai", ()),
)


def one_input(raw: bytes) -> None:
    """Take in a request, plan it, and hold each leg to the body parsed and edited."""
    source = Source(raw)
    case, api, lines = source.pick(CASES), source.pick(PAIRED_APIS), headers(source)
    asked = body(source, api)
    try:
        inbound = Intake(ROUTER, OPTIONS).read(api, lines, asked, "r")[1]
        legs = planned(case, inbound)
    except ClientError:
        return
    for leg in legs:
        hold_head(leg, api, lines)
        owned, ours = case.edit(inbound, leg)
        hold_body(leg, fields_of(asked), owned, fields_of(b"{" + ours + b"}"))


def planned(case: Case, inbound: Inbound) -> Sequence[Leg]:
    """Return all legs, those that follow a prefill's answer as well.

    Raises: InvalidJson, DuplicateField.
    """
    attempt = make_attempt(rooms(inbound))
    plan = case.engine.plan(case.decision, inbound, attempt)
    legs = [leg for leg in (plan.prefill, plan.decode) if leg is not None]
    if plan.decode is None:
        follows = case.engine.hand_over(case.decision, inbound, plan, case.prefill_reply).decode
        assert follows is not None
        legs.append(follows)
    return legs


def hold_head(leg: Leg, api: Api, lines: Headers) -> None:
    """Hold that a head says what follows, once, and nothing of a client's that isn't to be passed on."""
    head = leg.head.removesuffix(b"\r\n\r\n")
    assert head != leg.head
    first, *rest = head.split(b"\r\n")
    assert first == b"POST %b HTTP/1.1" % api.encode()
    names = [name for name, _, _ in (line.partition(b":") for line in rest)]
    assert all(name and not name.isspace() for name in names)
    for name in (b"host", b"content-length", b"content-type", b"x-request-id"):
        assert names.count(name) == 1, name
    assert names.count(b"x-data-parallel-rank") <= 1
    assert not {b"cookie", b"x-prefiller-host-port"} & set(names)
    assert b"content-length: %d" % sum(map(len, leg.body)) in rest


def hold_body(leg: Leg, asked: Pairs, owned: Collection[str], ours: Pairs) -> None:
    """Hold that a body is our fields, then the client's without those we own, in order, and each as it was."""
    sent = fields_of(b"".join(leg.body))
    kept = [pair for pair in asked if pair[0] not in owned]
    assert sent == ours + kept, (sent, ours, kept)
