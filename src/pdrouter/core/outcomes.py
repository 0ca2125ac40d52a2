"""Tells each endpoint's breaker how the legs that it was given ended, and the router whom to take out or let in.

While no breaker has seen a failure lately nothing is kept of a request: that it succeeded changes nothing.
"""

from collections.abc import Callable

from pdrouter.core.breaker import Attempt, Breakers, Readiness
from pdrouter.core.decision import Decision, Placement
from pdrouter.errors import RouterError

_MAX_CAUSE_CHARS = 200


class Outcomes:
    """``change`` is called with whatever the fleet must know at once."""

    def __init__(self, breakers: Breakers[str], change: Callable[[Readiness[str], float], None]) -> None:
        self.breakers = breakers
        self._change = change
        self._attempts: dict[int, dict[Placement, Attempt[str]]] = {}  # of live decisions

    def tick(self, now_s: float) -> None:
        """Let those in that have been out for long enough."""
        if self.breakers.wake_at_s() <= now_s:
            for readiness in self.breakers.due(now_s):
                self._change(readiness, now_s)

    def placed(self, decision: Decision, now_s: float) -> None:
        """A request was placed; where a breaker is half-open it is the probe."""
        decision.epoch = self.breakers.epoch
        if self.breakers.is_calm:
            return
        attempts = self._attempts[decision.number] = {}
        for placement in decision.placements:
            attempts[placement], readiness = self.breakers.placed(placement.endpoint.address)
            self._tell(readiness, now_s)

    def went_well(self, decision: Decision, placement: Placement, now_s: float) -> None:
        """A leg has brought what it is for, or begun to: no probe waits for the end of a long answer."""
        if self._attempts and (attempts := self._attempts.get(decision.number)) is not None:
            tried = attempts.pop(placement, None)
            if tried is not None:
                self._tell(self.breakers.succeeded(tried), now_s)

    def settled(self, decision: Decision, error: RouterError | None, at_fault: Placement | None, now_s: float) -> None:
        """It has ended; ``at_fault`` is the leg whose engine is to blame, if any."""
        attempts = self._attempts.pop(decision.number, {})
        if at_fault is None and not attempts and (error is not None or self.breakers.is_calm):
            return
        for placement in decision.placements:
            tried = attempts.get(placement) or self.breakers.attempt(placement.endpoint.address, decision.epoch)
            if error is None:
                self._tell(self.breakers.succeeded(tried), now_s)
            elif placement is at_fault:
                self._tell(self.breakers.failed(tried, error.message[:_MAX_CAUSE_CHARS], now_s), now_s)
            else:
                self._tell(self.breakers.abandoned(tried), now_s)

    def _tell(self, readiness: Readiness[str] | None, now_s: float) -> None:
        if readiness is not None:
            self._change(readiness, now_s)
