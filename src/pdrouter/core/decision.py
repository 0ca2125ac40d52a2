"""What ``Router.decide`` answers: a Decision that explains itself, or a Rejection."""

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from pdrouter.core.fleet import Endpoint
from pdrouter.core.ledger import LegKind, RankKey, Reservation
from pdrouter.core.lifecycle import State
from pdrouter.core.request import RequestFacts
from pdrouter.errors import RouterError

if TYPE_CHECKING:
    from pdrouter.core.shadow import Shadowed

MAX_SHOWN = 32
"""Candidates that an explanation names (I9)."""


_KEY = attrgetter("key")


class Named(Protocol):
    """Whatever can be told apart in an explanation."""

    @property
    def key(self) -> object:
        """Its identity."""
        ...


class Why(msgspec.Struct, frozen=True, eq=False):
    """Why one endpoint or rank was chosen: the policy, the rule that fired, and what was seen.

    ``candidates`` and ``values`` go together, the lower value wins, in the policy's own unit. ``is_notable`` marks an
    imbalance or a fallback: what an operator wants to hear of. ``more`` candidates were there, but aren't named.
    Candidates live on and change; ``keys`` are names alone, in the place of candidates.
    """

    policy: str
    rule: str
    candidates: Sequence[Named] = ()
    values: Sequence[float] = ()
    is_notable: bool = False
    more: int = 0
    keys: Sequence[object] = ()

    def detached(self) -> "Why":
        """Return it with names in the place of candidates, so that it keeps none of them alive."""
        candidates, values = self.candidates, self.values
        if not candidates:
            return self
        more = self.more
        if len(values) > MAX_SHOWN:
            candidates, values, more = candidates[:MAX_SHOWN], values[:MAX_SHOWN], more + len(values) - MAX_SHOWN
        return Why(self.policy, self.rule, (), values, self.is_notable, more, list(map(_KEY, candidates)))

    def with_chosen(self, index: int) -> "Why":
        """Return what can be shown of a choice among many: the first candidates, and the chosen one."""
        candidates, values = self.candidates, self.values
        count = len(values)
        if count <= MAX_SHOWN or len(candidates) != count:
            return self
        shown = [*range(MAX_SHOWN - 1), max(index, MAX_SHOWN - 1)]
        seen = [values[i] for i in shown]
        return Why(self.policy, self.rule, [candidates[i] for i in shown], seen, self.is_notable, count - MAX_SHOWN)

    def seen(self) -> list[tuple[str, float]]:
        """Return the names of the first candidates, each with its value."""
        plain = self.detached()
        return [(_name(key), value) for key, value in zip(plain.keys, plain.values, strict=False)]

    def sentence(self) -> str:
        """Return the reason in words, with the first candidates as they were seen."""
        seen = ", ".join(f"{name}={value:g}" for name, value in self.seen())
        unnamed = self.detached().more
        more = f", {unnamed} more" if unnamed else ""
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


class Usage(NamedTuple):
    """The engine's own count of a request's tokens, and when it was read."""

    at_s: float
    prompt_tokens: int
    completion_tokens: int


class PrefillUsage(NamedTuple):
    """The count of the engine that read the prompt, and when it was read; ``cached_tokens`` needn't be computed."""

    at_s: float
    prompt_tokens: int
    cached_tokens: int


class Note(NamedTuple):
    """What else is worth telling of a request, and when it was seen."""

    at_s: float
    text: str


class Decision:
    """One request's placement. ``prefill`` is ``None`` where one endpoint does both.

    ``number`` is ours and unique; the client's id is a label in ``facts``. ``grown_at_s`` is when its answer was last
    seen to grow, ``shadowed`` what a policy that looks on would have chosen. ``insert`` is the number of its prompt in
    the prefix index, ``prefix_is_read`` says that what the index predicted had been read by then. ``prefill_took_s`` is
    how long its prompt took, while that is worth learning from. ``epoch`` is that of the breakers when it was placed.
    """

    __slots__ = (
        "decided_at_s",
        "decode",
        "epoch",
        "facts",
        "first_token_at_s",
        "grown_at_s",
        "insert",
        "notes",
        "number",
        "prefill",
        "prefill_took_s",
        "prefill_usage",
        "prefix_is_read",
        "prefix_tokens",
        "shadowed",
        "state",
        "usage",
    )
    epoch: int  # set when it is placed

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
        self.first_token_at_s: float | None = None
        self.grown_at_s: float | None = None
        self.usage: Usage | None = None
        self.prefill_usage: PrefillUsage | None = None
        self.notes: tuple[Note, ...] = ()
        self.prefill_took_s: float | None = None
        self.insert = 0
        self.prefix_is_read = False
        self.shadowed: Shadowed | None = None
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
