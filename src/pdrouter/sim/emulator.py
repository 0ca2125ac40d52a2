"""An engine's server without a GPU: real HTTP, real time divided by ``speed``, the PD handshake enforced.

Start it in a process with ``run`` or inside a test with ``start_emulator``. Beyond the real one's endpoints there are
``/_fault`` (``faults.py``) and ``GET /_snapshot``. What engines have in common: ``live_engine.py``; where they differ:
``emulator_kind.py``.
"""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from pdrouter.sim.call import Call, Part
from pdrouter.sim.emulator_control import Control
from pdrouter.sim.emulator_kind import EngineKind, Handshake, Routes
from pdrouter.sim.emulator_openai import OpenAiKind
from pdrouter.sim.emulator_replies import Reply, chunk_ends
from pdrouter.sim.emulator_settings import EmulatorSettings, EngineError
from pdrouter.sim.emulator_sglang import SglangKind
from pdrouter.sim.engine_key import is_refused
from pdrouter.sim.faults import FaultRule, Faults
from pdrouter.sim.http_exchange import Broken, Exchange
from pdrouter.sim.job import Job
from pdrouter.sim.live_engine import LiveEngine
from pdrouter.sim.load_samples import LoadSamples
from pdrouter.sim.sglang_handshake import SglangHandshake
from pdrouter.sim.text import expected_text, render_chat, text_seed, token_text
from pdrouter.sim.ticket import EngineSnapshot, Inbox, Received, Ticket
from pdrouter.sim.trtllm.handshake import TrtllmHandshake
from pdrouter.sim.trtllm.kind import TrtllmKind
from pdrouter.sim.vllm.connector import Connector
from pdrouter.sim.vllm.kind import VllmKind, make_connector

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveCallable, ASGISendCallable, Scope

__all__ = [
    "Emulator",
    "EmulatorSettings",
    "EngineSnapshot",
    "Received",
    "expected_text",
    "render_chat",
    "run",
    "start_emulator",
    "token_text",
]

_STOP_S = 0.2


class _Parts(NamedTuple):
    handshake: Callable[[LiveEngine], Handshake]
    kind: Callable[[LiveEngine, LoadSamples], EngineKind]


_ENGINES: Mapping[str, _Parts] = {
    "sglang": _Parts(SglangHandshake, SglangKind),
    "vllm": _Parts(make_connector, VllmKind),
    "trtllm": _Parts(TrtllmHandshake, TrtllmKind),
    "openai": _Parts(Connector, OpenAiKind),
}


class Emulator:
    """A running emulator. ``start_emulator`` makes it."""

    def __init__(self, settings: EmulatorSettings) -> None:
        self.settings = settings
        self.url = ""
        parts = _ENGINES[settings.engine]
        self.engine = LiveEngine(settings, parts.handshake)
        self._samples = LoadSamples(self.engine)
        self.kind = parts.kind(self.engine, self._samples)
        self.faults = Faults(self.kind.load_paths)
        self._state = ServerState()
        self._servers: list[asyncio.Server] = []
        control = Control(self.engine, self._samples, self.faults)
        generating: Routes = {path: {"POST": self._infer} for path in self.kind.paths}
        self._routes = generating | self.kind.routes() | control.routes()

    @property
    def bootstrap_port(self) -> int | None:
        """Where the other side of the handshake reaches this one."""
        return self.engine.handshake.port

    def snapshot(self) -> EngineSnapshot:
        """All that the engine holds now, and what it refused so far."""
        return self.engine.snapshot()

    @property
    def received(self) -> list[Received]:
        """The newest prompts, as the engine understood them."""
        return list(self.engine.received)

    async def start(self) -> None:
        """Listen. Raises: ``OSError`` if a port can't be had."""
        host = self.settings.host
        port = await self.serve(self._routes, self.settings.port)
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        await self.engine.handshake.start(self)

    async def serve(self, routes: Routes, port: int) -> int:
        """Listen for HTTP. Raises: ``OSError``."""
        config = uvicorn.Config(
            partial(self._app, routes),
            interface="asgi3",
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
        )
        config.load()
        return await self.listen(
            partial(HttpToolsProtocol, config=config, server_state=self._state, app_state={}), port
        )

    async def listen(self, factory: Callable[[], asyncio.BaseProtocol], port: int) -> int:
        """Listen for anything. Raises: ``OSError``."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(factory, self.settings.host, port, backlog=2048)
        self._servers.append(server)
        opened: int = server.sockets[0].getsockname()[1]
        return opened

    async def stop(self) -> None:
        """Close all sockets and end all requests, as a dying process does."""
        for server in self._servers:
            server.close()
        for connection in list(self._state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        self._samples.shut()
        await self.engine.shut()
        await asyncio.sleep(0)  # lets aborted transports tell their protocols
        if self._state.tasks:
            _, stuck = await asyncio.wait(self._state.tasks, timeout=_STOP_S)
            for task in stuck:
                task.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)

    async def _app(
        self, routes: Routes, scope: "Scope", receive: "ASGIReceiveCallable", send: "ASGISendCallable"
    ) -> None:
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send, partial(self._transport, scope["client"]), self.kind.error_reply)
        with contextlib.suppress(Broken):
            rules = self.faults.take(exchange.path) if self.faults.rules else []
            if is_refused(self.settings, exchange.path, exchange.headers):
                await exchange.reply_json(401, {"error": "Unauthorized"})
            elif not await self._spoil(exchange, rules):
                await self._route(routes, exchange, rules)

    def _transport(self, client: tuple[str, int] | None) -> asyncio.Transport | None:
        for connection in self._state.connections:
            if isinstance(connection, HttpToolsProtocol) and connection.client == client:
                return connection.transport
        return None

    async def _spoil(self, exchange: Exchange, rules: list[FaultRule]) -> bool:
        """Apply the faults that come before an answer; true if there is nothing left to do."""
        for rule in rules:
            if rule.kind == "slow":
                await asyncio.sleep(rule.seconds)
            elif rule.kind == "hang" or (rule.kind == "no_load" and rule.mode == "hang"):
                await exchange.gone()
                return True
            elif rule.kind in {"status", "no_load"}:
                error = EngineError(rule.status, "fault", "fault on demand")
                await exchange.reply_json(rule.status, rule.body or self.kind.error_reply(exchange.path, error)[1])
                return True
            elif rule.kind == "reset" and rule.after_chunks is None:
                exchange.reset()
            elif rule.kind in {"reset", "half_stream"}:
                exchange.breaking = rule
        return False

    async def _route(self, routes: Routes, exchange: Exchange, rules: list[FaultRule]) -> None:
        handlers = routes.get(exchange.path)
        if handlers is None:
            await exchange.reply_json(404, {"detail": "Not Found"})
        elif exchange.method not in handlers:
            await exchange.reply_json(405, {"detail": "Method Not Allowed"})
        else:
            await handlers[exchange.method](exchange, rules)

    # Inference.

    async def _infer(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        raw = await exchange.read()
        inbox: Inbox = asyncio.Queue()
        tickets: list[Ticket] = []
        try:
            call = self.kind.read(exchange.path, raw, exchange.headers)
            if call.hangs:
                self.engine.count_error(EngineError(500, "hangs", "n > 1 on a decode engine: no answer ever comes"))
                await exchange.gone()
                return
            ranks = {part.rank for part in call.parts if part.rank is not None}
            if self.faults.rules and await self._spoil(exchange, self.faults.take(exchange.path, ranks)):
                return
            self._submit(call, inbox, tickets)
        except EngineError as error:
            for ticket in tickets:
                self.engine.abort(ticket)
            self.engine.count_error(error)
            await self._refuse(exchange, raw, error)
            return
        watch = asyncio.get_running_loop().create_task(_tell_when_gone(exchange, inbox))
        try:
            reply = self.kind.reply(call, tickets)
            if call.is_stream:
                await self._stream(exchange, reply, inbox, len(tickets))
            else:
                await _whole(exchange, reply, inbox, tickets)
        finally:
            watch.cancel()
            for ticket in tickets:
                self.engine.abort(ticket)

    async def _refuse(self, exchange: Exchange, raw: bytes, error: EngineError) -> None:
        told = self.kind.refused_stream(exchange.path, raw, error)
        if told is None:
            await exchange.fail(error)
        else:
            await exchange.stream(told)
            await exchange.end()

    def _submit(self, call: Call, inbox: Inbox, tickets: list[Ticket]) -> None:
        for index, part in enumerate(call.parts):
            ticket = self._ticket(call, part, index, inbox)
            tickets.append(ticket)
            self.engine.submit(ticket)

    def _ticket(self, call: Call, part: Part, index: int, inbox: Inbox) -> Ticket:
        rank = self.engine.next_rank() if part.rank is None else part.rank
        interval = self.settings.stream_interval if call.is_stream else 0
        prompt = part.prompt
        job = Job(rank, prompt.tokens, part.output_tokens, prompt.blocks, interval)
        job.role = part.role or self.engine.role
        seed = text_seed(prompt.digest, part.choice)
        ticket = Ticket(job, inbox, rid=part.rid, index=index, digest=prompt.digest, seed=seed)
        ticket.handoff = part.handoff
        ticket.stops_early = part.stops_early
        return ticket

    async def _stream(self, exchange: Exchange, reply: Reply, inbox: Inbox, open_count: int) -> None:
        """Write events as tokens come, until every prompt is over, or one fails whose failure ends the stream."""
        while open_count:
            ticket = await inbox.get()
            if ticket is None:
                raise Broken
            ticket.is_posted = False
            if ticket.error is not None and reply.ends_with_failure:
                await self._end(exchange, ticket.error, reply.failure(ticket, ticket.error))
                return
            chunks = [] if ticket.error is None else [reply.failure(ticket, ticket.error) or b""]
            for end in [] if chunks else chunk_ends(ticket.sent_tokens, ticket.tokens, self.settings.stream_interval):
                chunks.append(reply.chunk(ticket, ticket.sent_tokens, end))
                ticket.sent_tokens = end
            open_count -= ticket.is_over
            if not open_count:
                chunks.append(reply.tail())
            for chunk in chunks if exchange.breaking else [b"".join(chunks)]:
                await exchange.stream(chunk)
        await exchange.end()

    async def _end(self, exchange: Exchange, error: EngineError, told: bytes | None) -> None:
        """End a stream that has failed; ``told``: what it says of that."""
        if told is None and not exchange.is_started:
            await exchange.fail(error)
            return
        await exchange.stream(self.kind.error_event(error) if told is None else told)
        await exchange.end()


async def _tell_when_gone(exchange: Exchange, inbox: Inbox) -> None:
    await exchange.gone()
    inbox.put_nowait(None)


async def _whole(exchange: Exchange, reply: Reply, inbox: Inbox, tickets: list[Ticket]) -> None:
    """Write one answer when every prompt is over, or the first failure."""
    while not all(ticket.is_over for ticket in tickets):
        ticket = await inbox.get()
        if ticket is None:
            raise Broken
        ticket.is_posted = False
        if ticket.error is not None:
            break
    error = next((ticket.error for ticket in tickets if ticket.error is not None), None)
    if error is not None:
        await exchange.fail(error)
    else:
        await exchange.reply(200, reply.whole())


@contextlib.asynccontextmanager
async def start_emulator(settings: EmulatorSettings) -> AsyncIterator[Emulator]:
    """Emulator that listens inside the ``with`` block."""
    emulator = Emulator(settings)
    try:
        await emulator.start()
        yield emulator
    finally:
        await emulator.stop()


async def _serve(settings: EmulatorSettings) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with start_emulator(settings) as emulator:
        line = {
            "event": "listening",
            "role": settings.role,
            "url": emulator.url,
            "bootstrap_port": emulator.bootstrap_port,
        }
        sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
        sys.stdout.flush()
        await stopped.wait()


def run(settings: EmulatorSettings) -> int:
    """Emulate until SIGTERM or SIGINT; prints one JSON line when listening. Returns the exit status."""
    try:
        uvloop.run(_serve(settings))
    except OSError as error:
        sys.stderr.write(f"emulator: can't listen: {error}\n")
        return 1
    return 0
