"""The PD handshake between emulated engines, enforced: who wants the KV of which room from which rank.

The decode side opens one TCP connection to a prefill's bootstrap port and keeps it; messages are JSON lines.
Decode: ``want`` (room, prefill rank or null for room mod dp_size, digest of the prompt), ``done``, ``drop``.
Prefill: ``ready`` (KV may move), ``fail`` (it never will).
A request that ends on the prefill side sends nothing: the decode side waits on, as engines do. When the whole prefill
is gone, it gives up after a while.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Generic, Literal, Protocol, TypeVar, cast

import msgspec

from pdrouter.sim.emulator_settings import EngineError

_ROOMS_REMEMBERED = 1 << 17
_TRIES = 15
"""How often a decode side tries to reach a prefill. Source: seen on SGLang 0.5.23."""

_MAX_LINE_BYTES = 1 << 16


class KvMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the handshake."""

    op: Literal["want", "done", "drop", "ready", "fail"]
    room: int
    rank: int | None = None
    digest: int = 0
    cached_tokens: int = 0
    message: str = ""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(KvMessage)


class KvConnection(asyncio.Protocol):
    """One side of a handshake connection; ``on_message`` gets every line, ``on_lost`` its end."""

    def __init__(
        self,
        on_message: Callable[["KvConnection", KvMessage], None],
        on_lost: Callable[["KvConnection"], None],
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._pending: list[bytes] = []
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send what was said before there was a connection."""
        # uvloop's transports don't derive from asyncio's, so the type can't be tested.
        self._transport = cast("asyncio.Transport", transport)
        if self._pending:
            self._transport.write(b"".join(self._pending))
            self._pending.clear()

    def data_received(self, data: bytes) -> None:
        """Split into lines; a line that isn't a message ends the connection."""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        try:
            for line in lines:
                self._on_message(self, _decoder.decode(line))
        except msgspec.MsgspecError:
            self.close()
        if len(self._buffer) > _MAX_LINE_BYTES:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (asyncio's signature)
        """Tell the owner."""
        self._on_lost(self)

    def send(self, message: KvMessage) -> None:
        """Send, or keep until connected."""
        line = _encoder.encode(message) + b"\n"
        if self._transport is None:
            self._pending.append(line)
        else:
            self._transport.write(line)

    def close(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()


class PrefillLeg(Protocol):
    """What the rooms must know of a prefill request."""

    digest: int

    @property
    def room(self) -> int | None:
        """Where the legs meet."""

    @property
    def rank(self) -> int:
        """DP rank that serves it."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache."""


LegT = TypeVar("LegT", bound=PrefillLeg)


class _Want(msgspec.Struct, frozen=True):
    peer: KvConnection
    rank: int | None
    digest: int


class _Room(Generic[LegT]):
    __slots__ = ("is_ready", "leg", "want")

    def __init__(self) -> None:
        self.leg: LegT | None = None
        self.want: _Want | None = None
        self.is_ready = False


class RoomBook:
    """Rooms used so far, the newest ``2**17`` of them: a room used twice is an error."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, None] = OrderedDict()

    def add(self, room: int) -> None:
        """Note a room. Raises: ``EngineError`` if it was used before."""
        if room in self._seen:
            raise EngineError(500, "room_reused", f"bootstrap_room {room} reused: the scheduler would crash")
        self._seen[room] = None
        if len(self._seen) > _ROOMS_REMEMBERED:
            self._seen.popitem(last=False)


class PrefillRooms(Generic[LegT]):
    """Prefill side: joins the request of a room with the decode side that wants its KV.

    ``asked_rank`` is the rank that a decode side asks which wasn't told the prefill's; ``None`` if it never finds it.
    """

    def __init__(
        self,
        dp_size: int,
        asked_rank: Callable[[LegT], int | None],
        *,
        on_met: Callable[[LegT], None],
        on_done: Callable[[LegT], None],
        on_failed: Callable[[LegT | None, EngineError], None],
    ) -> None:
        self._dp_size = dp_size
        self._asked_rank = asked_rank
        self._on_met = on_met
        self._on_done = on_done
        self._on_failed = on_failed
        self._book = RoomBook()
        self._rooms: dict[int, _Room[LegT]] = {}
        self._peers: set[KvConnection] = set()

    def accept(self) -> KvConnection:
        """Protocol factory of the bootstrap port."""
        peer = KvConnection(self._on_message, self._lost)
        self._peers.add(peer)
        return peer

    def live(self) -> list[int]:
        """Rooms with a live prefill request."""
        return [number for number, room in self._rooms.items() if room.leg is not None]

    def wanted(self) -> list[int]:
        """Rooms whose decode side is waiting or receiving."""
        return [number for number, room in self._rooms.items() if room.want is not None]

    def open(self, leg: LegT) -> None:
        """Note that a prefill request has arrived. Raises: ``EngineError`` if its room was used before."""
        number = _room_number(leg)
        self._book.add(number)
        self._rooms.setdefault(number, _Room()).leg = leg

    def meet(self, leg: LegT) -> None:
        """Join an opened room with the decode side that is waiting for it, if there is one."""
        room = self._rooms.get(_room_number(leg))
        if room is not None and room.want is not None:
            self._match(room, room.want)

    def prefilled(self, leg: LegT) -> None:
        """Offer the KV: it is there."""
        room = self._rooms.get(_room_number(leg))
        if room is not None:
            room.is_ready = True
            self._offer(room)

    def close(self, leg: LegT) -> None:
        """Forget the request; a decode side that waits for it is told nothing."""
        number = _room_number(leg)
        room = self._rooms.get(number)
        if room is not None:
            room.leg = None
            room.is_ready = False
            if room.want is None:
                del self._rooms[number]

    def shut(self) -> None:
        """End all connections."""
        for peer in list(self._peers):
            peer.close()

    def _on_message(self, peer: KvConnection, message: KvMessage) -> None:
        if message.op == "want":
            self._wanted(peer, message)
        elif message.op == "drop":
            self._dropped(message.room, peer)
        elif message.op == "done":
            room = self._rooms.get(message.room)
            if room is not None and room.leg is not None and room.want and room.want.peer is peer:
                del self._rooms[message.room]
                self._on_done(room.leg)

    def _wanted(self, peer: KvConnection, message: KvMessage) -> None:
        want = _Want(peer, message.rank, message.digest)
        room = self._rooms.get(message.room)
        if message.rank is not None and not 0 <= message.rank < self._dp_size:
            text = f"prefill rank {message.rank} isn't there (dp_size {self._dp_size})"
            self._refuse(None, want, message.room, EngineError(500, "no_such_prefill_rank", text))
        elif room is not None and room.want is not None:
            error = EngineError(500, "room_reused", f"bootstrap_room {message.room} is wanted twice")
            self._refuse(None, want, message.room, error)
        else:
            room = self._rooms.setdefault(message.room, _Room())
            room.want = want
            if room.leg is not None:
                self._match(room, want)

    def _match(self, room: _Room[LegT], want: _Want) -> None:
        leg = room.leg
        if leg is None:
            return
        number = _room_number(leg)
        asked = self._asked_rank(leg) if want.rank is None else want.rank
        if asked is None:
            return  # the decode side never learns whom to ask
        if asked != leg.rank:
            room.want = None
            text = f"KV of bootstrap_room {number} is on prefill rank {leg.rank}, decode asked rank {asked}"
            self._refuse(None, want, number, EngineError(500, "wrong_prefill_rank", text))
        elif want.digest != leg.digest:
            del self._rooms[number]
            text = f"the legs of bootstrap_room {number} have different prompts"
            self._refuse(leg, want, number, EngineError(500, "prompt_mismatch", text))
        else:
            self._on_met(leg)
            self._offer(room)

    def _offer(self, room: _Room[LegT]) -> None:
        if room.leg is not None and room.want is not None and room.is_ready:
            number = _room_number(room.leg)
            room.want.peer.send(KvMessage("ready", number, cached_tokens=room.leg.cached_tokens))

    def _refuse(self, leg: LegT | None, want: _Want, room: int, error: EngineError) -> None:
        want.peer.send(KvMessage("fail", room, message=f"{error.code}: {error.message}"))
        self._on_failed(leg, error)

    def _dropped(self, number: int, peer: KvConnection) -> None:
        room = self._rooms.get(number)
        if room is not None and room.want is not None and room.want.peer is peer:
            room.want = None
            if room.leg is None:
                del self._rooms[number]

    def _lost(self, peer: KvConnection) -> None:
        self._peers.discard(peer)
        for number in list(self._rooms):
            self._dropped(number, peer)


def _room_number(leg: PrefillLeg) -> int:
    assert leg.room is not None  # noqa: S101 (only legs with a room come here)
    return leg.room


class DecodeLinks:
    """Decode side: one kept connection per prefill bootstrap address, shared by all rooms.

    ``patience_s``: real seconds until it gives up on an address where nobody listens, or listens any more. Source:
    SGLang 0.5.6 to 0.5.23, ``disaggregation/common/conn.py`` (tries of a handshake, heartbeats).
    """

    def __init__(
        self,
        patience_s: float,
        *,
        on_ready: Callable[[KvMessage], None],
        on_failed: Callable[[int, EngineError], None],
    ) -> None:
        self._patience_s = patience_s
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._links: dict[tuple[str, int], KvConnection] = {}
        self._rooms: dict[int, tuple[str, int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, address: tuple[str, int], room: int) -> None:
        """Connect to where the room's prefill is said to be; a refusal comes through ``on_failed``."""
        self._rooms[room] = address
        if address not in self._links:
            link = KvConnection(self._on_message, self._lost)
            self._links[address] = link
            self._start(self._connect(address, link))

    def send(self, message: KvMessage) -> None:
        """Send to the prefill of the message's room; without a connection the message is lost."""
        address = self._rooms.get(message.room)
        link = self._links.get(address) if address is not None else None
        if link is not None:
            link.send(message)

    def close(self, room: int) -> None:
        """Forget a room."""
        self._rooms.pop(room, None)

    async def shut(self) -> None:
        """End all connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in list(self._links.values()):
            link.close()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, address: tuple[str, int], link: KvConnection) -> None:
        host, port = address
        for left in reversed(range(_TRIES)):
            try:
                await asyncio.get_running_loop().create_connection(lambda: link, host.strip("[]"), port)
            except (OSError, OverflowError) as error:
                if left:
                    await asyncio.sleep(self._patience_s / _TRIES)
                    continue
                self._links.pop(address, None)
                text = f"can't reach the prefill bootstrap server at {host}:{port}: {error}"
                self._fail(
                    self._rooms_at(address),
                    EngineError(500, "bootstrap_unreachable", f"Decode handshake failed: {text}"),
                )
            return

    def _rooms_at(self, address: tuple[str, int]) -> list[int]:
        return [room for room, target in self._rooms.items() if target == address]

    def _fail(self, rooms: list[int], error: EngineError) -> None:
        for room in rooms:
            if room in self._rooms:
                self._on_failed(room, error)

    async def _outlive(self, address: tuple[str, int], rooms: list[int]) -> None:
        """Fail what waits for a prefill that is gone, unless another listens there by then."""
        await asyncio.sleep(self._patience_s)
        host, port = address
        try:
            transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, host.strip("[]"), port)
        except (OSError, OverflowError):
            text = f"Lost connection with prefill instance (bootstrap_addr: {host}:{port})"
            self._fail(rooms, EngineError(500, "prefill_lost", f"Decode transfer failed: {text}"))
        else:
            transport.close()

    def _on_message(self, _link: KvConnection, message: KvMessage) -> None:
        if message.op == "ready":
            self._on_ready(message)
        elif message.op == "fail":
            code, _, text = message.message.partition(": ")
            self._on_failed(message.room, EngineError(500, code, f"Decode transfer failed: {text}"))

    def _lost(self, link: KvConnection) -> None:
        for address in [address for address, other in self._links.items() if other is link]:
            del self._links[address]
            if rooms := self._rooms_at(address):
                self._start(self._outlive(address, rooms))
