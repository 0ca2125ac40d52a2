"""Requests of TensorRT-LLM's endpoints that generate, read and checked: bytes in, prompts and legs out.

What it would refuse is refused, fields that it doesn't know too. Fields: TensorRT-LLM 1.2. Replies: ``replies.py``.
"""

import uuid
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from pdrouter.sim.call import Api, Call, Handoff, Part
from pdrouter.sim.emulator_settings import EmulatorSettings, EngineError
from pdrouter.sim.job import Role
from pdrouter.sim.text import Prompt, render_chat, text_seed, token_text
from pdrouter.sim.trtllm.params import LegRequest, Params, read_leg
from pdrouter.sim.trtllm.tokens import prompt_of

_SHARED = (
    "model best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream "
    "stream_options temperature top_p user lora_request prompt_ignore_length use_beam_search top_k top_p_min min_p "
    "repetition_penalty length_penalty early_stopping stop_token_ids include_stop_str_in_output ignore_eos min_tokens "
    "skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens thinking_token_budget "
    "add_special_tokens response_format disaggregated_params priority conversation_params"
)
_CHAT = (
    "messages prompt_token_ids prompt_token_ids_b64 top_logprobs max_completion_tokens tools tool_choice "
    "parallel_tool_calls reasoning_effort thinking add_generation_prompt documents chat_template "
    "chat_template_kwargs media_io_kwargs cache_salt agent_hierarchy mm_processor_kwargs"
)
_TEXT = "prompt suffix return_context_logits detokenize"
_KNOWN: Mapping[Api, frozenset[str]] = {
    Api.CHAT: frozenset(f"{_SHARED} {_CHAT}".split()),
    Api.COMPLETION: frozenset(f"{_SHARED} {_TEXT}".split()),
}


class StreamOptions(msgspec.Struct, frozen=True):
    """OpenAI's ``stream_options``; here usage is told if they are there and don't say otherwise."""

    include_usage: bool | None = True


class Body(msgspec.Struct, frozen=True):
    """Fields that matter here."""

    model: str
    messages: list[dict[str, object]] | None = None
    prompt: str | list[str | int | list[int]] | None = None
    prompt_token_ids: list[int] | None = None
    tools: list[object] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int = 1
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | int | None = None
    disaggregated_params: Params | None = None


_decoder = msgspec.json.Decoder(Body)
_names = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_call(api: Api, raw: bytes, settings: EmulatorSettings) -> Call:
    """Read and check a request. Raises: ``EngineError``."""
    try:
        unknown = _names.decode(raw).keys() - _KNOWN[api]
        body = _decoder.decode(raw)
        sources = _sources(api, body)
        prompts = [_prompt(source, settings) for source in sources]
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError) as error:
        raise EngineError(400, "bad_request", str(error)) from None
    if unknown:
        raise EngineError(400, "unknown_field", f"Extra inputs are not permitted: {', '.join(sorted(unknown))}")
    if not prompts or not all(prompt.tokens for prompt in prompts):
        raise EngineError(400, "bad_request", "an empty prompt")
    return _make_call(api, body, sources[0], prompts, settings)


def _make_call(
    api: Api, body: Body, source: str | Sequence[int], prompts: list[Prompt], settings: EmulatorSettings
) -> Call:
    if body.stream_options is not None and not body.stream:
        raise EngineError(400, "bad_request", "stream_options can only be set if stream is true")
    if body.n < 1:
        raise EngineError(400, "bad_request", f"n must be at least 1, got {body.n}")
    limit = _limit(body)
    leg = LegRequest(
        params=body.disaggregated_params,
        source=source,
        max_tokens=limit,
        is_stream=bool(body.stream),
        prompts=len(prompts) * body.n,
    )
    role, handoff = read_leg(leg, Role(settings.role))
    asked = _Asked(body, limit, role, handoff)
    parts = [_part(asked, prompt, choice, settings) for prompt in prompts for choice in range(body.n)]
    return Call(
        api=api,
        parts=parts,
        is_batch=len(parts) > 1,
        is_stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        has_logprobs=body.logprobs is not None and body.logprobs is not False,
        model=body.model,
        id=("chatcmpl-" if api is Api.CHAT else "cmpl-") + uuid.uuid4().hex,
    )


class _Asked(NamedTuple):
    body: Body
    limit: int | None
    role: Role
    handoff: Handoff | None


def _part(asked: _Asked, prompt: Prompt, choice: int, settings: EmulatorSettings) -> Part:
    """Return one prompt. An answer whose first word is among ``stop`` ends with it; it isn't cut off."""
    stops = [asked.body.stop] if isinstance(asked.body.stop, str) else asked.body.stop or []
    is_stopped = token_text(text_seed(prompt.digest, choice), 0).strip() in stops
    limit = settings.default_output_tokens if asked.limit is None else asked.limit
    return Part(
        rid=uuid.uuid4().hex,
        prompt=prompt,
        choice=choice,
        output_tokens=1 if is_stopped else limit,
        stops_early=is_stopped or asked.limit is None,
        rank=None,
        role=asked.role,
        handoff=asked.handoff,
    )


def _limit(body: Body) -> int | None:
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise EngineError(400, "unknown_field", "max_tokens and max_completion_tokens are one field with two names")
    limit = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    if limit is not None and limit < 1:
        raise EngineError(400, "bad_request", f"max_tokens must be greater than 0, got {limit}")
    return limit


def _prompt(source: str | Sequence[int], settings: EmulatorSettings) -> Prompt:
    return Prompt(source if isinstance(source, str) else prompt_of(source), settings.bytes_per_token)


def _sources(api: Api, body: Body) -> Sequence[str | list[int]]:
    if api is Api.CHAT:
        if not body.messages:
            raise EngineError(400, "bad_request", "messages must be a list with one message at least")
        return [render_chat(body.messages, body.tools) if body.prompt_token_ids is None else body.prompt_token_ids]
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        return []
    if isinstance(prompt[0], int):
        return [msgspec.convert(prompt, list[int])]
    return msgspec.convert(prompt, list[str] if isinstance(prompt[0], str) else list[list[int]])
