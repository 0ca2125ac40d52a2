"""Breakers under any course of placements and outcomes, judged by a fleet that only knows what it was told."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule, run_state_machine_as_test

from pdrouter.core.breaker import Attempt, BreakerOptions, Breakers, Phase, Readiness

KEYS = ("a", "b")
FAILURES, SUCCESSES, OPEN_S, WINDOW_S = 3, 2, 10.0, 20.0


class Courses(RuleBasedStateMachine):
    """Requests go where the fleet is ready, and sometimes where it isn't, as a client asked for that rank."""

    attempts = Bundle("attempts")

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.breakers: Breakers[str] = Breakers(
            BreakerOptions(
                failure_threshold=FAILURES,
                success_threshold=SUCCESSES,
                open_s=OPEN_S,
                window_s=WINDOW_S,
                is_disabled=False,
            )
        )
        self.out: dict[str, str | None] = dict.fromkeys(KEYS)
        self.probes: dict[str, Attempt[str] | None] = dict.fromkeys(KEYS)
        self.row: dict[str, int] = dict.fromkeys(KEYS, 0)  # failures or, half-open, successes, in a row
        for key in KEYS:
            self.breakers.add(key)

    def told(self, change: Readiness[str] | None) -> None:
        """The fleet believes what it is told."""
        if change is not None:
            self.out[change.key] = change.out

    @rule(seconds=st.sampled_from([0.0, 1.0, 5.0, 11.0, 30.0]))
    def pass_time(self, seconds: float) -> None:
        """Time goes on; what is due is asked for."""
        self.now_s += seconds
        for change in self.breakers.due(self.now_s):
            assert self.out[change.key] is not None
            self.row[change.key] = 0
            self.told(change)

    @rule(target=attempts, key=st.sampled_from(KEYS), is_forced=st.sampled_from([False, False, True]))
    def place(self, key: str, is_forced: bool) -> object:
        """A request goes to an endpoint that is ready, or to the one that its client named."""
        if self.out[key] is not None and not is_forced:
            return multiple()
        attempt, change = self.breakers.placed(key)
        if attempt.is_probe:
            assert self.breakers.phase(key) is Phase.HALF_OPEN
            assert self.probes[key] is None, "two probes at once"
            assert change is not None
            self.probes[key] = attempt
        self.told(change)
        return attempt

    @rule(attempt=attempts, outcome=st.sampled_from(["succeeded", "failed", "abandoned"]))
    def end(self, attempt: Attempt[str], outcome: str) -> None:
        """An attempt's outcome is told, perhaps again, perhaps late."""
        key, before = attempt.key, self.breakers.phase(attempt.key)
        counts = attempt.is_probe and self.probes[key] is attempt
        if outcome == "succeeded":
            change = self.breakers.succeeded(attempt)
        elif outcome == "failed":
            change = self.breakers.failed(attempt, "why", self.now_s)
        else:
            change = self.breakers.abandoned(attempt)
        self.told(change)
        after = self.breakers.phase(key)
        if before is Phase.HALF_OPEN:
            assert counts == (change is not None)
            self.probe_ended(key, outcome, after, counts=counts)
        elif before is Phase.OPEN:
            assert after is Phase.OPEN
        if counts:
            self.probes[key] = None

    def probe_ended(self, key: str, outcome: str, after: Phase, *, counts: bool) -> None:
        """A probe closes after enough successes and opens by one failure; nothing else changes the phase."""
        if not counts or outcome == "abandoned":
            assert after is Phase.HALF_OPEN
        elif outcome == "failed":
            assert after is Phase.OPEN
        else:
            self.row[key] += 1
            assert (after is Phase.CLOSED) == (self.row[key] == SUCCESSES)

    @invariant()
    def fleet_and_breakers_agree(self) -> None:
        """What the fleet was told is what holds, and no count leaves its bounds."""
        for key in KEYS:
            phase = self.breakers.phase(key)
            assert (self.out[key] is None) == (self.breakers.why_out(key, self.now_s) is None)
            is_shut = phase is Phase.OPEN or (phase is Phase.HALF_OPEN and self.probes[key] is not None)
            assert (self.out[key] is not None) == is_shut
            breaker = self.breakers._breakers[key]
            assert 0 <= breaker.successes < SUCCESSES
            assert 0 <= len(breaker.failed_at_s) <= FAILURES
            assert (breaker.due is not None) == (phase is Phase.OPEN)


def test_breakers_are_right_after_every_step() -> None:
    """Whatever is placed, told and forgotten to be told, in whatever order."""
    run_state_machine_as_test(Courses, settings=settings(stateful_step_count=50))
