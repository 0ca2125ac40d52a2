"""vLLM: prefill and decode legs by connector, global ranks by header, load from its metrics.

NIXL and shared storage run their legs in turn, and so does P2P NCCL; Mooncake runs both at once. A leg ends when its
connection closes; no abort is sent. Source: vLLM 0.32 (``entrypoints/``, ``distributed/kv_transfer/kv_connector/``);
see docs/engines.md.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum

import msgspec

from pdrouter.core.decision import Decision, Placement
from pdrouter.core.fleet import Endpoint
from pdrouter.core.load import RankReport
from pdrouter.core.request import Task
from pdrouter.engines.about import described
from pdrouter.engines.base import (
    Attempt,
    Described,
    HandOver,
    Inbound,
    Leg,
    LoadReply,
    Piece,
    Plan,
    Traits,
    leg_head,
    rank_line,
    request_head,
    rest_without,
    splice,
    with_priority,
)
from pdrouter.engines.prometheus import series
from pdrouter.engines.usage import PromptCount
from pdrouter.errors import UpstreamProtocol


class Connector(StrEnum):
    """How KV comes from a prefill to a decode engine; the values of ``Endpoint.kv_transport``."""

    NIXL = "nixl"
    MOONCAKE = "mooncake"
    P2P_NCCL = "p2p_nccl"
    SHARED_STORAGE = "shared_storage"


_OWNED = frozenset({"kv_transfer_params"})

_PREFILL_OWNED = _OWNED | {
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "min_tokens",
    "background",
    "store",
}
"""Top-level fields of a prefill leg that the router writes itself, or leaves out: it makes one token, for nobody."""

_COPIES = frozenset({"n", "best_of"})
"""Several answers read the same KV, which is made once; but P2P NCCL sends each its own."""

_ONE_TOKEN = b'"stream":false,"max_tokens":1'
_ONE_TOKEN_TOO: Sequence[tuple[bytes, bytes]] = (
    (b'"max_completion_tokens"', b',"max_completion_tokens":1'),
    (b'"max_output_tokens"', b',"max_output_tokens":1'),
    (b'"store"', b',"store":false'),
)
"""Other names of the limit, and what goes with it, written where the client's body mentions them."""

_RESPONSES = "/v1/responses"
_RESPONSE_OF_ONE_TOKEN = b'"stream":false,"store":false,"max_output_tokens":1'

_NIXL_PREFILL = (
    b'"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
_MOONCAKE_PREFILL = b'"kv_transfer_params":{"do_remote_prefill":false,"do_remote_decode":true,"transfer_id":"xfer-%b"}'
_MOONCAKE_DECODE = (
    b'"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"transfer_id":"xfer-%b",'
    b'"remote_bootstrap_addr":%b,"remote_engine_id":%b}'
)

_JSON = b"content-type: application/json\r\n"

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_CACHE = "vllm:cache_config_info"
_READ = "vllm:prompt_tokens_total"
"""A counter that each rank has from the start. With several API servers, the default with several ranks, its gauges
aren't there until it has worked. Source: seen on vLLM 0.32; ``v1/metrics/loggers.py``, and prometheus_client's pages of
several processes, which leave out ``mostrecent`` gauges that aren't set yet."""
_STARTED = "process_start_time_seconds"
"""Told by every process with Python's Prometheus client, unless several share one page."""


class Vllm:
    """Plans vLLM requests and reads vLLM's replies."""

    kv_transports: Sequence[str] = tuple(connector.value for connector in Connector)
    info_paths: Sequence[Sequence[str]] = (("/v1/models",), ("/version",), ("/metrics",))
    tells: Collection[str] = ("model", "dp_size", "version")
    load_paths: Sequence[str] = ("/metrics",)

    def traits(self, endpoint: Endpoint) -> Traits:
        """Return what each connector can do with more than one answer.

        Source: seen on vLLM 0.32 with NIXL: several answers to a prompt read the same KV, but the other prompts of a
        list are answered from the first one's, in silence; gauges are written when a step ends, so that a prompt which
        takes one long step never shows; the decode side tells the prefill's cached tokens as its own. A Mooncake
        transfer is one answer's. P2P NCCL names each answer's KV, and refuses a request without such a name.
        ``/v1/messages/count_tokens``: ``anthropic/api_router.py``; an older one without it says so itself.
        ``priority``: ``openai/engine/protocol.py``, "lower means earlier handling".
        """
        kv_transport = endpoint.kv_transport
        has_names = kv_transport in (Connector.P2P_NCCL, Connector.SHARED_STORAGE)
        return Traits(
            frozenset({Task.GENERATE, Task.RESPONSES, Task.MESSAGES}),
            pairs_lists=has_names,
            pairs_copies=has_names or kv_transport == Connector.NIXL,
            reads_prompts=kv_transport != Connector.P2P_NCCL,
            reports_lag=True,
            tells_transfer=kv_transport != Connector.NIXL,
            counts_messages=True,
            puts_low_first=True,
        )

    def plan(self, decision: Decision, inbound: Inbound, attempt: Attempt) -> Plan:
        """Return the prefill leg, with Mooncake both; one leg where one endpoint does both."""
        prefill, decode = decision.prefill, decision.decode
        rid = f"{inbound.request_id}-{attempt.suffix}"
        if prefill is None:
            return Plan(rid, None, _whole_leg(inbound, decode, rid, b""))
        connector = prefill.endpoint.kv_transport
        if connector == Connector.MOONCAKE:
            return _mooncake(inbound, prefill, decode, rid, attempt)
        if connector == Connector.P2P_NCCL:
            rid = _addressed_id(prefill.endpoint, decode.endpoint, attempt)
        fields = _NIXL_PREFILL if connector == Connector.NIXL else b""
        return Plan(rid, _one_token_leg(inbound, prefill, rid, fields), None)

    def hand_over(self, decision: Decision, inbound: Inbound, plan: Plan, reply: bytes) -> HandOver:
        """Return the decode leg: the client's own body, and where the KV is as the prefill told it."""
        told = _read_prefill(reply)
        is_told = decision.decode.endpoint.kv_transport == Connector.NIXL
        fields = b'"kv_transfer_params":' + told.params if is_told and told.params is not None else b""
        return HandOver(
            _whole_leg(inbound, decision.decode, plan.rid, fields),
            has_kv=bool(fields) or not is_told,
            count=_prompt_count(told),
        )

    def abort(self, endpoint: Endpoint, plan: Plan) -> None:
        """Nothing: vLLM ends a request whose connection closes."""

    def release(self, decision: Decision, reply: bytes) -> tuple[Endpoint, bytes] | None:
        """Return a request that the decode engine refuses at once, and then tells the prefill to let go.

        Source: seen on vLLM 0.32 with NIXL (``entrypoints/generate/base/serving.py``); sent to the prefill itself it
        would free nothing. Without it the KV is held until vLLM's own time limit.
        """
        if decision.decode.endpoint.kv_transport != Connector.NIXL:
            return None
        params = None
        with suppress(UpstreamProtocol):  # the reply may be what the request failed of
            params = _read_prefill(reply).params
        if params is None:
            return None
        body = b'{"prompt":"x","max_tokens":0,"kv_transfer_params":' + params + b"}"
        endpoint = decision.decode.endpoint
        return endpoint, request_head("POST", "/v1/completions", endpoint, _JSON, len(body)) + body

    def bootstrap_path(self, endpoint: Endpoint) -> str | None:
        """Return where a Mooncake prefill names its engines."""
        return "/query" if endpoint.kv_transport == Connector.MOONCAKE and endpoint.bootstrap_port else None

    def describe(self, path: str, body: bytes) -> Described | None:
        """Read ``/v1/models``, ``/version``, ``/metrics``, and Mooncake's ``/query``."""
        try:
            if path == "/metrics":
                return _described_by_metrics(body)
            if path == "/query":
                return _described_by_query(body)
        except (msgspec.MsgspecError, RecursionError):
            return None
        return described(path, body)

    def read_load(self, body: bytes) -> LoadReply | None:
        """Read ``/metrics``: one report for each ``engine`` label.

        Requests are the running and the waiting ones. Tokens are the KV in use, told only while nothing waits: what
        waiting prompts will take isn't told.
        """
        capacity = _capacity_tokens(body)
        waiting = _by_rank(body, _WAITING)
        usage = _by_rank(body, *_KV_USAGE)
        running = _by_rank(body, _RUNNING)
        for rank, read in _by_rank(body, _READ).items():
            if not read and rank not in running:  # it hasn't worked yet
                running[rank] = usage[rank] = 0.0
        reports = []
        for rank, count in running.items():
            queued, used = waiting.get(rank, 0.0), usage.get(rank)
            tokens = None if used is None or queued or rank not in capacity else used * capacity[rank]
            reports.append(RankReport(rank, tokens, count + queued, None, used))
        if not reports:
            return None
        started_unix_s = next((value for _, value in series(body, _STARTED)), None)
        return LoadReply(reports, started_unix_s=started_unix_s)


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    input_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _PrefillReply(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")
    usage: _Usage | None = None

    @property
    def params(self) -> bytes | None:
        """Where the KV is, raw (I10); ``None`` where that isn't told."""
        raw = bytes(self.kv_transfer_params)
        return None if raw == b"null" else raw


class _KvParams(msgspec.Struct):
    remote_prefill_cached_tokens: int | None = None


class _MooncakeEngine(msgspec.Struct):
    engine_id: str


def _read_prefill(reply: bytes) -> _PrefillReply:
    try:
        return msgspec.json.decode(reply, type=_PrefillReply)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UpstreamProtocol(f"the prefill's answer isn't understood: {error}") from error


def _whole_leg(inbound: Inbound, place: Placement, rid: str, fields: bytes) -> Leg:
    """Return the leg that writes the answer."""
    return _leg(inbound, place, rid, inbound.rest(_OWNED), fields)


def _one_token_leg(inbound: Inbound, place: Placement, rid: str, fields: bytes) -> Leg:
    """Return the leg that reads the prompt and makes one token."""
    body = inbound.body
    if inbound.path == _RESPONSES:
        limits = _RESPONSE_OF_ONE_TOKEN
    else:
        limits = _ONE_TOKEN + b"".join(field for name, field in _ONE_TOKEN_TOO if name in body)
    is_named = place.endpoint.kv_transport == Connector.P2P_NCCL
    rest = rest_without(body, _PREFILL_OWNED if is_named else _PREFILL_OWNED | _COPIES)
    return _leg(inbound, place, rid, rest, limits + b"," + fields if fields else limits)


def _leg(inbound: Inbound, place: Placement, rid: str, rest: Piece, fields: bytes) -> Leg:
    endpoint = place.endpoint
    rest, priority = with_priority(inbound, endpoint, rest)
    if priority:
        fields = fields + b"," + priority if fields else priority
    body = splice(rest, fields)
    headers = b"%bx-request-id: %b\r\n" % (inbound.headers, rid.encode("latin-1", "replace"))
    if place.rank is not None and (endpoint.dp_size > 1 or endpoint.rank_base):
        headers += rank_line(endpoint.rank_base + place.rank)
    return Leg(place, leg_head(inbound, endpoint, headers, sum(map(len, body))), body)


def _mooncake(inbound: Inbound, prefill: Placement, decode: Placement, rid: str, attempt: Attempt) -> Plan:
    """Return both legs; they find each other by the transfer's id and the prefill rank's engine id."""
    endpoint = prefill.endpoint
    ids = endpoint.kv_engine_ids
    if not ids:
        raise UpstreamProtocol(f"{endpoint.address} hasn't named its Mooncake engines")
    rank = 0 if prefill.rank is None else prefill.rank
    transfer_id = attempt.suffix.encode()
    meeting_point = msgspec.json.encode(f"http://{endpoint.host}:{endpoint.bootstrap_port}")
    fields = _MOONCAKE_DECODE % (transfer_id, meeting_point, msgspec.json.encode(ids[min(rank, len(ids) - 1)]))
    return Plan(
        rid,
        _one_token_leg(inbound, prefill, rid, _MOONCAKE_PREFILL % transfer_id),
        _whole_leg(inbound, decode, rid, fields),
    )


def _addressed_id(prefill: Endpoint, decode: Endpoint, attempt: Attempt) -> str:
    """Return the request id by which P2P NCCL finds both sides.

    Raises: UpstreamProtocol where the settings don't say where a side listens.
    """
    for endpoint in (prefill, decode):
        if endpoint.kv_address is None:
            raise UpstreamProtocol(f"{endpoint.address}: kv_transport p2p_nccl needs the endpoint's kv_address")
    unique = f"{attempt.suffix}{attempt.rooms[0]:016x}"
    return f"___prefill_addr_{prefill.kv_address}___decode_addr_{decode.kv_address}_{unique}"


def _prompt_count(told: _PrefillReply) -> PromptCount | None:
    usage = told.usage or _Usage()
    cached_tokens = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
    if cached_tokens is None:
        with suppress(msgspec.MsgspecError):
            params = msgspec.json.decode(told.kv_transfer_params, type=_KvParams | None)
            cached_tokens = params.remote_prefill_cached_tokens if params else None
    return None if cached_tokens is None else PromptCount(usage.prompt_tokens or usage.input_tokens, cached_tokens)


def _by_rank(page: bytes, *names: str) -> dict[int, float]:
    """Return a gauge or counter by rank; an engine without the label is rank 0."""
    return {rank: value for labels, value in series(page, *names) if (rank := _rank(labels)) is not None}


def _rank(labels: Mapping[str, str]) -> int | None:
    text = labels.get("engine", "0")
    return int(text) if text.isdecimal() and len(text) <= _MAX_RANK_DIGITS else None


_MAX_RANK_DIGITS = 6
_MAX_CAPACITY_DIGITS = 18


def _capacity_tokens(page: bytes) -> Mapping[int, int]:
    """Return the tokens that each rank's KV takes."""
    capacity = {}
    for labels, _ in series(page, _CACHE):
        rank = _rank(labels)
        size, blocks = labels.get("block_size", ""), labels.get("num_gpu_blocks", "")
        is_told = size.isdecimal() and blocks.isdecimal() and len(size + blocks) <= _MAX_CAPACITY_DIGITS
        if rank is not None and is_told:
            capacity[rank] = int(size) * int(blocks)
    return capacity


def _described_by_metrics(page: bytes) -> Described | None:
    """Return the ranks that an endpoint owns, and what one of them holds."""
    ranks: Collection[int] = _by_rank(page, _RUNNING, _READ)
    if not ranks:
        return None
    first, last = min(ranks), max(ranks)
    capacity = min(_capacity_tokens(page).values(), default=0)
    return Described(dp_size=last - first + 1, rank_base=first, kv_capacity_tokens=capacity or None)


def _described_by_query(body: bytes) -> Described | None:
    engines = msgspec.json.decode(body, type=dict[int, _MooncakeEngine])
    return Described(kv_engine_ids=tuple(engines[rank].engine_id for rank in sorted(engines))) if engines else None
