"""A router over emulated engines in one event loop, and a raw HTTP client that can stop anywhere."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal, Protocol, Self
from urllib.parse import urlsplit

import uvicorn.server

from pdrouter.config import Settings
from pdrouter.core.router import Router
from pdrouter.loading import load_settings
from pdrouter.server import Running, running
from pdrouter.sim.emulator import Emulator, EmulatorSettings, start_emulator


class Engine(Protocol):
    """Whatever listens as an engine."""

    url: str


CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"
INFERENCE = "/v1/chat"
"""A prefix that hits the inference path of a test, and no probe."""

DEADLINE_S = 8.0
"""Longest wait for anything; what a test promises is shorter where it says so."""


# uvicorn looks ten times a second whether it is to stop, which would cost two hundred labs half a minute.
vars(uvicorn.server)["asyncio"] = SimpleNamespace(**vars(asyncio) | {"sleep": lambda s: asyncio.sleep(s / 20)})


async def until(is_met: Callable[[], bool], within_s: float = DEADLINE_S) -> None:
    """Let the loop run until a condition on plain state holds; raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while not is_met():  # noqa: ASYNC110 - plain state has no event
            await asyncio.sleep(0.002)


class Reply:
    """What a server answered; ``is_whole`` says that it came to its proper end."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes, *, is_whole: bool) -> None:
        self.status = status
        self.headers = headers
        self.body = body
        self.is_whole = is_whole

    def json(self) -> Any:
        """Return the body, decoded."""
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        """The error object in OpenAI's shape, which has these four fields and no more."""
        error = self.json()["error"]
        assert set(error) == {"message", "type", "code", "param"}
        return error

    @property
    def events(self) -> list[Any]:
        """The events of a stream that ended with [DONE]."""
        *events, done = self.pieces
        assert done == "[DONE]"
        return [json.loads(event) for event in events]

    @property
    def pieces(self) -> list[str]:
        """What stands behind ``data: `` in each event."""
        return [part.removeprefix("data: ") for part in self.body.decode().split("\n\n") if part]


class Call:
    """One connection: write, read as much as wanted, finish or leave."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.status = 0
        self.headers: dict[str, str] = {}

    async def __aenter__(self) -> Self:
        """Use it inside a ``with`` block."""
        return self

    async def __aexit__(self, *error: object) -> None:
        """Leave."""
        await self.leave()

    def send(self, method: str, path: str, body: bytes, headers: Mapping[str, str], *, framing: bool = True) -> None:
        """Write a request."""
        lines = [f"{method} {path} HTTP/1.1", "host: lab"]
        if framing:
            lines.append(f"content-length: {len(body)}")
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.writer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)

    async def head(self) -> int:
        """Read the head of the reply."""
        raw = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").rstrip().split("\r\n")
        self.status = int(first.split()[1])
        self.headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
        return self.status

    async def some(self) -> bytes:
        """Read some bytes of the body, framing included."""
        data = await self.reader.read(4096)
        assert data
        return data

    async def finish(self) -> Reply:
        """Read the rest of the reply."""
        async with asyncio.timeout(DEADLINE_S):
            if not self.status:
                await self.head()
            body, is_whole = await self._body()
            reply = Reply(self.status, self.headers, body, is_whole=is_whole)
            self.status = 0
            return reply

    async def leave(self) -> None:
        """Close the connection."""
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    async def _body(self) -> tuple[bytes, bool]:
        if "content-length" in self.headers:
            try:
                return await self.reader.readexactly(int(self.headers["content-length"])), True
            except asyncio.IncompleteReadError as error:
                return error.partial, False
        if self.headers.get("transfer-encoding") != "chunked":
            return await self.reader.read(), True
        parts: list[bytes] = []
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                parts.append((await self.reader.readexactly(size + 2))[:-2])
            await self.reader.readexactly(2)
            return b"".join(parts), True
        return b"".join(parts), False


async def connect(url: str, receive_bytes: int | None = None) -> Call:
    """Open a connection; ``receive_bytes`` is the size of its receive buffer in the kernel and here."""
    parts = urlsplit(url)
    sock = socket.socket(socket.AF_INET6 if ":" in (parts.hostname or "") else socket.AF_INET)
    sock.setblocking(False)
    limit = 2**20
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        limit = receive_bytes
    try:
        await asyncio.get_running_loop().sock_connect(sock, (parts.hostname, parts.port))
    except BaseException:
        sock.close()
        raise
    return Call(*await asyncio.open_connection(sock=sock, limit=limit))


async def start(url: str, path: str, body: object, headers: Mapping[str, str] | None = None, **options: Any) -> Call:
    """Send a POST and leave its reply unread."""
    call = await connect(url, **options)
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    call.send("POST", path, raw, {"content-type": "application/json"} | dict(headers or {}))
    return call


async def post(url: str, path: str, body: object, headers: Mapping[str, str] | None = None) -> Reply:
    """Send a POST and read its reply."""
    async with await start(url, path, body, headers) as call:
        return await call.finish()


async def get(url: str, path: str, method: str = "GET") -> Reply:
    """Send a request without a body and read its reply."""
    async with await connect(url) as call:
        call.send(method, path, b"", {})
        if method != "HEAD":
            return await call.finish()
        await call.head()
        return Reply(call.status, call.headers, b"", is_whole=True)


def chat(text: str, tokens: int = 8, **fields: object) -> dict[str, object]:
    """Return the body of a chat request."""
    messages = [{"role": "user", "content": text}]
    return {"model": "emulated", "messages": messages, "max_tokens": tokens} | fields


class Lab:
    """A running router and the engines behind it."""

    def __init__(
        self, router: Running, prefills: list[Emulator], decodes: list[Emulator], workers: list[Emulator]
    ) -> None:
        self.router = router
        self.prefills = prefills
        self.decodes = decodes
        self.workers = workers

    @property
    def url(self) -> str:
        """Where the router listens."""
        return self.router.url

    @property
    def core(self) -> Router:
        """The router's core."""
        return self.router.service.router

    @property
    def emulators(self) -> list[Emulator]:
        """All engines."""
        return [*self.prefills, *self.decodes, *self.workers]

    @property
    def is_ledger_zero(self) -> bool:
        """Whether nothing is reserved anywhere; the books are checked on the way (I1)."""
        self.core.validate()
        accounts = [rank.account for load in self.core.load.endpoints.values() for rank in load.ranks]
        accounts += [load.unassigned for load in self.core.load.endpoints.values()]
        return not self.core.live and all(a.tokens == 0 and a.requests == 0 for a in accounts)

    @property
    def are_engines_idle(self) -> bool:
        """Whether no engine runs, waits or holds KV for anything."""
        return all(emulator.snapshot().is_idle for emulator in self.emulators)

    @property
    def is_quiet(self) -> bool:
        """Whether no connection of the traffic is in use."""
        pools = self.router.service.pools
        return all(pools.get(e).statistics().active == 0 for e in self.core.fleet)

    async def ready(self) -> None:
        """Wait until the router is ready."""
        async with asyncio.timeout(DEADLINE_S):
            while (await get(self.url, "/readiness")).status != 200:  # noqa: ASYNC110 - another side's state
                await asyncio.sleep(0.005)
        await until(lambda: all(self.core.fleet.is_ready(e.address) for e in self.core.fleet))

    async def settled(self, within_s: float = 1.0) -> None:
        """Wait until the ledger is zero, the engines idle and no connection in use."""
        await until(lambda: self.is_ledger_zero and self.are_engines_idle and self.is_quiet, within_s)

    async def post(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> Reply:
        """Send a POST to the router and read its reply."""
        return await post(self.url, path, body, headers)

    async def start(self, path: str, body: object, **options: Any) -> Call:
        """Send a POST to the router and leave its reply unread."""
        return await start(self.url, path, body, **options)

    async def get(self, path: str, method: str = "GET") -> Reply:
        """Get a page of the router."""
        return await get(self.url, path, method)


async def fault(emulator: Emulator, kind: str, path: str = INFERENCE, **fields: object) -> None:
    """Make an engine misbehave."""
    reply = await post(emulator.url, "/_fault", [{"kind": kind, "path": path} | fields])
    assert reply.status == 200, reply.body


async def mend(emulator: Emulator) -> None:
    """End all faults of an engine."""
    async with await connect(emulator.url) as call:
        call.send("DELETE", "/_fault", b"", {})
        assert (await call.finish()).status == 200


@contextlib.asynccontextmanager
async def mute_port(emulator: Emulator) -> AsyncIterator[None]:
    """Put in an engine's place a port that takes no connection and refuses none."""
    await emulator.stop()
    port = int(emulator.url.rpartition(":")[2])
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        yield


def make_settings(flags: Mapping[str, object]) -> Settings:
    """Return settings fit for tests: any port, quick checks, one attempt for each request."""
    quick = {
        "port": 0,
        "worker_startup_check_interval": 0.05,
        "worker_startup_timeout_secs": 0,
        "health_check_interval_secs": 0.05,
        "worker_load_check_interval": 0.2,
        "abort_retry_delay_secs": 0.1,
        "shutdown_grace_period_secs": 0,
        "disable_retries": True,
        "log_level": "error",
        "allowed_hosts": ["lab"],
    }
    return load_settings(None, {}, quick | dict(flags))


@contextlib.asynccontextmanager
async def route_to(
    prefills: Sequence[Engine] = (),
    decodes: Sequence[Engine] = (),
    workers: Sequence[Engine] = (),
    *,
    waits: bool = True,
    **flags: Any,
) -> AsyncIterator[Lab]:
    """Run a router over engines that run already; ``waits``: until it is ready."""
    endpoints = {
        name: [_endpoint(e) for e in emulators]
        for name, emulators in (("prefill", prefills), ("decode", decodes), ("worker", workers))
        if emulators
    }
    async with running(make_settings(endpoints | flags)) as router:
        emulated = [[e for e in side if isinstance(e, Emulator)] for side in (prefills, decodes, workers)]
        lab = Lab(router, *emulated)
        if waits:
            await lab.ready()
        yield lab


def _endpoint(engine: Engine) -> str | dict[str, object]:
    """Return what the settings must say of an engine."""
    if not isinstance(engine, Emulator) or engine.settings.engine == "sglang":
        return engine.url
    settings = engine.settings
    endpoint: dict[str, object] = {"url": engine.url, "engine": settings.engine}
    if settings.kv_connector is not None:
        endpoint["kv_transport"] = settings.kv_connector
    if settings.kv_connector == "p2p_nccl":
        endpoint["kv_address"] = f"127.0.0.1:{engine.bootstrap_port}"
    if settings.kv_connector == "mooncake" and settings.role == "prefill":
        endpoint["bootstrap_port"] = engine.bootstrap_port
    return endpoint


@contextlib.asynccontextmanager
async def make_lab(
    prefill: int = 1,
    decode: int = 1,
    worker: int = 0,
    engine: Mapping[str, Any] | None = None,
    **flags: Any,
) -> AsyncIterator[Lab]:
    """Run a router over so many engines, of two ranks and fast unless ``engine`` says otherwise."""
    settings: dict[str, Any] = {"dp_size": 2, "speed": 100.0, "handshake_timeout_s": 1e6} | dict(engine or {})
    async with contextlib.AsyncExitStack() as stack:

        async def emulators(role: Literal["prefill", "decode", "regular"], count: int) -> list[Emulator]:
            return [
                await stack.enter_async_context(start_emulator(EmulatorSettings(role=role, **settings)))
                for _ in range(count)
            ]

        prefills, decodes = await emulators("prefill", prefill), await emulators("decode", decode)
        workers = await emulators("regular", worker)
        yield await stack.enter_async_context(route_to(prefills, decodes, workers, **flags))


async def gather(*calls: Awaitable[Reply]) -> list[Reply]:
    """Wait for several replies at once."""
    return list(await asyncio.gather(*calls))


Script = Callable[["Asked"], Awaitable[bytes | None]]
"""What a scripted engine answers: raw bytes of a whole reply; ``None`` never answers."""


class Asked:
    """A request that a scripted engine got, and the connection to write to."""

    def __init__(self, method: str, path: str, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        self.method = method
        self.path = path
        self.head = head
        self.body = body
        self.writer = writer

    def json(self) -> Any:
        """Return the body, decoded."""
        return json.loads(self.body)


def http(status: int, body: bytes | object, *lines: str) -> bytes:
    """Return a whole reply."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"HTTP/1.1 {status} Status", f"content-length: {len(raw)}", *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + raw


class ScriptedEngine:
    """An engine that says what a test tells it to, byte for byte, and remembers what it was asked.

    ``scripts`` answer by path; other paths answer as a healthy engine of this role without load reports.
    """

    def __init__(
        self, role: str | None, scripts: Mapping[str, Script], info: Mapping[str, object] | None = None
    ) -> None:
        self.scripts = dict(scripts)
        self.info = {"disaggregation_mode": role, "dp_size": 1, "served_model_name": "emulated"} | dict(info or {})
        self.asked: list[Asked] = []
        self.open_connections = 0
        self.url = ""
        self._tasks: set[asyncio.Task[None]] = set()

    def asked_for(self, path: str) -> list[Asked]:
        """Return the requests for a path."""
        return [asked for asked in self.asked if asked.path == path]

    @contextlib.asynccontextmanager
    async def listen(self, port: int = 0) -> AsyncIterator[Self]:
        """Listen inside the ``with`` block."""
        server = await asyncio.start_server(self._handle, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.open_connections += 1
        try:
            while True:
                await self._serve_one(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the caller left, or the test is over
        finally:
            self.open_connections -= 1
            writer.transport.abort()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        method, path, _ = head.split(b"\r\n")[0].decode().split(" ")
        sizes = (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        size = next(sizes, 0)
        asked = Asked(method, path.partition("?")[0], head, await reader.readexactly(size), writer)
        self.asked.append(asked)
        reply = await self.scripts.get(asked.path, self._healthy)(asked)
        if reply is None:
            await reader.read()  # until the caller leaves
            raise asyncio.IncompleteReadError(b"", None)
        writer.write(reply)
        await writer.drain()

    async def _healthy(self, asked: Asked) -> bytes:
        if asked.path == "/server_info":
            return http(200, self.info)
        return http(200 if asked.path in ("/health", "/abort_request") else 404, b"")


async def hang(asked: Asked) -> bytes | None:
    """Never answer."""
    return None


def always(status: int, body: bytes | object, *lines: str) -> Script:
    """Return a script that always answers the same."""

    async def answer(asked: Asked) -> bytes:
        return http(status, body, *lines)

    return answer
