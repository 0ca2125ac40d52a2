"""[5] Runs a Plan: sends its legs, answers the client from the decode leg, and ends what must be ended (I12).

Both legs start at once. The prefill leg's reply is read and dropped (``legs.py``); if it fails, the decode leg is ended
and the client gets the prefill's error. The client's reply starts with the decode leg's first body byte, so that until
then any failure is a proper error. All goes by callbacks: an engine's bytes are written to the client in the turn of
the loop in which they come, and no task waits. What has begun has one end, ``Flight._end``, which settles (I2, I3).
"""

from collections.abc import Callable, Mapping
from functools import lru_cache

import msgspec

from pdrouter.core.decision import Decision, Placement, Rejection
from pdrouter.core.request import RequestFacts
from pdrouter.core.router import Router
from pdrouter.engines.base import Engine, Inbound, Plan
from pdrouter.engines.logprobs import StreamMerger, merge_reply, prompt_logprobs
from pdrouter.errors import ClientGone, RouterError, UpstreamTimeout
from pdrouter.proxy.abort import Aborter
from pdrouter.proxy.client import Client, Headers
from pdrouter.proxy.deadlines import Deadlines
from pdrouter.proxy.edge import attempt
from pdrouter.proxy.ids import Ids
from pdrouter.proxy.legs import STATUS_OK_BELOW, EngineReply, Held, PrefillLeg
from pdrouter.proxy.relay import Observer
from pdrouter.proxy.replies import error_event, passed_on
from pdrouter.telemetry.logs import DecisionLog
from pdrouter.telemetry.metrics import Metrics
from pdrouter.upstream.connection import Exchange
from pdrouter.upstream.pools import Pools

_PREFILL_GRACE_S = 5.0
"""How long a prefill reply may still come once the whole answer is there; it is normally there before."""

OnEnd = Callable[[Client, str, str, RouterError | None], None]
"""Called once when all is over, with path and request id; with an error if the client is still to be told of it."""


class DispatchOptions(msgspec.Struct, frozen=True):
    """Settings of the dispatcher; ``config.py`` says what they mean."""

    request_timeout_s: float
    max_reply_bytes: int
    decision_headers: bool


class Dispatcher:
    """Runs requests: decide, send, relay, settle."""

    def __init__(
        self,
        router: Router,
        engines: Mapping[str, Engine],
        pools: Pools,
        aborter: Aborter,
        metrics: Metrics,
        log: DecisionLog,
        ids: Ids,
        clock: Callable[[], float],
        options: DispatchOptions,
    ) -> None:
        self.router = router
        self.pools = pools
        self.aborter = aborter
        self.metrics = metrics
        self.log = log
        self.clock = clock
        self.options = options
        self.deadlines: Deadlines[Flight] = Deadlines(options.request_timeout_s, Flight.time_out)
        self.late_prefills: Deadlines[Flight] = Deadlines(_PREFILL_GRACE_S, Flight.end_prefill)
        self.engines = engines
        self.ids = ids

    def start(self, facts: RequestFacts, inbound: Inbound, client: Client, on_end: OnEnd) -> None:
        """Begin to serve one request; ``on_end`` is called when it is over.

        Raises: RouterError if it can't be placed; then ``on_end`` isn't called.
        """
        decision = self.router.decide(facts, self.clock())
        if isinstance(decision, Rejection):
            self.log.rejected(facts, decision.error)
            raise decision.error
        Flight(self, decision, inbound, client, on_end).start()


class Flight:
    """One attempt under way: its legs, its first failure, its end."""

    __slots__ = (
        "_client",
        "_decision",
        "_engine",
        "_exchange",
        "_held",
        "_inbound",
        "_is_over",
        "_merger",
        "_observer",
        "_on_end",
        "_owner",
        "_plan",
        "_prefill",
    )
    _engine: Engine  # both are there before any leg is
    _plan: Plan

    def __init__(self, owner: Dispatcher, decision: Decision, inbound: Inbound, client: Client, on_end: OnEnd) -> None:
        self._owner = owner
        self._decision = decision
        self._inbound = inbound
        self._client = client
        self._on_end = on_end
        self._observer = Observer(owner.router, owner.metrics, decision, owner.clock, is_stream=inbound.is_stream)
        self._is_over = False
        self._exchange: Exchange | None = None
        self._prefill: PrefillLeg | None = None
        self._held: Held | None = None
        self._merger: StreamMerger | None = None

    def start(self) -> None:
        """Send the legs, over kept connections at once."""
        error = attempt(self._send)
        if error is not None:
            self._end(error)

    def _send(self) -> None:
        owner, decision, inbound = self._owner, self._decision, self._inbound
        owner.log.decided(decision)
        self._client.listener = self
        owner.deadlines.put(self)
        self._engine = owner.engines[decision.decode.endpoint.engine]
        plan = self._plan = self._engine.plan(decision, inbound, owner.ids.attempt(inbound.batch or 1))
        leg = plan.prefill
        if leg is not None:
            self._prefill = PrefillLeg(
                leg.placement,
                owner.pools.get(leg.placement.endpoint).start(leg.head, *leg.body),
                self._prefill_done,
                keeps=plan.merges_logprobs,
                max_bytes=owner.options.max_reply_bytes,
            )
        leg = plan.decode
        self._exchange = owner.pools.get(leg.placement.endpoint).start(leg.head, *leg.body)
        self._exchange.listen(self._arrived)

    # What happens to it.

    def _arrived(self) -> None:
        error = attempt(self._relay)
        if error is not None:
            self._end(error)

    def _prefill_done(self, error: RouterError | None) -> None:
        if self._is_over:
            self._owner.late_prefills.take_out(self)
            return
        error = error or attempt(self._observer.prefill_done)
        if error is not None:
            self._end(error)
        elif self._plan.merges_logprobs:
            self._arrived()

    def client_drained(self) -> None:
        """Pass on what has come meanwhile."""
        self._arrived()

    def client_gone(self) -> None:
        """Nobody waits any more."""
        self._end(ClientGone("the client closed its connection"))

    def time_out(self) -> None:
        """It takes too long."""
        limit_s = self._owner.options.request_timeout_s
        self._end(UpstreamTimeout(f"the request took longer than {limit_s:g} s (request_timeout_secs)"))

    # The answer.

    def _relay(self) -> None:
        """Pass on what has arrived, unless the client is behind: then the engine is held back as well (I9)."""
        exchange, client, merges = self._exchange, self._client, self._plan.merges_logprobs
        if exchange is None or client.is_full or (merges and self._waits_for_prefill(exchange)):
            return
        piece = exchange.read_nowait()
        if piece is None:
            return
        if not client.is_started:
            if exchange.status >= STATUS_OK_BELOW or (merges and not self._inbound.is_stream):
                self._hold(exchange, piece)
                return
            self._begin(exchange)
        self._observer.piece(piece)
        is_last = exchange.is_complete
        if self._merger is not None:
            piece = self._merger.feed(piece) + (self._merger.finish() if is_last else b"")
        if not is_last:
            client.write(piece)
            return
        client.end(piece)
        self._observer.finished()
        self._end(None)

    def _waits_for_prefill(self, exchange: Exchange) -> bool:
        """Whether a good answer can't go on without the prompt's logprobs."""
        is_good = 0 < exchange.status < STATUS_OK_BELOW
        return is_good and self._prefill is not None and not self._prefill.is_done

    def _begin(self, exchange: Exchange) -> None:
        self._observer.first_piece()
        headers = passed_on(exchange.raw_headers)
        if self._plan.merges_logprobs and self._prefill is not None:
            prompt = prompt_logprobs(self._prefill.reply(), is_stream=True)
            self._merger = StreamMerger(prompt, self._owner.options.max_reply_bytes)
            headers = _unsized(headers)
        self._client.start(exchange.status, headers, self._own_lines())

    def _hold(self, exchange: Exchange, piece: bytes) -> None:
        """Keep what can only be passed on whole: an error, or an answer that logprobs are put into."""
        place = self._plan.decode.placement
        if self._held is None:
            self._held = Held(place, self._owner.options.max_reply_bytes)
        self._held.add(piece)
        if not exchange.is_complete:
            return
        body = self._held.whole()
        if exchange.status >= STATUS_OK_BELOW:
            raise EngineReply(place, exchange.status, exchange.headers, body)
        self._observer.first_piece()
        self._observer.piece(body)
        prompt = prompt_logprobs(self._prefill.reply() if self._prefill is not None else b"", is_stream=False)
        headers = _unsized(passed_on(exchange.raw_headers))
        self._client.reply(exchange.status, headers, merge_reply(body, prompt), self._own_lines())
        self._observer.finished()
        self._end(None)

    # The end.

    def _end(self, error: RouterError | None) -> None:
        """Leave nothing behind; the first to come here says why."""
        if self._is_over:
            return
        self._is_over = True
        owner, untold = self._owner, error
        try:
            owner.deadlines.take_out(self)
            self._client.listener = None
            self._end_legs(is_answered=error is None)
            if error is not None:
                untold = self._tell(error)
        finally:
            owner.router.settle(self._decision, owner.clock(), error)  # I2
            self._on_end(self._client, self._inbound.path, self._inbound.request_id, untold)

    def _end_legs(self, *, is_answered: bool) -> None:
        """End each leg that hasn't run to its end, at the engine too (I12)."""
        exchange, prefill = self._exchange, self._prefill
        if exchange is not None:
            exchange.listen(None)  # nor is a cycle left for the collector
            if not exchange.is_complete:
                exchange.close()
                if exchange.is_sent:
                    self._abort(self._plan.decode.placement)
        if prefill is not None and not prefill.is_done:
            if is_answered and prefill.send_no_more():
                self._owner.late_prefills.put(self)
            else:
                self.end_prefill()

    def end_prefill(self) -> None:
        """End the prefill leg, at the engine too."""
        prefill = self._prefill
        if prefill is not None and not prefill.is_done:
            prefill.close()
            if prefill.is_sent:
                self._abort(prefill.placement)

    def _abort(self, place: Placement) -> None:
        self._owner.aborter.abort(place.endpoint, self._engine.abort(place.endpoint, self._plan.rid))

    def _tell(self, error: RouterError) -> RouterError | None:
        """Tell a client that can still hear; return what is to be told by a reply of its own."""
        self._owner.log.failed(self._decision, error)
        client = self._client
        if isinstance(error, ClientGone):
            return None
        if client.is_started:
            if client.is_full:
                client.abort()
            elif self._inbound.is_stream:
                client.write(self._observer.event_end() + error_event(error))
            client.cut()
            return None
        if not isinstance(error, EngineReply):
            return error
        client.reply(error.reply_status, _unsized(passed_on(error.reply_headers)), error.body, self._own_lines())
        return None

    def _own_lines(self) -> bytes:
        """Return the header lines that we add."""
        lines = b"x-request-id: %b\r\n" % self._inbound.request_id.encode("latin-1", "replace")
        if self._owner.options.decision_headers:
            prefill, decode = self._decision.prefill, self._decision.decode
            if prefill is not None:
                lines += _place_line("prefill", prefill.endpoint.address, prefill.rank)
            lines += _place_line("decode", decode.endpoint.address, decode.rank)
        return lines


def _unsized(headers: Headers) -> list[tuple[bytes, bytes]]:
    return [pair for pair in headers if pair[0] != b"content-length"]


@lru_cache(maxsize=65536)
def _place_line(leg: str, address: str, rank: int | None) -> bytes:
    """Return a header line with address and rank."""
    return f"x-pdrouter-{leg}: {address}; rank={'engine' if rank is None else rank}\r\n".encode()
