"""A snapshot: the load and readiness of the whole fleet at one moment, as frozen values.

Pages and metrics read it. Taking one changes nothing: a report that is too old by then is left out of it and stays in
the core until the core itself drops it.
"""

from collections.abc import Sequence

import msgspec

from pdrouter.core.fleet import Endpoint, Fleet
from pdrouter.core.load import EndpointLoad, LoadView, RankLoad


class Amount(msgspec.Struct, frozen=True):
    """A load; ``None`` where an engine doesn't say."""

    tokens: float | None
    requests: float | None


class RankSnapshot(msgspec.Struct, frozen=True):
    """A rank: what its engine reported, what the ledger holds, and what they say together.

    ``out`` says why it takes nothing though its endpoint may.
    """

    rank: int
    out: str | None
    reported: Amount | None
    report_age_s: float | None
    ledger: Amount
    effective: Amount


class EndpointSnapshot(msgspec.Struct, frozen=True):
    """An endpoint and its ranks; ``out`` says why it takes nothing, ``unassigned`` is the load of no known rank.

    ``known_tokens`` is the load of all of them, ``None`` where the engine doesn't report and nothing of ours is there.
    """

    endpoint: Endpoint
    is_ready: bool
    out: str | None
    unassigned: Amount
    ranks: Sequence[RankSnapshot]
    known_tokens: float | None


class Snapshot(msgspec.Struct, frozen=True):
    """The fleet at one moment, and how many decisions were live."""

    live_decisions: int
    endpoints: Sequence[EndpointSnapshot]


def take_snapshot(fleet: Fleet, load: LoadView, live_decisions: int, now_s: float) -> Snapshot:
    """Return the fleet as it is at ``now_s``; cost: a look at each rank."""
    endpoints = [_endpoint(fleet, load, one, now_s) for one in load.endpoints.values()]
    return Snapshot(live_decisions, tuple(endpoints))


def _endpoint(fleet: Fleet, view: LoadView, load: EndpointLoad, now_s: float) -> EndpointSnapshot:
    address, unassigned = load.endpoint.address, load.unassigned
    ranks = [_rank(fleet, view, rank, now_s) for rank in load.ranks]
    is_known = load.ledger_requests > 0 or all(rank.reported is not None for rank in ranks)
    tokens = unassigned.tokens + sum(rank.effective.tokens or 0.0 for rank in ranks)
    return EndpointSnapshot(
        endpoint=load.endpoint,
        is_ready=fleet.is_ready(address),
        out=fleet.why_out(address),
        unassigned=Amount(unassigned.tokens, unassigned.requests),
        ranks=tuple(ranks),
        known_tokens=tokens if is_known else None,
    )


def _rank(fleet: Fleet, view: LoadView, rank: RankLoad, now_s: float) -> RankSnapshot:
    report = rank.report if view.is_fresh(rank, now_s) else None
    ledger = Amount(rank.account.tokens, rank.account.requests)
    return RankSnapshot(
        rank=rank.key.rank,
        out=fleet.why_out(rank.key),
        reported=None if report is None else Amount(report.tokens, report.requests),
        report_age_s=None if report is None else rank.age_s(now_s),
        ledger=ledger,
        effective=ledger if report is None else Amount(rank.effective_tokens, rank.effective_requests),
    )
