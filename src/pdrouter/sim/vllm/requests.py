"""Requests of vLLM's endpoints that generate, read and checked: bytes and headers in, prompts with ranks and legs out.

What vLLM would refuse is refused. Replies: ``replies.py``; the fields of a leg: the connectors.
"""

import uuid
from collections.abc import Mapping, Sequence

import msgspec

from pdrouter.sim.call import Api, Call, Part
from pdrouter.sim.emulator_settings import EmulatorSettings, EngineError
from pdrouter.sim.text import Prompt, as_messages, render_chat
from pdrouter.sim.vllm.connector import Connector, LegRequest

_ID_PREFIXES: Mapping[Api, str] = {
    Api.CHAT: "chatcmpl-",
    Api.COMPLETION: "cmpl-",
    Api.RESPONSES: "resp_",
    Api.MESSAGES: "chatcmpl-",
}
_COMPLETION_TOKENS = 16
_MOST_CHOICES = 16384  # vLLM's VLLM_MAX_N_SEQUENCES


class StreamOptions(msgspec.Struct, frozen=True):
    """OpenAI's ``stream_options``."""

    include_usage: bool | None = None


class Body(msgspec.Struct, frozen=True):
    """Fields of all endpoints that generate."""

    messages: list[dict[str, object]] | None = None
    system: str | list[dict[str, object]] | None = None
    prompt: str | list[str | int | list[int]] | None = None
    input: str | list[dict[str, object]] | None = None
    instructions: str | None = None
    tools: list[object] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | int | None = None
    model: str | None = None
    kv_transfer_params: dict[str, object] | None = None


_decoder = msgspec.json.Decoder(Body)


def read_call(
    api: Api, raw: bytes, headers: Mapping[str, str], settings: EmulatorSettings, connector: Connector
) -> Call:
    """Read and check a request. Raises: ``EngineError``; then the connector lets go what the request was to fetch."""
    try:
        body = _decoder.decode(raw)
        prompts = [Prompt(prompt, settings.bytes_per_token) for prompt in _prompts(api, body)]
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError) as error:
        raise EngineError(400, "bad_request", str(error)) from None
    if not prompts or not all(prompt.tokens for prompt in prompts):
        raise EngineError(400, "bad_request", "The decoder prompt cannot be empty")
    try:
        return _make_call(api, body, prompts, headers, settings, connector)
    except EngineError:
        connector.rejected(body.kv_transfer_params or {}, len(prompts) * (body.n or 1))
        raise


def _make_call(
    api: Api,
    body: Body,
    prompts: list[Prompt],
    headers: Mapping[str, str],
    settings: EmulatorSettings,
    connector: Connector,
) -> Call:
    _check_model(body, settings)
    choices = _choices(body)
    limit = _max_tokens(api, body)
    request_id = headers.get("x-request-id") or uuid.uuid4().hex
    rank = _local_rank(headers, settings)
    leg = LegRequest(
        params=body.kv_transfer_params,
        request_id=request_id,
        max_tokens=limit,
        is_stream=bool(body.stream),
        has_stream_options=body.stream_options is not None,
        prompts=len(prompts) * choices,
    )
    role, handoff = connector.place(leg)
    answer_id = _ID_PREFIXES[api] + request_id
    parts = [
        Part(
            rid=_engine_id(answer_id, index if api is Api.COMPLETION else None, choice if choices > 1 else None),
            prompt=prompt,
            choice=choice,
            output_tokens=settings.default_output_tokens if limit is None else limit,
            stops_early=limit is None,
            rank=rank,
            role=role,
            handoff=handoff,
        )
        for index, prompt in enumerate(prompts)
        for choice in range(choices)
    ]
    return Call(
        api=api,
        parts=parts,
        is_batch=len(parts) > 1,
        is_stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        has_logprobs=body.logprobs is not None and body.logprobs is not False,
        model=body.model or settings.model,
        id=answer_id,
    )


def _engine_id(answer_id: str, index: int | None, choice: int | None) -> str:
    name = answer_id if index is None else f"{answer_id}-{index}"
    name = f"{name}-{uuid.uuid4().hex[:8]}"
    return name if choice is None else f"{choice}_{name}"


def _check_model(body: Body, settings: EmulatorSettings) -> None:
    if body.model is not None and body.model != settings.model:
        raise EngineError(404, "unknown_model", f"The model `{body.model}` does not exist.")


def _prompts(api: Api, body: Body) -> Sequence[str | list[int]]:
    if api is Api.COMPLETION:
        return _text_prompts(body.prompt)
    first = body.system if api is Api.MESSAGES else body.instructions if api is Api.RESPONSES else None
    messages = as_messages(body.input if api is Api.RESPONSES else body.messages, first)
    if not messages:
        raise EngineError(400, "bad_request", "messages must be a list with one message at least")
    return [render_chat(messages, body.tools)]


def _text_prompts(source: str | list[str | int | list[int]] | None) -> Sequence[str | list[int]]:
    if isinstance(source, str):
        return [source]
    if not source:
        raise EngineError(400, "bad_request", "Either prompt or prompt_embeds must be provided and non-empty.")
    if isinstance(source[0], int):
        return [msgspec.convert(source, list[int])]
    if isinstance(source[0], str):
        return msgspec.convert(source, list[str])
    return msgspec.convert(source, list[list[int]])


def _choices(body: Body) -> int:
    choices = 1 if body.n is None else body.n
    if not 1 <= choices <= _MOST_CHOICES:
        raise EngineError(400, "bad_request", f"n must be at least 1 and at most {_MOST_CHOICES}, got {choices}.")
    return choices


def _max_tokens(api: Api, body: Body) -> int | None:
    limit = body.max_output_tokens if api is Api.RESPONSES else body.max_tokens
    if limit is None and api is Api.COMPLETION:
        limit = _COMPLETION_TOKENS
    if api is Api.CHAT and body.max_completion_tokens is not None:
        limit = body.max_completion_tokens
    if api is Api.MESSAGES and limit is None:
        raise EngineError(400, "bad_request", "max_tokens is required")
    if limit is not None and limit < 1:
        raise EngineError(400, "bad_request", f"max_tokens must be at least 1, got {limit}.")
    least = body.min_tokens or 0
    if least < 0 or (limit is not None and least > limit):
        raise EngineError(
            400, "bad_request", f"min_tokens must be less than or equal to max_tokens={limit}, got {least}."
        )
    return limit


def _local_rank(headers: Mapping[str, str], settings: EmulatorSettings) -> int | None:
    value = headers.get("x-data-parallel-rank")
    if value is None:
        return None
    first, end = settings.dp_start_rank, settings.dp_start_rank + settings.dp_size
    if not value.isascii() or not value.isdigit() or not first <= int(value) < end:
        text = f"data_parallel_rank {value} is out of range [{first}, {end})."
        raise EngineError(400, "rank_out_of_range", text)
    return int(value) - first
