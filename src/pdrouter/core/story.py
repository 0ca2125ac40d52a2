"""One request's life: as it is kept (``Life``), and as it is told (``Story``).

A ``Life`` holds plain values and nothing that changes or keeps anything else alive. A ``Story`` is made of it when
somebody asks; its times are seconds after the decision.
"""

from math import isfinite

import msgspec

from pdrouter.core.chooser import Spot
from pdrouter.core.decision import Decision, Note, Placement, PrefillUsage, Usage, Why
from pdrouter.core.fleet import Endpoint
from pdrouter.core.ledger import LegKind
from pdrouter.core.request import RequestFacts
from pdrouter.core.shadow import Shadowed
from pdrouter.errors import RouterError

KeptLeg = tuple[LegKind, Endpoint, int | None, float | None, Why, Why]
"""Where a leg ran: its kind, endpoint, rank, the age of its rank's report, why that endpoint and why that rank."""

KeptShadow = tuple[str, str, str | None, tuple[KeptLeg, ...]]
"""What a policy that looked on would have chosen: its name, how that compares, why it chose nothing, the legs."""


class Life(msgspec.Struct, frozen=True, gc=False):
    """A request's life in plain values.

    ``number`` is 0 and there are no legs where it wasn't placed. ``settled_at_s`` is ``None`` while it lives; ``code``
    and ``message`` are those of its failure. ``generated_tokens`` is what the ledger was told of.
    """

    number: int
    request_id: str
    model: str | None
    prompt_tokens: int
    prefix_tokens: int
    prefill: KeptLeg | None
    decode: KeptLeg | None
    decided_at_s: float
    first_token_at_s: float | None
    grown_at_s: float | None
    generated_tokens: int
    prefill_usage: PrefillUsage | None
    usage: Usage | None
    notes: tuple[Note, ...]
    shadow: KeptShadow | None
    settled_at_s: float | None
    code: str | None
    message: str | None


class Seen(msgspec.Struct, frozen=True):
    """A candidate and its value at the moment of the choice, ``None`` where that is infinite; the lowest wins."""

    name: str
    value: float | None


class Explanation(msgspec.Struct, frozen=True):
    """How an endpoint or a rank was chosen; ``more`` candidates aren't named."""

    policy: str
    rule: str
    candidates: list[Seen]
    more: int
    is_notable: bool
    sentence: str


class LegStory(msgspec.Struct, frozen=True):
    """Where a leg ran; ``rank`` is ``None`` where the engine chose it. ``report_age_s``: of the rank's load report."""

    kind: str
    endpoint: str
    rank: int | None
    report_age_s: float | None
    endpoint_why: Explanation
    rank_why: Explanation


class Moment(msgspec.Struct, frozen=True):
    """What happened, and how long after the decision."""

    after_s: float
    what: str


class ShadowStory(msgspec.Struct, frozen=True):
    """What a policy that looked on would have chosen.

    ``result`` is ``same``, ``other_endpoint``, ``other_rank`` or ``none``; then ``failure`` says why.
    """

    policy: str
    result: str
    failure: str | None
    legs: list[LegStory]


class Story(msgspec.Struct, frozen=True):
    """A request's whole life. ``outcome`` is ``live``, ``answered``, or the code of its failure."""

    request_id: str
    number: int
    outcome: str
    message: str | None
    decided_ago_s: float
    model: str | None
    prompt_tokens: int
    prefix_tokens: int
    legs: list[LegStory]
    moments: list[Moment]
    shadow: ShadowStory | None


class Stories(msgspec.Struct, frozen=True):
    """All lives of one request id, oldest first."""

    request_id: str
    lives: list[Story]


def life_of(decision: Decision, error: RouterError | None, settled_at_s: float | None) -> Life:
    """Return what is kept of a decision; ``settled_at_s`` is ``None`` while it lives."""
    facts, prefill, decode = decision.facts, decision.prefill, decision.decode
    return Life(
        decision.number,
        facts.request_id,
        facts.model,
        facts.prompt_tokens,
        decision.prefix_tokens,
        None if prefill is None else _leg(prefill),
        _leg(decode),
        decision.decided_at_s,
        decision.first_token_at_s,
        decision.grown_at_s,
        decode.reservation.held_tokens - facts.prompt_tokens,
        decision.prefill_usage,
        decision.usage,
        decision.notes,
        None if decision.shadowed is None else _shadow(decision.shadowed),
        settled_at_s,
        None if error is None else error.code,
        None if error is None else error.message,
    )


def turned_away(facts: RequestFacts, error: RouterError, now_s: float) -> Life:
    """Return what is kept of a request that couldn't be placed."""
    return Life(
        number=0,
        request_id=facts.request_id,
        model=facts.model,
        prompt_tokens=facts.prompt_tokens,
        prefix_tokens=0,
        prefill=None,
        decode=None,
        decided_at_s=now_s,
        first_token_at_s=None,
        grown_at_s=None,
        generated_tokens=0,
        prefill_usage=None,
        usage=None,
        notes=(),
        shadow=None,
        settled_at_s=now_s,
        code=error.code,
        message=error.message,
    )


def _leg(place: Placement) -> KeptLeg:
    endpoint_why, rank_why = place.endpoint_why, place.rank_why
    if endpoint_why.candidates:
        endpoint_why = endpoint_why.detached()
    if rank_why.candidates:
        rank_why = rank_why.detached()
    return (place.kind, place.endpoint, place.rank, place.report_age_s, endpoint_why, rank_why)


def _shadow(shadowed: Shadowed) -> KeptShadow:
    choice = shadowed.choice
    legs = () if choice is None else tuple([_spot(spot) for spot in choice.spots])
    return (shadowed.policy, shadowed.result.value, shadowed.failure, legs)


def _spot(spot: Spot) -> KeptLeg:
    kind = LegKind(spot.load.endpoint.role.value)
    return (kind, spot.load.endpoint, spot.rank, None, spot.endpoint_why.detached(), spot.rank_why.detached())


def story_of(life: Life, now_s: float) -> Story:
    """Put a life into words, as it is known at ``now_s``."""
    return Story(
        request_id=life.request_id,
        number=life.number,
        outcome="live" if life.settled_at_s is None else life.code or "answered",
        message=life.message,
        decided_ago_s=now_s - life.decided_at_s,
        model=life.model,
        prompt_tokens=life.prompt_tokens,
        prefix_tokens=life.prefix_tokens,
        legs=[_leg_story(leg) for leg in (life.prefill, life.decode) if leg is not None],
        moments=_moments(life),
        shadow=None if life.shadow is None else _shadow_story(life.shadow),
    )


def _shadow_story(kept: KeptShadow) -> ShadowStory:
    policy, result, failure, legs = kept
    return ShadowStory(policy, result, failure, [_leg_story(leg) for leg in legs])


def _leg_story(leg: KeptLeg) -> LegStory:
    kind, endpoint, rank, report_age_s, endpoint_why, rank_why = leg
    return LegStory(
        kind.value, endpoint.address, rank, report_age_s, _explanation(endpoint_why), _explanation(rank_why)
    )


def _explanation(why: Why) -> Explanation:
    return Explanation(
        policy=why.policy,
        rule=why.rule,
        candidates=[Seen(name, value if isfinite(value) else None) for name, value in why.seen()],
        more=why.more,
        is_notable=why.is_notable,
        sentence=why.sentence(),
    )


def _moments(life: Life) -> list[Moment]:
    """Return what happened, in order; a moment that wasn't seen is left out."""
    usage, prefill_usage = life.usage, life.prefill_usage
    told: list[tuple[float | None, str]] = [
        (life.decided_at_s, "decided" if life.decode else "turned away"),
        (life.first_token_at_s, "first token"),
        (life.grown_at_s, f"answer grown to {life.generated_tokens} tokens"),
    ]
    if prefill_usage is not None:
        counted = f"cached: predicted {life.prefix_tokens}, engine counted {prefill_usage.cached_tokens}"
        told.append((prefill_usage.at_s, f"prefill usage: {prefill_usage.prompt_tokens} prompt tokens; {counted}"))
    if usage is not None:
        told.append((usage.at_s, f"usage: {usage.prompt_tokens} prompt, {usage.completion_tokens} completion tokens"))
    told += life.notes
    if life.decode:
        told.append((life.settled_at_s, f"settled: {life.code or 'answered'}"))
    moments = [Moment(at_s - life.decided_at_s, what) for at_s, what in told if at_s is not None]
    return sorted(moments, key=lambda moment: moment.after_s)
