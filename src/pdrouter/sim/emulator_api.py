"""Requests of SGLang's inference endpoints, read and checked: bytes and headers in, prompts with ranks and rooms out.

What SGLang would refuse is refused, and what it would ignore is ignored. Replies: ``sglang_replies.py``.
"""

import uuid
from collections.abc import Mapping

import msgspec

from pdrouter.sim.call import Api, Call, Part, RoomHandoff
from pdrouter.sim.emulator_settings import MAX_ROOM, EmulatorSettings, EngineError
from pdrouter.sim.sglang_version import SglangVersion
from pdrouter.sim.text import Prompt, as_messages, echo_text, render_chat

_CHATS = frozenset({Api.CHAT, Api.RESPONSES, Api.MESSAGES})
_FAKE_BOOTSTRAP_HOST = "2.2.2.2"  # SGLang's own name for "no other side" (disaggregation/utils.py)
DEFAULT_BOOTSTRAP_PORT = 8998


class StreamOptions(msgspec.Struct, frozen=True):
    """OpenAI's ``stream_options``."""

    include_usage: bool | None = None


class SamplingParams(msgspec.Struct, frozen=True):
    """The part of ``sampling_params`` that matters here."""

    max_new_tokens: int | None = None
    n: int | None = None


class Body(msgspec.Struct, frozen=True):
    """Fields of all endpoints; handshake and rank fields stay unchecked until their own rules are applied."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    prompt: str | list[str | int | list[int]] | None = None
    messages: list[dict[str, object]] | None = None
    system: str | list[dict[str, object]] | None = None
    input: str | list[dict[str, object]] | None = None
    instructions: str | None = None
    tools: list[object] | None = None
    sampling_params: SamplingParams | list[SamplingParams] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    rid: str | list[str] | None = None
    request_id: str | None = None
    model: str | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    logprobs: bool | int | None = None
    echo: bool | None = None
    bootstrap_host: object = None
    bootstrap_port: object = None
    bootstrap_room: object = None
    routed_dp_rank: object = None
    disagg_prefill_dp_rank: object = None
    data_parallel_rank: object = None


_decoder = msgspec.json.Decoder(Body)

_UNREAD = dict.fromkeys(
    ["bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank", "disagg_prefill_dp_rank"]
)
"""Fields that a version doesn't know yet on an endpoint: they are passed over, as any that it doesn't know."""


def read_call(api: Api, raw: bytes, headers: Mapping[str, str], settings: EmulatorSettings) -> Call:
    """Read and check a request. Raises: ``EngineError`` with status 400."""
    try:
        body = _known(api, _decoder.decode(raw), settings.sglang)
        prompts, is_batch = _prompts(api, body)
        kept = [Prompt(prompt, settings.bytes_per_token) for prompt in prompts]
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError) as error:
        raise EngineError(400, "bad_request", f"invalid request: {error}") from None
    if not kept or not all(prompt.tokens for prompt in kept):
        raise EngineError(400, "bad_request", "the prompt is empty")
    if not (settings.takes_overrides and settings.sglang.takes_overrides):
        headers = {name: value for name, value in headers.items() if not name.startswith("x-override-")}
    choices = _choices(api, body)
    count = len(kept) * choices
    is_batch = is_batch or choices > 1
    # SGLang sends a warm-up and all samples to the first room, whatever shape the rooms have: a prefill answers, a
    # decode engine never does. Source: seen on 0.5.23; ``managers/tokenizer_manager.py``, ``_handle_batch_request``.
    has_rooms = settings.role != "regular" and choices == 1
    rooms, addresses = _bootstrap(body, headers, count, is_batch=is_batch, has_rooms=has_rooms)
    rids = _rids(headers.get("x-override-rid") or _rid(api, body), count, is_batch=is_batch)
    limit, stops_early = _output_tokens(api, body, settings)
    rank, prefill_rank = _ranks(api, body, headers, settings)
    parts = [
        Part(
            rid=rids[i],
            prompt=kept[i // choices],
            choice=i % choices,
            output_tokens=limit,
            stops_early=stops_early,
            rank=_own_rank(rank, rooms[i], settings),
            handoff=_handoff(rooms[i], addresses[i], prefill_rank),
            echo=echo_text(prompts[i // choices]) if body.echo and api is Api.COMPLETION else "",
        )
        for i in range(count)
    ]
    start = body.logprob_start_len
    return Call(
        api=api,
        parts=parts,
        is_batch=is_batch,
        is_stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        has_logprobs=_has_logprobs(api, body),
        logprob_start=max(0, start) if isinstance(start, int) else 0,
        echo_logprobs=bool(body.echo and body.logprobs),
        top_logprobs=int(body.logprobs or 0),
        hangs=choices > 1 and settings.role == "decode",
        model=body.model or settings.model,
        id=f"msg_{rids[0]}" if api is Api.MESSAGES else None,
    )


def _known(api: Api, body: Body, version: SglangVersion) -> Body:
    """Return the body without what an endpoint of this version doesn't read.

    Source: 0.5.20 ``openai/protocol.py``, ``ResponsesRequest``; 0.5.22 ``anthropic/protocol.py``,
    ``AnthropicMessagesRequest``, which never had ``data_parallel_rank`` or an id.
    """
    if api is Api.RESPONSES and not version.pairs_responses:
        return msgspec.structs.replace(body, **_UNREAD, data_parallel_rank=None)
    if api is Api.MESSAGES:
        return msgspec.structs.replace(body, **({} if version.pairs_messages else _UNREAD), data_parallel_rank=None)
    return body


def _rid(api: Api, body: Body) -> str | list[str] | None:
    """Return the id that the client gives: a response has a field of its own for it, a message none."""
    if api is Api.RESPONSES:
        return body.request_id or f"resp_{uuid.uuid4().hex}"
    return None if api is Api.MESSAGES else body.rid


def _prompts(api: Api, body: Body) -> tuple[list[str | list[int]], bool]:
    if api in _CHATS:
        system = {Api.MESSAGES: body.system, Api.RESPONSES: body.instructions}.get(api)
        messages = as_messages(body.input if api is Api.RESPONSES else body.messages, system)
        if not messages:
            raise EngineError(400, "bad_request", "messages must be a list with one message at least")
        return [render_chat(messages, body.tools)], False
    source: object = body.prompt
    if api is Api.GENERATE:
        if (body.text is None) == (body.input_ids is None):
            raise EngineError(400, "bad_request", "Either text or input_ids should be provided.")
        source = body.text if body.input_ids is None else body.input_ids
    if isinstance(source, str):
        return [source], False
    if not isinstance(source, list) or not source:
        raise EngineError(400, "bad_request", "the prompt is missing or empty")
    if isinstance(source[0], int):
        return [msgspec.convert(source, list[int])], False
    if isinstance(source[0], str):
        return list(msgspec.convert(source, list[str])), True
    return list(msgspec.convert(source, list[list[int]])), True


def _choices(api: Api, body: Body) -> int:
    if api in {Api.RESPONSES, Api.MESSAGES}:
        return 1
    choices = body.n
    if api is Api.GENERATE:
        params = body.sampling_params
        choices = params.n if isinstance(params, SamplingParams) else None
    if choices is not None and not 1 <= choices <= 1024:
        raise EngineError(400, "bad_request", f"n should be positive and small, got {choices}")
    return choices or 1


def _output_tokens(api: Api, body: Body, settings: EmulatorSettings) -> tuple[int, bool]:
    limit = body.max_completion_tokens or body.max_tokens
    if api is Api.GENERATE:
        params = body.sampling_params
        if isinstance(params, list):
            params = params[0] if params else None
        limit = params.max_new_tokens if params else None
    if api is Api.RESPONSES:
        limit = body.max_output_tokens
    if api is Api.MESSAGES and limit is None:
        raise EngineError(400, "bad_request", "max_tokens is required")
    if limit is not None and limit < 1:
        raise EngineError(400, "bad_request", f"max_new_tokens must be at least 1, got {limit}")
    if settings.role == "prefill":
        return 1, False
    return (settings.default_output_tokens, True) if limit is None else (limit, False)


def _has_logprobs(api: Api, body: Body) -> bool:
    if api is Api.GENERATE:
        return body.return_logprob is True or (isinstance(body.return_logprob, list) and any(body.return_logprob))
    return body.logprobs is not None and body.logprobs is not False


def _rids(rid: str | list[str] | None, count: int, *, is_batch: bool) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(rid, str):
        return [f"{rid}_{i}" for i in range(count)] if is_batch else [rid]
    if len(rid) != count:
        raise EngineError(400, "bad_request", "The rids should be provided for each request.")
    return rid


# Rooms.


def _bootstrap(
    body: Body, headers: Mapping[str, str], count: int, *, is_batch: bool, has_rooms: bool
) -> tuple[list[int | None], list[tuple[str, int] | None]]:
    if not has_rooms:
        return [None] * count, [None] * count
    room = _header_int(headers, "x-override-bootstrap-room", body.bootstrap_room)
    host: object = headers.get("x-override-bootstrap-host", body.bootstrap_host)
    port = _header_int(headers, "x-override-bootstrap-port", body.bootstrap_port)
    rooms = [_room(value) for value in _spread("bootstrap_room", room, count, is_batch=is_batch)]
    hosts = _spread("bootstrap_host", host, count, is_batch=is_batch)
    ports = _spread("bootstrap_port", port, count, is_batch=is_batch)
    if len(set(rooms)) != count:
        raise EngineError(500, "room_reused", "a bootstrap_room stands twice in one batch")
    return list(rooms), [_address(hosts[i], ports[i]) for i in range(count)]


def _spread(name: str, value: object, count: int, *, is_batch: bool) -> list[object]:
    if not is_batch:
        if isinstance(value, list):
            raise EngineError(400, "bad_batch", f"{name} is a list, but the request isn't a batch")
        return [value]
    if not isinstance(value, list) or len(value) != count:
        raise EngineError(400, "bad_batch", f"{name} must be a list of {count} for this batch")
    return value


def _room(value: object) -> int:
    if value is None:
        raise EngineError(400, "bad_room", "Disaggregated request received without bootstrap room id.")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_ROOM:
        raise EngineError(400, "bad_room", f"bootstrap_room must be an integer in [0, 2^63 - 1], got {value!r}")
    return value


def _address(host: object, port: object) -> tuple[str, int] | None:
    if not isinstance(host, str) or not host:
        raise EngineError(400, "bad_bootstrap_host", f"bootstrap_host must be a string, got {host!r}")
    if host == _FAKE_BOOTSTRAP_HOST:
        return None
    if port is None:
        return host, DEFAULT_BOOTSTRAP_PORT
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
        raise EngineError(400, "bad_bootstrap_port", f"bootstrap_port must be a port number, got {port!r}")
    return host, port


def _handoff(room: int | None, address: tuple[str, int] | None, prefill_rank: int | None) -> RoomHandoff | None:
    return None if room is None or address is None else RoomHandoff(room, address, prefill_rank)


def _header_int(headers: Mapping[str, str], name: str, other: object) -> object:
    value = headers.get(name)
    if value is None:
        return other
    try:
        return int(value)
    except ValueError:
        raise EngineError(400, "bad_header", f"invalid {name} header {value!r}") from None


# Ranks.


def _ranks(
    api: Api, body: Body, headers: Mapping[str, str], settings: EmulatorSettings
) -> tuple[int | None, int | None]:
    """Own rank and the prefill's; None where nothing was said.

    Source: ``managers/io_struct.py``, ``managers/tokenizer_manager.py``, ``openai/protocol.py``,
    ``openai/serving_base.py``. Before 0.5.10 ``disaggregation/decode.py`` takes its own rank for the prefill's.
    """
    version = settings.sglang
    own: object = body.data_parallel_rank if api is Api.GENERATE or version.takes_openai_rank else None
    other: object = own if settings.role == "decode" else None
    if version.takes_routed:
        own = own if body.routed_dp_rank is None else body.routed_dp_rank
        if api is not Api.GENERATE:
            own = _header_int(headers, "x-data-parallel-rank", own)
        own = _header_int(headers, "x-override-routed-dp-rank", own)
        other = _header_int(headers, "x-override-disagg-prefill-dp-rank", body.disagg_prefill_dp_rank)
    rank = _integer("routed_dp_rank", own)
    if rank is not None and not 0 <= rank < settings.dp_size:
        if not version.takes_routed:
            raise EngineError(500, "rank_out_of_range", f"data_parallel_rank={rank}: the DP controller would crash")
        raise EngineError(400, "rank_out_of_range", f"routed_dp_rank={rank} out of range [0, {settings.dp_size})")
    return rank, _integer("disagg_prefill_dp_rank", other)


def _own_rank(rank: int | None, room: int | None, settings: EmulatorSettings) -> int | None:
    if rank is None and room is not None and settings.follows_rooms:
        return room % settings.dp_size
    return rank


def _integer(name: str, value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise EngineError(400, "bad_rank", f"{name} must be an integer, got {value!r}")
    return value
