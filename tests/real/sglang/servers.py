"""A prefill and a decode server of SGLang, two ranks each, that can be killed, paused and started again."""

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.real.processes import Server, end, start

MODEL = "m"
ADAPTER = "ad"
RANKS = 2
CONTEXT_TOKENS = 2048
START_S = 900.0
"""Longest time until a server answers: half a minute of work for each of its five processes, on a busy machine."""
BOOTSTRAP_PORT = 8998
_PREFILL_PORT = 30000
_DECODE_PORT = 31000
"""Far from the prefill's: with DP attention a server takes further ports above its own."""

STUBS = Path(__file__).parent / "stubs"


class Kind(NamedTuple):
    """A kind of data parallelism: its flags, a tiny model that has it, and whether that has an adapter.

    Source: SGLang 0.5.23, ``lora_manager.py``: of the backends of LoRA only Triton's knows DP attention.
    """

    name: str
    model: str
    flags: Sequence[str]
    has_adapter: bool = False


PLAIN = Kind("plain DP", "tiny", ["--dp-size", "2"], has_adapter=True)
ATTENTION = Kind("DP attention", "tinyq", ["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"])


class Engine(Server):
    """One SGLang server, started at once; it may not answer yet."""

    def __init__(self, name: str, port: int, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        super().__init__(name, f"http://127.0.0.1:{port}", start(command, log, environment), log)
        self._command = (command, log, environment)

    def kill(self) -> None:
        """End all its processes at once, as a machine that fails."""
        self._signal(signal.SIGKILL)
        self.process.wait()

    def start_again(self) -> None:
        """Start it again on its port."""
        self.process = start(*self._command)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop its schedulers while the block lasts: it takes requests, and nothing becomes of them."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        schedulers = [child for child in family if child.cmdline()[0].startswith("sglang::scheduler")]
        assert len(schedulers) == RANKS, f"{len(schedulers)} schedulers, not {RANKS}"
        for scheduler in schedulers:
            scheduler.suspend()
        try:
            yield
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                for scheduler in schedulers:
                    scheduler.resume()

    def end(self) -> None:
        """End it, and whatever it leaves behind."""
        end(self.process)
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


@contextlib.contextmanager
def pair(venv: Path, folder: Path, kind: Kind) -> Iterator[tuple[Engine, Engine]]:
    """Start a prefill and a decode server."""
    sides = {
        "prefill": (_PREFILL_PORT, ["--disaggregation-bootstrap-port", str(BOOTSTRAP_PORT)]),
        "decode": (_DECODE_PORT, ["--disaggregation-decode-retraction-backup", "cpu_tensor"]),
    }
    with contextlib.ExitStack() as stack:
        engines = []
        for role, (port, flags) in sides.items():
            command = [*_command(venv, kind), "--port", str(port), "--disaggregation-mode", role, *flags]
            log = folder / f"{kind.model}-{role}.log"
            log.unlink(missing_ok=True)
            engines.append(Engine(role, port, command, log, _environment()))
            stack.callback(engines[-1].end)
        yield engines[0], engines[1]


def _command(venv: Path, kind: Kind) -> list[str]:
    command = [str(venv / "bin" / "python"), "-m", "sglang.launch_server", "--host", "127.0.0.1"]
    command += ["--model-path", str(venv / "models" / kind.model), "--served-model-name", MODEL, *kind.flags]
    if kind.has_adapter:
        command += ["--enable-lora", "--lora-paths", f"{ADAPTER}={venv / 'models' / f'{kind.model}-lora'}"]
        command += ["--lora-backend", "torch_native"]
    # Nothing that needs a GPU or compiled kernels; idle schedulers sleep.
    command += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    command += ["--grammar-backend", "none", "--disable-cuda-graph", "--sleep-on-idle"]
    command += ["--mem-fraction-static", "0.2", "--max-total-tokens", "16384", "--max-running-requests", "32"]
    command += ["--context-length", str(CONTEXT_TOKENS), "--enable-metrics"]
    return [*command, "--disaggregation-transfer-backend", "mooncake_tcp"]


def _environment() -> dict[str, str]:
    return {
        "PYTHONPATH": str(STUBS),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank) for rank in range(RANKS)),
        "SGLANG_HOST_IP": "127.0.0.1",
        "HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def count_in_log(engine: Engine, words: str) -> int:
    """Return how often an engine has written some words."""
    return engine.log.read_text(errors="replace").count(words)
