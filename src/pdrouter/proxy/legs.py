"""The prefill leg of a pair: its reply is read as it comes, by callbacks and without a task of its own."""

from collections.abc import Callable

from pdrouter.core.decision import Placement
from pdrouter.engines.failures import ERROR, Dialect, Failure, true_status
from pdrouter.engines.streams import leg_failure
from pdrouter.engines.usage import Tail
from pdrouter.errors import ConnectFailed, NameNotResolved, RouterError, UpstreamError, UpstreamProtocol
from pdrouter.upstream.exchange import Exchange

STATUS_OK_BELOW = 400
SERVER_ERROR = 500

RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
"""Answers after which another engine may do better. Source: the SGLang router's retries."""

UNREACHABLE = (ConnectFailed, NameNotResolved)
"""Failures of a whole endpoint and not of a rank."""


_MAX_DETAIL_BYTES = 512


class EngineReply(UpstreamError):
    """An engine's own error reply, to be passed on as it is."""

    code = "engine_reply"

    _verb = "answered"

    def __init__(self, place: Placement, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self.reply_status = true_status(status, body)
        self.reply_headers = headers
        self.body = body
        super().__init__(f"{place.kind} on {place.label} {self._verb} {self.reply_status}")
        self.detail = body[:_MAX_DETAIL_BYTES].decode("utf-8", "replace")


class EngineFailure(EngineReply):
    """An engine's own error inside a reply whose status is good."""

    code = "engine_failure"
    _verb = "failed inside a good reply with"

    def __init__(self, place: Placement, failure: Failure) -> None:
        super().__init__(place, failure.status, [(b"content-type", b"application/json")], failure.body)


def is_retried(error: RouterError) -> bool:
    """Whether another engine may do better."""
    return error.reply_status in RETRIED_STATUSES if isinstance(error, EngineReply) else error.is_retryable


def is_engines_fault(error: RouterError) -> bool:
    """Whether a failure tells of its engine's health; what an engine refuses doesn't."""
    return error.reply_status >= SERVER_ERROR if isinstance(error, EngineReply) else error.counts_against_health


class Held:
    """The pieces of a reply that can only be used whole; no more than ``max_bytes`` of them (I9)."""

    __slots__ = ("_held_bytes", "_max_bytes", "_pieces", "_placement")

    def __init__(self, placement: Placement, max_bytes: int) -> None:
        self._placement = placement
        self._max_bytes = max_bytes
        self._pieces: list[bytes] = []
        self._held_bytes = 0

    def add(self, piece: bytes) -> None:
        """Keep a piece.

        Raises: UpstreamProtocol if it is one too many.
        """
        self._held_bytes += len(piece)
        if self._held_bytes > self._max_bytes:  # I9
            raise UpstreamProtocol(f"the reply of {self._placement.label} exceeds {self._max_bytes} bytes")
        self._pieces.append(piece)

    def whole(self) -> bytes:
        """Return all of it."""
        return b"".join(self._pieces)


class PrefillLeg:
    """Reads a prefill reply and calls ``on_done`` once, at its end or at a failure, with what went wrong or ``None``.

    A good reply is dropped unless ``keeps`` asks for it, but for its end. ``is_good`` says that it has
    come, and isn't an error, nor has one inside (``spoken`` is how it would tell that).
    """

    __slots__ = (
        "_exchange",
        "_held",
        "_keeps",
        "_max_bytes",
        "_on_done",
        "_spoken",
        "_tail",
        "is_done",
        "is_good",
        "placement",
    )

    def __init__(
        self,
        placement: Placement,
        exchange: Exchange,
        on_done: Callable[[RouterError | None], None],
        spoken: Dialect,
        *,
        keeps: bool,
        max_bytes: int,
    ) -> None:
        self.placement = placement
        self.is_done = False
        self.is_good = False
        self._exchange = exchange
        self._on_done: Callable[[RouterError | None], None] | None = on_done
        self._spoken = spoken
        self._keeps = keeps
        self._max_bytes = max_bytes
        self._held: Held | None = None
        self._tail = Tail()
        exchange.listen(self._arrived)

    @property
    def is_sent(self) -> bool:
        """Whether the engine may know of it."""
        return self._exchange.is_sent

    def reply(self) -> bytes:
        """Return what was kept."""
        return b"" if self._held is None else self._held.whole()

    @property
    def tail(self) -> bytes:
        """The end of the reply."""
        return self._tail.text()

    def send_no_more(self) -> bool:
        """Only wait for the reply from now on (I3); ``False`` if none is on its way."""
        self._exchange.forget_request()
        return self._exchange.connection is not None

    def close(self) -> None:
        """End the leg where it stands; ``on_done`` isn't called any more."""
        self.is_done = True
        self._on_done = None
        self._exchange.listen(None)
        self._exchange.close()

    def _arrived(self) -> None:
        exchange = self._exchange
        try:
            while piece := exchange.read_nowait():
                self._tail.add(piece)
                if self._keeps or exchange.status >= STATUS_OK_BELOW:
                    self._keep(piece)
                elif ERROR in piece or self._spoken.mark in piece:
                    self._check()
            if piece is None:
                return
            if exchange.status < STATUS_OK_BELOW:
                self._check()
        except RouterError as error:
            self._end(error.with_traceback(None))  # it would hold the exchange, which holds the error
            return
        if exchange.status >= STATUS_OK_BELOW:
            self._end(EngineReply(self.placement, exchange.status, exchange.headers, self.reply()))
        else:
            self.is_good = True
            self._end(None)

    def _check(self) -> None:
        """Look for a failure in what has come of a good reply.

        Raises: EngineFailure.
        """
        failure = leg_failure(self.tail, self._spoken)
        if failure is not None:
            raise EngineFailure(self.placement, failure)

    def _keep(self, piece: bytes) -> None:
        if self._held is None:
            self._held = Held(self.placement, self._max_bytes)
        self._held.add(piece)

    def _end(self, error: RouterError | None) -> None:
        on_done, self._on_done = self._on_done, None  # no cycle is left for the collector
        if on_done is not None:
            self.is_done = self._exchange.is_complete or not isinstance(error, EngineFailure)
            self._exchange.listen(None)
            on_done(error)
