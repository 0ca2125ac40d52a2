"""vLLM's P2pNcclConnector: the request id names both sides, and the prefill puts its KV to the decode side.

Source: vllm/distributed/kv_transfer/kv_connector/v1/p2p/p2p_nccl_connector.py (2025-2026).
"""

import asyncio
import re

import msgspec

from pdrouter.sim.call import Handoff
from pdrouter.sim.emulator_kind import Ports
from pdrouter.sim.emulator_settings import EngineError
from pdrouter.sim.job import Role
from pdrouter.sim.live_engine import LiveEngine
from pdrouter.sim.ticket import Ticket
from pdrouter.sim.vllm.connector import Connector, LegRequest, UsedIds, check_prefill, refuse_params
from pdrouter.sim.vllm.kv_stream import Answer, KvStream, KvTasks, connect

_REQUEST_ID = re.compile(r"___prefill_addr_(.+):(\d+)___decode_addr_(.+):(\d+)_([0-9a-f]{32})")


class _Pair(Handoff, frozen=True):
    """Both sides of a request."""

    request_id: str
    prefill: tuple[str, int]
    decode: tuple[str, int]


class _Put(msgspec.Struct, frozen=True):
    """KV of one prompt. ``key``: request id and place of the prompt in it."""

    key: str
    digest: int


class P2pNcclConnector(Connector):
    """Serial: the prefill leg is read to its end, its KV is with the decode side by then or soon."""

    def __init__(self, engine: LiveEngine) -> None:
        super().__init__(engine)
        self._used = UsedIds("request_id")
        self._waiting: dict[str, Ticket] = {}
        self._arrived: dict[str, _Put] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks = KvTasks()

    async def start(self, ports: Ports) -> None:
        """Open what would be the ZMQ port."""
        self.port = await ports.listen(self._tasks.server(self._serve), self.settings.bootstrap_port)

    async def shut(self) -> None:
        """End all transfers."""
        for timer in self._timers.values():
            timer.cancel()
        await self._tasks.shut()

    def place(self, leg: LegRequest) -> tuple[Role, Handoff | None]:
        """Read the request id. Raises: ``EngineError`` if it doesn't name this engine."""
        refuse_params(leg)
        match = _REQUEST_ID.fullmatch(leg.request_id)
        if match is None:
            text = f"Request id {leg.request_id} does not contain hostname and port"
            raise EngineError(400, "bad_request_id", text)
        pair = _Pair(leg.request_id, (match[1], int(match[2])), (match[3], int(match[4])))
        is_prefill = self.engine.role is Role.PREFILL
        named = pair.prefill if is_prefill else pair.decode
        own = (self.settings.host, self.port)
        if named != own:
            text = f"the {self.engine.role} address is {own[0]}:{own[1]}, the request id names {named[0]}:{named[1]}"
            raise EngineError(400, "wrong_address", text)
        if is_prefill:
            check_prefill(leg)
        self._used.add(leg.request_id)
        return self.engine.role, pair

    # Prefill side.

    def prefilled(self, ticket: Ticket) -> None:
        """Answer, and put the KV to the decode side."""
        self.hold(ticket)
        if isinstance(ticket.handoff, _Pair):
            self._tasks.start(self._put(ticket, ticket.handoff))

    async def _put(self, ticket: Ticket, pair: _Pair) -> None:
        host, port = pair.decode
        try:
            stream = await connect(host, port)
        except (OSError, OverflowError) as error:
            text = f"can't reach the decode side at {host}:{port}: {error}"
            self.engine.count_error(EngineError(500, "decode_unreachable", text))
            self.engine.let_go(ticket)
            return
        try:
            stream.send(_Put(_key(ticket, pair), ticket.digest))
            await stream.receive(Answer)
            self.engine.let_go(ticket)
        finally:
            stream.abort()

    # Decode side.

    async def _serve(self, stream: KvStream) -> None:
        put = await stream.receive(_Put)
        if put is None:
            return
        ticket = self._waiting.pop(put.key, None)
        if ticket is not None:
            self._take(ticket, put)
        else:
            loop = asyncio.get_running_loop()
            self._arrived[put.key] = put
            timeout_s = self.settings.kv_hold_timeout_s / self.settings.speed
            self._timers[put.key] = loop.call_later(timeout_s, self._strand, put.key)
        stream.send(Answer())

    def reserved(self, ticket: Ticket) -> None:
        """Take the KV, or wait for it; after a while the prompt is read here."""
        if not isinstance(ticket.handoff, _Pair):
            return
        key = _key(ticket, ticket.handoff)
        put = self._arrived.pop(key, None)
        if put is not None:
            self._timers.pop(key).cancel()
            self._take(ticket, put)
        else:
            self._waiting[key] = ticket
            self.engine.expect(ticket, self.settings.handshake_timeout_s, self.engine.recompute)

    def closed(self, ticket: Ticket) -> None:
        """Wait no more."""
        super().closed(ticket)
        if isinstance(ticket.handoff, _Pair):
            self._waiting.pop(_key(ticket, ticket.handoff), None)

    def _take(self, ticket: Ticket, put: _Put) -> None:
        if ticket.job.role is not Role.DECODE:
            return  # it came too late
        if put.digest != ticket.digest:
            self.refuse(ticket, EngineError(500, "prompt_mismatch", f"the legs of {put.key} have different prompts"))
        else:
            self.take_remote(ticket, ticket.job.prompt_tokens - 1)

    def _strand(self, key: str) -> None:
        del self._arrived[key], self._timers[key]
        self.engine.stranded_requests += 1


def _key(ticket: Ticket, pair: _Pair) -> str:
    return f"{pair.request_id}-{ticket.index}"
