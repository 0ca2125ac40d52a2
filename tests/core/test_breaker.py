"""The breakers: when they open, what they let through, when they close."""

import msgspec
import pytest

from pdrouter.core.breaker import TRANSITIONS, Attempt, BreakerOptions, Breakers, Phase, Readiness
from pdrouter.errors import InvariantViolation

OPTIONS = BreakerOptions(failure_threshold=3, success_threshold=2, open_s=60.0, window_s=120.0, is_disabled=False)
REFUSED = "connection refused"


def watched(options: BreakerOptions = OPTIONS) -> Breakers[str]:
    """Return breakers that watch one endpoint."""
    breakers: Breakers[str] = Breakers(options)
    breakers.add("e")
    return breakers


def place(breakers: Breakers[str]) -> Attempt[str]:
    """Place a request while the breaker is closed."""
    attempt, change = breakers.placed("e")
    assert change is None
    return attempt


def fail(breakers: Breakers[str], now_s: float) -> Readiness[str] | None:
    """Let a request fail."""
    return breakers.failed(place(breakers), REFUSED, now_s)


def opened(options: BreakerOptions = OPTIONS) -> Breakers[str]:
    """Return breakers of which one opened at 2."""
    breakers = watched(options)
    for now_s in (0.0, 1.0):
        assert fail(breakers, now_s) is None
    assert fail(breakers, 2.0) == Readiness("e", "breaker open (3 failures in a row: connection refused)")
    return breakers


def half_open() -> Breakers[str]:
    """Return breakers of which one became half-open at 62."""
    breakers = opened()
    assert breakers.due(62.0) == [Readiness("e", None)]
    return breakers


def probe(breakers: Breakers[str]) -> Attempt[str]:
    """Place the one request that a half-open breaker lets through."""
    attempt, change = breakers.placed("e")
    assert attempt.is_probe
    assert change is not None
    assert change.out is not None
    assert change.out.startswith("breaker half-open (probe under way")
    return attempt


def test_failures_in_a_row_open() -> None:
    """And the reason says how many, of what, and when the next try is."""
    breakers = opened()
    assert breakers.phase("e") is Phase.OPEN
    assert breakers.why_out("e", 12.0) == "breaker open (3 failures in a row: connection refused), next try in 50 s"


def test_a_success_breaks_the_row() -> None:
    """Two failures, an answer and two more leave it closed."""
    breakers = watched()
    for now_s in (0.0, 1.0):
        fail(breakers, now_s)
    assert breakers.succeeded(place(breakers)) is None
    for now_s in (2.0, 3.0):
        assert fail(breakers, now_s) is None
    assert breakers.phase("e") is Phase.CLOSED


def test_a_row_must_fit_in_the_window() -> None:
    """Failures spread over more than the window don't open, three within it do."""
    breakers = watched()
    assert [fail(breakers, now_s) for now_s in (0.0, 100.0, 121.0)] == [None, None, None]
    assert fail(breakers, 219.0) is not None


def test_what_isnt_the_engines_fault_doesnt_count() -> None:
    """Neither as a failure nor as a success."""
    breakers = watched()
    for now_s in (0.0, 1.0):
        fail(breakers, now_s)
    for _ in range(10):
        assert breakers.abandoned(place(breakers)) is None
    assert breakers.phase("e") is Phase.CLOSED
    assert fail(breakers, 2.0) is not None


def test_time_alone_makes_it_half_open() -> None:
    """At the moment that was named, not before; then it takes one request."""
    breakers = opened()
    assert breakers.wake_at_s() == 62.0
    assert breakers.due(61.9) == []
    assert breakers.due(62.0) == [Readiness("e", None)]
    assert breakers.phase("e") is Phase.HALF_OPEN
    assert breakers.wake_at_s() == float("inf")
    assert breakers.why_out("e", 62.0) is None


def test_one_probe_at_a_time() -> None:
    """While it is under way the endpoint takes nothing; whoever goes there all the same is no probe."""
    breakers = half_open()
    first = probe(breakers)
    other, change = breakers.placed("e")
    assert (other.is_probe, change) == (False, None)
    assert breakers.succeeded(other) is None
    assert breakers.failed(other, REFUSED, 63.0) is None
    assert breakers.phase("e") is Phase.HALF_OPEN
    assert breakers.succeeded(first) == Readiness("e", None)
    assert breakers.why_out("e", 63.0) is None


def test_successes_close() -> None:
    """As many as it takes, one after the other."""
    breakers = half_open()
    assert breakers.succeeded(probe(breakers)) == Readiness("e", None)
    assert breakers.phase("e") is Phase.HALF_OPEN
    assert breakers.succeeded(probe(breakers)) == Readiness("e", None)
    assert breakers.phase("e") is Phase.CLOSED
    assert dict(breakers.counts) == {"opened": 1, "half_opened": 1, "probes": 2, "closed": 1}


def test_a_probe_that_fails_opens_again() -> None:
    """At once, for as long as before, and what had succeeded counts no more."""
    breakers = half_open()
    breakers.succeeded(probe(breakers))
    change = breakers.failed(probe(breakers), "answered 500", 70.0)
    assert change == Readiness("e", "breaker open (a probe failed: answered 500)")
    assert breakers.due(129.9) == []
    breakers.due(130.0)
    breakers.succeeded(probe(breakers))
    assert breakers.phase("e") is Phase.HALF_OPEN


def test_a_probe_that_tells_nothing_makes_way() -> None:
    """The client of a probe leaves: the next request is the probe."""
    breakers = half_open()
    assert breakers.abandoned(probe(breakers)) == Readiness("e", None)
    assert breakers.succeeded(probe(breakers)) == Readiness("e", None)


def test_a_probes_outcome_counts_once() -> None:
    """Told at its first byte, a long answer's end tells nothing new."""
    breakers = half_open()
    first = probe(breakers)
    breakers.succeeded(first)
    assert breakers.succeeded(first) is None
    assert breakers.failed(first, REFUSED, 64.0) is None
    assert breakers.abandoned(first) is None
    assert breakers.phase("e") is Phase.HALF_OPEN


def test_what_was_sent_before_tells_nothing_of_now() -> None:
    """Answers and failures of requests that were under way when it opened change nothing later."""
    breakers = watched()
    before = [place(breakers) for _ in range(6)]
    for attempt in before[:3]:
        breakers.failed(attempt, REFUSED, 0.0)
    assert breakers.phase("e") is Phase.OPEN
    assert breakers.failed(before[3], REFUSED, 1.0) is None
    breakers.due(60.0)
    assert breakers.succeeded(before[4]) is None
    assert breakers.failed(before[5], REFUSED, 61.0) is None
    assert breakers.phase("e") is Phase.HALF_OPEN


def test_off_by_a_setting() -> None:
    """Then nothing opens."""
    breakers = watched(msgspec.structs.replace(OPTIONS, is_disabled=True))
    assert [fail(breakers, float(n)) for n in range(20)] == [None] * 20


def test_unknown_and_gone() -> None:
    """What isn't watched is let through; one that comes back is new, whatever is still told of before."""
    breakers = opened()
    late = place(watched())
    breakers.remove("e")
    assert breakers.due(1000.0) == []
    attempt = place(breakers)
    assert breakers.failed(attempt, REFUSED, 0.0) is None
    assert (breakers.phase("e"), breakers.why_out("e", 0.0)) == (Phase.CLOSED, None)
    breakers.remove("e")
    breakers.add("e")
    breakers.add("e")
    for _ in range(5):
        assert breakers.failed(late, REFUSED, 0.0) is None
        assert breakers.failed(attempt, REFUSED, 0.0) is None
    assert breakers.phase("e") is Phase.CLOSED


def test_the_soonest_is_due_first() -> None:
    """Each at its own moment."""
    breakers: Breakers[str] = Breakers(msgspec.structs.replace(OPTIONS, failure_threshold=1))
    for key, now_s in (("a", 5.0), ("b", 1.0), ("c", 3.0)):
        breakers.add(key)
        breakers.failed(breakers.placed(key)[0], REFUSED, now_s)
    assert breakers.wake_at_s() == 61.0
    assert [change.key for change in breakers.due(64.0)] == ["b", "c"]
    assert breakers.wake_at_s() == 65.0


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("target", Phase)
def test_only_these_ways(phase: Phase, target: Phase) -> None:
    """The table says which phase may follow which; any other is a fault of ours."""
    breakers = {Phase.CLOSED: watched, Phase.OPEN: opened, Phase.HALF_OPEN: half_open}[phase]()
    breaker = breakers._breakers["e"]
    if target in TRANSITIONS[phase]:
        breaker.enter(target, 99)
        assert breakers.phase("e") is target
    else:
        with pytest.raises(InvariantViolation):
            breaker.enter(target, 99)
