"""vLLM's NixlConnector: a prefill answers and holds its blocks, then the decode side pulls them.

Simplified against vLLM: one port for all ranks, and blocks are named but don't exist. Stricter: the decode leg must
bring back the whole object that the prefill gave, and a prompt that differs between the legs is refused.
Source: vllm/distributed/kv_transfer/kv_connector/v1/nixl_connector.py (2025-2026).
"""

import asyncio
import contextlib
import uuid
from collections.abc import Mapping
from itertools import islice

import msgspec

from pdrouter.sim.call import Handoff
from pdrouter.sim.emulator_kind import Ports
from pdrouter.sim.emulator_settings import EngineError
from pdrouter.sim.job import Role
from pdrouter.sim.live_engine import LiveEngine
from pdrouter.sim.text import BLOCK_TOKENS
from pdrouter.sim.ticket import Ticket
from pdrouter.sim.vllm.connector import Connector, LegRequest, check_prefill, read_direction, read_text
from pdrouter.sim.vllm.kv_stream import Answer, Done, KvStream, KvTasks, connect

_TELLS_CACHED = (0, 32)  # seen in 0.32; the first version that does is not known


class _Send(Handoff, frozen=True):
    """A prefill leg."""


class _Pull(Handoff, frozen=True):
    """A decode leg: the object that the prefill gave. ``readers``: samples that pull the same blocks."""

    host: str
    port: int
    request_id: str
    params: Mapping[str, object]
    readers: int


class _Ask(msgspec.Struct, frozen=True):
    """What a decode side says first. ``digest`` None: it gives the blocks up unread."""

    params: dict[str, object]
    digest: int | None
    readers: int


class _Held:
    __slots__ = ("readers", "ticket")

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.readers = 0


class NixlConnector(Connector):
    """Serial: the prefill's answer carries ``kv_transfer_params``, which go into the decode's request as they are."""

    is_nixl = True

    def __init__(self, engine: LiveEngine) -> None:
        super().__init__(engine)
        self._engine_id = str(uuid.uuid4())
        self._next_block = 1
        self._tells_cached = _is_at_least(engine.settings.version, _TELLS_CACHED)
        self._held: dict[str, _Held] = {}
        self._pulls: dict[Ticket, asyncio.Event] = {}
        self._tasks = KvTasks()

    async def start(self, ports: Ports) -> None:
        """Open the side channel."""
        self.port = await ports.listen(self._tasks.server(self._serve), self.settings.bootstrap_port)

    async def shut(self) -> None:
        """End all transfers."""
        await self._tasks.shut()

    def place(self, leg: LegRequest) -> tuple[Role, Handoff | None]:
        """Read ``kv_transfer_params``. Raises: ``EngineError``."""
        role = read_direction(leg, self.engine.role)
        if role is Role.PREFILL:
            check_prefill(leg)
            return role, _Send()
        if role is Role.DECODE and leg.params is not None:
            return role, _read_pull(leg.params, leg.prompts)
        return role, None

    # Prefill side.

    def prefilled(self, ticket: Ticket) -> None:
        """Answer with where the blocks are, and hold them."""
        ticket.handover = self._describe(ticket)
        self._held[ticket.rid] = _Held(ticket)
        self.hold(ticket)

    def forget(self, ticket: Ticket) -> None:
        """Take note that the blocks were never pulled."""
        self._held.pop(ticket.rid, None)
        self.expired_requests[ticket.rank] += 1

    def _describe(self, ticket: Ticket) -> dict[str, object]:
        count = -(-ticket.job.prompt_tokens // BLOCK_TOKENS)
        first, self._next_block = self._next_block, self._next_block + count
        cached = {"remote_prefill_cached_tokens": ticket.job.cached_tokens} if self._tells_cached else {}
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(first, first + count))],
            "remote_engine_id": self._rank_id(ticket.rank),
            "remote_request_id": ticket.rid,
            "remote_host": self.settings.host,
            "remote_port": self.port,
            "tp_size": self.engine.profile.tp,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": ticket.job.prompt_tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            **cached,
        }

    def _rank_id(self, rank: int) -> str:
        return self._engine_id if self.settings.dp_size == 1 else f"{self._engine_id}_dp{rank}"

    async def _serve(self, stream: KvStream) -> None:
        ask = await stream.receive(_Ask)
        if ask is None:
            return
        held = self._held.get(str(ask.params.get("remote_request_id")))
        error = self._check(held, ask)
        if error is not None or held is None:
            if error is not None and ask.digest is not None:
                self.engine.count_error(error)
                stream.send(Answer(error.code, error.message))
            return
        stream.send(Answer())
        if ask.digest is None or await stream.receive(Done) is not None:
            held.readers += 1
            if held.readers >= ask.readers:
                self._held.pop(held.ticket.rid, None)
                self.engine.let_go(held.ticket)

    def _check(self, held: _Held | None, ask: _Ask) -> EngineError | None:
        engine_id = ask.params.get("remote_engine_id")
        if engine_id not in {self._rank_id(rank) for rank in range(self.settings.dp_size)}:
            return EngineError(
                500, "wrong_engine_id", f"this engine isn't {engine_id}: it was started again, or is another"
            )
        if held is None:
            return EngineError(500, "kv_not_held", f"no blocks are held for {ask.params.get('remote_request_id')}")
        given = held.ticket.handover or {}
        for name in given.keys() | ask.params.keys():
            is_there = name in given and name in ask.params
            if not is_there or msgspec.json.encode(given[name]) != msgspec.json.encode(ask.params[name]):
                code = "wrong_blocks" if name == "remote_block_ids" else "params_changed"
                return EngineError(500, code, f"{name} isn't what the prefill gave")
        if ask.digest is not None and ask.digest != held.ticket.digest:
            return EngineError(500, "prompt_mismatch", f"the prompt isn't that of {held.ticket.rid}")
        return None

    # Decode side.

    def reserved(self, ticket: Ticket) -> None:
        """Pull the blocks."""
        if isinstance(ticket.handoff, _Pull):
            over = self._pulls[ticket] = asyncio.Event()
            self.expect_prefill(ticket)
            self._tasks.start(self._pull(ticket, ticket.handoff, over))

    def received(self, ticket: Ticket) -> None:
        """Let the prefill go."""
        self._end_pull(ticket)

    def refused(self, ticket: Ticket) -> None:
        """Let the prefill go."""
        if isinstance(ticket.handoff, _Pull):
            self._tasks.start(self._give_up(ticket.handoff))

    def rejected(self, params: Mapping[str, object], prompts: int) -> None:
        """Let the prefill go, as vLLM 0.32 does: a way to free blocks that nobody will want."""
        if params.get("do_remote_prefill") is True:
            with contextlib.suppress(EngineError):
                self._tasks.start(self._give_up(_read_pull(params, prompts)))

    def closed(self, ticket: Ticket) -> None:
        """Let the prefill go, also if nothing was pulled."""
        super().closed(ticket)
        was_pulled = self._end_pull(ticket) or ticket.tokens
        if isinstance(ticket.handoff, _Pull) and not was_pulled:
            self._tasks.start(self._give_up(ticket.handoff))

    def _end_pull(self, ticket: Ticket) -> bool:
        over = self._pulls.pop(ticket, None)
        if over is not None:
            over.set()
        return over is not None

    async def _pull(self, ticket: Ticket, pull: _Pull, over: asyncio.Event) -> None:
        try:
            stream = await connect(pull.host, pull.port)
        except (OSError, OverflowError) as error:
            text = f"can't reach the prefill at {pull.host}:{pull.port}: {error}"
            self.refuse(ticket, EngineError(500, "prefill_unreachable", text))
            return
        try:
            stream.send(_Ask(dict(pull.params), ticket.digest, pull.readers))
            answer = await stream.receive(Answer)
            if answer is None or answer.code:
                code, text = (answer.code, answer.message) if answer else ("prefill_lost", "the prefill went away")
                self.refuse(ticket, EngineError(500, code, f"KV transfer failed: {text}"))
                return
            if not over.is_set():
                self.take_remote(ticket, _told_cached(pull.params, ticket))
            await over.wait()
            stream.send(Done())
            await stream.close()
        finally:
            stream.abort()

    async def _give_up(self, pull: _Pull) -> None:
        try:
            stream = await connect(pull.host, pull.port)
        except (OSError, OverflowError):
            return
        try:
            stream.send(_Ask(dict(pull.params), None, pull.readers))
            await stream.receive(Answer)
            await stream.close()
        finally:
            stream.abort()


def _told_cached(params: Mapping[str, object], ticket: Ticket) -> int:
    # The prefill's number if it is told, else all that came: the last token is always computed here.
    told = params.get("remote_prefill_cached_tokens")
    return told if isinstance(told, int) else ticket.job.prompt_tokens - 1


def _is_at_least(version: str, least: tuple[int, ...]) -> bool:
    return tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2]) >= least


def _read_pull(params: Mapping[str, object], readers: int) -> _Pull:
    blocks = params.get("remote_block_ids")
    if not isinstance(blocks, list) or not all(_is_block_list(group) for group in islice(blocks, len(blocks))):
        raise EngineError(
            400, "bad_kv_transfer_params", "remote_block_ids must be lists of block numbers, one per group"
        )
    port = params.get("remote_port")
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
        raise EngineError(400, "bad_kv_transfer_params", f"remote_port must be a port number, got {port!r}")
    read_text(params, "remote_engine_id")
    return _Pull(read_text(params, "remote_host"), port, read_text(params, "remote_request_id"), params, readers)


def _is_block_list(group: object) -> bool:
    return isinstance(group, list) and bool(group) and all(type(block) is int for block in group)
