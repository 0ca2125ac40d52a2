"""SGLang: PD handshake by bootstrap room, both legs at once. Ranks and rooms: ``sglang_ranks.py``.

Source: SGLang 0.5.x (``io_struct.py``, ``http_server.py``, ``disaggregation/``); see docs/engines.md.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import lru_cache

import msgspec

from pdrouter.core.decision import Decision, Placement
from pdrouter.core.fleet import Endpoint, Role
from pdrouter.core.load import RankReport
from pdrouter.core.request import Task
from pdrouter.engines.about import MODELS_PATH, listed
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
    request_head,
    splice,
    with_priority,
)
from pdrouter.engines.sglang_adapters import with_adapter
from pdrouter.engines.sglang_ranks import (
    RANK_FIELDS,
    RankFields,
    RoomRule,
    is_older,
    rank_fields,
    room_rule,
    version_numbers,
)

OWNED_FIELDS = RANK_FIELDS | {"bootstrap_host", "bootstrap_port", "bootstrap_room", "rid"}
"""Top-level fields of a body that the router writes itself."""

RESPONSE_ID = "request_id"
"""What ``/v1/responses`` calls the ``rid``. Source: ``openai/protocol.py``, ``serving_responses.py``."""

_PAIRED_SINCE: Mapping[Task, tuple[int, ...]] = {
    Task.GENERATE: (),
    Task.RESPONSES: (0, 5, 20),
    Task.MESSAGES: (0, 5, 22),
}
"""The first version that does a task in two legs; one that isn't told is older."""

_COUNTS_SINCE = (0, 5, 9)
"""The first version with ``/v1/messages/count_tokens``; one that isn't told is asked. Source: ``http_server.py``."""

_RESPONSES, _MESSAGES = "/v1/responses", "/v1/messages"

DEFAULT_BOOTSTRAP_PORT = 8998
"""Source: SGLang's ``--disaggregation-bootstrap-port``."""

_MAX_OBJECTS = 16_384
"""Objects in a load report: a rank of 0.5.23 has at most six (``load_snapshot.py``). Chosen."""

MAX_COUNT = 2**63 - 1
"""What counters can hold; a number beyond is none."""

_MOST = 1e300
"""A number beyond can't be reckoned with; the core judges all others."""

_JSON = b"content-type: application/json\r\n"


class Sglang:
    """Plans SGLang requests and reads SGLang's replies."""

    kv_transports: Sequence[str] = ("bootstrap",)
    info_paths: Sequence[Sequence[str]] = (("/server_info", "/get_server_info"), (MODELS_PATH,))
    tells: Collection[str] = ("role", "model", "dp_size", "version")
    load_paths: Sequence[str] = ("/v1/loads?include=core", "/get_load")

    def __init__(self, rank_fields: RankFields) -> None:
        self._rank_fields = rank_fields
        # Where ranks aren't ours to write, the client's own go through.
        self._owned = OWNED_FIELDS - RANK_FIELDS if rank_fields is RankFields.NONE else OWNED_FIELDS

    def traits(self, endpoint: Endpoint) -> Traits:
        """Return what a version does in pairs: lists are batches with a room for each prompt, decode reads none.

        Since when responses and messages take room and ranks: ``openai/protocol.py``, ``openai/serving_responses.py``,
        ``anthropic/protocol.py``. A decode rank can't be named beside the prefill's before 0.5.10.
        With ``n`` > 1 a decode engine hangs: it sends a warm-up and all samples to the first room.
        Source: seen on SGLang 0.5.23; ``managers/tokenizer_manager.py``, ``_handle_batch_request``.
        """
        numbers = version_numbers(endpoint.version) or ()
        tasks = (task for task, since in _PAIRED_SINCE.items() if numbers >= since)
        is_old = endpoint.role is Role.DECODE and is_older(self._rank_fields, endpoint.version)
        return Traits(
            frozenset(tasks),
            pairs_lists=True,
            pairs_copies=False,
            reads_prompts=False,
            takes_ranks=not is_old,
            counts_messages=not numbers or numbers >= _COUNTS_SINCE,
            puts_low_first=endpoint.puts_low_first,
        )

    def plan(self, decision: Decision, inbound: Inbound, attempt: Attempt) -> Plan:
        """Return both legs, each with its own fields; one leg for a regular endpoint."""
        rid, parts, shared = _ids(inbound, attempt)
        owned = self._owned if inbound.path != _RESPONSES else self._owned | {RESPONSE_ID}
        rest, adapter = with_adapter(decision, inbound, owned)
        shared += adapter
        headers = inbound.headers + inbound.id_line
        decode, prefill = decision.decode, decision.prefill
        if prefill is None:
            return Plan(rid, None, self._leg(inbound, rest, headers, decode, None, shared), parts=parts)
        rule = room_rule(self._rank_fields, prefill, inbound)
        shared += _bootstrap(prefill.endpoint, inbound, attempt, rule)
        return Plan(
            rid,
            self._leg(inbound, rest, headers, prefill, prefill, shared),
            self._leg(inbound, rest, headers, decode, prefill, shared),
            merges_logprobs=inbound.wants_prompt_logprobs,
            parts=parts,
        )

    def hand_over(self, decision: Decision, inbound: Inbound, plan: Plan, reply: bytes) -> HandOver:
        """Never asked: both legs run at once."""
        raise NotImplementedError

    def _leg(
        self, inbound: Inbound, rest: Piece, headers: bytes, place: Placement, prefill: Placement | None, shared: bytes
    ) -> Leg:
        """Return one leg; ``prefill`` is where a pair's prompt is read."""
        is_decode = prefill is not None and prefill is not place
        fields, header = rank_fields(self._rank_fields, inbound.path, place, prefill, is_decode=is_decode)
        rest, priority = with_priority(inbound, place.endpoint, rest)
        if priority:
            shared += b"," + priority
        body = splice(rest, (shared + fields)[1:])
        head = leg_head(inbound, place.endpoint, headers + header, len(body[0]) + len(body[1]))
        return Leg(place, head, body)

    def abort(self, endpoint: Endpoint, plan: Plan) -> Sequence[bytes]:
        """Return a request for each id; an id that the engine doesn't know exactly is ignored there."""
        bodies = [b'{"rid":' + msgspec.json.encode(rid) + b"}" for rid in plan.parts or (plan.rid,) if rid]
        return [request_head("POST", "/abort_request", endpoint, _JSON, len(body)) + body for body in bodies]

    def release(self, decision: Decision, reply: bytes) -> None:
        """Nothing: a prefill lets go when it is aborted."""

    def bootstrap_path(self, endpoint: Endpoint) -> None:
        """Nothing: rooms need no names."""

    def describe(self, path: str, body: bytes) -> Described | None:
        """Read ``/server_info`` and ``/v1/models``, where an adapter ``A`` of ``M`` is asked for as ``M:A``."""
        if path == MODELS_PATH:
            return listed(body, "{parent}:{id}")
        try:
            info = msgspec.json.decode(body, type=_ServerInfo)
        except (msgspec.MsgspecError, RecursionError):
            return None
        mode, counts = info.disaggregation_mode, _rank_counts(info)
        return Described(
            role=None if isinstance(mode, msgspec.UnsetType) else _MODES.get(mode or "null"),
            model=info.served_model_name or info.model_path,
            dp_size=max(counts.values(), default=None),
            bootstrap_port=info.disaggregation_bootstrap_port,
            version=info.version,
            kv_capacity_tokens=info.max_total_num_tokens or info.max_total_tokens,
            dp_attention=info.enable_dp_attention if info.attn_dp_size is None else info.attn_dp_size > 1,
            puts_low_first=info.schedule_low_priority_values_first,
            contradiction=_contradiction(counts),
        )

    def read_load(self, body: bytes) -> LoadReply | None:
        """Read ``/v1/loads`` or ``/get_load``.

        Tokens are those held or queued (``num_total_tokens``; older: ``num_used_tokens``, ``num_tokens``); requests are
        the running and the waiting ones. What isn't a number is left out, and a report with far more entries than
        there can be ranks is none (I9).
        """
        if body.count(b"{") > _MAX_OBJECTS:
            return None
        try:
            reply = msgspec.json.decode(body, type=_Loads | list[_RankLoad])
        except (msgspec.MsgspecError, RecursionError):
            return None
        if isinstance(reply, list):
            return LoadReply([_report(load) for load in reply])
        return LoadReply([_report(load) for load in reply.loads], _unix_s(reply.timestamp))


class _ServerInfo(msgspec.Struct):
    served_model_name: str | None = None
    model_path: str | None = None
    dp_size: int | None = None
    attn_dp_size: int | None = None
    enable_dp_attention: bool | None = None
    internal_states: object = None
    disaggregation_mode: str | msgspec.UnsetType | None = msgspec.UNSET
    disaggregation_bootstrap_port: int | None = None
    version: str | None = None
    max_total_num_tokens: int | None = None
    max_total_tokens: int | None = None
    schedule_low_priority_values_first: bool | None = None


def _rank_counts(info: _ServerInfo) -> Mapping[str, int]:
    """Return the number of ranks by the part of ``/server_info`` that tells it.

    Source: up to 0.5.21 ``dp_size`` counts all ranks; since 0.5.22 ``dp_size`` counts replicas and ``attn_dp_size`` the
    ranks of one (``runtime_context.py``, ``num_dp_ranks_of``). ``internal_states`` has an entry for each rank.
    """
    counts = {}
    if info.dp_size is not None and info.attn_dp_size is not None:
        counts["dp_size x attn_dp_size"] = info.dp_size * info.attn_dp_size
    elif info.dp_size is not None:
        counts["dp_size"] = info.dp_size
    if isinstance(info.internal_states, list) and info.internal_states:
        counts["entries of internal_states"] = len(info.internal_states)
    return counts


def _contradiction(counts: Mapping[str, int]) -> str | None:
    """Return in words what disagrees on the number of ranks, ``None`` if nothing does."""
    if len(set(counts.values())) < 2:
        return None
    return "/server_info contradicts itself: " + ", ".join(f"{name} {count}" for name, count in counts.items())


_MODES: Mapping[str, Role] = {"prefill": Role.PREFILL, "decode": Role.DECODE, "null": Role.REGULAR}


class _RankLoad(msgspec.Struct):
    """Numbers by contract; a version that writes something else shall not void the other ranks."""

    dp_rank: object = None
    num_running_reqs: object = None
    num_waiting_reqs: object = None
    num_reqs: object = None
    num_total_tokens: object = None
    num_used_tokens: object = None
    num_tokens: object = None
    gen_throughput: object = None
    token_usage: object = None
    total_prefill_uncached_tokens: object = None
    total_prefill_busy_us: object = None


class _Loads(msgspec.Struct):
    loads: list[_RankLoad]
    timestamp: object = None


def _report(load: _RankLoad) -> RankReport:
    tokens = map(_number, (load.num_total_tokens, load.num_used_tokens, load.num_tokens))
    rank, busy_us = load.dp_rank, _total(load.total_prefill_busy_us)
    return RankReport(
        rank if type(rank) is int else -1,
        next((number for number in tokens if number is not None), None),
        _requests(load),
        _number(load.gen_throughput),
        _number(load.token_usage),
        waiting_requests=_number(load.num_waiting_reqs),
        prefill_tokens_total=_total(load.total_prefill_uncached_tokens),
        prefill_busy_s_total=None if busy_us is None else busy_us / 1e6,
    )


def _requests(load: _RankLoad) -> float | None:
    total, running = _number(load.num_reqs), _number(load.num_running_reqs)
    if total is not None or running is None:
        return total
    waiting = _number(load.num_waiting_reqs) or 0
    return min(running, waiting) if running < 0 or waiting < 0 else running + waiting


def _number(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if -_MOST <= value <= _MOST else None


def _total(value: object) -> float | None:
    """Return what a counter may hold."""
    number = _number(value)
    return number if number is not None and 0 <= number <= MAX_COUNT else None


def _unix_s(timestamp: object) -> float | None:
    """Return a time stamp in seconds; SGLang writes Unix seconds or, newer, ISO 8601 with its offset from UTC."""
    if not isinstance(timestamp, str):
        return _number(timestamp)
    try:
        moment = datetime.fromisoformat(timestamp)
    except ValueError:
        return None
    return None if moment.tzinfo is None else moment.timestamp()


def _ids(inbound: Inbound, attempt: Attempt) -> tuple[str, Sequence[str], bytes]:
    """Return the id of a request, those of its parts if it is a batch, and the field that says so.

    Source: ``managers/io_struct.py``, ``_normalize_rid``: the parts of ``X`` are ``X_0``, ``X_1`` and so on. Messages
    have no id of the client's: ``anthropic/protocol.py``.
    """
    own, suffix = inbound.rid, attempt.suffix
    if inbound.path == _MESSAGES:
        return "", (), b""
    if isinstance(own, tuple):
        rids = [f"{rid}-{suffix}" for rid in own]
        return rids[0], rids, b',"rid":' + msgspec.json.encode(rids)
    rid = f"{own or inbound.request_id}-{suffix}"
    name = RESPONSE_ID if inbound.path == _RESPONSES else "rid"
    parts = [f"{rid}_{index}" for index in range(inbound.batch)] if inbound.batch is not None else ()
    return rid, parts, b',"%b":%b' % (name.encode(), msgspec.json.encode(rid))


def _bootstrap(endpoint: Endpoint, inbound: Inbound, attempt: Attempt, rule: RoomRule) -> bytes:
    """Return the handshake fields; a batch has an array of each, as long as its samples."""
    host, port = _meeting_point(endpoint.host, endpoint.bootstrap_port)
    if inbound.batch is None:
        return b',"bootstrap_host":%b,"bootstrap_port":%b,"bootstrap_room":%d' % (
            host,
            port,
            rule.fit(attempt.rooms[0]),
        )
    size = inbound.batch
    return b',"bootstrap_host":[%b],"bootstrap_port":[%b],"bootstrap_room":%b' % (
        b",".join([host] * size),
        b",".join([port] * size),
        msgspec.json.encode(list(rule.fit_all(attempt.rooms))),
    )


@lru_cache(maxsize=65536)
def _meeting_point(host: str, port: int | None) -> tuple[bytes, bytes]:
    """Return host and port in JSON."""
    return msgspec.json.encode(host), msgspec.json.encode(port)
