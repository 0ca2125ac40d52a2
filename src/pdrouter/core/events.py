"""What the core is told of the world, in the past tense. ``Router.observe`` takes them in."""

from collections.abc import Sequence

import msgspec

from pdrouter.core.decision import Decision
from pdrouter.core.fleet import Endpoint
from pdrouter.core.load import RankReport


class EndpointJoined(msgspec.Struct, frozen=True):
    """An endpoint is known from now on; ``out`` says why it can't be used yet."""

    endpoint: Endpoint
    out: str | None = None


class EndpointDescribed(msgspec.Struct, frozen=True):
    """An endpoint told more of itself (ranks, model, version); its load stays."""

    endpoint: Endpoint


class ReadinessChanged(msgspec.Struct, frozen=True):
    """An endpoint is ready (``None``) or out, with the reason."""

    address: str
    out: str | None


class EndpointLeft(msgspec.Struct, frozen=True):
    """An endpoint is gone, with its load and its prefixes."""

    address: str


class LoadReported(msgspec.Struct, frozen=True):
    """An engine told the load of its ranks as it was at ``t_report_s``."""

    address: str
    ranks: Sequence[RankReport]
    t_report_s: float


class LoadMissing(msgspec.Struct, frozen=True):
    """A load check brought nothing usable."""

    address: str
    reason: str


class FirstTokenSeen(msgspec.Struct, frozen=True):
    """The first byte of an answer came: its prefill is done."""

    decision: Decision


class TokensGenerated(msgspec.Struct, frozen=True):
    """``tokens`` more were generated for a decision."""

    decision: Decision
    tokens: int


class UsageSeen(msgspec.Struct, frozen=True):
    """The engine's own count for a finished request; ``events`` is how many stream events carried its answer."""

    decision: Decision
    prompt_tokens: int
    completion_tokens: int = 0
    events: int = 0


Event = (
    EndpointJoined
    | EndpointDescribed
    | ReadinessChanged
    | EndpointLeft
    | LoadReported
    | LoadMissing
    | FirstTokenSeen
    | TokensGenerated
    | UsageSeen
)
