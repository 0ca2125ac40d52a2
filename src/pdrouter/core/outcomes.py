"""Tells each endpoint's and each rank's breaker how its legs ended, and the router whom to take out or let in.

A leg counts for its endpoint and for its rank: a rank that fails alone opens alone, as its neighbours' answers break
the endpoint's row. Ranks have breakers where there are several, and requests run on the one that they name.
While no breaker has seen a failure lately nothing is kept of a request: that it succeeded changes nothing.
"""

from collections.abc import Callable, Sequence

from pdrouter.core.breaker import Attempt, Breakers, Readiness
from pdrouter.core.decision import Decision, Placement
from pdrouter.core.ejections import Name
from pdrouter.core.fleet import Endpoint
from pdrouter.core.ledger import RankKey
from pdrouter.errors import ConnectFailed, RouterError

_MAX_CAUSE_CHARS = 200


class Outcomes:
    """``change`` is called with whatever the fleet must know at once; ``names_ranks``: requests name their ranks."""

    def __init__(
        self, breakers: Breakers[Name], change: Callable[[Readiness[Name], float], None], *, names_ranks: bool
    ) -> None:
        self.breakers = breakers
        self._change = change
        self._names_ranks = names_ranks
        self._ranks: dict[str, int] = {}  # that have a breaker
        self._attempts: dict[int, dict[Placement, list[Attempt[Name]]]] = {}  # of live decisions

    def watch(self, endpoint: Endpoint, now_s: float) -> None:
        """Have a breaker for an endpoint and for each of its ranks, as it describes itself now."""
        address = endpoint.address
        has_ranks = self._names_ranks and endpoint.takes_ranks and endpoint.dp_size > 1
        before, ranks = self._ranks.get(address, 0), endpoint.dp_size if has_ranks else 0
        self._ranks[address] = ranks
        self.breakers.add(address)
        for rank in range(ranks):
            self.breakers.add(RankKey(address, rank))
        for rank in range(ranks, before):
            self.breakers.remove(RankKey(address, rank))
            self._change(Readiness(RankKey(address, rank), None), now_s)

    def forget(self, address: str) -> None:
        """An endpoint is gone."""
        self.breakers.remove(address)
        for rank in range(self._ranks.pop(address, 0)):
            self.breakers.remove(RankKey(address, rank))

    def tick(self, now_s: float) -> None:
        """Let those in that have been out for long enough."""
        if self.breakers.wake_at_s() <= now_s:
            for readiness in self.breakers.due(now_s):
                self._change(readiness, now_s)

    def placed(self, decision: Decision, now_s: float) -> None:
        """A request was placed; where a breaker is half-open it is the probe."""
        breakers = self.breakers
        decision.epoch = breakers.epoch
        if not breakers.disturbed:  # is_calm, without a call
            return
        attempts = self._attempts[decision.number] = {}
        for placement in decision.placements:
            tried = attempts[placement] = []
            for name in _names(placement):
                attempt, readiness = breakers.placed(name)
                tried.append(attempt)
                self._tell(readiness, now_s)

    def went_well(self, decision: Decision, placement: Placement, now_s: float) -> None:
        """A prefill leg has done its work, or another has begun to.

        A beginning counts for a probe, which needn't wait for the end of a long answer, and for nobody else: streams
        that always break are failures in a row.
        """
        if not self._attempts or (attempts := self._attempts.get(decision.number)) is None:
            return
        tried = attempts.get(placement, [])
        is_done = placement is decision.prefill
        attempts[placement] = [] if is_done else [attempt for attempt in tried if not attempt.is_probe]
        for attempt in tried:
            if is_done or attempt.is_probe:
                self._tell(self.breakers.succeeded(attempt), now_s)

    def settled(
        self, decision: Decision, error: RouterError | None, at_fault: Sequence[Placement], now_s: float
    ) -> None:
        """It has ended; ``at_fault`` are the legs whose engines are to blame."""
        attempts = self._attempts.pop(decision.number, {})
        if not at_fault and not attempts and (error is not None or not self.breakers.disturbed):
            return
        for placement in decision.placements:
            tried = attempts.get(placement)
            if tried is None:
                tried = [self.breakers.attempt(name, decision.epoch) for name in _names(placement)]
            for attempt in tried:
                self._ended(attempt, error, now_s, is_at_fault=placement in at_fault)

    def _ended(self, attempt: Attempt[Name], error: RouterError | None, now_s: float, *, is_at_fault: bool) -> None:
        if error is None:
            readiness = self.breakers.succeeded(attempt)
        elif is_at_fault and _tells_of(attempt.key, error):
            readiness = self.breakers.failed(attempt, error.message[:_MAX_CAUSE_CHARS], now_s)
        else:
            readiness = self.breakers.abandoned(attempt)
        self._tell(readiness, now_s)

    def _tell(self, readiness: Readiness[Name] | None, now_s: float) -> None:
        if readiness is not None:
            self._change(readiness, now_s)


def suspects(decision: Decision) -> Sequence[Placement]:
    """Return which legs may be to blame where both wait for each other and neither has answered.

    A rank that has answered others since isn't, unless both have.
    """
    silent = [p for p in decision.placements if p.reservation.account.answered_at_s < decision.decided_at_s]
    return silent or decision.placements


def _names(placement: Placement) -> tuple[str, RankKey]:
    """Return whose breakers a leg concerns; a rank that has none is let through."""
    return placement.endpoint.address, placement.reservation.account.key


def _tells_of(name: Name, error: RouterError) -> bool:
    """Whether a failure tells of an endpoint or rank: one that couldn't be reached was asked for no rank."""
    return isinstance(name, str) or not isinstance(error, ConnectFailed)
