"""The start: the port opens when each endpoint was asked once, in bounded time."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdrouter.proxy.listener import CannotListen, bind, open_port
from pdrouter.server import StoppedEarly, running
from pdrouter.sim.emulator import EmulatorSettings, start_emulator
from tests.lab import CHAT, chat, get, make_settings, post
from tests.test_server import QUICK, serve

LONG_S = 600.0
SILENT = ("--health-check-timeout-secs", "60")


class Gate:
    """An endpoint that takes connections, and answers when it is let."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.opened = asyncio.Event()
        self.url = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Say that there is no such page, once that is allowed."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                self.asked.set()
                await self.opened.wait()
                writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        writer.close()


@contextlib.asynccontextmanager
async def gate() -> AsyncIterator[Gate]:
    """Run a gate on a port of its own."""
    made = Gate()
    server = await asyncio.start_server(made.answer, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        made.opened.set()
        server.close()


def free_port() -> int:
    """Return a port that nobody has now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


async def test_the_port_opens_when_all_were_asked() -> None:
    """Until then connections are refused; the first request is served, though another endpoint has failed."""
    port = free_port()
    async with (
        start_emulator(EmulatorSettings(speed=100.0)) as worker,
        gate() as slow,
        contextlib.AsyncExitStack() as stack,
    ):
        flags = {"worker": [worker.url, slow.url, "http://127.0.0.1:9"], "port": port}
        context = running(make_settings({**flags, "worker_startup_timeout_secs": LONG_S}))
        starting = asyncio.create_task(stack.enter_async_context(context))
        await slow.asked.wait()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        assert not starting.done()
        slow.opened.set()
        router = await starting
        assert (await post(router.url, CHAT, chat("x"))).status == 200
        reply = await get(router.url, "/readiness")
        assert reply.status == 200


async def test_the_time_is_bounded(capfd: pytest.CaptureFixture[str]) -> None:
    """A silent endpoint keeps the port closed for so long, and is named."""
    async with (
        gate() as silent,
        serve(*QUICK, *SILENT, "--worker", silent.url, "--worker-startup-timeout-secs", "0.2") as router,
    ):
        url = await router.listening()
        assert (await get(url, "/liveness")).status == 200
        assert (await get(url, "/readiness")).status == 503
        router.signal(signal.SIGTERM)
        status, _, errors = await router.ended()
        assert status == 0
        assert "worker_startup_timeout_secs" in errors
        assert silent.url.removeprefix("http://") in errors


async def test_a_stop_ends_the_wait() -> None:
    """SIGTERM before the port is open: status 0 at once, and nothing was said."""
    async with gate() as silent, serve(*QUICK, *SILENT, "--worker", silent.url) as router:
        await silent.asked.wait()
        router.signal(signal.SIGTERM)
        async with asyncio.timeout(1):
            assert await router.ended() == (0, "", "")


async def test_a_reload_while_it_waits(tmp_path: Path) -> None:
    """SIGHUP before the port is open ends nothing; the settings are read once it is."""
    async with gate() as silent:
        file = tmp_path / "settings.yaml"
        file.write_text(f"worker: [{silent.url}]\n")
        async with serve(*QUICK, *SILENT, "--config", str(file)) as router:
            await silent.asked.wait()
            router.signal(signal.SIGHUP)
            file.write_text(f"worker: [{silent.url}, 'http://127.0.0.1:9']\n")
            silent.opened.set()
            url = await router.listening()

            async def count() -> int:
                return len((await get(url, "/workers")).json()["workers"])

            async with asyncio.timeout(8):
                while await count() != 2:  # noqa: ASYNC110 - another process's state
                    await asyncio.sleep(0.02)


async def test_stopped_before_it_listens() -> None:
    """Inside another program the context isn't entered, and nothing is left."""
    async with gate() as silent:
        settings = make_settings({"worker": [silent.url], "worker_startup_timeout_secs": LONG_S})
        with pytest.raises(StoppedEarly):
            async with running(settings, is_stopped=silent.asked.is_set):
                pytest.fail("it was entered")


def test_two_that_wait_for_one_port() -> None:
    """Both may have the address before either listens; the slower one is told as if it had come later."""
    port = free_port()
    with bind("127.0.0.1", port) as first, bind("127.0.0.1", port) as second:
        open_port(first)
        with pytest.raises(CannotListen, match=f"can't listen on 127.0.0.1:{port}"):
            open_port(second)
