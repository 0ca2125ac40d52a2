"""The ledger: load that we hold on each rank, by reservation.

A reservation is held per leg and settled exactly once (I2); a rank's load is the sum of its live reservations (I1).
The numbers per rank live in ``Account``, apart from the reservations, and remember their recent past, so that a
load report can be compared with what the engine can have counted when it was taken (``load.py``).
"""

from collections import deque
from enum import StrEnum
from typing import NamedTuple

from pdrouter.errors import InvariantViolation

UNASSIGNED = -1
"""The rank of work whose rank is left to the engine."""


class RankKey(NamedTuple):
    """One data-parallel worker of an endpoint; ``rank`` is local to it, or ``UNASSIGNED``."""

    endpoint: str
    rank: int


class LegKind(StrEnum):
    """What a leg does on its rank: read the prompt, write the answer, or both."""

    PREFILL = "prefill"
    DECODE = "decode"
    REGULAR = "regular"


class Reservation:
    """Load held by one leg.

    ``tokens`` is the load that policies weigh: uncached prompt tokens for a prefill leg, prompt and generated tokens
    otherwise. ``held_tokens`` is what the engine's own count will show for it: cached tokens too.
    ``visible_tokens`` is the part of ``tokens`` that the newest report can have counted. ``prefill_s`` is how long its
    prompt is expected to take, until it is read; ``was_alone`` says that it found its rank empty.
    """

    __slots__ = (
        "account",
        "held_tokens",
        "is_live",
        "kind",
        "prefill_s",
        "reserved_at_s",
        "tokens",
        "visible_in",
        "visible_tokens",
        "was_alone",
    )

    def __init__(self, account: "Account", kind: LegKind, tokens: int, held_tokens: int, reserved_at_s: float) -> None:
        self.account = account
        self.kind = kind
        self.tokens = tokens
        self.held_tokens = held_tokens
        self.reserved_at_s = reserved_at_s
        self.is_live = True
        self.visible_in = 0
        self.visible_tokens = 0
        self.prefill_s = 0.0
        self.was_alone = False


class Account:
    """The numbers of one rank: sums over its live reservations, and how they came about lately.

    The past is a list of changes, each at the moment from which a report can show it: ``visible_delay_s`` after the
    reservation. It reaches back ``history_s`` and is bounded by ``history_events`` (I9); older changes are folded, and
    reports from before the folded moment can't be used any more. ``answered_at_s`` is when it was last seen to do its
    work.
    """

    __slots__ = (
        "_folded_held",
        "_folded_requests",
        "_history",
        "_history_events",
        "_history_s",
        "_live",
        "_visible_delay_s",
        "answered_at_s",
        "folded_until_s",
        "held_tokens",
        "history_overflows",
        "key",
        "report_serial",
        "requests",
        "tokens",
        "visible_requests",
        "visible_tokens",
    )

    def __init__(self, key: RankKey, *, visible_delay_s: float, history_s: float, history_events: int) -> None:
        self.key = key
        self.tokens = 0
        self.held_tokens = 0
        self.requests = 0
        self.visible_tokens = 0
        self.visible_requests = 0
        self.report_serial = 0
        self.history_overflows = 0
        self.answered_at_s = float("-inf")
        self.folded_until_s = float("-inf")
        self._visible_delay_s = visible_delay_s
        self._history_s = history_s
        self._history_events = history_events
        self._history: deque[tuple[float, Reservation | None, int, int]] = deque()
        self._folded_held = 0
        self._folded_requests = 0
        self._live: dict[Reservation, None] = {}

    @property
    def live(self) -> int:
        """How many reservations live."""
        return len(self._live)

    def reserve(self, kind: LegKind, tokens: int, held_tokens: int, now_s: float) -> Reservation:
        """Hold load for one leg from now on."""
        leg = Reservation(self, kind, tokens, held_tokens, now_s)
        self._live[leg] = None
        self.tokens += tokens
        self.held_tokens += held_tokens
        self.requests += 1
        self._remember(now_s + self._visible_delay_s, None, held_tokens, 1)
        return leg

    def grow(self, leg: Reservation, tokens: int, now_s: float) -> None:
        """Add generated tokens to a live leg; nothing once it is settled."""
        if not leg.is_live or tokens <= 0:
            return
        leg.tokens += tokens
        leg.held_tokens += tokens
        self.tokens += tokens
        self.held_tokens += tokens
        self._remember(max(now_s, leg.reserved_at_s + self._visible_delay_s), leg, tokens, 0)

    def settle(self, leg: Reservation, now_s: float) -> bool:
        """End a leg and return its load; ``False`` if that was done before (I2)."""
        if not leg.is_live:
            return False
        leg.is_live = False
        del self._live[leg]
        self.tokens -= leg.tokens
        self.held_tokens -= leg.held_tokens
        self.requests -= 1
        if leg.visible_in and leg.visible_in == self.report_serial:
            self.visible_tokens -= leg.visible_tokens
            self.visible_requests -= 1
        self._remember(max(now_s, leg.reserved_at_s + self._visible_delay_s), None, -leg.held_tokens, -1)
        return True

    def visible_at(self, t_s: float) -> tuple[int, int]:
        """Return what a report taken at ``t_s`` can have counted of ours: (held tokens, requests)."""
        held, requests = self._folded_held, self._folded_requests
        for at_s, _, held_change, requests_change in self._history:
            if at_s <= t_s:
                held += held_change
                requests += requests_change
        return held, requests

    def mark_visible(self, t_s: float) -> None:
        """Remember what of the live legs a report taken at ``t_s`` can have counted, and forget what came before it."""
        self.report_serial += 1
        self.visible_tokens = 0
        self.visible_requests = 0
        for leg in self._live:
            if leg.reserved_at_s + self._visible_delay_s > t_s:
                continue
            leg.visible_in = self.report_serial
            leg.visible_tokens = leg.tokens
            self.visible_tokens += leg.tokens
            self.visible_requests += 1
        for at_s, grown, held_change, _ in self._history:
            if grown is not None and at_s > t_s and grown.visible_in == self.report_serial:
                grown.visible_tokens -= held_change
                self.visible_tokens -= held_change
        self.forget(t_s)

    def forget(self, until_s: float) -> None:
        """Fold the changes before ``until_s``; a later report must be younger."""
        history, held, requests = self._history, 0, 0
        while history and history[0][0] <= until_s:
            _, _, held_change, requests_change = history.popleft()
            held += held_change
            requests += requests_change
        self._folded_held += held
        self._folded_requests += requests
        self.folded_until_s = max(self.folded_until_s, until_s)

    def validate(self) -> None:
        """Check I1 against the live reservations.

        Raises: InvariantViolation when the sums differ from them or anything is negative.
        """
        tokens = sum(leg.tokens for leg in self._live)
        held = sum(leg.held_tokens for leg in self._live)
        if (tokens, held, len(self._live)) != (self.tokens, self.held_tokens, self.requests):  # I1
            raise InvariantViolation(f"ledger of {self.key}: {self.tokens} tokens held, {tokens} reserved")
        if min(self.tokens, self.held_tokens, self.visible_tokens, self.visible_requests) < 0:
            raise InvariantViolation(f"ledger of {self.key} is negative")
        visible = [leg.visible_tokens for leg in self._live if leg.visible_in and leg.visible_in == self.report_serial]
        if (sum(visible), len(visible)) != (self.visible_tokens, self.visible_requests):  # I11
            raise InvariantViolation(f"ledger of {self.key}: a report can have seen {sum(visible)} tokens of it")
        if self.visible_at(float("inf")) != (held, self.requests):
            raise InvariantViolation(f"history of {self.key} doesn't add up to its load")

    def _remember(self, at_s: float, grown: Reservation | None, held_change: int, requests_change: int) -> None:
        history = self._history
        history.append((at_s, grown, held_change, requests_change))
        if history[0][0] < at_s - self._history_s:
            self._fold_older(at_s - self._history_s)
        if len(history) > self._history_events:  # I9
            self.history_overflows += 1
            self.folded_until_s = max(self.folded_until_s, history[0][0])
            self._fold()

    def _fold_older(self, than_s: float) -> None:
        while self._history[0][0] < than_s:
            self._fold()

    def _fold(self) -> None:
        _, _, held_change, requests_change = self._history.popleft()
        self._folded_held += held_change
        self._folded_requests += requests_change
