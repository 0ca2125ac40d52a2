"""What the core is told of the world, in the past tense. ``Router.observe`` takes them in."""

from collections.abc import Sequence

import msgspec

from pdrouter.core.decision import Decision
from pdrouter.core.fleet import HEALTH, Endpoint
from pdrouter.core.load import RankReport


class EndpointJoined(msgspec.Struct, frozen=True):
    """An endpoint is known from now on; ``out`` says why it can't be used yet."""

    endpoint: Endpoint
    out: str | None = None


class EndpointDescribed(msgspec.Struct, frozen=True):
    """An endpoint told more of itself (ranks, model, version); its load stays."""

    endpoint: Endpoint


class ReadinessChanged(msgspec.Struct, frozen=True):
    """A source finds an endpoint ready (``None``) or takes it out, with the reason."""

    address: str
    out: str | None
    source: str = HEALTH


class EndpointRestarted(msgspec.Struct, frozen=True):
    """An endpoint has begun anew: its cache and its load are gone; what we have placed there stays until it ends."""

    address: str


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
    """The first token of an answer came, or its prefill leg has answered: the prompt is read."""

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


class PrefillUsageSeen(msgspec.Struct, frozen=True):
    """The engine that read a prompt has counted it, and how much of it was in its cache."""

    decision: Decision
    prompt_tokens: int
    cached_tokens: int


class Noted(msgspec.Struct, frozen=True):
    """Something that a request's story must tell."""

    decision: Decision
    text: str


FleetEvent = EndpointJoined | EndpointDescribed | ReadinessChanged | EndpointRestarted | EndpointLeft
"""What changes the fleet."""

Event = (
    FleetEvent | LoadReported | LoadMissing | FirstTokenSeen | TokensGenerated | UsageSeen | PrefillUsageSeen | Noted
)
