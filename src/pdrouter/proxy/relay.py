"""[6] Learns from an answer's bytes as they pass: first token, tokens generated, usage, the end, a failure.

It changes nothing, and keeps a copy of the answer's end for the usage in it. It never writes: that is ``answer.py``'s.
"""

import math
from collections.abc import Callable

from pdrouter.core.decision import Decision
from pdrouter.core.events import FirstTokenSeen, Noted, PrefillUsageSeen, TokensGenerated, UsageSeen
from pdrouter.core.lifecycle import State
from pdrouter.core.router import Router
from pdrouter.engines.failures import dialect
from pdrouter.engines.streams import StreamReader, trailing_events
from pdrouter.engines.usage import PromptCount, Tail, answer_count
from pdrouter.telemetry.journal_file import Answered
from pdrouter.telemetry.metrics import Metrics

_PREFILLING = State.PREFILLING

_GROWTH_EVENTS = 16
"""Stream events after which the ledger is told of growth; chosen to keep the cost per event small."""


class Observer:
    """Tells the router what the bytes of one attempt's answer show; ``is_stream``: they come as events.

    ``reader`` knows more of a stream of events, and is ``None`` for any other answer.
    """

    __slots__ = (
        "_clock",
        "_decision",
        "_first_at_s",
        "_metrics",
        "_path",
        "_pieces",
        "_router",
        "_seen",
        "_seen_at_s",
        "_tail",
        "_told",
        "dialect",
        "is_stream",
        "reader",
    )

    def __init__(
        self,
        router: Router,
        metrics: Metrics,
        decision: Decision,
        clock: Callable[[], float],
        path: str,
        *,
        is_stream: bool,
    ) -> None:
        self._router = router
        self._clock = clock
        self._metrics = metrics
        self._decision = decision
        self._path = path
        self.is_stream = is_stream
        self.dialect = dialect(path, decision.decode.endpoint.engine)
        self.reader = StreamReader(self.dialect) if is_stream else None
        self._tail = Tail()
        self._pieces = 0
        self._told = 0
        self._first_at_s: float | None = None
        self._seen = -1
        self._seen_at_s = 0.0

    @property
    def has_begun(self) -> bool:
        """Whether the answer has begun: a comment or an event without content is no answer."""
        return self._first_at_s is not None

    @property
    def is_over(self) -> bool:
        """Whether the end mark of a stream has come."""
        return self.reader is not None and self.reader.is_over

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

    def reads_no_events(self) -> None:
        """The answer is no stream of events, though one was asked for."""
        self.reader = None

    def piece(self, piece: bytes) -> bool:
        """Take note of a piece of the answer; return whether the end mark of its stream has come."""
        self._tail.add(piece)
        reader = self.reader
        if reader is None:
            self._pieces += 1
            return False
        reader.feed(piece)
        if reader.events - self._told >= _GROWTH_EVENTS:
            self._tell_growth(self._clock(), reader.events)
        return reader.is_over

    def without_surplus(self, piece: bytes) -> bytes:
        """Return the last piece without what came behind the end mark."""
        surplus_bytes = 0 if self.reader is None else self.reader.surplus_bytes
        return piece[: len(piece) - surplus_bytes]

    def quiet_since_s(self, now_s: float, *, is_excused: bool) -> float:
        """Return when the stream was last seen to have grown, or not to be at fault; comments are no growth.

        Each call is a look, so that it costs nothing in between.
        """
        grown = self._pieces if self.reader is None else self.reader.events
        if is_excused or grown != self._seen:
            self._seen, self._seen_at_s = grown, now_s
        return self._seen_at_s

    def ends(self) -> bool:
        """Take note that nothing more is read, and return whether the end mark has come."""
        if self.reader is not None:
            self.reader.finish()
        return self.is_over

    def event_end(self) -> bytes:
        """Return what ends an event that was cut off in the middle."""
        is_open = self.has_begun and not self.tail().endswith((b"\n\n", b"\r\n\r\n"))
        return b"\n\n" if is_open else b""

    def finished(self) -> None:
        """The answer is whole: read the engine's own count."""
        now_s = self._clock()
        if self._first_at_s is not None:
            self._metrics.decoded(now_s - self._first_at_s)
        self.ends()
        if self.reader is not None and self.reader.events > self._told:
            self._tell_growth(now_s, self.reader.events)
        if self._decision.facts.prompts != 1 or not self._router.wants_usage(self._decision):
            return
        prompt_tokens, output_tokens = answer_count(self._path, self.tail())
        if prompt_tokens is not None:
            events = self._token_events() if output_tokens else 0
            self._router.observe(UsageSeen(self._decision, prompt_tokens, output_tokens or 0, events), now_s)

    def answered(self) -> Answered:
        """Return what was seen of the answer: the engine's own count, or else an estimate by its events."""
        prompt_tokens, output_tokens = answer_count(self._path, self.tail())
        if output_tokens is None and self.reader is not None:
            output_tokens = int(min(round(self._token_events() * self._event_tokens), self._most_tokens))
        return Answered(self._first_at_s, prompt_tokens, output_tokens)

    @property
    def _event_tokens(self) -> float:
        return self._router.event_tokens.of(self._decision.decode.endpoint.address)

    @property
    def _most_tokens(self) -> float:
        """How many tokens the request allows, all its samples together."""
        facts = self._decision.facts
        return math.inf if facts.max_output_tokens is None else max(0, facts.max_output_tokens) * facts.prompts

    def _token_events(self) -> int:
        """Return the events with tokens: those that end the stream have none."""
        if self.reader is None:
            return 0
        return max(0, self.reader.events - trailing_events(self.tail(), self.dialect))

    def _tell_growth(self, now_s: float, events: int) -> None:
        tokens = round((events - self._told) * self._event_tokens)
        self._router.observe(TokensGenerated(self._decision, tokens), now_s)
        self._told = events
