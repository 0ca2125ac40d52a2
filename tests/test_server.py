"""``pdrouter serve`` as a process, and ``running`` in one's own loop: start, drain, stop, and starts that can't be."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from pdrouter import server
from pdrouter.config import Settings
from pdrouter.options import router_options
from pdrouter.proxy.limits import room_for
from pdrouter.proxy.listener import bind
from pdrouter.server import running
from pdrouter.sim.emulator import EmulatorSettings, expected_text, render_chat, start_emulator
from tests.lab import CHAT, Reply, chat, connect, fault, get, make_settings, mend, post, start, until

LINE = "pdrouter listens on "


class Process:
    """A router of its own process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.url = ""

    async def listening(self) -> str:
        """Read the line that tells the address."""
        assert self.process.stdout is not None
        async with asyncio.timeout(10):
            line = (await self.process.stdout.readline()).decode().strip()
        assert line.startswith(LINE), line
        self.url = line.removeprefix(LINE)
        return self.url

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    async def ended(self) -> tuple[int, str, str]:
        """Wait for the end; return status, output and errors."""
        async with asyncio.timeout(10):
            out, err = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, out.decode(), (err or b"").decode()


@contextlib.asynccontextmanager
async def serve(
    *words: str, env: dict[str, str] | None = None, before: Sequence[str] = (), stderr: int = asyncio.subprocess.PIPE
) -> AsyncIterator[Process]:
    """Start ``pdrouter serve``; it is gone when the block is left."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PDROUTER_")}
    process = await asyncio.create_subprocess_exec(
        *before,
        sys.executable,
        "-m",
        "pdrouter",
        "serve",
        *words,
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
        env=clean | (env or {}),
    )
    try:
        yield Process(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ready(url: str) -> None:
    """Wait until a router is ready."""
    async with asyncio.timeout(8):
        while (await get(url, "/readiness")).status != 200:  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.02)


async def closed(url: str) -> None:
    """Wait until a router takes no connection any more."""
    async with asyncio.timeout(8):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                await get(url, "/liveness")


QUICK = (
    *("--port", "0", "--worker-startup-check-interval", "0.05"),
    *("--drain-notice-secs", "0", "--log-level", "warning", "--client-max-connections", "200"),
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_serve_until_a_signal(number: signal.Signals) -> None:
    """Port 0 is chosen and told on one line; requests are served; a stop signal ends it with status 0."""
    async with (
        start_emulator(EmulatorSettings(speed=100.0)) as worker,
        serve(*QUICK, "--worker", worker.url) as router,
    ):
        url = await router.listening()
        assert not url.endswith(":0")
        await ready(url)
        assert (await post(url, CHAT, chat("x"))).status == 200
        router.signal(number)
        assert await router.ended() == (0, "", "")


async def test_what_bounds_memory_is_told() -> None:
    """A line of the log at start has the budgets."""
    async with serve(*QUICK, "--log-level", "info", "--client-body-budget-bytes", "7000000") as router:
        await router.listening()
        router.signal(signal.SIGTERM)
        _, _, errors = await router.ended()
    told = [json.loads(line) for line in errors.splitlines() if "limits of memory" in line]
    assert [line["client_body_budget_bytes"] for line in told] == [7_000_000]


class Stderr:
    """Where a router's log goes: a full disk, a pipe without a reader, or one whose reader has left."""

    def __init__(self, kind: str) -> None:
        self.files = [os.open("/dev/full", os.O_WRONLY)] if kind == "full" else list(os.pipe())
        self.file = self.files[-1]
        if kind == "closed":
            os.close(self.files.pop(0))

    def close(self) -> None:
        """Close it."""
        for file in self.files:
            os.close(file)


@pytest.mark.parametrize("kind", ["full", "unread", "closed"])
async def test_the_log_decides_nothing(kind: str) -> None:
    """Whatever becomes of its lines: requests are served, failures are told, engines are watched, and it ends."""
    async with start_emulator(EmulatorSettings(speed=1000.0)) as worker:
        stderr = Stderr(kind)
        words = (*QUICK, "--log-level", "debug", "--health-check-interval-secs", "0.05", "--disable-retries")
        async with serve(*words, "--worker", worker.url, stderr=stderr.file) as router:
            url = await router.listening()
            await ready(url)
            for _ in range(150):
                assert (await post(url, CHAT, chat("x", 2))).status == 200
            await fault(worker, "status", times=1, status=500)
            assert (await post(url, CHAT, chat("x", 2))).status == 500
            await fault(worker, "status", "/health", status=503)
            async with asyncio.timeout(8):
                while (await get(url, "/readiness")).status == 200:
                    pass
            await mend(worker)
            await ready(url)
            metrics = (await get(url, "/metrics")).body.decode()
            assert 'pdrouter_background_total{event="restarted"} 0.0' in metrics
            assert 'pdrouter_rank_requests{endpoint="%s",rank="0",role="regular",source="ledger"} 0.0' in (
                metrics.replace(worker.url[7:], "%s")
            )
            assert ('pdrouter_log_lines_total{event="failed"} 0.0' in metrics) == (kind == "unread")
            router.signal(signal.SIGTERM)
            assert (await router.ended())[0] == 0
        stderr.close()


@pytest.mark.parametrize("redirection", [">/dev/full", "<&- >&- 2>&-"])
async def test_standard_files_that_arent_there(redirection: str) -> None:
    """A router starts, serves and ends without them, and none of its connections gets one of their numbers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with serve(
        *QUICK, "--port", str(port), before=("sh", "-c", f'exec "$0" "$@" {redirection}'), stderr=subprocess.DEVNULL
    ) as router:
        url = f"http://127.0.0.1:{port}"
        async with asyncio.timeout(10):
            while True:
                with contextlib.suppress(OSError):
                    assert (await get(url, "/liveness")).status == 200
                    break
                await asyncio.sleep(0.02)
        sockets = {connection.fd for connection in psutil.Process(router.process.pid).net_connections()}
        assert sockets
        assert not sockets & {0, 1, 2}
        router.signal(signal.SIGTERM)
        assert (await router.ended())[0] == 0


async def test_a_stop_signal_drains() -> None:
    """After SIGTERM a running stream is finished whole, while nobody new is let in."""
    async with (
        start_emulator(EmulatorSettings(speed=4.0)) as worker,
        serve(*QUICK, "--worker", worker.url) as router,
    ):
        url = await router.listening()
        await ready(url)
        async with await start(url, CHAT, chat("drain", 300, stream=True)) as call:
            await call.head()
            router.signal(signal.SIGTERM)
            await closed(url)
            reply = await call.finish()
        text = "".join(e["choices"][0]["delta"].get("content") or "" for e in reply.events)
        assert text == expected_text(render_chat([{"role": "user", "content": "drain"}]), 300)
        status, _, errors = await router.ended()
        assert (status, errors) == (0, "")


async def test_draining_is_announced() -> None:
    """From SIGTERM on it isn't ready, but still serves for the time of notice, on old connections and new ones."""
    async with (
        start_emulator(EmulatorSettings(speed=100.0)) as worker,
        serve(*QUICK, "--drain-notice-secs", "60", "--worker", worker.url) as router,
    ):
        url = await router.listening()
        await ready(url)
        router.signal(signal.SIGTERM)
        async with asyncio.timeout(5):
            while (page := await get(url, "/readiness")).status == 200:
                pass
        assert (page.status, page.json()["status"], page.json()["reason"]) == (503, "not ready", "draining")
        assert (await get(url, "/health")).status == 200
        reply = await post(url, CHAT, chat("x"))
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        router.signal(signal.SIGTERM)
        assert await router.ended() == (0, "", "")


async def test_the_grace_period_ends() -> None:
    """A stream that outlasts the grace period is told so, and cut; the engine is free, and the status is 0."""
    async with (
        start_emulator(EmulatorSettings(speed=2.0)) as worker,
        serve(*QUICK, "--shutdown-grace-period-secs", "0.5", "--worker", worker.url) as router,
    ):
        url = await router.listening()
        await ready(url)
        async with (
            await start(url, CHAT, chat("x", 100_000, stream=True)) as stream,
            await start(url, CHAT, chat("x", 100_000)) as call,
        ):
            await stream.head()
            router.signal(signal.SIGTERM)
            reply = await stream.finish()
            assert (reply.is_whole, json.loads(reply.pieces[-1])["error"]["code"]) == (False, "shutting_down")
            reply = await call.finish()
            assert (reply.status, reply.error["code"], reply.headers["connection"]) == (503, "shutting_down", "close")
        assert (await router.ended())[0] == 0
        await until(lambda: worker.snapshot().is_idle, 2.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_at_once(number: signal.Signals) -> None:
    """Without waiting for the streams, which are told so."""
    async with (
        start_emulator(EmulatorSettings(speed=2.0)) as worker,
        serve(*QUICK, "--worker", worker.url) as router,
    ):
        url = await router.listening()
        await ready(url)
        async with await start(url, CHAT, chat("x", 100_000, stream=True)) as call:
            await call.head()
            router.signal(number)
            await closed(url)  # two signals at once would be one
            router.signal(number)
            reply = await call.finish()
            assert (reply.is_whole, json.loads(reply.pieces[-1])["error"]["code"]) == (False, "shutting_down")
            status, _, errors = await router.ended()
        assert "Traceback" not in errors
        assert status == 0
        await until(lambda: worker.snapshot().is_idle, 2.0)


async def test_a_client_that_doesnt_read_delays_no_end() -> None:
    """Nor does one that sends half a request."""
    async with (
        start_emulator(EmulatorSettings(speed=100.0, stream_interval=1)) as worker,
        serve(*QUICK, "--shutdown-grace-period-secs", "0.2", "--worker", worker.url) as router,
    ):
        url = await router.listening()
        await ready(url)
        async with (
            await start(url, CHAT, chat("x", 100_000, stream=True), receive_bytes=4096) as deaf,
            await connect(url) as slow,
        ):
            await deaf.head()
            slow.writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
            await slow.writer.drain()
            router.signal(signal.SIGTERM)
            assert (await router.ended())[0] == 0


async def test_a_port_in_use() -> None:
    """A port that is taken stops the start with one clear line and status 1."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        async with serve("--port", port) as router:
            status, out, errors = await router.ended()
    assert (status, out) == (1, "")
    assert errors == f"pdrouter: can't listen on 127.0.0.1:{port}: Address already in use\n"


@pytest.mark.parametrize("host", ["192.0.2.1", "nowhere.invalid"])
async def test_an_address_that_isnt_ours(host: str) -> None:
    """An address that can't be listened on stops the start with one clear line and status 1."""
    async with serve("--port", "0", "--host", host) as router:
        status, out, errors = await router.ended()
    assert (status, out) == (1, "")
    assert errors.startswith(f"pdrouter: can't listen on {host}:0: ")
    assert len(errors.splitlines()) == 1
    assert "None" not in errors


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--port", "99999"), ["--port"]),
        (("--policy", "best"), ["--policy"]),
        (("--prefill", "not a url"), ["--prefill"]),
        (("--port", "x", "--seed", "-1"), ["--port", "--seed"]),
        (("--no-such-flag",), ["--no-such-flag"]),
    ],
)
async def test_settings_that_cant_be(words: tuple[str, ...], named: list[str]) -> None:
    """A setting that is wrong stops the start with one line for each, and status 2."""
    async with serve(*words) as router:
        status, out, errors = await router.ended()
    assert (status, out) == (2, "")
    assert len(errors.splitlines()) == len(named)
    for name, line in zip(named, errors.splitlines(), strict=True):
        assert name in line


async def test_a_config_file(tmp_path: Path) -> None:
    """The same settings come from a YAML file; an unknown key stops the start."""
    file = tmp_path / "router.yaml"
    async with start_emulator(EmulatorSettings(speed=100.0)) as worker:
        file.write_text(f"port: 0\nlog_level: warning\nworker:\n  - url: {worker.url}\n")
        async with serve("--config", str(file)) as router:
            url = await router.listening()
            await ready(url)
            reply: Reply = await post(url, CHAT, chat("x"))
            assert reply.status == 200
            router.signal(signal.SIGTERM)
            assert (await router.ended())[0] == 0
    file.write_text("port: 0\nno_such: 1\n")
    async with serve("--config", str(file)) as router:
        status, _, errors = await router.ended()
    assert status == 2
    assert "no_such" in errors


async def test_a_config_file_that_changes(tmp_path: Path) -> None:
    """SIGHUP reads it again: an engine is swapped under a running stream; a bad file is refused, and told on stderr."""
    file = tmp_path / "router.yaml"
    async with (
        start_emulator(EmulatorSettings(speed=2.0)) as old,
        start_emulator(EmulatorSettings(speed=100.0)) as new,
    ):
        file.write_text(f"port: 0\nlog_level: error\ndrain_notice_secs: 0\nworker:\n  - url: {old.url}\n")
        async with serve("--config", str(file), "--config-check-interval-secs", "3600") as router:
            url = await router.listening()
            await ready(url)
            async with await start(url, CHAT, chat("x", 300, stream=True)) as call:
                await call.head()
                file.write_text(file.read_text().replace(old.url, new.url))
                router.signal(signal.SIGHUP)
                async with asyncio.timeout(8):
                    while new.url not in str((await get(url, "/workers")).json()):
                        pass
                await ready(url)
                assert (await post(url, CHAT, chat("x"))).status == 200
                assert new.snapshot().total_requests == 1
                file.write_text("worker: 7\nno_such: 1\n")
                router.signal(signal.SIGHUP)
                async with asyncio.timeout(8):
                    while b'pdrouter_reloads_total{event="refused"} 1.0' not in (await get(url, "/metrics")).body:
                        pass
                assert (await post(url, CHAT, chat("x"))).status == 200
                assert (await call.finish()).is_whole
            router.signal(signal.SIGTERM)
            status, _, errors = await router.ended()
            assert (status, "no_such" in errors) == (0, True)


@contextlib.contextmanager
def file_limit(soft: int) -> Iterator[None]:
    """Give this process, and those that it starts, few open files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_open_files() -> None:
    """As many as the system grants are taken; where that may be too few it is said."""
    with file_limit(200):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        clients = str(min(most, 1_000_000))
        async with serve(*QUICK, "--client-max-connections", clients) as router:
            await router.listening()
            assert resource.prlimit(router.process.pid, resource.RLIMIT_NOFILE) == (most, most)
            router.signal(signal.SIGTERM)
            status, _, errors = await router.ended()
            assert (status, "few open files; raise the limit" in errors) == (0, True)


FEW_FILES = ("sh", "-c", 'ulimit -n 256; exec "$0" "$@"')


async def test_idle_clients_take_no_files_from_others() -> None:
    """With 256 open files and 300 idle clients, those that ask are served, 20 at a time, by two engines each."""
    async with (
        start_emulator(EmulatorSettings(speed=100.0, role="prefill", handshake_timeout_s=1e6)) as prefill,
        start_emulator(EmulatorSettings(speed=100.0, role="decode", handshake_timeout_s=1e6)) as decode,
        serve(*QUICK, "--prefill", prefill.url, "--decode", decode.url, before=FEW_FILES) as router,
        contextlib.AsyncExitStack() as stack,
    ):
        url = await router.listening()
        await ready(url)
        for _ in range(3):
            for _ in range(100):
                await stack.enter_async_context(await connect(url))
            replies = await asyncio.gather(*(post(url, CHAT, chat("x", 20)) for _ in range(20)))
            assert [reply.status for reply in replies] == [200] * 20
        metrics = (await get(url, "/metrics")).body.decode()
        assert 'pdrouter_clients_total{event="idle_closed"}' in metrics
        assert 'pdrouter_upstream_connections_total{event="exhausted"} 0.0' in metrics
        assert "too_many_connections" not in metrics


async def test_clients_that_ask_are_never_closed() -> None:
    """Where all that there is room for have begun to ask, one more is 503, and all of them get their answers."""
    body = json.dumps(chat("x", 2)).encode()
    async with (
        start_emulator(EmulatorSettings(speed=100.0)) as worker,
        serve(*QUICK, "--worker", worker.url, before=FEW_FILES) as router,
        contextlib.AsyncExitStack() as stack,
    ):
        url = await router.listening()
        await ready(url)
        calls = [await stack.enter_async_context(await connect(url)) for _ in range(room_for(256))]
        for call in calls:
            call.send("POST", CHAT, b"", {"content-length": str(len(body)), "expect": "100-continue"}, framing=False)
            assert await call.head() == 100
            call.status = 0
        reply = await get(url, "/health")
        assert (reply.status, reply.error["code"]) == (503, "too_many_connections")
        for call in calls:
            call.writer.write(body)
            assert (await call.finish()).status == 200
        assert (await get(url, "/health")).status == 200


async def test_start_without_engines() -> None:
    """Without any engine a router starts, lives and isn't ready."""
    async with running(make_settings({})) as router:
        assert (await get(router.url, "/liveness")).status == 200
        assert (await get(router.url, "/readiness")).status == 503


async def test_two_routers_in_one_loop() -> None:
    """Two routers over one engine share nothing but the engine."""
    async with start_emulator(EmulatorSettings(speed=100.0)) as worker:
        settings = make_settings({"worker": [worker.url]})
        async with running(settings) as first, running(settings) as second:
            for router in (first, second):
                await ready(router.url)
                assert (await post(router.url, CHAT, chat("x"))).status == 200
            assert (first.service.router.decided, second.service.router.decided) == (1, 1)


async def test_ipv6() -> None:
    """Router and engines listen on IPv6 as well, the handshake included."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    common = {"host": "::1", "speed": 100.0}
    async with (
        start_emulator(EmulatorSettings(role="prefill", **common)) as prefill,  # type: ignore[arg-type]
        start_emulator(EmulatorSettings(role="decode", **common)) as decode,  # type: ignore[arg-type]
        running(make_settings({"host": "::1", "prefill": [prefill.url], "decode": [decode.url]})) as router,
    ):
        assert router.url.startswith("http://[::1]:")
        await ready(router.url)
        assert (await post(router.url, CHAT, chat("x"))).status == 200


STOPPED_BY_TERM = 128 + signal.SIGTERM
IN_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
STOPS_EARLY = """
import os, runpy, signal, sys
class Hook:
    def find_spec(self, name, path=None, target=None):
        if name == "pdrouter.cli":
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Hook())
runpy.run_module("pdrouter", run_name="__main__")
"""


def namespace() -> Sequence[str]:
    """Return the words before a command that run it as process 1; skip where that isn't allowed."""
    try:
        subprocess.run([*IN_NAMESPACE, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no process namespaces here")
    return IN_NAMESPACE


def test_a_signal_before_the_imports() -> None:
    """A stop signal ends a process that hasn't even been loaded, also as process 1 of a container."""
    for words in ((), namespace()):
        command = [*words, sys.executable, "-c", STOPS_EARLY]
        assert subprocess.run(command, check=False, capture_output=True).returncode == STOPPED_BY_TERM, words


async def test_process_1() -> None:
    """As process 1 of a container it serves, drains and ends as elsewhere."""
    async with (
        start_emulator(EmulatorSettings(speed=100.0)) as worker,
        serve(*QUICK, "--worker", worker.url, before=namespace()) as router,
    ):
        url = await router.listening()
        await ready(url)
        assert (await post(url, CHAT, chat("x"))).status == 200
        (child,) = psutil.Process(router.process.pid).children()
        child.send_signal(signal.SIGTERM)
        assert await router.ended() == (0, "", "")


def test_a_signal_during_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop signal that comes before the server listens isn't lost: it ends with status 0."""

    def signalled(host: str, port: int) -> socket.socket:
        os.kill(os.getpid(), signal.SIGTERM)
        return bind(host, port)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr("pdrouter.server.bind", signalled)
    monkeypatch.setattr(server, "set_up_logs", lambda *_: None)
    try:
        assert server.serve(make_settings({})) == 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("flags", "rank_policy"),
    [
        ({}, "least_work"),
        ({"policy": "load_aware"}, "minimum_tokens"),
        ({"policy": "round_robin", "rank_policy": "random"}, "random"),
        ({"dp_minimum_tokens_scheduler": True}, "minimum_tokens"),
        ({"rank_fields": "none", "rank_policy": "minimum_tokens"}, "engine"),
    ],
)
def test_the_rank_policy_follows_the_policy(flags: dict[str, object], rank_policy: str) -> None:
    """Unless it is set; where ranks aren't told, the engine chooses them."""
    assert router_options(Settings(**flags)).rank_policy == rank_policy  # type: ignore[arg-type]
