"""SGLang's handshake on a live engine: rooms on the prefill side, links on the decode side (``handshake.py``)."""

from pdrouter.sim.call import RoomHandoff
from pdrouter.sim.emulator_kind import Handshake, Ports
from pdrouter.sim.emulator_settings import EngineError
from pdrouter.sim.handshake import DecodeLinks, KvMessage, PrefillRooms, RoomBook
from pdrouter.sim.job import Phase, Role
from pdrouter.sim.live_engine import LiveEngine
from pdrouter.sim.ticket import Ticket


class SglangHandshake(Handshake):
    """Both legs start at once and meet in a room; the prefill leg is answered when its KV has been fetched."""

    def __init__(self, engine: LiveEngine) -> None:
        self._engine = engine
        self._settings = engine.settings
        self._is_prefill = engine.role is Role.PREFILL
        self._prefills: PrefillRooms[Ticket] = PrefillRooms(
            engine.settings.dp_size, on_met=self._met, on_done=engine.finish, on_failed=self._refused
        )
        self._links = DecodeLinks(on_ready=self._ready, on_failed=self._link_failed)
        self._book = RoomBook()
        self._decodes: dict[int, Ticket] = {}

    async def start(self, ports: Ports) -> None:
        """Open the bootstrap port of a prefill."""
        if self._is_prefill:
            self.port = await ports.listen(self._prefills.accept, self._settings.bootstrap_port)

    def opened(self, ticket: Ticket) -> None:
        """Open the room. Raises: ``EngineError`` if it was used before."""
        handoff = ticket.handoff
        if not isinstance(handoff, RoomHandoff):
            return
        if self._is_prefill:
            self._prefills.open(ticket)
            if self._settings.waits_for_decode:
                self._expect_other_leg(ticket)
        else:
            self._book.add(handoff.room)
            self._decodes[handoff.room] = ticket
            self._links.open(handoff.address, handoff.room)

    def submitted(self, ticket: Ticket) -> None:
        """Join the room with a decode side that is waiting."""
        if self._is_prefill and ticket.room is not None:
            self._prefills.meet(ticket)

    def prefilled(self, ticket: Ticket) -> None:
        """Offer the KV."""
        if ticket.timeout is None:
            self._expect_other_leg(ticket)
        self._prefills.prefilled(ticket)

    def reserved(self, ticket: Ticket) -> None:
        """Ask the room's prefill for the KV."""
        handoff = ticket.handoff
        if isinstance(handoff, RoomHandoff):
            self._expect_other_leg(ticket)
            self._links.send(KvMessage("want", handoff.room, handoff.prefill_rank, ticket.digest))

    def received(self, ticket: Ticket) -> None:
        """Let the prefill go."""
        self._engine.expected(ticket)
        if ticket.room is not None:
            self._links.send(KvMessage("done", ticket.room))

    def closed(self, ticket: Ticket) -> None:
        """Leave the room; the other side is told of a decode that leaves, never of a prefill."""
        room = ticket.room
        if room is None:
            return
        if self._is_prefill:
            self._prefills.close(ticket)
        elif self._decodes.pop(room, None) is not None:
            if ticket.job.phase in {Phase.PREALLOC, Phase.TRANSFER}:
                self._links.send(KvMessage("drop", room))
            self._links.close(room)

    def rooms(self) -> list[int]:
        """Rooms with a live request here."""
        return self._prefills.live() + list(self._decodes)

    def wanted_rooms(self) -> list[int]:
        """Rooms whose decode side waits or receives."""
        return self._prefills.wanted()

    async def shut(self) -> None:
        """End all connections."""
        self._prefills.shut()
        await self._links.shut()

    def _expect_other_leg(self, ticket: Ticket) -> None:
        self._engine.expect(ticket, self._settings.handshake_timeout_s, self._timed_out)

    def _timed_out(self, ticket: Ticket) -> None:
        error = EngineError(500, "handshake_timeout", f"KV transfer of room {ticket.room} timed out")
        self._engine.count_error(error)
        self._engine.fail(ticket, error)

    # Decode side.

    def _ready(self, message: KvMessage) -> None:
        ticket = self._decodes.get(message.room)
        if ticket is not None:
            ticket.remote_cached_tokens = message.cached_tokens
            self._engine.start_transfer(ticket)

    def _link_failed(self, room: int, error: EngineError) -> None:
        ticket = self._decodes.get(room)
        if ticket is not None:
            self._engine.count_error(error)
            self._engine.fail(ticket, error)

    # Prefill side.

    def _met(self, ticket: Ticket) -> None:
        if ticket.job.phase is Phase.BOOTSTRAP:
            self._engine.expected(ticket)
        self._engine.meet(ticket)

    def _refused(self, ticket: Ticket | None, error: EngineError) -> None:
        self._engine.count_error(error)
        if ticket is not None:
            self._engine.fail(ticket, error)
