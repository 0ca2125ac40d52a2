"""[6] Learns from an answer's bytes as they pass: first token, tokens generated, usage.

It changes nothing, and keeps a copy of the answer's end for the usage in it. It never writes: that is ``answer.py``'s.
"""

from collections.abc import Callable

from pdrouter.core.decision import Decision
from pdrouter.core.events import FirstTokenSeen, Noted, PrefillUsageSeen, TokensGenerated, UsageSeen
from pdrouter.core.lifecycle import State
from pdrouter.core.router import Router
from pdrouter.engines.usage import COMPLETION_TOKENS, PROMPT_TOKENS, PromptCount, Tail, last_number
from pdrouter.telemetry.journal_file import Answered
from pdrouter.telemetry.metrics import Metrics

_PREFILLING = State.PREFILLING

_GROWTH_EVENTS = 16
"""Stream events after which the ledger is told of growth; chosen to keep the cost per event small."""


_EVENT = b"data:"
_INSIDE = frozenset(_EVENT[:-1])
"""What a piece ends with that was cut inside an event's first word, though seldom."""


class Observer:
    """Tells the router what one request's bytes show; ``is_stream``: they come as events, token by token."""

    __slots__ = (
        "_clock",
        "_decision",
        "_edge",
        "_events",
        "_first_at_s",
        "_metrics",
        "_router",
        "_seen",
        "_seen_at_s",
        "_tail",
        "_told",
        "is_stream",
    )

    def __init__(
        self, router: Router, metrics: Metrics, decision: Decision, clock: Callable[[], float], *, is_stream: bool
    ) -> None:
        self._router = router
        self._clock = clock
        self._metrics = metrics
        self._decision = decision
        self.is_stream = is_stream
        self._tail = Tail()
        self._edge = b""
        self._events = 0
        self._told = 0
        self._first_at_s = 0.0
        self._seen = -1
        self._seen_at_s = 0.0

    def prefill_done(self, count: PromptCount | None) -> None:
        """The prefill leg has answered, and perhaps told how much of the prompt it had."""
        if count is not None and count.is_possible:
            self._router.observe(PrefillUsageSeen(self._decision, *count), self._clock())
        if self._decision.state is _PREFILLING:
            self._router.observe(FirstTokenSeen(self._decision), self._clock())

    def tail(self) -> bytes:
        """Return the end of the answer so far."""
        return self._tail.text()

    def note(self, text: str) -> None:
        """Let the request's story tell something."""
        self._router.observe(Noted(self._decision, text), self._clock())

    def first_piece(self) -> None:
        """The answer has begun."""
        now_s = self._clock()
        if self._decision.state is _PREFILLING:
            self._router.observe(FirstTokenSeen(self._decision), now_s)
        self._first_at_s = now_s
        self._metrics.first_token(now_s - self._decision.decided_at_s)

    def piece(self, piece: bytes) -> None:
        """Take note of a piece of the answer."""
        self._tail.add(piece)
        if self.is_stream:
            if self._edge:
                piece = self._edge + piece
            self._edge = piece[1 - len(_EVENT) :] if piece and piece[-1] in _INSIDE else b""
            self._events += piece.count(_EVENT)
            if self._events - self._told >= _GROWTH_EVENTS:
                self._tell_growth(self._clock())

    def quiet_since_s(self, now_s: float, *, is_excused: bool) -> float:
        """Return when the stream was last seen to have grown, or not to be at fault.

        Each call is a look, so that it costs nothing in between.
        """
        if is_excused or self._events != self._seen:
            self._seen, self._seen_at_s = self._events, now_s
        return self._seen_at_s

    def event_end(self) -> bytes:
        """Return what ends an event that was cut off in the middle."""
        return b"" if self._tail.text().endswith(b"\n\n") else b"\n\n"

    def finished(self) -> None:
        """The answer is whole: read the engine's own count."""
        now_s = self._clock()
        self._metrics.decoded(now_s - self._first_at_s)
        if self._events > self._told:
            self._tell_growth(now_s)
        if self._decision.facts.prompts != 1 or not self._router.wants_usage(self._decision):
            return
        tail = self.tail()
        prompt_tokens = last_number(PROMPT_TOKENS, tail)
        if prompt_tokens is not None:
            completion_tokens = last_number(COMPLETION_TOKENS, tail) or 0
            self._router.observe(UsageSeen(self._decision, prompt_tokens, completion_tokens, self._events), now_s)

    def answered(self) -> Answered:
        """Return what was seen of the answer: the engine's own count, or else what the ledger was told."""
        tail, decision = self.tail(), self._decision
        prompt_tokens, output_tokens = (last_number(name, tail) for name in (PROMPT_TOKENS, COMPLETION_TOKENS))
        if output_tokens is None and self.is_stream:
            output_tokens = decision.decode.reservation.held_tokens - decision.facts.prompt_tokens
        return Answered(self._first_at_s or None, prompt_tokens, output_tokens)

    def _tell_growth(self, now_s: float) -> None:
        rate = self._router.tokens_per_event(self._decision)
        self._router.observe(TokensGenerated(self._decision, round((self._events - self._told) * rate)), now_s)
        self._told = self._events
