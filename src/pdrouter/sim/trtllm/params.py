"""What the legs of a request tell each other: ``disaggregated_params``, read and checked.

Fields: TensorRT-LLM 1.2 (``tensorrt_llm/serve/openai_protocol.py``). Stricter than the real one, which takes an id
written as a float, and any number that nobody gave: here both are refused.
"""

from collections.abc import Sequence

import msgspec

from pdrouter.sim.call import Handoff
from pdrouter.sim.emulator_settings import MAX_ROOM, EngineError
from pdrouter.sim.job import Role

LEAST_ID = 1 << 42
"""Below are an engine's own ids. Source: ``llmapi/disagg_utils.py`` (in later versions 2^40)."""

CONTEXT, GENERATION = "context_only", "generation_only"


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The object. A decoder of this type refuses floats where ids are, and fields that nobody knows."""

    request_type: str
    first_gen_tokens: list[int] | None = None
    first_gen_log_probs: list[object] | None = None
    first_gen_logits: list[object] | None = None
    ctx_request_id: int | None = None
    encoded_opaque_state: str | None = None
    draft_tokens: list[int] | None = None
    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None
    schedule_style: int | None = None
    ctx_usage: dict[str, object] | None = None
    return_prompt_token_ids_b64: bool = False
    resolved_thinking: bool | None = None


class ContextLeg(Handoff, frozen=True):
    """A context leg: the id by which the other leg will ask for its KV, and the prompt."""

    number: int
    source: str | Sequence[int]


class GenerationLeg(Handoff, frozen=True):
    """A generation leg: the object that the context engine gave, and where that listens."""

    number: int
    address: tuple[str, int]
    params: Params


class LegRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a handshake must know of a request. ``source`` is its first prompt, ``prompts`` counts answers too."""

    params: Params | None
    source: str | Sequence[int]
    max_tokens: int | None
    is_stream: bool
    prompts: int


def read_leg(leg: LegRequest, role: Role) -> tuple[Role, Handoff | None]:
    """Return what an engine of this role does for a request, and how it meets its other leg.

    Raises: ``EngineError``.
    """
    params = leg.params
    if params is None:
        if role is Role.PREFILL:
            raise _refused("no_disaggregated_params", "a context engine needs disaggregated_params")
        return Role.REGULAR, None
    asked = {CONTEXT: Role.PREFILL, GENERATION: Role.DECODE}.get(params.request_type)
    if asked is None:
        raise _refused("bad_request_type", f"Unknown request type: {params.request_type}")
    if role not in {asked, Role.REGULAR}:
        raise _refused("wrong_role", f"a {role} engine got a {params.request_type} request")
    if leg.prompts != 1:
        raise _refused("several_prompts", f"a {params.request_type} request has one prompt and one answer")
    number = _number(params)
    if asked is Role.PREFILL:
        _check_context(leg, params)
        return asked, ContextLeg(number, leg.source)
    if isinstance(leg.source, str):
        raise _refused("no_prompt_token_ids", "a generation leg brings the ids of its prompt")
    return asked, GenerationLeg(number, _address(params), params)


def _refused(code: str, message: str) -> EngineError:
    return EngineError(400, code, message)


def _number(params: Params) -> int:
    number = params.disagg_request_id
    if number is None:
        raise _refused("no_id", "disagg_request_id is missing")
    if not LEAST_ID <= number <= MAX_ROOM:
        raise _refused("id_out_of_range", f"disagg_request_id {number} isn't in [2^42, 2^63)")
    return number


def _check_context(leg: LegRequest, params: Params) -> None:
    if leg.is_stream:
        raise _refused("context_streams", "a context leg isn't streamed: its disaggregated_params would be lost")
    if leg.max_tokens != 1:
        raise _refused("context_not_one_token", f"a context leg has max_tokens 1, not {leg.max_tokens}")
    if params.ctx_request_id is not None or params.encoded_opaque_state is not None:
        raise _refused("bad_context", "a context leg was told where its own KV is")


def _address(params: Params) -> tuple[str, int]:
    scheme, _, place = (params.ctx_info_endpoint or "").partition("://")
    host, _, port = place.rpartition(":")
    if scheme != "tcp" or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise _refused("bad_endpoint", f"ctx_info_endpoint isn't an address: {params.ctx_info_endpoint!r}")
    return host, int(port)
