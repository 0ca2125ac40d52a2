"""What ``Router.decide`` answers: a Decision that explains itself, or a Rejection."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from pdrouter.core.fleet import Endpoint
from pdrouter.core.ledger import LegKind, RankKey, Reservation
from pdrouter.core.lifecycle import State
from pdrouter.core.request import RequestFacts
from pdrouter.errors import RouterError

MAX_SHOWN = 32
"""Candidates that an explanation names (I9)."""


class Named(Protocol):
    """Whatever can be told apart in an explanation."""

    @property
    def key(self) -> object:
        """Its identity."""
        ...


class Why(msgspec.Struct, frozen=True, eq=False):
    """Why one endpoint or rank was chosen: the policy, the rule that fired, and what was seen.

    ``candidates`` and ``values`` go together, the lower value wins, in the policy's own unit. ``is_notable`` marks an
    imbalance or a fallback: what an operator wants to hear of.
    """

    policy: str
    rule: str
    candidates: Sequence[Named] = ()
    values: Sequence[float] = ()
    is_notable: bool = False

    def sentence(self) -> str:
        """Return the reason in words, with the first candidates as they were seen."""
        shown = zip(self.candidates[:MAX_SHOWN], self.values, strict=False)
        seen = ", ".join(f"{_name(candidate.key)}={value:g}" for candidate, value in shown)
        more = f", {len(self.values) - MAX_SHOWN} more" if len(self.values) > MAX_SHOWN else ""
        return f"{self.policy}: {self.rule}" + (f" ({seen}{more})" if seen else "")


def _name(key: object) -> str:
    return f"rank {key.rank}" if isinstance(key, RankKey) else str(key)


class Placement(msgspec.Struct, frozen=True, eq=False):
    """Where one leg runs. ``rank`` is ``None`` where the engine chooses it."""

    endpoint: Endpoint
    kind: LegKind
    rank: int | None
    reservation: Reservation
    endpoint_why: Why
    rank_why: Why
    report_age_s: float | None

    @property
    def label(self) -> str:
        """``host:port rank N``, for people; never a key."""
        return f"{self.endpoint.address} rank {'engine' if self.rank is None else self.rank}"


class Decision:
    """One request's placement. ``prefill`` is ``None`` where one endpoint does both.

    ``number`` is ours and unique; the client's id is a label in ``facts``.
    """

    __slots__ = ("decided_at_s", "decode", "facts", "number", "prefill", "prefix_tokens", "state")

    def __init__(
        self,
        *,
        number: int,
        facts: RequestFacts,
        prefill: Placement | None,
        decode: Placement,
        prefix_tokens: int,
        decided_at_s: float,
    ) -> None:
        self.number = number
        self.facts = facts
        self.prefill = prefill
        self.decode = decode
        self.prefix_tokens = prefix_tokens
        self.decided_at_s = decided_at_s
        self.state = State.PREFILLING

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The legs in the order in which the request passes them."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)

    def story(self) -> str:
        """Return the decision in a sentence for each leg."""
        legs = [
            f"{p.kind} on {p.label} [{p.endpoint_why.sentence()}; {p.rank_why.sentence()};"
            f" {'no report' if p.report_age_s is None else f'report {p.report_age_s:.1f} s old'}]"
            for p in self.placements
        ]
        return f"request {self.facts.request_id} ({self.facts.prompt_tokens} tokens): " + ", ".join(legs)


class Rejection(msgspec.Struct, frozen=True):
    """Why a request can't be placed."""

    error: RouterError
