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
            engine.settings.dp_size, self._asked_rank, on_met=self._met, on_done=engine.finish, on_failed=self._refused
        )
        self._links = DecodeLinks(
            engine.settings.prefill_patience_s / engine.settings.speed,
            on_ready=self._ready,
            on_failed=self._link_failed,
        )
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
        """Join the room with a decode side that is waiting, unless room and rank don't agree."""
        if not self._is_prefill or ticket.room is None:
            return
        conflict = self._conflict(ticket)
        if conflict is not None:
            self._engine.count_error(conflict)
            self._engine.fail(ticket, conflict)  # the decode side isn't told, and waits
        else:
            self._prefills.meet(ticket)

    def _conflict(self, ticket: Ticket) -> EngineError | None:
        """Source: ``disaggregation/common/conn.py``, ``CommonKVSender.__init__``."""
        settings, room = self._settings, ticket.room
        if room is None or not (settings.sglang.compares_rooms and settings.follows_rooms) or self._is_exempt(ticket):
            return None
        size, own = settings.dp_size, self._rank_in_group(ticket)
        if size == 1 or own == room % size:
            return None
        text = (
            f"Prefill bootstrap failed for request rank=0 req.rid={ticket.rid!r} req.bootstrap_room={room} with "
            f"exception KVTransferError(bootstrap_room={room}): follow_bootstrap_room conflict: dispatched to dp_rank "
            f"{own} but bootstrap_room {room} implies dp_rank {room % size}. Set "
            "SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK=1 to allow mixed routing."
        )
        return EngineError(500, "room_conflict", text)

    def _rank_in_group(self, ticket: Ticket) -> int:
        """What a rank calls itself inside its tensor-parallel group: all replicas are 0."""
        return ticket.rank if self._settings.dp_attention else 0

    def _asked_rank(self, ticket: Ticket) -> int | None:
        """Source: ``disaggregation/decode.py``, ``_resolve_prefill_dp_rank``, and what the prefill registers."""
        settings = self._settings
        if ticket.room is None or not settings.sglang.takes_routed or settings.follows_rooms:
            return (ticket.room or 0) % settings.dp_size
        return None if self._is_exempt(ticket) else self._rank_in_group(ticket)

    def _is_exempt(self, ticket: Ticket) -> bool:
        """Whether a prefill neither compares its rank nor registers it, because the request names it."""
        handoff = ticket.handoff
        is_named = isinstance(handoff, RoomHandoff) and handoff.prefill_rank is not None
        return self._settings.sglang.exempts_named and is_named

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
