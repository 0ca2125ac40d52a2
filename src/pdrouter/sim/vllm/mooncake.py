"""vLLM's MooncakeConnector: both legs at once; the decode side finds the prefill by its bootstrap server.

Simplified against vLLM: KV moves when the decode side asks, not by a push of the prefill. Stricter: a wrong engine id
or a transfer id used twice is refused, where the real one waits for a timeout.
Source: vllm/distributed/kv_transfer/kv_connector/v1/mooncake (2026).
"""

import asyncio
import uuid
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from pdrouter.sim.call import Handoff
from pdrouter.sim.emulator_kind import Ports
from pdrouter.sim.emulator_settings import EngineError
from pdrouter.sim.faults import FaultRule
from pdrouter.sim.http_exchange import Exchange
from pdrouter.sim.job import Role
from pdrouter.sim.live_engine import LiveEngine
from pdrouter.sim.ticket import Ticket
from pdrouter.sim.vllm.connector import Connector, LegRequest, UsedIds, check_prefill, read_direction, read_text
from pdrouter.sim.vllm.kv_stream import Answer, Done, KvStream, KvTasks, connect


class _Send(Handoff, frozen=True):
    """A prefill leg."""

    transfer_id: str


class _Fetch(Handoff, frozen=True):
    """A decode leg."""

    transfer_id: str
    host: str
    port: int
    engine_id: str


class _Ask(msgspec.Struct, frozen=True):
    transfer_id: str
    engine_id: str
    digest: int


class _Engine(msgspec.Struct, frozen=True):
    """What a bootstrap server tells of one rank. ``worker_addr``: address by tensor- and pipeline-parallel rank."""

    engine_id: str
    worker_addr: dict[str, dict[str, str]]


class _Transfer:
    """A transfer of which one side is known at least; ``ready`` gets the prefill leg when its KV is there."""

    __slots__ = ("is_wanted", "leg", "ready")

    def __init__(self) -> None:
        self.leg: Ticket | None = None
        self.is_wanted = False
        self.ready: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()


class MooncakeConnector(Connector):
    """Concurrent: the legs share a transfer id that their router made."""

    def __init__(self, engine: LiveEngine) -> None:
        super().__init__(engine)
        self._engine_ids = [str(uuid.uuid4()) for _ in range(engine.settings.dp_size)]
        self._kv_port = 0
        self._used = UsedIds("transfer_id")
        self._transfers: dict[str, _Transfer] = {}
        self._fetches: dict[Ticket, asyncio.Event] = {}
        self._tasks = KvTasks()

    async def start(self, ports: Ports) -> None:
        """Open the bootstrap server of a prefill, and where it gives KV."""
        if self.engine.role is not Role.DECODE:
            self._kv_port = await ports.listen(self._tasks.server(self._serve), 0)
            self.port = await ports.serve({"/query": {"GET": self._query}}, self.settings.bootstrap_port)

    async def shut(self) -> None:
        """End all transfers."""
        await self._tasks.shut()

    def place(self, leg: LegRequest) -> tuple[Role, Handoff | None]:
        """Read ``kv_transfer_params``. Raises: ``EngineError``."""
        role = read_direction(leg, self.engine.role)
        if role is Role.REGULAR or leg.params is None:
            return role, None
        transfer_id = read_text(leg.params, "transfer_id")
        if role is Role.PREFILL:
            check_prefill(leg)
            return role, _Send(transfer_id)
        address = read_text(leg.params, "remote_bootstrap_addr")
        host, port = _read_address(address)
        return role, _Fetch(transfer_id, host, port, read_text(leg.params, "remote_engine_id"))

    def opened(self, ticket: Ticket) -> None:
        """Note the transfer id. Raises: ``EngineError`` if it was used before, by another prompt of the request too."""
        super().opened(ticket)
        handoff = ticket.handoff
        if isinstance(handoff, _Send | _Fetch):
            self._used.add(handoff.transfer_id)
        if isinstance(handoff, _Send):
            self._transfers.setdefault(handoff.transfer_id, _Transfer()).leg = ticket

    # Prefill side.

    async def _query(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        address = f"{self.settings.host}:{self._kv_port}"
        first = self.settings.dp_start_rank
        ranks = {str(first + i): _Engine(name, {"0": {"0": address}}) for i, name in enumerate(self._engine_ids)}
        await exchange.reply_json(200, ranks)

    def prefilled(self, ticket: Ticket) -> None:
        """Answer, hold the KV, and tell a decode side that waits."""
        self.hold(ticket)
        if isinstance(ticket.handoff, _Send):
            self._transfers[ticket.handoff.transfer_id].ready.set_result(ticket)

    def forget(self, ticket: Ticket) -> None:
        """Take note that the KV was never fetched."""
        if isinstance(ticket.handoff, _Send):
            self._transfers.pop(ticket.handoff.transfer_id, None)

    async def _serve(self, stream: KvStream) -> None:
        ask = await stream.receive(_Ask)
        if ask is None:
            return
        transfer = self._transfers.setdefault(ask.transfer_id, _Transfer())
        if transfer.is_wanted:
            self._refuse(stream, EngineError(500, "transfer_id_reused", f"{ask.transfer_id} is wanted twice"))
            return
        transfer.is_wanted = True
        done = asyncio.ensure_future(stream.receive(Done))
        try:
            either: set[asyncio.Future[Ticket] | asyncio.Future[Done | None]] = {transfer.ready, done}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if transfer.ready.done():
                await self._give(stream, ask, transfer.ready.result(), done)
        finally:
            done.cancel()
            transfer.is_wanted = False
            if transfer.leg is None:
                self._transfers.pop(ask.transfer_id, None)

    async def _give(self, stream: KvStream, ask: _Ask, leg: Ticket, done: "asyncio.Future[Done | None]") -> None:
        error = self._check(ask, leg)
        if error is not None:
            self._refuse(stream, error)
            return
        stream.send(Answer())
        if await done is not None:
            self._transfers.pop(ask.transfer_id, None)
            self.engine.let_go(leg)

    def _check(self, ask: _Ask, leg: Ticket) -> EngineError | None:
        own = self._engine_ids[leg.rank]
        if ask.engine_id != own:
            text = f"{ask.transfer_id} is on engine {own}, decode asked {ask.engine_id}"
            return EngineError(500, "wrong_engine_id", text)
        if ask.digest != leg.digest:
            return EngineError(500, "prompt_mismatch", f"the legs of {ask.transfer_id} have different prompts")
        return None

    def _refuse(self, stream: KvStream, error: EngineError) -> None:
        self.engine.count_error(error)
        stream.send(Answer(error.code, error.message))

    # Decode side.

    def reserved(self, ticket: Ticket) -> None:
        """Find the prefill and wait for its KV."""
        if isinstance(ticket.handoff, _Fetch):
            over = self._fetches[ticket] = asyncio.Event()
            self.expect_prefill(ticket)
            self._tasks.start(self._fetch(ticket, ticket.handoff, over))

    def received(self, ticket: Ticket) -> None:
        """Let the prefill go."""
        self._fetches[ticket].set()

    def closed(self, ticket: Ticket) -> None:
        """Forget the transfer; a prefill that was not done with is told nothing but the end of the connection."""
        super().closed(ticket)
        over = self._fetches.pop(ticket, None)
        if over is not None:
            over.set()
        if isinstance(ticket.handoff, _Send):
            self._transfers.pop(ticket.handoff.transfer_id, None)

    async def _fetch(self, ticket: Ticket, fetch: _Fetch, over: asyncio.Event) -> None:
        try:
            host, port = await self._find(fetch)
            stream = await connect(host, port)
        except EngineError as error:
            self.refuse(ticket, error)
            return
        except (OSError, OverflowError) as error:
            text = f"can't reach the bootstrap server at {fetch.host}:{fetch.port}: {error}"
            self.refuse(ticket, EngineError(500, "bootstrap_unreachable", text))
            return
        try:
            stream.send(_Ask(fetch.transfer_id, fetch.engine_id, ticket.digest))
            await self._receive(stream, ticket, over)
        finally:
            stream.abort()

    async def _receive(self, stream: KvStream, ticket: Ticket, over: asyncio.Event) -> None:
        answered = asyncio.ensure_future(stream.receive(Answer))
        ended = asyncio.ensure_future(over.wait())
        try:
            either: set[asyncio.Future[Answer | None] | asyncio.Future[Literal[True]]] = {answered, ended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            answer = answered.result() if answered.done() else None
            if answer is None:
                return  # the prompt is over, or the prefill is gone: the decode side waits on, as engines do
            if answer.code:
                self.refuse(ticket, EngineError(500, answer.code, f"KV transfer failed: {answer.message}"))
                return
            self.take_remote(ticket, ticket.job.prompt_tokens - 1)
            await over.wait()
            stream.send(Done())
            await stream.close()
        finally:
            answered.cancel()
            ended.cancel()

    async def _find(self, fetch: _Fetch) -> tuple[str, int]:
        """Ask the bootstrap server for the engine. Raises: ``EngineError``, ``OSError``."""
        reader, writer = await asyncio.open_connection(fetch.host.strip("[]"), fetch.port)
        try:
            head = f"GET /query HTTP/1.1\r\nHost: {fetch.host}:{fetch.port}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode())
            _, _, body = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
        try:
            ranks = msgspec.json.decode(body, type=dict[str, _Engine])
        except msgspec.MsgspecError as error:
            raise EngineError(500, "bootstrap_unreachable", f"no bootstrap server: {error}") from None
        for engine in ranks.values():
            if engine.engine_id == fetch.engine_id:
                host, _, port = engine.worker_addr["0"]["0"].rpartition(":")
                return host, int(port)
        raise EngineError(500, "wrong_engine_id", f"no rank of {fetch.host}:{fetch.port} is engine {fetch.engine_id}")


def _read_address(text: str) -> tuple[str, int]:
    try:
        address = urlsplit(text)
        host, port = address.hostname, address.port
    except ValueError:
        host = port = None
    if not host or not port or not text.startswith("http://"):
        raise EngineError(
            400, "bad_kv_transfer_params", f"remote_bootstrap_addr must be http://HOST:PORT, got {text!r}"
        )
    return host, port
