"""The bodies of the inference paths: only what the router reads is declared and decoded, the rest is skipped.

Fields whose bytes matter are kept raw. Read next: ``prompts.py`` and ``intake.py``.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TypeVar, cast

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from pdrouter.core.request import Task
from pdrouter.errors import InvalidJson, InvalidRequest
from pdrouter.proxy.bounds import has_more, items
from pdrouter.proxy.content import Message, RawField, is_array, value
from pdrouter.proxy.scalars import Scalar, boolean, count, integer

S = TypeVar("S")

MAX_ID_CHARS = 256

MAX_BATCH = 4096
"""Samples of one request (I9)."""

MAX_OBJECTS = 131_072
"""JSON objects in the body of one request (I9): messages, parts, tools and what they are made of. Chosen."""

_FEW_BYTES = 2 * MAX_OBJECTS
"""A body that can't have so many: each takes two bytes."""


class Api(StrEnum):
    """The inference paths."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    GENERATE = "/generate"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    COUNT_TOKENS = "/v1/messages/count_tokens"
    EMBEDDINGS = "/v1/embeddings"
    RERANK_V1 = "/v1/rerank"
    RERANK = "/rerank"
    SCORE = "/v1/score"
    CLASSIFY = "/v1/classify"
    TOKENIZE = "/tokenize"
    DETOKENIZE = "/detokenize"
    TRANSCRIPTIONS = "/v1/audio/transcriptions"
    TRANSLATIONS = "/v1/audio/translations"
    SPEECH = "/v1/audio/speech"
    IMAGES = "/v1/images/generations"
    IMAGE_EDITS = "/v1/images/edits"
    IMAGE_VARIATIONS = "/v1/images/variations"


TASKS: Mapping[Api, Task] = {
    Api.CHAT: Task.GENERATE,
    Api.COMPLETIONS: Task.GENERATE,
    Api.GENERATE: Task.GENERATE,
    Api.RESPONSES: Task.RESPONSES,
    Api.MESSAGES: Task.MESSAGES,
    Api.EMBEDDINGS: Task.READ,
    Api.RERANK_V1: Task.READ,
    Api.RERANK: Task.READ,
    Api.SCORE: Task.READ,
    Api.CLASSIFY: Task.READ,
    Api.COUNT_TOKENS: Task.COUNT,
}
"""What a path asks for; of those that aren't here any engine may serve one leg, whose body is passed on as it is."""


class Body(Struct):
    """What all paths share: model, answer's form, and the fields that the router writes itself."""

    model: str | None = None
    stream: Scalar = None
    priority: Scalar = None
    lora_path: RawField = UNSET
    cache_salt: RawField = UNSET
    extra_key: RawField = UNSET
    rid: RawField = UNSET
    request_id: RawField = UNSET
    bootstrap_host: RawField = UNSET
    bootstrap_port: RawField = UNSET
    bootstrap_room: RawField = UNSET
    routed_dp_rank: RawField = UNSET
    disagg_prefill_dp_rank: RawField = UNSET
    data_parallel_rank: RawField = UNSET
    data_parallel_rank_decode: RawField = UNSET
    decode_dp_rank: RawField = UNSET
    kv_transfer_params: RawField = UNSET
    disaggregated_params: RawField = UNSET

    def copies(self) -> int | None:
        """Return how many answers each prompt gets, ``None`` where the body doesn't say."""
        return None

    def max_output_tokens(self) -> int | None:
        """Return the limit of each answer, ``None`` where the body sets none."""
        return None

    def wants_prompt_logprobs(self) -> bool:
        """Whether the prefill leg's reply is needed."""
        return False


class Chat(Body):
    """``/v1/chat/completions``."""

    messages: list[Message] | UnsetType = UNSET
    tools: RawField = UNSET
    n: Scalar = None
    max_tokens: Scalar = None
    max_completion_tokens: Scalar = None

    def copies(self) -> int | None:
        """Return ``n``."""
        return integer("n", self.n)

    def max_output_tokens(self) -> int | None:
        """Return the larger one where both limits are given: which one counts depends on the engine.

        Source: ``max_completion_tokens`` in vLLM 0.32 and SGLang 0.5.9 and later, ``max_tokens`` in SGLang 0.5.6 to
        0.5.8 (``protocol.py`` of each).
        """
        older, newer = count("max_tokens", self.max_tokens), count("max_completion_tokens", self.max_completion_tokens)
        return newer if older is None else older if newer is None else max(older, newer)


class Completion(Body):
    """``/v1/completions``."""

    prompt: RawField = UNSET
    echo: RawField = UNSET
    logprobs: RawField = UNSET
    n: Scalar = None
    max_tokens: Scalar = None

    def copies(self) -> int | None:
        """Return ``n``."""
        return integer("n", self.n)

    def max_output_tokens(self) -> int | None:
        """Return the limit of each answer."""
        return count("max_tokens", self.max_tokens)

    def wants_prompt_logprobs(self) -> bool:
        """Whether the prompt is echoed with its logprobs: a decode engine doesn't have them."""
        return _is_set(self.echo) and _is_set(self.logprobs)


class Responses(Body):
    """``/v1/responses``."""

    input: RawField = UNSET
    instructions: RawField = UNSET
    tools: RawField = UNSET
    max_output_tokens_: Scalar = msgspec.field(default=None, name="max_output_tokens")

    def max_output_tokens(self) -> int | None:
        """Return the limit of the answer."""
        return count("max_output_tokens", self.max_output_tokens_)


class Messages(Body):
    """``/v1/messages``."""

    messages: list[Message] | UnsetType = UNSET
    system: RawField = UNSET
    tools: RawField = UNSET
    max_tokens: Scalar = None

    def max_output_tokens(self) -> int | None:
        """Return the limit of the answer."""
        return count("max_tokens", self.max_tokens)


class Whole(Body):
    """What goes to one engine as it is, but for the fields that the router writes itself."""


class Generate(Body):
    """``/generate``. Its ``n`` stands in ``sampling_params``, where SGLang takes integers only."""

    text: RawField = UNSET
    input_ids: RawField = UNSET
    input_embeds: RawField = UNSET
    image_data: RawField = UNSET
    audio_data: RawField = UNSET
    video_data: RawField = UNSET
    sampling_params: "SamplingParams | list[SamplingParams] | None" = None
    return_logprob: RawField = UNSET

    def copies(self) -> int | None:
        """Return ``n``; in a list of parameters all have the same.

        Source: SGLang's ``io_struct.py``, ``_handle_parallel_sampling``; a beam search is one sample, whatever its
        ``n``. Raises: InvalidRequest.
        """
        params = self.sampling_params
        several = params if isinstance(params, list) else [] if params is None else [params]
        copies = {1 if each.n is None or each.is_beam else each.n for each in several}
        if len(copies) > 1:
            raise InvalidRequest("n must be the same in all of sampling_params", param="n")
        return copies.pop() if copies else None

    def max_output_tokens(self) -> int | None:
        """Return ``max_new_tokens``; of a list of parameters the largest."""
        params = self.sampling_params
        if not isinstance(params, list):
            return None if params is None else params.limit()
        return max((limit for one in params if (limit := one.limit()) is not None), default=None)

    def wants_prompt_logprobs(self) -> bool:
        """Whether any sample asks for logprobs: the prompt's come from the prefill leg."""
        flags = _one_or_several("return_logprob", self.return_logprob)
        return any(boolean("return_logprob", _scalar("return_logprob", flag)) for flag in flags)


class SamplingParams(Struct, gc=False):
    """How to sample."""

    n: int | None = None
    max_new_tokens: int | None = None
    beam_width: RawField = UNSET

    @property
    def is_beam(self) -> bool:
        """Whether it is a beam search."""
        width = b"" if isinstance(self.beam_width, UnsetType) else bytes(self.beam_width)
        return width.isdigit() and width not in (b"0", b"1")

    def limit(self) -> int | None:
        """Return ``max_new_tokens``."""
        return count("max_new_tokens", self.max_new_tokens)


_NOT_SET = (b"null", b"false", b"0")

AnyBody = Chat | Completion | Generate | Responses | Messages

_DECODERS: Mapping[Api, "msgspec.json.Decoder[AnyBody]"] = {
    Api.CHAT: msgspec.json.Decoder(Chat),
    Api.COMPLETIONS: msgspec.json.Decoder(Completion),
    Api.GENERATE: msgspec.json.Decoder(Generate),
    Api.RESPONSES: msgspec.json.Decoder(Responses),
    Api.MESSAGES: msgspec.json.Decoder(Messages),
}
_WHOLE = msgspec.json.Decoder(Whole)


def body_type(api: Api) -> type[Struct]:
    """Return what is read of a path's bodies."""
    return cast("type[Struct]", _DECODERS[api].type) if api in _DECODERS else Whole


def decode(api: Api, body: bytes) -> AnyBody:
    """Read a body.

    Raises: InvalidJson; InvalidRequest for a field of another type, or too many objects.
    """
    if len(body) > _FEW_BYTES and has_more(body, b"{", MAX_OBJECTS):  # I9
        raise InvalidRequest(f"the body has more than {MAX_OBJECTS} objects: messages, parts, tools and theirs")
    return _decode(_DECODERS[api], body)


def decode_whole(body: bytes) -> Whole:
    """Read of a body only what routing needs.

    Raises: InvalidJson; InvalidRequest for a field of another type.
    """
    return _decode(_WHOLE, body)


def _decode(decoder: "msgspec.json.Decoder[S]", body: bytes) -> S:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error), param=_path_of(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidJson(f"the body isn't JSON: {error}") from error


def _path_of(error: msgspec.ValidationError) -> str | None:
    """Return the field that a validation error names (msgspec writes ``... - at `$.field` ``)."""
    _, found, rest = str(error).partition("at `$.")
    return rest.split("`")[0].split("[")[0].split(".")[0] if found else None


def _is_set(field: RawField) -> bool:
    """Whether a flag or a number is given, and neither false nor 0."""
    return not isinstance(field, UnsetType) and bytes(field) not in _NOT_SET


def batch_size(body: Body, prompts: int | None) -> int | None:
    """Return how many samples the engine makes, ``None`` for a plain request; ``prompts`` likewise.

    Raises: InvalidRequest.
    """
    copies = body.copies()
    if copies is None:
        copies = 1
    if copies < 1:
        raise InvalidRequest("n must be at least 1", param="n")
    if prompts is None and copies == 1:
        return None
    samples = (prompts or 1) * copies
    if samples > MAX_BATCH:
        raise too_many_samples()
    return samples


def too_many_samples() -> InvalidRequest:
    """Return what to say of a request of too many samples: prompts, times answers to each."""
    return InvalidRequest(f"a request of more than {MAX_BATCH} samples", param="n")


def client_rid(body: Body, batch: int | None) -> str | tuple[str, ...] | None:
    """Return the client's own id for engines: a list if it gives one for a batch, else the first of it.

    Raises: InvalidRequest if one is too long.
    """
    if isinstance(body, Responses):
        rids = [_text(body.request_id) or ""]
    else:
        rids = [_rid(raw) for raw in _one_or_several("rid", body.rid)]
    if any(len(rid) > MAX_ID_CHARS for rid in rids):
        raise InvalidRequest(f"rid has more than {MAX_ID_CHARS} characters", param="rid")
    if batch is not None and rids and is_array(body.rid):
        return tuple(rids)
    return rids[0] or None if rids else None


def _rid(raw: Raw) -> str:
    text = _text(raw)
    if text is None:
        raise InvalidRequest("rid must be text, or a list of texts", param="rid")
    return text


def _one_or_several(name: str, field: RawField) -> Sequence[Raw]:
    """Return the values of a field that may be a list: none where it is null or missing.

    Raises: InvalidRequest if there are more than samples may be.
    """
    raw = value(field)
    if raw is None:
        return ()
    if not is_array(raw):
        return (raw,)
    found = items(bytes(raw), MAX_BATCH)
    if found is None:
        raise InvalidRequest(f"{name} has more than {MAX_BATCH} items", param=name)
    return found


def _scalar(name: str, raw: Raw) -> Scalar:
    try:
        return msgspec.json.decode(raw, type=Scalar)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{name}: {error}", param=name) from error


def _text(field: RawField) -> str | None:
    """Return the string that stands in a field, if one does; engines judge what else they are given."""
    if isinstance(field, UnsetType):
        return None
    try:
        return msgspec.json.decode(field, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
