"""Fixtures of the emulator's tests: a small HTTP client, pairs of emulators, a profile in round numbers."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from pdrouter.sim.emulator import Emulator, EmulatorSettings, start_emulator
from pdrouter.sim.profiles import (
    DecodeCurve,
    DecodeExperts,
    DpSplit,
    PrefillCurve,
    PrefillExperts,
    Profile,
)

FAST = 200.0


class Response:
    """Status, headers and body of a reply."""

    def __init__(self, raw: bytes) -> None:
        head, _, body = raw.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        self.status = int(lines[0].split(" ")[1])
        self.headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines[1:])}
        self.is_whole = True
        self.body = self._unchunked(body) if self.headers.get("transfer-encoding") == "chunked" else body

    def _unchunked(self, body: bytes) -> bytes:
        parts: list[bytes] = []
        while True:
            size, _, body = body.partition(b"\r\n")
            length = int(size or b"0", 16)
            if not size or len(body) < length:
                self.is_whole = False
            if not length or not self.is_whole:
                return b"".join(parts) + (b"" if self.is_whole else body)
            parts.append(body[:length])
            body = body[length + 2 :]

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """Events of a stream that ended with [DONE]."""
        lines = [line for line in self.body.decode().split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


class Call:
    """A request on its own connection; ``abandon`` closes it, ``finish`` waits for the reply."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def finish(self) -> Response:
        try:
            return Response(await self.reader.read())
        finally:
            await self.abandon()

    async def abandon(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


class Client:
    """HTTP client of the tests: one connection a request, closed by the server."""

    @staticmethod
    async def start(
        url: str,
        path: str,
        body: object = None,
        headers: dict[str, str] | None = None,
        method: str | None = None,
    ) -> Call:
        parts = urlsplit(url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        method = method or ("GET" if body is None else "POST")
        lines = [f"{method} {path} HTTP/1.1", "Host: test", "Connection: close"]
        lines += [f"Content-Length: {len(data)}", *(f"{k}: {v}" for k, v in (headers or {}).items())]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        return Call(reader, writer)

    async def send(
        self,
        url: str,
        path: str,
        body: object = None,
        headers: dict[str, str] | None = None,
        method: str | None = None,
    ) -> Response:
        return await (await self.start(url, path, body, headers, method)).finish()


class Pair:
    """A prefill and a decode emulator, and the requests that a router would send them."""

    def __init__(self, client: Client, prefill: Emulator, decode: Emulator) -> None:
        self.client = client
        self.prefill = prefill
        self.decode = decode
        self._room = 1000

    def bootstrap(self, **fields: object) -> dict[str, object]:
        """Handshake fields with a new room."""
        self._room += 1
        port = self.prefill.bootstrap_port
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": port,
            "bootstrap_room": self._room,
        } | fields

    async def send(
        self,
        path: str,
        body: dict[str, object],
        prefill: dict[str, object] | None = None,
        decode: dict[str, object] | None = None,
    ) -> tuple[Response, Response]:
        """Send both legs; the last two arguments are added to one leg only. Returns both replies."""
        body = self.bootstrap() | body
        return await asyncio.gather(
            self.client.send(self.prefill.url, path, body | (prefill or {})),
            self.client.send(self.decode.url, path, body | (decode or {})),
        )

    @property
    def is_idle(self) -> bool:
        return self.prefill.snapshot().is_idle and self.decode.snapshot().is_idle


async def wait_until(is_true: Callable[[], bool]) -> None:
    """Let the event loop run until something holds; the test's timeout is the limit."""
    while not is_true():  # noqa: ASYNC110 (a condition of many parts has no event)
        await asyncio.sleep(0.001)


@pytest.fixture
def until() -> Any:
    """Waits until something holds."""
    return wait_until


@pytest.fixture
def client() -> Client:
    """HTTP client."""
    return Client()


@contextlib.asynccontextmanager
async def make_pair(**settings: Any) -> AsyncIterator[Pair]:
    """Pair of emulators with these settings; no leg times out, a room gives the rank, unless they say so."""
    settings = {"speed": FAST, "dp_size": 4, "dp_attention": True, "handshake_timeout_s": 1e6} | settings
    async with (
        start_emulator(EmulatorSettings(role="prefill", **settings)) as prefill,
        start_emulator(EmulatorSettings(role="decode", **settings)) as decode,
    ):
        yield Pair(Client(), prefill, decode)


@pytest.fixture
def new_pair() -> Any:
    """Maker of pairs with other settings."""
    return make_pair


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """Fast pair of four ranks each."""
    async with make_pair() as pair:
        yield pair


def make_profile(**changes: Any) -> Profile:
    """Profile in round numbers: prefill 10 ms + 1 ms a token, step 10 ms + 1 a request + 0.01 a KV token."""
    fields: dict[str, Any] = {
        "source": "test",
        "use": "test",
        "engine": "sglang",
        "gpu": "none",
        "model": "test",
        "tp": 1,
        "dp": 1,
        "units": "ms; tokens",
        "prefill": PrefillCurve(a0=10.0, a1=1.0, a2=0.0),
        "decode": DecodeCurve(b0=10.0, b1=1.0, b2=0.01),
        "kv_capacity_tokens": 100_000,
        "kv_bytes_per_token": 1000,
        "kv_transfer_us_per_token": 100.0,
        "max_batch": 8,
        "prefill_chunk_tokens": 1000,
    }
    return Profile(**(fields | changes))


@pytest.fixture
def new_profile() -> Any:
    """Maker of profiles in round numbers."""
    return make_profile


@pytest.fixture
def dp_split() -> DpSplit:
    """Split of DP attention in round numbers."""
    return DpSplit(
        prefill_local=PrefillCurve(a0=5.0, a1=1.0, a2=0.0),
        prefill_moe=PrefillExperts(g0=2.0, g1=0.1),
        decode_local=DecodeCurve(b0=10.0, b1=1.0, b2=0.0),
        decode_moe=DecodeExperts(g0=3.0, g1=0.5, g2=0.25, knee=2),
    )
