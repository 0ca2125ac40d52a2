"""Drives the engine model in real time for a handshake: requests in, progress out.

Knows tickets and timers, but no HTTP and no kind of engine: what legs do is the ``Handshake``'s. One timer serves
all ranks. The model's clock is the event loop's, times ``speed``.
"""

import asyncio
import sys
from collections import Counter, deque
from collections.abc import Callable
from math import inf

from pdrouter.sim.call import RoomHandoff
from pdrouter.sim.emulator_kind import Handshake
from pdrouter.sim.emulator_settings import EmulatorSettings, EngineError
from pdrouter.sim.engine_model import EngineModel, ModelSettings
from pdrouter.sim.full_kv import rule_of
from pdrouter.sim.job import Event, EventKind, Job, RankLoad, Role
from pdrouter.sim.profiles import load_profile
from pdrouter.sim.text import BLOCK_TOKENS
from pdrouter.sim.ticket import EngineSnapshot, Received, Ticket

_MESSAGES_KEPT = 100
_RECEIVED_KEPT = 1000


class LiveEngine:
    """An engine without HTTP. Must be made and used inside a running event loop."""

    def __init__(self, settings: EmulatorSettings, new_handshake: Callable[["LiveEngine"], Handshake]) -> None:
        profile = load_profile(settings.profile)
        role = Role(settings.role)
        self.settings = settings
        self.role = role
        self.profile = profile
        self.kv_capacity_tokens = settings.kv_capacity_tokens or profile.kv_capacity_tokens
        self.model = EngineModel(
            ModelSettings(
                profile=profile,
                role=role,
                dp_size=settings.dp_size,
                kv_capacity_tokens=self.kv_capacity_tokens,
                block_tokens=BLOCK_TOKENS,
                when_full=rule_of(settings.engine),
                waits_for_decode=settings.waits_for_decode,
            )
        )
        self.errors: Counter[str] = Counter()
        self.error_messages: deque[str] = deque(maxlen=_MESSAGES_KEPT)
        self.received: deque[Received] = deque(maxlen=_RECEIVED_KEPT)
        self.requests_by_rank = [0] * settings.dp_size
        self.stranded_requests = 0
        self.recomputed_requests = 0
        self._tickets: dict[Job, Ticket] = {}
        self._held: dict[Job, Ticket] = {}
        self._loop = asyncio.get_running_loop()
        self._start_s = self._loop.time()
        self._pumped_s = -inf
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = inf
        self._is_pumping = False
        self._next_rank = 0
        self.handshake = new_handshake(self)

    def now_s(self) -> float:
        """Engine time."""
        return (self._loop.time() - self._start_s) * self.settings.speed

    def next_rank(self) -> int:
        """Rank of a request that names none: in turn."""
        rank = self._next_rank
        self._next_rank = (rank + 1) % self.settings.dp_size
        return rank

    # Requests.

    def submit(self, ticket: Ticket) -> None:
        """Take a prompt in. Raises: ``EngineError`` if it can't be served."""
        job = ticket.job
        if not self.model.fits(job):
            text = (
                f"Input length ({job.prompt_tokens} tokens) and answer ({job.output_tokens}) exceed the "
                f"maximum allowed length ({self.kv_capacity_tokens} tokens)"
            )
            self.handshake.refused(ticket)
            raise EngineError(400, "too_long", text)
        self.handshake.opened(ticket)
        ticket.created_s = self._loop.time()
        self._tickets[job] = ticket
        self._count(ticket)
        self.model.submit(job, self.now_s())
        self.handshake.submitted(ticket)
        self._pump()

    def abort(self, ticket: Ticket) -> None:
        """End a request and free all it holds; its reply says so."""
        if self._tickets.get(ticket.job) is ticket:
            ticket.tokens = max(ticket.tokens, self.model.generated(ticket.job, self.now_s()))
            ticket.finish = "abort"
            self._close(ticket)
            self._pump()

    def abort_matching(self, rid: str) -> int:
        """Abort the requests whose id begins with ``rid``; returns how many."""
        found = [t for t in self._tickets.values() if rid and t.rid.startswith(rid)]
        for ticket in found:
            self.abort(ticket)
        return len(found)

    def live(self) -> list[Ticket]:
        """Return all requests that aren't answered yet."""
        return list(self._tickets.values())

    def named(self, rid: str) -> list[Ticket]:
        """Return the request of that id and then all whose ids begin with it; none if there is no request of that id.

        Source: SGLang's ``tokenizer_manager.py`` drops an abort of an id that it doesn't know, and its ``scheduler.py``
        compares beginnings.
        """
        tickets = self._tickets.values()
        return [t for t in tickets if t.rid.startswith(rid)] if any(t.rid == rid for t in tickets) else []

    def flush_cache(self) -> bool:
        """Empty the prefix caches; refused while there are requests."""
        if self._tickets:
            return False
        self.model.flush()
        return True

    def count_error(self, error: EngineError) -> None:
        """Remember a refusal and say it on stderr."""
        self.errors[error.code] += 1
        self.error_messages.append(f"{error.code}: {error.message}")
        sys.stderr.write(f"emulator {self.role}: {error.status} {error.code}: {error.message}\n")
        sys.stderr.flush()

    def loads(self) -> list[RankLoad]:
        """Load of every rank now."""
        self._pump()
        return self.model.loads(self.now_s())

    def snapshot(self) -> EngineSnapshot:
        """Return everything that is held now."""
        return EngineSnapshot(
            ranks=self.loads(),
            requests=len(self._tickets),
            requests_by_rank=list(self.requests_by_rank),
            rooms=self.handshake.rooms(),
            wanted_rooms=self.handshake.wanted_rooms(),
            errors=dict(self.errors),
            error_messages=list(self.error_messages),
            total_requests=sum(self.requests_by_rank),
            held_requests=len(self._held),
            stranded_requests=self.stranded_requests,
            recomputed_requests=self.recomputed_requests,
        )

    async def shut(self) -> None:
        """End timers and connections."""
        for ticket in list(self._tickets.values()):
            self.abort(ticket)
        for ticket in list(self._held.values()):
            self.let_go(ticket)
        if self._timer is not None:
            self._timer.cancel()
        await self.handshake.shut()

    def _count(self, ticket: Ticket) -> None:
        job, handoff = ticket.job, ticket.handoff
        self.requests_by_rank[job.rank] += 1
        prefill_rank = handoff.prefill_rank if isinstance(handoff, RoomHandoff) else None
        self.received.append(
            Received(
                ticket.rid,
                job.rank,
                job.role or self.role,
                prefill_rank,
                ticket.room,
                job.prompt_tokens,
                job.output_tokens,
            )
        )

    def _close(self, ticket: Ticket) -> None:
        del self._tickets[ticket.job]
        self._stop_clock(ticket)
        self.handshake.closed(ticket)
        self.model.release(ticket.job, self.now_s())
        ticket.post()

    @property
    def live_requests(self) -> int:
        """Prompts that are not answered yet."""
        return len(self._tickets)

    # For handshakes.

    def is_live(self, ticket: Ticket) -> bool:
        """Whether its request is still here."""
        return self._tickets.get(ticket.job) is ticket

    def expect(self, ticket: Ticket, timeout_s: float, on_timeout: Callable[[Ticket], None]) -> None:
        """Call back unless something happens to the prompt within ``timeout_s`` of engine time."""
        self._stop_clock(ticket)
        ticket.timeout = self._loop.call_later(timeout_s / self.settings.speed, on_timeout, ticket)

    def expected(self, ticket: Ticket) -> None:
        """Take note that what was expected has come."""
        self._stop_clock(ticket)

    def meet(self, ticket: Ticket) -> None:
        """Prefill: let a prompt in that waited for its decode side."""
        self.model.meet(ticket.job, self.now_s())
        self._pump()

    def start_transfer(self, ticket: Ticket) -> None:
        """Decode: let the KV of a reserved prompt begin to move."""
        self.model.start_transfer(ticket.job, self.now_s())
        self._pump()

    def recompute(self, ticket: Ticket) -> None:
        """Decode: give up on the KV of a prefill side and read the prompt here, as a new job of the same rank."""
        if not self.is_live(ticket):
            return
        old = ticket.job
        self._stop_clock(ticket)
        del self._tickets[old]
        self.model.release(old, self.now_s())
        job = Job(old.rank, old.prompt_tokens, old.output_tokens, old.blocks, old.interval)
        job.role = Role.REGULAR
        ticket.job = job
        self._tickets[job] = ticket
        self.recomputed_requests += 1
        self.model.submit(job, self.now_s())
        self._pump()

    def finish(self, ticket: Ticket) -> None:
        """End a prompt well."""
        if self.is_live(ticket):
            self._finish(ticket)
            self._pump()

    def hold(self, ticket: Ticket, timeout_s: float, on_let_go: Callable[[Ticket], None]) -> None:
        """Prefill: answer the request, and keep its KV until ``let_go``; after ``timeout_s`` it counts as stranded."""
        del self._tickets[ticket.job]
        self._held[ticket.job] = ticket
        ticket.finish = _finish_reason(ticket)
        ticket.post()

        def strand(ticket: Ticket) -> None:
            self.stranded_requests += 1
            self.let_go(ticket)
            on_let_go(ticket)

        self.expect(ticket, timeout_s, strand)

    def let_go(self, ticket: Ticket) -> None:
        """Prefill: free the KV of a held prompt."""
        if self._held.pop(ticket.job, None) is not None:
            self._stop_clock(ticket)
            self.model.release(ticket.job, self.now_s())
            self._pump()

    def fail(self, ticket: Ticket, error: EngineError) -> None:
        """End a prompt with an error."""
        if self.is_live(ticket):
            ticket.error = error
            self._close(ticket)
            self._pump()

    def _finish(self, ticket: Ticket) -> None:
        ticket.finish = _finish_reason(ticket)
        self._close(ticket)

    @staticmethod
    def _stop_clock(ticket: Ticket) -> None:
        if ticket.timeout is not None:
            ticket.timeout.cancel()
            ticket.timeout = None

    # Time.

    def _pump(self) -> None:
        if self._is_pumping:
            return
        self._is_pumping = True
        try:
            while events := self.model.advance(self.now_s()):
                for event in events:
                    self._happened(event)
        finally:
            self._is_pumping = False
        self._pumped_s = self._loop.time()
        self._arm()

    def _arm(self) -> None:
        next_s = self.model.next_event_s
        due_s = self._start_s + next_s / self.settings.speed
        if next_s < inf:
            due_s = max(due_s, self._pumped_s + self.settings.tick_s)
        if due_s == self._timer_s:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_s = due_s
        if due_s < inf:
            self._timer = self._loop.call_at(due_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._timer_s = inf
        self._pump()

    def _happened(self, event: Event) -> None:
        ticket = self._tickets.get(event.job)
        if ticket is None:
            return
        ticket.tokens = max(ticket.tokens, event.tokens)
        if event.kind is EventKind.PROGRESS:
            ticket.post()
        elif event.kind is EventKind.FINISHED:
            self._finish(ticket)
        elif event.kind is EventKind.PREFILLED:
            if ticket.handoff is None:
                self._finish(ticket)
            else:
                self.handshake.prefilled(ticket)
        elif event.kind is EventKind.RESERVED:
            if ticket.handoff is None:
                self.model.start_transfer(ticket.job, self.now_s())
            else:
                self.handshake.reserved(ticket)
        elif ticket.handoff is not None:
            self.handshake.received(ticket)


def _finish_reason(ticket: Ticket) -> str:
    return "stop" if ticket.stops_early else "length"
