"""The ledger: sums of live reservations, settled once, and their recent past."""

import math

import pytest

from pdrouter.core.ledger import LegKind, Reservation
from pdrouter.errors import InvariantViolation

from .builders import make_account


@pytest.mark.invariant("I1")
def test_an_account_is_the_sum_of_its_live_reservations() -> None:
    """Tokens, held tokens and requests are the sums over the legs that live, and zero when none do."""
    account = make_account()
    short = account.reserve(LegKind.PREFILL, 100, 300, 1.0)
    long = account.reserve(LegKind.DECODE, 500, 500, 2.0)
    account.grow(long, 7, 3.0)
    assert (account.tokens, account.held_tokens, account.requests, account.live) == (607, 807, 2, 2)
    account.settle(short, 4.0)
    assert (account.tokens, account.held_tokens, account.requests, account.live) == (507, 507, 1, 1)
    account.settle(long, 5.0)
    assert (account.tokens, account.held_tokens, account.requests, account.live) == (0, 0, 0, 0)
    account.validate()


@pytest.mark.invariant("I2")
def test_a_leg_is_settled_once() -> None:
    """The second settlement changes nothing and says so; so does growth after the first."""
    account = make_account()
    leg = account.reserve(LegKind.DECODE, 10, 10, 1.0)
    other = account.reserve(LegKind.DECODE, 5, 5, 1.0)
    assert account.settle(leg, 2.0) is True
    assert account.settle(leg, 3.0) is False
    account.grow(leg, 50, 4.0)
    assert (account.tokens, account.requests) == (5, 1)
    account.settle(other, 5.0)
    account.validate()


@pytest.mark.parametrize("tokens", [0, -3])
def test_growth_is_never_negative(tokens: int) -> None:
    """A leg doesn't shrink."""
    account = make_account()
    account.grow(account.reserve(LegKind.DECODE, 10, 10, 1.0), tokens, 2.0)
    assert account.tokens == 10


@pytest.mark.parametrize(
    ("t_s", "seen"),
    [(0.9, (0, 0)), (1.0, (10, 1)), (2.5, (30, 2)), (3.0, (34, 2)), (4.0, (20, 1)), (math.inf, (20, 1))],
)
def test_the_past_tells_what_a_report_could_count(t_s: float, seen: tuple[int, int]) -> None:
    """``visible_at`` is the sum of the legs as they were at that moment."""
    account = make_account()
    leg = account.reserve(LegKind.DECODE, 10, 10, 1.0)
    account.reserve(LegKind.DECODE, 20, 20, 2.0)
    account.grow(leg, 4, 3.0)
    account.settle(leg, 4.0)
    assert account.visible_at(t_s) == seen


@pytest.mark.parametrize(
    ("t_s", "seen"),
    [(1.4, (0, 0)), (1.5, (14, 1)), (1.9, (14, 1)), (2.0, (0, 0))],
)
def test_a_leg_can_be_seen_only_after_the_visible_delay(t_s: float, seen: tuple[int, int]) -> None:
    """Nothing of a leg shows earlier, not even its growth; its end shows at once."""
    account = make_account(visible_delay_s=0.5)
    leg = account.reserve(LegKind.DECODE, 10, 10, 1.0)
    account.grow(leg, 4, 1.2)
    account.settle(leg, 2.0)
    assert account.visible_at(t_s) == seen


def test_a_leg_that_ended_within_the_visible_delay_never_shows() -> None:
    """It cancels out at the moment when it would have been seen."""
    account = make_account(visible_delay_s=0.5)
    account.settle(account.reserve(LegKind.DECODE, 10, 10, 1.0), 1.1)
    assert [account.visible_at(t_s) for t_s in (1.1, 1.5, 9.0)] == [(0, 0)] * 3
    account.validate()


def test_marking_counts_visible_legs_until_they_end() -> None:
    """What a report can have counted fades as those legs are settled, and only as they are."""
    account = make_account()
    seen = account.reserve(LegKind.PREFILL, 10, 40, 1.0)
    late = account.reserve(LegKind.PREFILL, 20, 20, 2.0)
    account.mark_visible(1.5)
    assert (account.visible_tokens, account.visible_requests) == (10, 1)
    account.settle(late, 3.0)
    assert (account.visible_tokens, account.visible_requests) == (10, 1)
    account.settle(seen, 3.0)
    assert (account.visible_tokens, account.visible_requests) == (0, 0)


def test_growth_after_a_report_is_not_visible_in_it() -> None:
    """A late report is compared with a leg as it was when the report was taken."""
    account = make_account()
    leg = account.reserve(LegKind.DECODE, 100, 100, 0.0)
    account.grow(leg, 5, 1.0)
    account.grow(leg, 50, 2.0)
    account.mark_visible(1.5)
    assert account.visible_tokens == 105
    account.settle(leg, 3.0)
    assert account.visible_tokens == 0


@pytest.mark.invariant("I9")
def test_history_is_bounded_and_counts_overflow() -> None:
    """The past has a limit; what is folded can't be asked for any more, and the sums stay right."""
    account = make_account(history_events=3)
    legs = [account.reserve(LegKind.DECODE, 10, 10, float(i)) for i in range(5)]
    assert account.history_overflows == 2
    assert account.folded_until_s == 1.0
    assert account.visible_at(1.0) == (20, 2)
    assert account.visible_at(2.5) == (30, 3)
    for leg in legs:
        account.settle(leg, 9.0)
    account.validate()


def test_history_reaches_back_as_far_as_a_report_may_be_old() -> None:
    """Older changes are folded without being an overflow."""
    account = make_account(history_s=10.0)
    leg = account.reserve(LegKind.DECODE, 10, 10, 0.0)
    account.grow(leg, 1, 5.0)
    account.grow(leg, 1, 12.0)
    assert (account.visible_at(2.0), account.visible_at(5.0), account.visible_at(12.0)) == ((10, 1), (11, 1), (12, 1))
    assert account.history_overflows == 0


def _wrong_sum(leg: Reservation) -> None:
    leg.account.tokens += 1


def _wrong_history(leg: Reservation) -> None:
    leg.account.forget(100.0)
    leg.account.grow(leg, 5, 200.0)
    leg.account.tokens -= 5
    leg.account.held_tokens -= 5
    leg.tokens -= 5
    leg.held_tokens -= 5


def _wrong_visible(leg: Reservation) -> None:
    leg.account.mark_visible(100.0)
    leg.account.visible_tokens += 1


def _negative(leg: Reservation) -> None:
    leg.account.visible_tokens = -1


@pytest.mark.invariant("I1")
@pytest.mark.parametrize(
    ("spoil", "words"),
    [(_wrong_sum, "reserved"), (_wrong_history, "history"), (_negative, "negative"), (_wrong_visible, "a report can")],
)
def test_wrong_books_are_found(spoil: object, words: str) -> None:
    """``validate`` names what doesn't add up."""
    leg = make_account().reserve(LegKind.DECODE, 10, 10, 0.0)
    assert callable(spoil)
    spoil(leg)
    with pytest.raises(InvariantViolation, match=words):
        leg.account.validate()
