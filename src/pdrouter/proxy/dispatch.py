"""[5] Runs a Plan: sends its legs, answers the client from the decode leg, and ends what must be ended (I12).

Both legs start at once. The prefill leg's reply is read and dropped (``legs.py``); if it fails, the decode leg is ended
and the client gets the prefill's error. The client's reply starts with the decode leg's first body byte, so that until
then any failure is a proper error. What has begun to run is always settled, in a ``finally`` (I2, I3).
"""

import asyncio
from collections.abc import Callable, Mapping

import msgspec

from pdrouter.core.decision import Decision, Placement, Rejection
from pdrouter.core.request import RequestFacts
from pdrouter.core.router import Router
from pdrouter.engines.base import Engine, Inbound, Leg, Plan
from pdrouter.engines.logprobs import StreamMerger, merge_reply, prompt_logprobs
from pdrouter.errors import ClientGone, RouterError, UpstreamTimeout
from pdrouter.proxy.abort import Aborter
from pdrouter.proxy.client import Client
from pdrouter.proxy.ids import Ids
from pdrouter.proxy.legs import STATUS_OK_BELOW, EngineReply, PrefillLeg
from pdrouter.proxy.relay import Observer
from pdrouter.proxy.replies import error_event, passed_on
from pdrouter.telemetry.logs import DecisionLog
from pdrouter.telemetry.metrics import Metrics
from pdrouter.upstream.connection import Exchange
from pdrouter.upstream.pool import Pool
from pdrouter.upstream.pools import Pools

_PREFILL_GRACE_S = 5.0
"""How long a prefill reply may still come once the whole answer is there; it is normally there before."""


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
        self._engines = engines
        self._ids = ids

    async def run(self, facts: RequestFacts, inbound: Inbound, client: Client) -> None:
        """Serve one request to its end.

        Raises: RouterError while the client has no byte of a reply yet; later failures are told in the stream.
        """
        decision = self.router.decide(facts, self.clock())
        if isinstance(decision, Rejection):
            self.log.rejected(facts, decision.error)
            raise decision.error
        try:
            self.log.decided(decision)
            engine = self._engines[decision.decode.endpoint.engine]
            plan = engine.plan(decision, inbound, self._ids.attempt(inbound.batch or 1))
            await Flight(self, engine, decision, plan, inbound, client).run()
        finally:
            self.router.settle(decision, self.clock())  # I2


class Flight:
    """One attempt under way: its legs, its first failure, its end."""

    def __init__(
        self, owner: Dispatcher, engine: Engine, decision: Decision, plan: Plan, inbound: Inbound, client: Client
    ) -> None:
        self._owner = owner
        self._engine = engine
        self._decision = decision
        self._plan = plan
        self._is_stream = inbound.is_stream
        self._request_id = inbound.request_id
        self._client = client
        self._observer = Observer(owner.router, owner.metrics, decision, is_stream=inbound.is_stream)
        self._failure: RouterError | None = None
        self._opening: asyncio.Task[Exchange] | None = None
        self._exchange: Exchange | None = None
        self._prefill: PrefillLeg | None = None

    async def run(self) -> None:
        """Send the legs and answer the client; on any failure end what runs."""
        deadline = asyncio.get_running_loop().call_later(self._owner.options.request_timeout_s, self._time_out)
        self._client.on_gone(self._client_gone)
        try:
            self._start_prefill()
            await self._answer()
        except RouterError as error:
            self._failure = self._failure or error
            self._tell(self._failure)
        finally:
            deadline.cancel()
            self._client.on_gone(None)
            self._end()

    def _start_prefill(self) -> None:
        leg = self._plan.prefill
        if leg is not None:
            self._prefill = PrefillLeg(
                leg,
                self._owner.pools.get(leg.placement.endpoint),
                self._prefill_done,
                keeps=self._plan.merges_logprobs,
                max_bytes=self._owner.options.max_reply_bytes,
            )
            self._prefill.start()

    async def _answer(self) -> None:
        leg = self._plan.decode
        pool = self._owner.pools.get(leg.placement.endpoint)
        exchange = self._exchange = pool.start(leg.head, *leg.body) or await self._open(pool, leg)
        if self._failure is not None:
            raise self._failure
        status = await exchange.head()
        if status >= STATUS_OK_BELOW:
            body = await exchange.read_all(self._owner.options.max_reply_bytes)
            raise EngineReply(leg.placement, status, exchange.headers, body)
        if self._plan.merges_logprobs and self._prefill is not None:
            await self._relay_merged(exchange, self._prefill)
        else:
            await self._relay(exchange)
        self._observer.finished(self._owner.clock())

    async def _open(self, pool: Pool, leg: Leg) -> Exchange:
        """Send over a fresh connection; a failure elsewhere ends the wait for it."""
        self._opening = asyncio.get_running_loop().create_task(pool.send(leg.head, *leg.body))
        try:
            return await self._opening
        except asyncio.CancelledError:
            if self._failure is None:
                raise
            raise self._failure from None

    async def _relay(self, exchange: Exchange) -> None:
        client, observer, clock = self._client, self._observer, self._owner.clock
        piece = await exchange.read()
        observer.first_piece(clock())
        client.start(exchange.status, self._reply_headers(exchange))
        while not exchange.is_complete:
            client.write(piece)
            observer.piece(piece, clock)
            if client.is_full:
                await client.drained()
            piece = await exchange.read()
        observer.piece(piece, clock)
        client.end(piece)

    async def _relay_merged(self, exchange: Exchange, prefill: PrefillLeg) -> None:
        client, observer, clock = self._client, self._observer, self._owner.clock
        limit_bytes = self._owner.options.max_reply_bytes
        prompt = prompt_logprobs(await prefill.reply(), is_stream=self._is_stream)
        if self._failure is not None:
            raise self._failure
        headers = [pair for pair in self._reply_headers(exchange) if pair[0] != b"content-length"]
        if not self._is_stream:
            body = await exchange.read_all(limit_bytes)
            observer.first_piece(clock())
            observer.piece(body, clock)
            client.reply(exchange.status, headers, merge_reply(body, prompt))
            return
        merger = StreamMerger(prompt, limit_bytes)
        piece = await exchange.read()
        observer.first_piece(clock())
        client.start(exchange.status, headers)
        while piece:
            client.write(merger.feed(piece))
            observer.piece(piece, clock)
            if client.is_full:
                await client.drained()
            piece = await exchange.read()
        client.end(merger.finish())

    def _prefill_done(self, error: RouterError | None) -> None:
        if error is None:
            self._observer.prefill_done(self._owner.clock())
        else:
            self._fail(error)

    def _client_gone(self) -> None:
        self._fail(ClientGone("the client closed its connection"))

    def _time_out(self) -> None:
        limit_s = self._owner.options.request_timeout_s
        self._fail(UpstreamTimeout(f"the request took longer than {limit_s:g} s (request_timeout_secs)"))

    def _fail(self, error: RouterError) -> None:
        """Take note of the first failure, and wake whoever waits for an engine or for a client that doesn't read."""
        if self._failure is None:
            self._failure = error
            if self._exchange is not None:
                self._exchange.close()
            elif self._opening is not None:
                self._opening.cancel()
            if self._client.is_full:
                self._client.abort()
            if self._prefill is not None and not self._prefill.is_done:
                self._end_prefill(self._prefill)

    def _end(self) -> None:
        """End each leg that hasn't run to its end, at the engine too (I12)."""
        is_answered = self._exchange is not None and self._exchange.is_complete
        if self._exchange is not None and not is_answered:
            self._exchange.close()
            self._abort(self._plan.decode.placement)
        prefill = self._prefill
        if prefill is None or prefill.is_done:
            return
        if is_answered and self._failure is None and prefill.send_no_more():
            asyncio.get_running_loop().call_later(_PREFILL_GRACE_S, self._end_prefill, prefill)
        else:
            self._end_prefill(prefill)

    def _end_prefill(self, prefill: PrefillLeg) -> None:
        if not prefill.is_done:
            prefill.close()
            if prefill.is_begun:
                self._abort(prefill.placement)

    def _abort(self, place: Placement) -> None:
        self._owner.aborter.abort(place.endpoint, self._engine.abort(place.endpoint, self._plan.rid))

    def _tell(self, error: RouterError) -> None:
        """Tell the client of a failure, as long as it can still hear."""
        self._owner.log.failed(self._decision, error)
        if isinstance(error, ClientGone):
            return
        if self._client.is_started:
            if self._is_stream:
                self._client.write(self._observer.event_end() + error_event(error))
            return
        if not isinstance(error, EngineReply):
            raise error
        headers = [*passed_on(error.reply_headers), *self._decision_headers()]
        plain = [pair for pair in headers if pair[0] != b"content-length"]
        self._client.reply(error.reply_status, plain, error.body)

    def _reply_headers(self, exchange: Exchange) -> list[tuple[bytes, bytes]]:
        return [*passed_on(exchange.headers), *self._decision_headers()]

    def _decision_headers(self) -> list[tuple[bytes, bytes]]:
        headers = [(b"x-request-id", self._request_id.encode("latin-1", "replace"))]
        if self._owner.options.decision_headers:
            if self._decision.prefill is not None:
                headers.append((b"x-pdrouter-prefill", _place_header(self._decision.prefill)))
            headers.append((b"x-pdrouter-decode", _place_header(self._decision.decode)))
        return headers


def _place_header(place: Placement) -> bytes:
    """Return address and rank for a response header."""
    rank = "engine" if place.rank is None else place.rank
    return f"{place.endpoint.address}; rank={rank}".encode()
