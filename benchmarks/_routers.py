"""Processes of the benchmark: the worker, pdrouter, and the peer in a virtual environment of its own.

Every process is ended by its own id; Ctrl-C reaches none of them directly. What a router writes goes to a file,
read for its address and shown when it does not come up.
"""

import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

PEER = "sglang-router==0.3.2"
BOOTSTRAP_PORT = 8998

_ADDRESS = re.compile(rb"http://127\.0\.0\.1:(\d+)(?=\D)")
_POLL_S = 0.05
_GRACE_S = 10.0


@dataclass(frozen=True)
class Ports:
    """Where the worker listens: prefill and decode side."""

    prefill: int
    decode: int

    def flags(self) -> list[str]:
        """Return the flags for one prefill and one decode endpoint, spelt alike by both routers."""
        prefill = ["--prefill", f"http://127.0.0.1:{self.prefill}", str(BOOTSTRAP_PORT)]
        return [*prefill, "--decode", f"http://127.0.0.1:{self.decode}"]


@dataclass(frozen=True)
class Router:
    """A running router."""

    name: str
    pid: int
    port: int
    log: Path

    def cpu_s(self) -> float:
        """Return user and system seconds of the process with all its threads, and of its living children."""
        try:
            children = psutil.Process(self.pid).children(recursive=True)
            return sum(_cpu_s(pid) for pid in [self.pid, *(child.pid for child in children)])
        except (psutil.Error, OSError) as error:
            raise RuntimeError(f"{self.name} has ended; it wrote:\n{self.log_tail()}") from error

    def log_tail(self) -> str:
        """Return the last lines that the router wrote."""
        return self.log.read_text(errors="replace")[-2000:]


def _cpu_s(pid: int) -> float:
    if platform.system() != "Linux":
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    # The clock of another process, in nanoseconds (MAKE_PROCESS_CPUCLOCK in the kernel's posix-timers.h);
    # /proc/PID/stat, which psutil reads, counts in steps of 10 ms.
    return time.clock_gettime((~pid << 3) | 2)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def worker() -> Iterator[Ports]:
    """Run the trivial worker."""
    command = [sys.executable, str(Path(__file__).with_name("_worker.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            yield Ports(**json.loads(process.stdout.readline()))
        finally:
            _end(process)


@contextmanager
def pdrouter(command: list[str], ports: Ports, scratch: Path, start_s: float) -> Iterator[Router]:
    """Run pdrouter with its defaults on a port that it chooses and prints."""
    command = [*command, "--host", "127.0.0.1", "--port", "0", *ports.flags()]
    with _running("pdrouter", command, scratch) as (process, log):
        deadline_s = time.monotonic() + start_s
        while (port := _printed_port(log.read_bytes(), ports)) is None:
            _check_alive("pdrouter", process, log, deadline_s)
        yield _when_listening(Router("pdrouter", process.pid, port, log), process, deadline_s)


@contextmanager
def sglang_router(python: Path, ports: Ports, scratch: Path, start_s: float) -> Iterator[Router]:
    """Run the peer at its cheapest: no policy that looks at text, no log line for each request."""
    port, metrics_port = _free_port(), _free_port()
    command = [str(python), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--pd-disaggregation", *ports.flags(), "--policy", "round_robin", "--log-level", "warn"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    command += ["--worker-startup-check-interval", "1"]
    with _running("sglang-router", command, scratch) as (process, log):
        router = Router("sglang-router", process.pid, port, log)
        yield _when_listening(router, process, time.monotonic() + start_s)


def peer_python(venv_dir: Path) -> Path:
    """Return the interpreter that has the peer; install it first where it is missing."""
    python = venv_dir / "bin" / "python"
    stamp = venv_dir / f".{PEER}"
    if not stamp.exists():
        print(f"installing {PEER} into {venv_dir} (once; --without-peer does without)", file=sys.stderr)
        venv.create(venv_dir, with_pip=True)
        (venv_dir / ".gitignore").write_text("*\n")
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install", PEER]
        if subprocess.run(pip, check=False).returncode:
            raise RuntimeError(f"{PEER} could not be installed; --without-peer measures pdrouter alone")
        stamp.touch()
    return python


@contextmanager
def _running(name: str, command: list[str], scratch: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    log = scratch / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},  # its address is read from a file
            start_new_session=True,
        )
    try:
        yield process, log
    finally:
        _end(process)


def _printed_port(printed: bytes, ports: Ports) -> int | None:
    """Return the port of the first address that is not the worker's, which a router may print before its own."""
    found = (int(port) for port in _ADDRESS.findall(printed))
    return next((port for port in found if port not in (ports.prefill, ports.decode)), None)


def _when_listening(router: Router, process: subprocess.Popen[bytes], deadline_s: float) -> Router:
    while True:
        try:
            socket.create_connection(("127.0.0.1", router.port), timeout=1).close()
        except OSError:
            _check_alive(router.name, process, router.log, deadline_s)
        else:
            return router


def _check_alive(name: str, process: subprocess.Popen[bytes], log: Path, deadline_s: float) -> None:
    """Wait a little; raise when the router has ended or takes too long."""
    if process.poll() is not None or time.monotonic() > deadline_s:
        state = "does not come up" if process.returncode is None else f"ended with status {process.returncode}"
        raise RuntimeError(f"{name} {state}; it wrote:\n{log.read_text(errors='replace')[-2000:]}")
    time.sleep(_POLL_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
