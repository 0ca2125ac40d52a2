"""[5] One request under way: places it, sends the legs of its Plan, answers the client, ends what must be ended (I12).

Either both legs start at once, or the decode leg is made from the prefill's answer (``legs.py``); if one fails, the
other is ended. The answer begins with the decode leg's first token; until then any failure is a proper error, or
another attempt (I7, I8). All goes by callbacks: an engine's bytes are written to the client in the turn of
the loop in which they come, and no task waits. Each attempt has one end, which settles (I2).
"""

from asyncio import TimerHandle
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from pdrouter.core.decision import Decision, Placement, Rejection
from pdrouter.core.entrance import MustWait
from pdrouter.core.ledger import UNASSIGNED, RankKey
from pdrouter.core.line import Place, Waiting
from pdrouter.core.request import RequestFacts
from pdrouter.engines.base import Engine, HandOver, Inbound, Leg, Plan, forward
from pdrouter.engines.usage import CACHED_TOKENS, CachedTokens, PromptCount, last_number, prompt_count
from pdrouter.errors import ClientGone, ConnectFailed, InvariantViolation, RouterError, UpstreamClosed, UpstreamProtocol
from pdrouter.proxy.answer import Answer
from pdrouter.proxy.client import Client
from pdrouter.proxy.deadlines import Late, end_of_stage
from pdrouter.proxy.edge import attempt
from pdrouter.proxy.keepalive import keep_alive
from pdrouter.proxy.legs import (
    RETRIED_STATUSES,
    UNREACHABLE,
    EngineReply,
    PrefillLeg,
    is_engines_fault,
    is_retried,
)
from pdrouter.proxy.relay import Observer
from pdrouter.proxy.replies import error_event, own_lines
from pdrouter.proxy.suspects import ENGINES, MOST_RESETS, points_at_request
from pdrouter.proxy.waitroom import Waiter

if TYPE_CHECKING:
    from pdrouter.proxy.dispatch import Dispatcher

OnEnd = Callable[[Client, str, str, RouterError | None], None]
"""Called once when all is over, with path and request id; with an error if the client is still to be told of it."""


class Flight:
    """One request: its attempts, and of the last one the legs, the failure, the end."""

    __slots__ = (
        "_answer",
        "_attempts",
        "_avoid",
        "_client",
        "_comment_s",
        "_decision",
        "_due_s",
        "_engine",
        "_facts",
        "_failed_on",
        "_inbound",
        "_is_over",
        "_is_unread",
        "_observer",
        "_on_end",
        "_owner",
        "_plan",
        "_prefill",
        "_resets",
        "_timer",
        "_turn",
    )
    _decision: Decision  # all five are there before any leg is, three of them from the first attempt on
    _observer: Observer
    _engine: Engine
    _plan: Plan
    _answer: Answer

    def __init__(
        self, owner: "Dispatcher", facts: RequestFacts, inbound: Inbound, client: Client, on_end: OnEnd
    ) -> None:
        self._owner = owner
        self._facts = facts
        self._inbound = inbound
        self._client = client
        self._on_end = on_end
        self._avoid: frozenset[RankKey] = frozenset()
        self._attempts = 0
        self._failed_on: frozenset[str] = frozenset()
        self._resets = 0
        self._is_over = False
        self._is_unread = False
        self._comment_s = 0.0
        self._timer: TimerHandle | None = None
        self._turn: Place[Waiter] | None = None
        self._prefill: PrefillLeg | None = None

    def start(self) -> None:
        """Place it and send the legs, over kept connections at once; or let it wait for its turn.

        Raises: RouterError if it can't be placed, nor wait; then ``on_end`` isn't called.
        """
        client, limits, now_s = self._client, self._owner.options.limits, self._owner.clock()
        self._owner.suspects.check(self._inbound)
        self._due_s = (client.asked_s or now_s) + limits.request_of(client.header)
        if self._due_s <= now_s:
            raise limits.too_late(client.header)
        must_wait = self._decide(is_admitted=False)
        if must_wait is not None:
            self._wait(must_wait)
        if self._is_over:
            return
        self._owner.retries.began()
        self._client.listener = self
        self._owner.under_way.put(self, self._due_s)
        if must_wait is None:
            self._send_legs()

    def _wait(self, told: MustWait) -> None:
        owner, facts = self._owner, self._facts
        if owner.waitroom is None:
            raise InvariantViolation("a request is to wait where nobody does")
        self._turn = owner.waitroom.enter(
            Waiting(
                request=self,
                model=told.model,
                priority=facts.priority,
                tenant=facts.tenant,
                weight=facts.weight,
                work_s=told.work_s,
                size_bytes=len(self._inbound.body),
                deadline_s=self._due_s,
            )
        )

    def go_on(self) -> None:
        """It has waited, and it is its turn."""
        self._turn = None
        error = attempt(self._place)
        if error is not None:
            self._end(error)
        else:
            self._send_legs()

    def turn_away(self, error: RouterError) -> None:
        """It has waited for nothing, or the router stops."""
        self._end(error)

    def _place(self) -> None:
        """Place it, now that it is its turn.

        Raises: RouterError if that can't be done.
        """
        self._decide(is_admitted=True)

    def _decide(self, *, is_admitted: bool) -> MustWait | None:
        owner = self._owner
        decision = owner.router.decide(self._facts, owner.clock(), self._avoid, is_admitted=is_admitted)
        if isinstance(decision, MustWait):
            return decision
        if isinstance(decision, Rejection):
            owner.log.rejected(self._facts, decision.error)
            raise decision.error
        owner.log.decided(decision)
        self._attempts += 1
        self._decision = decision
        is_stream = self._inbound.is_stream
        path = self._inbound.path
        self._observer = Observer(owner.router, owner.metrics, decision, owner.clock, path, is_stream=is_stream)
        options = owner.options
        lines = own_lines(self._inbound.request_id, decision if options.decision_headers else None)
        self._answer = Answer(self._client, decision, self._observer, lines, self._max_reply_bytes, is_stream=is_stream)
        return None

    @property
    def _max_reply_bytes(self) -> int:
        """How much of a reply may be held; all samples of one request share that (I9)."""
        return self._owner.options.max_reply_bytes // self._inbound.sample_of

    def _send_legs(self) -> None:
        error = attempt(self._send)
        if error is not None:
            self._fail(error)

    def _send(self) -> None:
        owner, decision, inbound = self._owner, self._decision, self._inbound
        self._engine = owner.engines[decision.decode.endpoint.engine]
        if inbound.is_opaque:
            plan = self._plan = forward(decision, inbound)
        else:
            plan = self._plan = self._engine.plan(decision, inbound, owner.ids.attempt(inbound.batch or 1))
        if (leg := plan.prefill) is not None:
            self._prefill = PrefillLeg(
                leg.placement,
                owner.pools.get(leg.placement.endpoint).start(leg.head, *leg.body),
                self._prefill_done,
                self._observer.dialect,
                keeps=plan.merges_logprobs or plan.decode is None,
                max_bytes=self._max_reply_bytes,
            )
        if plan.decode is not None:
            self._send_decode(plan.decode)

    def _send_decode(self, leg: Leg) -> None:
        exchange = self._owner.pools.get(leg.placement.endpoint).start(leg.head, *leg.body)
        self._answer.expect(exchange, self._prefill if self._plan.merges_logprobs else None)
        exchange.listen(self._arrived)

    # What happens to it.

    def _arrived(self) -> None:
        answer = self._answer
        error = attempt(answer.relay)
        if error is None and answer.is_whole:
            error = attempt(self._finish)
        if error is not None:
            self._fail(error, self._decision.decode)

    def _prefill_done(self, error: RouterError | None) -> None:
        if self._is_over:
            self._owner.late_prefills.take_out(self)
            self.end_prefill()
            return
        prefill, decode = self._decision.prefill or self._decision.decode, self._decision.decode
        if error is not None and self._answer.has_begun:
            self._observer.note(f"the prefill leg failed when decode had the KV: {error.message}")
        elif error is not None:
            self._fail(error, prefill)
            return
        if (error := attempt(self._prefilled)) is not None:
            self._fail(error, prefill if isinstance(error, UpstreamProtocol) else decode)

    def client_drained(self) -> None:
        """Pass on what has come meanwhile."""
        if self._attempts:
            self._arrived()

    def client_gone(self) -> None:
        """Nobody waits any more."""
        if self._attempts and self._answer.has_begun and self._observer.ends():
            self._finish()
        else:
            self._fail(ClientGone("the client closed its connection"))

    def check_time(self, now_s: float) -> float:
        """End it if it takes too long, or keep its connection alive; return when to look again."""
        until_s = self._check_limits(now_s)
        interval_s, inbound = self._owner.options.limits.keepalive_s, self._inbound
        if not interval_s or self._is_over or not inbound.is_stream or inbound.sample_of > 1:
            return until_s
        if self._attempts and self._answer.has_begun:
            return until_s
        self._comment_s = keep_alive(self._client, inbound.request_id, self._comment_s, interval_s, now_s)
        return min(until_s, self._comment_s)

    def _check_limits(self, now_s: float) -> float:
        """End it if it takes too long, or its present stage does; return until when there is time."""
        limits = self._owner.options.limits
        if now_s >= self._due_s:
            self._end(limits.too_late(self._client.header))
        elif self._timer is None and self._attempts:
            is_met = self._plan.decode is not None
            until = end_of_stage(self._decision, self._observer, self._client, limits, now_s, is_met=is_met)
            if not isinstance(until, Late):
                return min(until, self._due_s)
            self._fail(until.error, *until.places)
        return self._due_s

    # Between the legs.

    def _prefilled(self) -> None:
        prefill, plan = self._prefill, self._plan
        if prefill is None:
            return
        if plan.decode is None:
            self._hand_over(self._engine.hand_over(self._decision, self._inbound, plan, prefill.reply()))
            return
        self._note_count(prompt_count(prefill.tail))
        if plan.merges_logprobs:
            self._arrived()

    def _hand_over(self, hand_over: HandOver) -> None:
        self._note_count(hand_over.count)
        leg = hand_over.decode
        if leg is None:
            self._answer.give(hand_over.answer)
            self._observer.finished()
            self._end(None)
            return
        if not hand_over.has_kv:
            self._read_again("the prefill's answer doesn't say where its KV is")
        self._send_decode(leg)

    def _note_count(self, count: PromptCount | None) -> None:
        """The prompt is read; what the prefill had of it is what the client is told, too."""
        self._observer.prefill_done(count)
        if count is not None and not self._answer.has_begun:
            self._answer.cached_tokens = CachedTokens(count.cached_tokens)

    def _finish(self) -> None:
        """The answer is whole."""
        observer, decision = self._observer, self._decision
        observer.finished()
        is_told = decision.prefill is not None and decision.decode.endpoint.tells_transfer
        if is_told and last_number(CACHED_TOKENS, observer.tail()) == 0:
            self._read_again("the decode engine had nothing of it")
        failure = self._answer.failure()
        if failure is None:
            self._end(None)
        else:
            self._end(failure, decision.decode)

    def _read_again(self, reason: str) -> None:
        prefill, decode = self._decision.prefill, self._decision.decode
        if prefill is not None:
            self._owner.hand_overs.recompute(prefill, decode, reason)
            self._observer.note(f"the prompt is read again: {reason}")

    # The end of an attempt, and of all.

    def _fail(self, error: RouterError, *places: Placement) -> None:
        """Try once more if that may help; ``places`` are those at fault, none if it is no engine's."""
        if self._is_over:
            return
        if not places or self._answer.has_begun or not is_retried(error):  # I7
            self._end(error, *places)
            return
        for place in places:
            rank = UNASSIGNED if place.rank is None or isinstance(error, UNREACHABLE) else place.rank
            self._avoid |= {RankKey(place.endpoint.address, rank)}
            if isinstance(error, UpstreamClosed):  # it may have killed the whole process
                self._avoid |= {RankKey(place.endpoint.address, UNASSIGNED)}
        self._is_unread = self._decision.prefill in places
        self._end_attempt(error, *places)
        self._prefill = self._answer.exchange = None
        self._resets += isinstance(error, UpstreamClosed)
        if self._attempts < self._owner.options.max_attempts and self._resets < MOST_RESETS:  # I8
            self._timer = self._owner.retries.later(self._attempts, self._due_s, partial(self._try_again, error))
        if self._timer is None:
            self._give_up(error)

    def _try_again(self, failure: RouterError) -> None:
        self._timer = None
        if attempt(self._place) is None:
            self._send_legs()
        else:
            self._give_up(failure)

    def _give_up(self, failure: RouterError) -> None:
        """Tell of the failure, unless no prefill could read the prompt and one endpoint may do it all."""
        if self._is_unread and self._owner.options.falls_back_to_decode and not self._facts.is_whole:
            self._facts = msgspec.structs.replace(self._facts, is_whole=True)
            if attempt(self._place) is None:
                self._owner.hand_overs.fall_back(self._decision.decode, failure.message)
                self._send_legs()
                return
        self._end(failure)

    def _charged(self, error: RouterError | None, places: Sequence[Placement]) -> Sequence[Placement]:
        """Return who is charged with a failure: engines once for each request, as it may be the request's doing."""
        if error is None or not is_engines_fault(error):
            return ()
        if not points_at_request(error):
            return places
        is_first = not self._failed_on
        self._failed_on |= {place.endpoint.address for place in places}
        return places if is_first else ()

    def _end(self, error: RouterError | None, *places: Placement) -> None:
        """Leave nothing behind; the first to come here says why, and whose fault it is."""
        if self._is_over:
            return
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._turn is not None and self._owner.waitroom is not None:
            self._owner.waitroom.leave(self._turn)
        untold = error
        try:
            self._owner.under_way.take_out(self)
            self._client.listener = None
            if error is not None:
                untold = self._tell(error)
        finally:
            self._end_attempt(error, *places)
            if error is not None and len(self._failed_on) >= ENGINES:
                self._owner.suspects.note(self._inbound)
            self._owner.ended(self._facts, self._client, self._observer if self._attempts else None, error)
            self._on_end(self._client, self._inbound.path, self._inbound.request_id, untold)

    def _end_attempt(self, error: RouterError | None, *places: Placement) -> None:
        """End each leg that hasn't run to its end, at the engine too (I12), and settle (I2)."""
        owner = self._owner
        if not self._attempts:
            return
        try:
            self._end_legs(error)
        finally:
            at_fault = self._charged(error, places)
            if isinstance(error, ConnectFailed):
                for place in at_fault:
                    owner.on_unreachable(place.endpoint.address, error)
            if owner.router.settle(self._decision, owner.clock(), error, at_fault) and error is not None:
                owner.log.failed(self._decision, error)
            if owner.waitroom is not None:
                owner.waitroom.room_may_be()

    def _end_legs(self, error: RouterError | None) -> None:
        exchange, prefill = self._answer.exchange, self._prefill
        if exchange is not None:
            exchange.listen(None)  # nor is a cycle left for the collector
            if exchange.is_complete:
                pass
            elif self._observer.is_over:
                self._owner.leftovers.drain(exchange)
            else:
                exchange.close()
                if exchange.is_sent:
                    self._abort(self._decision.decode)
        if prefill is None:
            return
        if not prefill.is_done:
            if error is None and prefill.send_no_more():
                self._owner.late_prefills.put(self)
            else:
                self.end_prefill()
        elif error is not None and self._plan.decode is None and prefill.is_good:
            is_refused = isinstance(error, EngineReply) and error.reply_status in RETRIED_STATUSES
            if exchange is None or (is_refused and not self._answer.has_begun):
                self._release(prefill)  # a decode engine that refuses like this may not have told the prefill
            elif not exchange.is_sent or isinstance(error, UpstreamClosed):
                self._owner.hand_overs.strand()  # it may have died before it fetched the KV

    def end_prefill(self) -> None:
        """End the prefill leg, at the engine too."""
        prefill = self._prefill
        if prefill is not None and not prefill.is_done:
            prefill.close()
            if prefill.is_sent:
                self._abort(prefill.placement)

    def _abort(self, place: Placement) -> None:
        requests = self._engine.abort(place.endpoint, self._plan)
        if requests:
            self._owner.aborter.abort(place.endpoint, requests)

    def _release(self, prefill: PrefillLeg) -> None:
        """Nobody will fetch the KV of a prompt that was read."""
        release = self._engine.release(self._decision, prefill.reply())
        if release is not None:
            self._owner.aborter.send(*release)
        else:
            self._owner.hand_overs.strand()

    def _tell(self, error: RouterError) -> RouterError | None:
        """Tell a client that can still hear; return what is to be told by a reply of its own."""
        client = self._client
        if isinstance(error, ClientGone):
            return None
        if client.is_started:
            self._owner.metrics.failed(error.code)
            if not (self._attempts and self._answer.is_whole):
                self._tell_in_stream(error)
            return None
        if not isinstance(error, EngineReply):
            return error
        self._answer.pass_error(error)
        return None

    def _tell_in_stream(self, error: RouterError) -> None:
        """End a reply that has begun: a stream by an error event, and any without its proper end."""
        client = self._client
        if client.is_full:
            client.abort()
            return
        if self._inbound.is_stream:
            has_begun = self._attempts and self._answer.has_begun
            end, tail = (self._observer.event_end(), self._observer.tail()) if has_begun else (b"", b"")
            client.write(end + error_event(error, self._inbound.path, tail))
        client.cut()
