"""TensorRT-LLM: a context leg of one token, then a generation leg made from its answer; load from its metrics.

Its ids have 64 bits: they are copied as they are written and never read as numbers. A request ends when its connection
closes. It chooses its ranks itself. Source: TensorRT-LLM 1.2 (``tensorrt_llm/serve/openai_protocol.py``,
``openai_disagg_service.py``, ``openai_server.py``); see docs/engines.md.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, TypeVar

import msgspec
from msgspec import Raw

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
    rest_without,
    splice,
)
from pdrouter.engines.prometheus import series
from pdrouter.engines.raw_json import Fields, write_list, write_object
from pdrouter.engines.usage import PromptCount
from pdrouter.errors import UpstreamProtocol

T = TypeVar("T")

_COMPLETIONS = "/v1/completions"

_OWNED = frozenset({"disaggregated_params"})
_CONTEXT_OWNED = _OWNED | {"stream", "stream_options", "max_tokens", "max_completion_tokens"}
_CHAT_OWNED = _OWNED | {"prompt_token_ids", "prompt_token_ids_b64"}
_COMPLETION_OWNED = _OWNED | {"prompt"}
_NOT_FOR_CLIENTS = _CHAT_OWNED
"""Fields of an answer, or of one of its choices, that are for the other leg."""

_CONTEXT = (
    b'"stream":false,"max_tokens":1,"disaggregated_params":{"request_type":"context_only","disagg_request_id":%d}'
)
_LEAST_ID = 1 << 42
"""Ids from here on are those of legs, below are an engine's own. Source: ``llmapi/disagg_utils.py`` (later 2^40)."""

_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError)

_GOES_ON = frozenset({"length", "not_finished"})
_NULL = Raw(b"null")

_RUNNING = "trtllm_num_requests_running"
_WAITING = "trtllm_num_requests_waiting"
_KV_USE = "trtllm_kv_cache_utilization"


class Trtllm:
    """Plans TensorRT-LLM requests and reads its replies."""

    kv_transports: Sequence[str] = ("native",)
    info_paths: Sequence[Sequence[str]] = (("/v1/models",), ("/version",))
    tells: Collection[str] = ("model", "version")
    load_paths: Sequence[str] = ("/prometheus/metrics", "/metrics")

    def traits(self, _endpoint: Endpoint) -> Traits:
        """Return that a generation engine can read prompts, and that two legs have one prompt and one answer."""
        return Traits(
            frozenset({Task.GENERATE}),
            pairs_lists=False,
            pairs_copies=False,
            reads_prompts=True,
            takes_ranks=False,
            reports_lag=True,
        )

    def plan(self, decision: Decision, inbound: Inbound, attempt: Attempt) -> Plan:
        """Return the context leg; one leg where one endpoint does both."""
        prefill = decision.prefill
        if prefill is None:
            return Plan("", None, _whole_leg(inbound, decision.decode))
        number = attempt.rooms[0] | _LEAST_ID
        rest = rest_without(inbound.body, _CONTEXT_OWNED)
        return Plan(str(number), _leg(inbound, prefill, splice(rest, _CONTEXT % number)), None)

    def hand_over(self, decision: Decision, inbound: Inbound, plan: Plan, reply: bytes) -> HandOver:
        """Return the generation leg, or where the answer ended with its first token the client's answer."""
        told = _read(_CONTEXT_REPLY, reply)
        if told.choices[0].finish_reason not in _GOES_ON:
            return HandOver(None, _answer(inbound, reply), count=told.count)
        params = told.params
        if params is None:
            return HandOver(_whole_leg(inbound, decision.decode), has_kv=False, count=told.count)
        fields = b'"disaggregated_params":' + _generation_params(params, plan.rid)
        is_completion = inbound.path == _COMPLETIONS
        owned = _OWNED
        if told.prompt_token_ids != _NULL:
            owned = _COMPLETION_OWNED if is_completion else _CHAT_OWNED
            name = b'"prompt":' if is_completion else b'"prompt_token_ids":'
            fields += b"," + name + bytes(told.prompt_token_ids)
        body = splice(rest_without(inbound.body, owned), fields)
        return HandOver(_leg(inbound, decision.decode, body), count=told.count)

    def abort(self, endpoint: Endpoint, plan: Plan) -> None:
        """Nothing: the connection closes."""

    def release(self, decision: Decision, reply: bytes) -> None:
        """Nothing: KV that isn't fetched is held until the engine's own time limit."""

    def bootstrap_path(self, endpoint: Endpoint) -> None:
        """Nothing: an answer says where its KV is."""

    def describe(self, path: str, body: bytes) -> Described | None:
        """Read ``/v1/models`` and ``/version``."""
        return described(path, body)

    def read_load(self, body: bytes) -> LoadReply | None:
        """Read ``/prometheus/metrics``, or the iterations at ``/metrics``: one report, tokens aren't told.

        Both are as old as the engine's newest iteration that was looked at, which isn't told either.
        """
        report = _from_iterations(body) if body.startswith(b"[") else _from_gauges(body)
        return None if report is None else LoadReply([report])


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    disaggregated_params: Raw = _NULL


class _ContextReply(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    disaggregated_params: Raw = _NULL
    prompt_token_ids: Raw = _NULL
    usage: _Usage | None = None

    @property
    def params(self) -> Raw | None:
        """Where the KV is: in the first choice, in older versions beside it."""
        found = (raw for raw in (self.choices[0].disaggregated_params, self.disaggregated_params) if raw != _NULL)
        return next(found, None)

    @property
    def count(self) -> PromptCount | None:
        """What the engine counted of the prompt."""
        details = self.usage.prompt_tokens_details if self.usage else None
        if self.usage is None or details is None or details.cached_tokens is None:
            return None
        return PromptCount(self.usage.prompt_tokens, details.cached_tokens)


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Request(msgspec.Struct):
    stream_options: _StreamOptions | None = None


class _KvStats(msgspec.Struct, rename="camel"):
    used_num_blocks: float = 0
    max_num_blocks: float = 0


class _Iteration(msgspec.Struct, rename="camel"):
    num_active_requests: float
    num_queued_requests: float = 0
    attention_dp_rank: int = 0
    kv_cache_stats: _KvStats | None = None


_CONTEXT_REPLY = msgspec.json.Decoder(_ContextReply)
_FIELDS = msgspec.json.Decoder(Fields)
_OBJECTS = msgspec.json.Decoder(list[Fields])
_TOOL_CALLS = msgspec.json.Decoder(list[Fields] | None)


def _read(decoder: "msgspec.json.Decoder[T]", raw: bytes | Raw) -> T:
    try:
        return decoder.decode(raw)
    except (*_UNREADABLE, RecursionError) as error:
        raise UpstreamProtocol(f"the context engine's answer isn't understood: {error}") from error


def _generation_params(params: Raw, number: str) -> bytes:
    """Return the object as the context engine gave it, for the other leg; ids stay as they are written."""
    fields = _read(_FIELDS, params)
    fields["request_type"] = Raw(b'"generation_only"')
    if fields.get("disagg_request_id", _NULL) == _NULL:
        fields["disagg_request_id"] = Raw(number.encode())
    return bytes(write_object(fields))


def _whole_leg(inbound: Inbound, place: Placement) -> Leg:
    return _leg(inbound, place, splice(inbound.rest(_OWNED), b""))


def _leg(inbound: Inbound, place: Placement, body: tuple[Piece, ...]) -> Leg:
    headers = inbound.headers + inbound.id_line
    return Leg(place, leg_head(inbound, place.endpoint, headers, sum(map(len, body))), body)


# The context engine's answer as the client's.


def _answer(inbound: Inbound, reply: bytes) -> bytes:
    fields = _for_client(_read(_FIELDS, reply))
    choices = [_for_client(choice) for choice in _read(_OBJECTS, fields["choices"])]
    if inbound.is_stream:
        return b"".join(b"data: " + event + b"\n\n" for event in _events(inbound, fields, choices))
    return bytes(write_object({**fields, "choices": _list(choices)}))


def _for_client(fields: Fields) -> Fields:
    return {name: raw for name, raw in fields.items() if name not in _NOT_FOR_CLIENTS}


def _list(objects: Sequence[Mapping[str, bytes | Raw]]) -> Raw:
    return write_list(map(write_object, objects))


def _events(inbound: Inbound, fields: Fields, choices: Sequence[Fields]) -> Iterator[bytes | Raw]:
    """Yield what a stream of this answer would have had."""
    usage = fields.pop("usage", _NULL)
    if inbound.path != _COMPLETIONS:
        fields["object"] = Raw(b'"chat.completion.chunk"')
        choices = [_as_delta(choice) for choice in choices]
    yield write_object({**fields, "choices": _list(choices)})
    if _wants_usage(inbound.body):
        yield write_object({**fields, "choices": Raw(b"[]"), "usage": usage})
    yield b"[DONE]"


def _wants_usage(body: bytes) -> bool:
    with suppress(*_UNREADABLE):
        options = msgspec.json.decode(body, type=_Request).stream_options
        return options is not None and bool(options.include_usage)
    return False


def _as_delta(choice: Fields) -> Fields:
    """Return a chat choice as a chunk has it; calls of tools are numbered there."""
    message = _read(_FIELDS, choice.get("message", Raw(b"{}")))
    calls = _read(_TOOL_CALLS, message.pop("tool_calls", _NULL))
    if calls:
        message["tool_calls"] = _list([{"index": b"%d" % i, **call} for i, call in enumerate(calls)])
    return {"delta": write_object(message), **{name: raw for name, raw in choice.items() if name != "message"}}


# Load.


def _from_gauges(page: bytes) -> RankReport | None:
    running = _total(page, _RUNNING)
    if running is None:
        return None
    waiting = _total(page, _WAITING)
    requests = running + (waiting or 0.0)
    return RankReport(0, requests=requests, kv_use=_total(page, _KV_USE), waiting_requests=waiting)


def _total(page: bytes, name: str) -> float | None:
    values = [value for _, value in series(page, name)]
    return sum(values) if values else None


def _from_iterations(body: bytes) -> RankReport | None:
    """Read the newest iteration of each rank of the engine."""
    try:
        newest = {told.attention_dp_rank: told for told in msgspec.json.decode(body, type=list[_Iteration])}.values()
    except (*_UNREADABLE, RecursionError):
        return None
    if not newest:
        return None
    waiting = sum(told.num_queued_requests for told in newest)
    blocks = sum(told.kv_cache_stats.max_num_blocks for told in newest if told.kv_cache_stats)
    used = sum(told.kv_cache_stats.used_num_blocks for told in newest if told.kv_cache_stats)
    return RankReport(
        0,
        requests=sum(told.num_active_requests for told in newest) + waiting,
        kv_use=used / blocks if blocks else None,
        waiting_requests=waiting,
    )
