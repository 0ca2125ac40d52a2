"""Who goes on at once, who waits, and who is turned away."""

import pytest

from pdrouter.core.admission import Queued
from pdrouter.errors import QueueFull, WaitedTooLong

from .waiting import INFINITY, is_admitted, made, queued, rejected, released, waiting


def test_through_an_open_gate_at_once() -> None:
    """While some rank is below its watermark nobody waits."""
    admission, gate = made()
    gate.opens_s = 0.0
    assert is_admitted(admission, waiting())
    assert admission.admit("m", 0.0)
    assert (len(admission), dict(admission.counts)) == (0, {"admitted": 2})
    assert admission.wake_at_s(0.0) == INFINITY


def test_before_a_shut_one_they_wait() -> None:
    """Until it opens; then they go in order, each only as long as it stays open."""
    admission, gate = made()
    queued(admission, waiting("long", 5.0))
    queued(admission, waiting("short", 1.0))
    assert released(admission) == []
    gate.opens_s = 3.0
    assert admission.wake_at_s(0.0) == 3.0
    assert admission.release(2.9) is None
    first = admission.release(3.0)
    assert first is not None
    assert first.request == "short"
    gate.opens_s = INFINITY
    assert released(admission, 3.0) == []
    assert admission.waiting == {None: 1}


def test_nobody_overtakes_by_coming_when_it_opens() -> None:
    """Who arrives while others wait takes a turn like them."""
    admission, gate = made()
    queued(admission, waiting("first", 5.0))
    gate.opens_s = 0.0
    assert not admission.admit(None, 1.0)
    queued(admission, waiting("second", 9.0), 1.0)
    assert released(admission, 1.0) == ["first", "second"]


@pytest.mark.invariant("I9")
def test_full_in_number() -> None:
    """The next is turned away with 429 and told when to come again."""
    admission, _ = made(max_waiting=2)
    for _ in range(2):
        queued(admission, waiting())
    error = rejected(admission, waiting())
    assert (error.status, error.code, error.retry_after_s) == (429, "queue_full", 60)
    assert "2 wait" in error.message
    assert (len(admission), admission.counts["rejected"]) == (2, 1)


@pytest.mark.invariant("I9")
def test_full_in_bytes() -> None:
    """However few they are; what has gone makes room."""
    admission, _ = made(max_waiting_bytes=1000)
    place = queued(admission, waiting(size_bytes=600))
    rejected(admission, waiting(size_bytes=401))
    queued(admission, waiting(size_bytes=400))
    assert admission.waiting_bytes == 1000
    assert admission.cancel(place)
    queued(admission, waiting(size_bytes=600))
    rejected(admission, waiting(size_bytes=1, tenant="t"))


def test_without_a_queue_there_is_no_waiting() -> None:
    """A size of 0 turns away whoever can't go on at once."""
    admission, gate = made(max_waiting=0)
    rejected(admission, waiting(priority=9))
    gate.opens_s = 0.0
    assert is_admitted(admission, waiting())


def test_an_urgent_one_takes_the_place_of_another() -> None:
    """The youngest of the lowest priority is turned away for it, with 429."""
    admission, gate = made(max_waiting=2)
    queued(admission, waiting("old"))
    queued(admission, waiting("young"))
    answer = admission.offer(waiting("urgent", 9.0, priority=1), 1.0)
    assert isinstance(answer, Queued)
    assert answer.shed is not None
    assert answer.shed.waiting.request == "young"
    assert isinstance(answer.shed.error, QueueFull)
    gate.opens_s = 0.0
    assert released(admission, 1.0) == ["urgent", "old"]
    assert admission.counts["displaced"] == 1


def test_nobody_is_turned_away_for_nothing() -> None:
    """Where one's going isn't enough for the bytes of an urgent arrival, the arrival goes."""
    admission, _ = made(max_waiting_bytes=10)
    for _ in range(2):
        queued(admission, waiting(size_bytes=5))
    rejected(admission, waiting(size_bytes=6, priority=9))
    assert len(admission) == 2


def test_a_crowd_of_one_tenant_leaves_room_for_others() -> None:
    """Whoever fills the queue makes way for a tenant that has fewer there, of whatever model."""
    admission, gate = made(max_waiting=4)
    for number in range(4):
        queued(admission, waiting(f"crowd {number}", tenant="crowd"))
    for number in range(2):
        answer = admission.offer(waiting(f"other {number}", tenant="other", model="m"), 0.0)
        assert isinstance(answer, Queued)
        assert answer.shed is not None
        assert answer.shed.waiting.request == f"crowd {3 - number}"
    rejected(admission, waiting(tenant="other", model="m"))
    rejected(admission, waiting(tenant="crowd"))
    gate.opens_s = 0.0
    assert sorted(released(admission)) == ["crowd 0", "crowd 1", "other 0", "other 1"]


def test_waiting_ends() -> None:
    """After the longest wait, or at the request's own deadline, with 408."""
    admission, _ = made(max_wait_s=60.0)
    queued(admission, waiting("patient"), 0.0)
    queued(admission, waiting("hurried", deadline_s=15.0), 10.0)
    assert admission.wake_at_s(10.0) == 15.0
    assert admission.expire(14.9) == []
    (shed,) = admission.expire(15.0)
    assert shed.waiting.request == "hurried"
    assert isinstance(shed.error, WaitedTooLong)
    assert shed.error.status == 408
    assert "waited 5.0 s" in shed.error.message
    assert [shed.waiting.request for shed in admission.expire(60.0)] == ["patient"]
    assert (len(admission), admission.waiting_bytes, admission.counts["expired"]) == (0, 0, 2)


def test_a_client_that_leaves_is_gone() -> None:
    """Once, and not after its turn."""
    admission, gate = made()
    first, second = queued(admission, waiting("a")), queued(admission, waiting("b"))
    assert admission.cancel(first)
    assert not admission.cancel(first)
    gate.opens_s = 0.0
    assert released(admission) == ["b"]
    assert not admission.cancel(second)
    assert admission.expire(1000.0) == []
    assert admission.counts["cancelled"] == 1


def test_models_dont_wait_for_each_other() -> None:
    """A model whose ranks are busy holds up no other, and open ones take turns."""
    admission, gate = made()
    for number in range(2):
        for model in ("busy", "a", "b"):
            queued(admission, waiting(f"{model} {number}", model=model))
    gate.of.update(a=0.0, b=0.0)
    assert released(admission) == ["a 0", "b 0", "a 1", "b 1"]
    gate.of = {}
    queued(admission, waiting("late", model="late", priority=1))
    gate.opens_s = 0.0
    assert released(admission) == ["late", "busy 0", "busy 1"]


def test_so_many_a_second() -> None:
    """A rate is one: so many at once, then one for each share of a second, and the rest waits for it."""
    admission, gate = made(rate_per_s=2.0, rate_burst=2.0)
    gate.opens_s = 0.0
    assert [is_admitted(admission, waiting(str(number))) for number in range(5)] == [True, True, False, False, False]
    assert admission.wake_at_s(0.0) == 0.5
    assert released(admission, 0.4) == []
    assert released(admission, 0.5) == ["2"]
    assert released(admission, 5.0) == ["3", "4"]


def test_when_to_come_again() -> None:
    """All that waits, by the pace of the last releases; longer while nothing moves; at most the longest wait."""
    admission, gate = made(max_waiting=30)
    for number in range(30):
        queued(admission, waiting(str(number)), 0.0)
    assert admission.retry_after_s(0.0) == 60
    gate.opens_s = 0.0
    for tenth in range(1, 11):
        admission.release(tenth / 10)
    gate.opens_s = INFINITY
    for number in range(10):
        queued(admission, waiting(str(number)), 1.0)
    assert admission.retry_after_s(1.0) == 4  # 31 of 0.1 s each
    assert rejected(admission, waiting(), 1.0).retry_after_s == 4
    assert admission.retry_after_s(2.0) == 31
    assert admission.retry_after_s(9.0) == 60


def test_idle_time_is_no_pace() -> None:
    """Only time in which somebody waited tells how fast they go."""
    admission, gate = made()
    for start_s in (0.0, 1000.0):
        gate.opens_s = INFINITY
        queued(admission, waiting(), start_s)
        gate.opens_s = 0.0
        assert released(admission, start_s + 0.5) == ["r"]
    assert admission.retry_after_s(1000.5) == 1
