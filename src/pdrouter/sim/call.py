"""A request as any emulated engine understands it: which endpoint, which prompts, where they run, what the answer is.

Kinds of engines read it from bytes (``emulator_api.py`` for SGLang); the emulator makes tickets of it.
"""

from enum import StrEnum, auto

import msgspec

from pdrouter.sim.job import Role
from pdrouter.sim.text import Prompt


class Api(StrEnum):
    """Which endpoint was called."""

    GENERATE = auto()
    CHAT = auto()
    COMPLETION = auto()
    RESPONSES = auto()
    MESSAGES = auto()


class Handoff(msgspec.Struct, frozen=True):
    """What a prompt's request says of its other leg; each handshake has its own."""


class RoomHandoff(Handoff, frozen=True):
    """SGLang: where the legs meet. ``prefill_rank``: what ``disagg_prefill_dp_rank`` says, None if it isn't said."""

    room: int
    address: tuple[str, int]
    prefill_rank: int | None


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt of a request, checked. ``rank``: of this engine, from 0; None: the engine chooses.

    ``role``: what the engine does for it; None: the engine's own role. ``stops_early``: the answer ends by itself.
    ``echo``: the prompt's text, where the answer is to begin with it.
    """

    rid: str
    prompt: Prompt
    choice: int
    output_tokens: int
    stops_early: bool
    rank: int | None
    role: Role | None = None
    handoff: Handoff | None = None
    echo: str = ""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A whole request, checked. ``id`` of the answer; None: that of its first prompt.

    ``logprob_start``: first token of the prompt whose logprobs are told; completions tell the prompt's where they
    ``echo_logprobs``, and ``top_logprobs`` alternatives of each token. ``hangs``: it is never answered.
    """

    api: Api
    parts: list[Part]
    is_batch: bool
    is_stream: bool
    include_usage: bool
    has_logprobs: bool
    model: str
    id: str | None = None
    logprob_start: int = 0
    echo_logprobs: bool = False
    top_logprobs: int = 0
    hangs: bool = False
