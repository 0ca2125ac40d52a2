"""TensorRT-LLM's two legs on a live engine: a context engine answers and holds KV, a generation engine fetches it.

Stricter than the real one: the object must come back as it was given, with the same prompt. Simplified: one port for
all ranks. The object: ``params.py``.
"""

import asyncio
import base64
import secrets

import msgspec

from pdrouter.sim.emulator_kind import Handshake, Ports
from pdrouter.sim.emulator_settings import EngineError
from pdrouter.sim.job import Role
from pdrouter.sim.live_engine import LiveEngine
from pdrouter.sim.text import token_id
from pdrouter.sim.ticket import Ticket
from pdrouter.sim.trtllm.params import CONTEXT, ContextLeg, GenerationLeg, Params
from pdrouter.sim.vllm.connector import UsedIds
from pdrouter.sim.vllm.kv_stream import Answer, Done, KvStream, KvTasks, connect

_STATE_BYTES = 24


class _Ask(msgspec.Struct, frozen=True):
    """What a generation side says first."""

    params: Params
    digest: int


class TrtllmHandshake(Handshake):
    """Serial: the context engine's answer carries ``disaggregated_params``, which go on with another type."""

    def __init__(self, engine: LiveEngine) -> None:
        self._engine = engine
        self._settings = engine.settings
        self._used = UsedIds("disagg_request_id")
        self._given: dict[int, Params] = {}
        self._held: dict[int, Ticket] = {}
        self._fetches: dict[Ticket, asyncio.Event] = {}
        self._tasks = KvTasks()

    @property
    def endpoint(self) -> str:
        """Where the other side fetches KV, as answers tell it."""
        return f"tcp://{self._settings.host}:{self.port}"

    async def start(self, ports: Ports) -> None:
        """Open the port of the transfers."""
        self.port = await ports.listen(self._tasks.server(self._serve), self._settings.bootstrap_port)

    async def shut(self) -> None:
        """End all transfers."""
        await self._tasks.shut()

    def opened(self, ticket: Ticket) -> None:
        """Note an id, and count a generation engine that reads a prompt itself. Raises: ``EngineError``."""
        if isinstance(ticket.handoff, ContextLeg):
            self._used.add(str(ticket.handoff.number))
        elif ticket.handoff is None and self._engine.role is Role.DECODE:
            self._engine.recomputed_requests += 1

    # Context side.

    def prefilled(self, ticket: Ticket) -> None:
        """Answer with where the KV is, and hold it; an answer that ended with its first token needs none."""
        if ticket.stops_early or not isinstance(ticket.handoff, ContextLeg):
            self._engine.finish(ticket)
            return
        number = ticket.handoff.number
        given = self._given[number] = self._describe(ticket, number)
        ticket.handover = msgspec.structs.asdict(given)
        self._held[number] = ticket
        self._engine.hold(ticket, self._settings.kv_hold_timeout_s, self._forget)

    def _describe(self, ticket: Ticket, number: int) -> Params:
        return Params(
            request_type=CONTEXT,
            first_gen_tokens=[token_id(ticket.seed, 0)],
            ctx_request_id=number,
            encoded_opaque_state=base64.b64encode(secrets.token_bytes(_STATE_BYTES)).decode(),
            disagg_request_id=number,
            ctx_dp_rank=ticket.rank,
            ctx_info_endpoint=self.endpoint,
            schedule_style=0,
        )

    def _forget(self, ticket: Ticket) -> None:
        if isinstance(ticket.handoff, ContextLeg):
            self._drop(ticket.handoff.number)

    def _drop(self, number: int) -> None:
        self._held.pop(number, None)
        self._given.pop(number, None)

    async def _serve(self, stream: KvStream) -> None:
        ask = await stream.receive(_Ask)
        if ask is None:
            return
        number = ask.params.disagg_request_id or 0
        ticket = self._held.get(number)
        error = self._check(ticket, ask)
        if error is not None:
            self._engine.count_error(error)
            stream.send(Answer(error.code, error.message))
        if error is not None or ticket is None:
            return
        stream.send(Answer())
        if await stream.receive(Done) is not None:
            self._drop(number)
            self._engine.let_go(ticket)

    def _check(self, ticket: Ticket | None, ask: _Ask) -> EngineError | None:
        if ticket is None:
            return EngineError(500, "kv_not_held", f"no KV is held for {ask.params.disagg_request_id}")
        given = self._given[ask.params.disagg_request_id or 0]
        for name in Params.__struct_fields__:
            if name != "request_type" and getattr(given, name) != getattr(ask.params, name):
                return EngineError(500, "params_changed", f"{name} isn't what the context engine gave")
        if ask.digest != ticket.digest:
            return EngineError(500, "prompt_mismatch", f"the prompt isn't that of {ask.params.disagg_request_id}")
        return None

    # Generation side.

    def reserved(self, ticket: Ticket) -> None:
        """Fetch the KV."""
        if isinstance(ticket.handoff, GenerationLeg):
            over = self._fetches[ticket] = asyncio.Event()
            self._engine.expect(ticket, self._settings.handshake_timeout_s, self._timed_out)
            self._tasks.start(self._fetch(ticket, ticket.handoff, over))

    def received(self, ticket: Ticket) -> None:
        """Let the context side go."""
        self._end_fetch(ticket)

    def closed(self, ticket: Ticket) -> None:
        """End a transfer. The context side isn't told of a leg that leaves before: it holds KV until its time limit."""
        self._end_fetch(ticket)

    def _end_fetch(self, ticket: Ticket) -> None:
        over = self._fetches.pop(ticket, None)
        if over is not None:
            over.set()

    async def _fetch(self, ticket: Ticket, leg: GenerationLeg, over: asyncio.Event) -> None:
        try:
            stream = await connect(*leg.address)
        except (OSError, OverflowError) as error:
            text = f"can't reach the context engine at {leg.params.ctx_info_endpoint}: {error}"
            self._refuse(ticket, EngineError(500, "context_unreachable", text))
            return
        try:
            stream.send(_Ask(leg.params, ticket.digest))
            answer = await stream.receive(Answer)
            if answer is None or answer.code:
                code, text = (answer.code, answer.message) if answer else ("context_lost", "the context engine is gone")
                self._refuse(ticket, EngineError(500, code, f"KV transfer failed: {text}"))
                return
            if not over.is_set():
                ticket.external_tokens = ticket.job.prompt_tokens
                self._engine.expected(ticket)
                self._engine.start_transfer(ticket)
            await over.wait()
            stream.send(Done())
            await stream.close()
        finally:
            stream.abort()

    def _refuse(self, ticket: Ticket, error: EngineError) -> None:
        self._engine.count_error(error)
        self._engine.fail(ticket, error)

    def _timed_out(self, ticket: Ticket) -> None:
        self._refuse(ticket, EngineError(500, "handshake_timeout", f"KV of {ticket.rid} didn't come in time"))
