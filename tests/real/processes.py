"""Real vLLM servers and a router as processes on loopback, each ended by its own id.

What they write goes to files, shown when one doesn't come up. It knows nothing of what is checked.
"""

import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

MODEL = "smollm2"
"""The name under which the model is served, and that of its folder."""

VLLM_START_S = 600.0
ROUTER_START_S = 30.0
GRACE_S = 30.0
_PORTS = (20_000, 32_000)
_POLL_S = 0.25

_QUIET: Mapping[str, str] = {
    "PYTHONPATH": str(Path(__file__).parent / "vllm_stubs"),
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    # UCX listens on every interface unless it is told.
    "UCX_TLS": "tcp,self,sm",
    "UCX_NET_DEVICES": "lo",
}

_LISTENS = re.compile(r"listens on (\S+)\n")


class Server:
    """One process that serves HTTP."""

    def __init__(self, name: str, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.url = url
        self.process = process
        self.log = log

    def wait_until_answers(self, path: str, within_s: float) -> None:
        """Wait until a path answers 200.

        Raises: RuntimeError with what the process wrote, if it ends before or takes too long.
        """
        deadline_s = time.monotonic() + within_s
        while not _answers(self.url + path):
            self.check_alive(deadline_s)

    def check_alive(self, deadline_s: float) -> None:
        """Wait a little; raises RuntimeError when the process has ended or takes too long."""
        if self.process.poll() is not None or time.monotonic() > deadline_s:
            state = "takes too long" if self.process.returncode is None else f"ended ({self.process.returncode})"
            raise RuntimeError(f"{self.name} {state}; it wrote:\n{self.log.read_text(errors='replace')[-4000:]}")
        time.sleep(_POLL_S)


@contextlib.contextmanager
def vllm(venv: Path, folder: Path, name: str, kv_role: str | None, ranks: int = 1) -> Iterator[Server]:
    """Start vLLM; with ``kv_role`` as one side of a pair whose KV goes by NIXL. It may not answer yet.

    Each of several data-parallel ``ranks`` has the side channel's port plus its number.
    """
    port = free_port()
    command = ["nice", "-n", "5", str(venv / "bin" / "vllm"), "serve", str(venv / MODEL)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL]
    command += ["--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "16"]
    command += ["--enable-request-id-headers", "--enable-prompt-tokens-details", "--enable-server-load-tracking"]
    if ranks > 1:
        command += ["--data-parallel-size", str(ranks), "--data-parallel-address", "127.0.0.1"]
        command += ["--data-parallel-rpc-port", str(free_port())]
    environment = dict(_QUIET)
    if kv_role is not None:
        transfer = {"kv_connector": "NixlConnector", "kv_role": kv_role, "kv_buffer_device": "cpu"}
        command += ["--kv-transfer-config", json.dumps(transfer)]
        environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port(ranks))
    with running(command, folder / f"{name}.log", environment) as process:
        yield Server(name, f"http://127.0.0.1:{port}", process, folder / f"{name}.log")


@contextlib.contextmanager
def router(folder: Path, name: str, flags: Sequence[str], ready_s: float = ROUTER_START_S) -> Iterator[Server]:
    """Run pdrouter, ready within ``ready_s``, on a port that the kernel chose."""
    log = folder / f"{name}.log"
    log.unlink(missing_ok=True)  # an earlier run's tells of another port
    command = [sys.executable, "-m", "pdrouter", "serve", "--host", "127.0.0.1", "--port", "0", *flags]
    with running(command, log, {"PYTHONUNBUFFERED": "1"}) as process:
        server = Server(name, "", process, log)
        deadline_s = time.monotonic() + ROUTER_START_S
        while (told := _LISTENS.search(log.read_text(errors="replace"))) is None:
            server.check_alive(deadline_s)
        server.url = told[1]
        server.wait_until_answers("/readiness", ready_s)
        yield server


@contextlib.contextmanager
def running(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command while the block lasts."""
    process = start(command, log, environment)
    try:
        yield process
    finally:
        end(process)


def start(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own; what it writes is added to ``log``."""
    with log.open("ab") as out:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process, and those of its children that outlive it."""
    children: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in psutil.wait_procs(children, timeout=GRACE_S)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def free_port(count: int = 1) -> int:
    """Return the first of ``count`` ports in a row that nobody listens on now.

    They aren't among those that the kernel gives to connections: a server may need minutes until it takes its own.
    """
    while True:
        first = random.randrange(*_PORTS)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
