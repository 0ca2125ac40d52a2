"""The order of those that wait: priority, fair share, least work, age."""

from collections import Counter

import pytest

from pdrouter.core import line as line_module
from pdrouter.core.line import Line, Waiting

from .waiting import waiting


def make_line(aging_rate: float = 0.1) -> Line[str]:
    """Return an empty line."""
    return Line(aging_rate, Counter())


def drain(line: Line[str]) -> list[str]:
    """Take all out, in order."""
    return [line.take().waiting.request for _ in range(len(line))]


def lined_up(*ones: Waiting[str], aging_rate: float = 0.1) -> list[str]:
    """Return in which order requests go that came one second after another."""
    line = make_line(aging_rate)
    for now_s, one in enumerate(ones):
        line.join(one, float(now_s))
    return drain(line)


def test_least_work_first() -> None:
    """A short request overtakes long ones that came before."""
    assert lined_up(waiting("long", 9.0), waiting("middle", 5.0), waiting("short", 1.0)) == ["short", "middle", "long"]


def test_equal_ones_in_the_order_of_their_coming() -> None:
    """The first come goes first."""
    assert lined_up(waiting("a"), waiting("b"), waiting("c"), aging_rate=0.0) == ["a", "b", "c"]


def test_waiting_makes_up_for_work() -> None:
    """At 0.1, what came 30 s ago with 3 s more work goes before what comes now."""
    line = make_line(0.1)
    line.join(waiting("old", 4.0), 0.0)
    line.join(waiting("soon", 1.0), 29.9)
    line.join(waiting("late", 1.0), 30.1)
    assert drain(line) == ["soon", "old", "late"]


def test_nothing_starves() -> None:
    """Under a stream of short requests that never ends, a long one goes once its wait outweighs its work."""
    line = make_line(0.1)
    line.join(waiting("long", 5.0), 0.0)
    for second in range(1, 100):
        line.join(waiting("short", 0.5), float(second))
        if line.take().waiting.request == "long":
            assert 45 <= second <= 46
            return
    pytest.fail("it never went")


def test_priority_before_all_else() -> None:
    """However long others have waited, however little they ask for."""
    ones = [waiting("low", 0.1, priority=-1), waiting("usual", 0.1), waiting("urgent", 99.0, priority=7)]
    assert lined_up(*ones) == ["urgent", "usual", "low"]


def test_tenants_share_by_work() -> None:
    """A tenant with many requests gets no more of the time than one with few long ones."""
    line = make_line()
    for number in range(40):
        line.join(waiting(f"many {number}", 1.0, tenant="many"), 0.0)
    for number in range(10):
        line.join(waiting(f"few {number}", 4.0, tenant="few"), 0.0)
    given: Counter[str] = Counter()
    for _ in range(25):
        one = line.take().waiting
        given[str(one.tenant)] += int(one.work_s)
        assert abs(given["many"] - given["few"]) <= 4
    assert given["many"] + given["few"] >= 40


def test_tenants_share_by_weight() -> None:
    """Three times the weight, three times the work."""
    line = make_line()
    for number in range(100):
        line.join(waiting(f"a{number}", tenant="a", weight=3.0), 0.0)
        line.join(waiting(f"b{number}", tenant="b", weight=1.0), 0.0)
    first = Counter(line.take().waiting.tenant for _ in range(80))
    assert first == {"a": 60, "b": 20}


def test_a_tenant_that_comes_late_has_no_debt_and_no_credit() -> None:
    """It shares from its coming on; it isn't given what it didn't ask for before."""
    line = make_line()
    for number in range(50):
        line.join(waiting(f"a{number}", tenant="a"), 0.0)
    for _ in range(20):
        line.take()
    for number in range(50):
        line.join(waiting(f"b{number}", tenant="b"), 1.0)
    first = Counter(line.take().waiting.tenant for _ in range(20))
    assert first == {"a": 10, "b": 10}


def test_a_share_is_remembered_while_a_tenant_rests() -> None:
    """Sending one request at a time doesn't win a tenant more than its share."""
    line = make_line()
    for number in range(20):
        line.join(waiting(f"a{number}", tenant="a"), 0.0)
    line.join(waiting("b", tenant="b"), 0.0)
    given: Counter[object] = Counter()
    for _ in range(12):
        tenant = line.take().waiting.tenant
        given[tenant] += 1
        if tenant == "b":
            line.join(waiting("b", tenant="b"), 0.0)
    assert given == {"a": 6, "b": 6}


@pytest.mark.invariant("I9")
def test_resting_tenants_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of too many that rest the one that has rested longest is forgotten, and counted."""
    monkeypatch.setattr(line_module, "_MAX_RESTING", 2)
    counts: Counter[str] = Counter()
    line: Line[str] = Line(0.1, counts)
    for tenant in "abcde":
        line.join(waiting(tenant, tenant=tenant), 0.0)
    for _ in range(4):
        line.take()
    assert counts["forgotten_shares"] == 2


def test_one_that_leaves_is_passed_over() -> None:
    """It leaves once, and neither its tenant nor its priority stays behind."""
    line = make_line()
    urgent = line.join(waiting("urgent", priority=9, tenant="x"), 0.0)
    line.join(waiting("usual"), 0.0)
    assert line.highest == 9
    assert line.leave(urgent)
    assert not line.leave(urgent)
    assert (len(line), line.highest) == (1, 0)
    assert drain(line) == ["usual"]
