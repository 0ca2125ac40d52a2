"""Drives the engine model in real time and joins it with the handshake: requests in, progress out.

Knows tickets, timers and rooms, but no HTTP. One timer serves all ranks. The model's clock is the event
loop's, times ``speed``.
"""

import asyncio
import sys
from collections import Counter, deque
from math import inf

from pdrouter.sim.emulator_settings import EmulatorSettings, EngineError
from pdrouter.sim.engine_model import EngineModel, ModelSettings
from pdrouter.sim.handshake import DecodeLinks, KvMessage, PrefillRooms, RoomBook
from pdrouter.sim.job import Event, EventKind, Job, Phase, RankLoad, Role
from pdrouter.sim.profiles import load_profile
from pdrouter.sim.text import BLOCK_TOKENS
from pdrouter.sim.ticket import EngineSnapshot, Received, Ticket

_MESSAGES_KEPT = 100
_RECEIVED_KEPT = 1000


class LiveEngine:
    """An engine without HTTP. Must be made and used inside a running event loop."""

    def __init__(self, settings: EmulatorSettings) -> None:
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
                waits_for_decode=settings.waits_for_decode,
            )
        )
        self.errors: Counter[str] = Counter()
        self.error_messages: deque[str] = deque(maxlen=_MESSAGES_KEPT)
        self.received: deque[Received] = deque(maxlen=_RECEIVED_KEPT)
        self.requests_by_rank = [0] * settings.dp_size
        self.rooms: PrefillRooms[Ticket] = PrefillRooms(
            settings.dp_size, on_met=self._met, on_done=self._sent, on_failed=self._refused
        )
        self._links = DecodeLinks(on_ready=self._ready, on_failed=self._link_failed)
        self._decode_book = RoomBook()
        self._decode_rooms: dict[int, Ticket] = {}
        self._tickets: dict[Job, Ticket] = {}
        self._loop = asyncio.get_running_loop()
        self._start_s = self._loop.time()
        self._pumped_s = -inf
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = inf
        self._is_pumping = False
        self._next_rank = 0

    def now_s(self) -> float:
        """Engine time."""
        return (self._loop.time() - self._start_s) * self.settings.speed

    def default_rank(self, room: int | None) -> int:
        """Rank of a request that names none: by room on the prefill side, else in turn."""
        if self.role is Role.PREFILL and room is not None:
            return room % self.settings.dp_size
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
            raise EngineError(400, "too_long", text)
        if ticket.room is not None:
            self._open_room(ticket, ticket.room)
        ticket.created_s = self._loop.time()
        self._tickets[job] = ticket
        self._count(ticket)
        self.model.submit(job, self.now_s())
        if ticket.room is not None and self.role is Role.PREFILL:
            self.rooms.meet(ticket)
        self._pump()

    def abort(self, ticket: Ticket) -> None:
        """End a request and free all it holds; its reply says so."""
        if self._tickets.get(ticket.job) is ticket:
            ticket.tokens = max(ticket.tokens, self.model.generated(ticket.job, self.now_s()))
            ticket.finish = "abort"
            self._close(ticket)
            self._pump()

    def abort_matching(self, rid: str, *, is_all: bool) -> int:
        """Abort the requests whose id begins with ``rid``, or all; returns how many."""
        found = [t for t in self._tickets.values() if is_all or (rid and t.rid.startswith(rid))]
        for ticket in found:
            self.abort(ticket)
        return len(found)

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
            rooms=self.rooms.live() + list(self._decode_rooms),
            wanted_rooms=self.rooms.wanted(),
            errors=dict(self.errors),
            error_messages=list(self.error_messages),
            total_requests=sum(self.requests_by_rank),
        )

    async def shut(self) -> None:
        """End timers and connections."""
        for ticket in list(self._tickets.values()):
            self.abort(ticket)
        if self._timer is not None:
            self._timer.cancel()
        self.rooms.shut()
        await self._links.shut()

    def _open_room(self, ticket: Ticket, room: int) -> None:
        if self.role is Role.PREFILL:
            self.rooms.open(ticket)
            if self.settings.waits_for_decode:
                self._expect_other_leg(ticket)
        else:
            self._decode_book.add(room)
            self._decode_rooms[room] = ticket
            if ticket.address is not None:
                self._links.open(ticket.address, room)

    def _expect_other_leg(self, ticket: Ticket) -> None:
        timeout_s = self.settings.handshake_timeout_s / self.settings.speed
        ticket.timeout = self._loop.call_later(timeout_s, self._timed_out, ticket)

    def _count(self, ticket: Ticket) -> None:
        job = ticket.job
        self.requests_by_rank[job.rank] += 1
        self.received.append(
            Received(ticket.rid, job.rank, ticket.prefill_rank, ticket.room, job.prompt_tokens, job.output_tokens)
        )

    def _close(self, ticket: Ticket) -> None:
        self._tickets.pop(ticket.job, None)
        if ticket.timeout is not None:
            ticket.timeout.cancel()
        if ticket.room is not None:
            if self.role is Role.PREFILL:
                self.rooms.close(ticket)
            elif self._decode_rooms.pop(ticket.room, None) is not None:
                if ticket.job.phase in {Phase.PREALLOC, Phase.TRANSFER}:
                    self._links.send(KvMessage("drop", ticket.room))
                self._links.close(ticket.room)
        self.model.release(ticket.job, self.now_s())
        ticket.post()

    def _fail(self, ticket: Ticket, error: EngineError) -> None:
        if self._tickets.get(ticket.job) is ticket:
            ticket.error = error
            self._close(ticket)
            self._pump()

    def _timed_out(self, ticket: Ticket) -> None:
        error = EngineError(500, "handshake_timeout", f"KV transfer of room {ticket.room} timed out")
        self.count_error(error)
        self._fail(ticket, error)

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
            if ticket.room is None:
                self._finish(ticket)
            else:
                if ticket.timeout is None:
                    self._expect_other_leg(ticket)
                self.rooms.prefilled(ticket)
        elif event.kind is EventKind.RESERVED:
            self._want(ticket)
        else:
            self._kv_received(ticket)

    def _finish(self, ticket: Ticket) -> None:
        ticket.finish = "stop" if ticket.stops_early else "length"
        self._close(ticket)

    # Handshake, decode side.

    def _want(self, ticket: Ticket) -> None:
        if ticket.room is None or ticket.address is None:
            self.model.start_transfer(ticket.job, self.now_s())
        else:
            self._expect_other_leg(ticket)
            self._links.send(KvMessage("want", ticket.room, ticket.prefill_rank, ticket.digest))

    def _ready(self, message: KvMessage) -> None:
        ticket = self._decode_rooms.get(message.room)
        if ticket is not None:
            ticket.remote_cached_tokens = message.cached_tokens
            self.model.start_transfer(ticket.job, self.now_s())
            self._pump()

    def _kv_received(self, ticket: Ticket) -> None:
        if ticket.timeout is not None:
            ticket.timeout.cancel()
        if ticket.room is not None:
            self._links.send(KvMessage("done", ticket.room))

    def _link_failed(self, room: int, error: EngineError) -> None:
        ticket = self._decode_rooms.get(room)
        if ticket is not None:
            self.count_error(error)
            self._fail(ticket, error)

    # Handshake, prefill side.

    def _met(self, ticket: Ticket) -> None:
        if ticket.timeout is not None and ticket.job.phase is Phase.BOOTSTRAP:
            ticket.timeout.cancel()
            ticket.timeout = None
        self.model.meet(ticket.job, self.now_s())
        self._pump()

    def _sent(self, ticket: Ticket) -> None:
        self._finish(ticket)
        self._pump()

    def _refused(self, ticket: Ticket | None, error: EngineError) -> None:
        self.count_error(error)
        if ticket is not None:
            self._fail(ticket, error)
