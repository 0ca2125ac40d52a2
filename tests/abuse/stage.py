"""Where a case plays: a router process with small limits, an emulated pair, an engine that lies, and honest traffic."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pdrouter.sim.fleet import Process, Processes
from tests.abuse.honest import Report
from tests.lab import Asked, Reply, get, http, post

MIB = 1 << 20
HONEST_PER_S = 20.0
SPOILT = "spoilt"
"""The model of the engine that lies, so that honest traffic never meets it."""

HOSTILE = "hostile"
"""The model of an emulated engine for hostile clients: an engine is slower for all that share it, whatever routes."""

KEPT_OUT = "wherever-it-is-kept"
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")
_POLL_S = 0.01

FLAGS: Mapping[str, object] = {
    "port": 0,
    "log-format": "json",
    "max-payload-size": 16 * MIB,
    "client-body-budget-bytes": 48 * MIB,
    "client-write-budget-bytes": 24 * MIB,
    "client-head-timeout-secs": 2,
    "client-body-timeout-secs": 2,
    "client-write-timeout-secs": 2,
    "prefix-index-bytes": 8 * MIB,
    "journal-decisions": 500,
    "ledger-history-events": 512,
    "health-check-interval-secs": 0.5,
    "worker-startup-check-interval": 0.1,
    "worker-load-check-interval": 0.5,
    "cb-failure-threshold": 3,
    "accept-any-model": "",
}
"""``accept-any-model`` and other switches have no value."""

BUDGETS_MIB = (48 + 24 + 8 * 2) + 24
"""What the flags above let the router hold beyond its start, and some room for its own objects."""


class Failed(Exception):
    """A case that didn't end as it must."""


class Engine:
    """An engine of raw sockets. ``script`` answers inference requests; pages are right unless ``pages`` has another."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[Asked] = []
        self.pages: dict[str, bytes] = {}
        self.script: Callable[[Asked], Awaitable[bytes | None]] = self.answers
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def listen(self) -> None:
        """Listen on a port of the kernel's choice."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=32 * MIB)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Close everything."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def answers(self, _: Asked) -> bytes:
        """Answer as an engine does."""
        return http(200, CHAT_ANSWER, "content-type: application/json")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                await self._one(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        method, path, _ = head.split(b"\r\n")[0].decode("latin-1").split(" ")
        path = path.partition("?")[0]
        lengths = (line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        body = await reader.readexactly(int(next(lengths, b"0")))
        asked = Asked(method, path, head, body, writer)
        if method == "GET":
            reply: bytes | None = self.pages.get(path) or _page(path)
        else:
            self.asked.append(asked)
            reply = await self.script(asked)
        if reply is None:
            await reader.read()
            raise asyncio.IncompleteReadError(b"", None)
        writer.write(reply)
        await writer.drain()


CHAT_ANSWER = msgspec.json.encode(
    {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": SPOILT,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6},
    }
)


def _page(path: str) -> bytes:
    if path == "/health":
        return http(200, b"")
    if path == "/v1/models":
        return http(200, msgspec.json.encode({"object": "list", "data": [{"id": SPOILT, "object": "model"}]}))
    return http(404, b"{}")


class Router(NamedTuple):
    """A router process and where it listens; ``log`` is the file that has its stderr."""

    url: str
    pid: int
    log: Path
    process: asyncio.subprocess.Process

    def rss_bytes(self) -> int:
        """Return its memory now."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text("ascii").split()[1])
        return pages * _PAGE_BYTES

    async def ledger_is_zero(self, within_s: float = 8.0) -> None:
        """Wait until no request is live and nothing is reserved. Raises: Failed."""
        end_s = time.monotonic() + within_s
        while (left := await self._held()) and time.monotonic() < end_s:  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(_POLL_S)
        if left:
            raise Failed(f"left in the ledger: {left}")

    async def _held(self) -> float:
        fleet = (await get(self.url, "/debug/fleet")).json()
        ranks = [rank["ledger"] for endpoint in fleet["endpoints"] for rank in endpoint["ranks"]]
        return sum(float(rank["tokens"]) + float(rank["requests"]) for rank in ranks)

    async def end(self, within_s: float = 10.0) -> int:
        """Ask it to end; return its status. Raises: Failed if it takes longer."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self.process.wait(), within_s)
        except TimeoutError:
            raise Failed(f"doesn't end within {within_s:g} s of SIGTERM") from None


class Stage:
    """The router that most cases share, and what runs beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine = Engine()
        self.pair: Sequence[str] = ()
        self.regular = ""
        self.router: Router
        self._honest: Process
        self._processes = Processes()
        self._count = 0
        self._polite: list[int] = [os.getpid()]

    @property
    def url(self) -> str:
        """Where the shared router listens."""
        return self.router.url

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator["Stage"]:
        """Start everything, and end it."""
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._processes)
            await self.engine.listen()
            stack.push_async_callback(self.engine.close)
            self.pair = [await self._emulator(role) for role in ("prefill", "decode")]
            self.regular = await self._emulator("regular", "--model", HOSTILE)
            fleet = ["--prefill", self.pair[0], "--decode", self.pair[1]]
            spoilt = self.folder / "fleet.yaml"
            workers = [{"url": self.engine.url, "engine": "openai", "model": SPOILT}, {"url": self.regular}]
            spoilt.write_text(json.dumps({"worker": workers}), "utf-8")
            self.router = await stack.enter_async_context(self.route("--config", str(spoilt), *fleet))
            await ready(self.url, 3)
            self._honest = await self._processes.start("honest", "tests.abuse.honest", self.url, str(HONEST_PER_S))
            await self._honest.first_line()
            yield self

    async def _emulator(self, role: str, *more: str) -> str:
        words = ("emulate", "--role", role, "--dp-size", "2", "--speed", "50", *more)
        process = await self._processes.start(role, "pdrouter", *words)
        if role == "regular":
            self._polite.append(process.pid)
        return msgspec.json.decode(await process.first_line(), type=_Listening).url

    @contextlib.asynccontextmanager
    async def route(
        self,
        *words: str,
        stderr: int | None = None,
        before: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        listens: bool = True,
        **flags: Any,
    ) -> AsyncIterator[Router]:
        """Run a router with the small limits and these flags; ``listens``: wait until it says where."""
        self._count += 1
        log = self.folder / f"router{self._count}.log"
        options = dict(FLAGS) | {name.replace("_", "-"): value for name, value in flags.items()}
        parts = [part for n, v in options.items() for part in ((f"--{n}", str(v)) if v != "" else (f"--{n}",))]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PDROUTER_")}
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *before,
                *(sys.executable, "-m", "pdrouter", "serve", *words, *parts),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=file if stderr is None else stderr,
                env=clean | dict(env or {}),
            )
        try:
            url = ""
            if listens:
                assert process.stdout is not None
                line = await asyncio.wait_for(process.stdout.readline(), 20)
                url = line.decode().strip().rpartition(" ")[2]
                if not url:
                    raise Failed(f"didn't start: {log.read_text('utf-8')[-400:]}")
            yield Router(url, process.pid, log, process)
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    async def ask(self, body: object, path: str = "/v1/chat/completions", **headers: str) -> Reply:
        """Send a request to the shared router."""
        return await post(self.url, path, body, {name.replace("_", "-"): value for name, value in headers.items()})

    def give_way(self) -> None:
        """Let hostile clients and their engine take no processor from the others: theirs is another machine."""
        for pid in self._polite:
            os.setpriority(os.PRIO_PROCESS, pid, 19)

    async def report(self) -> Report:
        """Return what became of honest traffic since the last report."""
        await self._honest.send_line(b"")
        return msgspec.json.decode(await self._honest.line(), type=Report)


class Watch:
    """The router's memory while a case runs: ``before_bytes`` and ``most_bytes``."""

    def __init__(self, router: Router) -> None:
        self.before_bytes = self.most_bytes = router.rss_bytes()
        self._router = router

    async def run(self) -> None:
        """Look again and again."""
        while True:
            self.most_bytes = max(self.most_bytes, self._router.rss_bytes())
            await asyncio.sleep(_POLL_S)

    @property
    def grown_mib(self) -> float:
        """By how much it grew at most."""
        return (self.most_bytes - self.before_bytes) / MIB


class _Listening(msgspec.Struct):
    url: str


async def ready(url: str, models: int = 1) -> None:
    """Wait until a router can serve so many models."""
    end_s = time.monotonic() + 20
    while time.monotonic() < end_s:
        reply: Any = await get(url, "/v1/models")
        knows_all = reply.status == 200 and len(reply.json()["data"]) >= models
        if knows_all and (await get(url, "/readiness")).status == 200:
            return
        await asyncio.sleep(_POLL_S)
    raise Failed("the router isn't ready after 20 s")


@contextlib.asynccontextmanager
async def open_stage() -> AsyncIterator[Stage]:
    """Run a stage in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        async with Stage(Path(folder)).open() as stage:
            yield stage
