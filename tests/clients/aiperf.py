"""``make aiperf``: NVIDIA's load generator against the router, over emulated engines of each kind.

aiperf runs in a process of its own, from a virtual environment of its own; router and engines run here. A run holds if
aiperf counts every request and no error, no engine refused anything, and the ledger is zero after.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.clients.fleets import MODEL, nothing_left
from tests.lab import Lab, make_lab

FLEETS: Mapping[str, Mapping[str, Any]] = {
    "sglang": {"engine": "sglang"},
    "vllm": {"engine": "vllm"},
    "trtllm": {"engine": "trtllm"},
}
TIME_LIMIT_S = 300
_SPECIAL = "<|end|>"


def make_tokenizer(folder: Path) -> None:
    """Train a small byte-level tokenizer on the standard library, and save it as transformers reads it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415 - slow to import

    sources = [str(path) for path in sorted(Path(json.__file__).parents[1].glob("*.py"))[:60]]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=[_SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train(sources, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _SPECIAL, "model_max_length": 32768}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")


async def profile(venv: Path, tokenizer: Path, url: str, requests: int, concurrency: int, out: Path) -> dict[str, Any]:
    """Run ``aiperf profile``; return the numbers that it exports.

    Raises: RuntimeError with its output if it fails.
    """
    # fmt: off
    command = [
        str(venv / "bin" / "aiperf"), "profile", "-m", MODEL, "--url", url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", str(tokenizer), "--concurrency", str(concurrency), "--request-count", str(requests),
        "--synthetic-input-tokens-mean", "200", "--output-tokens-mean", "16", "--random-seed", "1", "--ui", "simple",
        "--no-server-metrics", "--no-gpu-telemetry", "--output-artifact-dir", str(out),
    ]
    # fmt: on
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(TIME_LIMIT_S):
            output, _ = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if process.returncode:
        raise RuntimeError(f"aiperf ended with {process.returncode}:\n{output.decode(errors='replace')[-4000:]}")
    return _exported(out)


def _exported(out: Path) -> dict[str, Any]:
    numbers: dict[str, Any] = json.loads(next(out.rglob("profile_export_aiperf.json")).read_text("utf-8"))
    return numbers


def _average(numbers: Mapping[str, Any], name: str) -> float:
    return float((numbers.get(name) or {}).get("avg") or 0)


def faults_of(lab: Lab, numbers: Mapping[str, Any], requests: int) -> list[str]:
    """Return what isn't as it must be."""
    faults = []
    if _average(numbers, "request_count") != requests:
        faults.append(f"{_average(numbers, 'request_count'):g} of {requests} requests were counted")
    if errors := numbers.get("error_summary"):
        faults.append(f"errors: {errors}")
    if refused := [error for emulator in lab.emulators for error in emulator.snapshot().error_messages]:
        faults.append(f"engines refused: {refused[:3]}")
    if any(not emulator.snapshot().total_requests for emulator in lab.emulators):
        faults.append("an engine had no request")
    return faults


async def run(arguments: argparse.Namespace) -> int:
    """Try each fleet, print what was seen, return how many failed."""
    tokenizer = arguments.venv / "tokenizer"
    if not (tokenizer / "tokenizer_config.json").exists():
        make_tokenizer(tokenizer)
    failed = 0
    for name, engine in FLEETS.items():
        with tempfile.TemporaryDirectory(prefix="aiperf-") as out:
            async with make_lab(2, 2, engine=dict(engine), disaggregation="always") as lab:
                numbers = await profile(
                    arguments.venv, tokenizer, lab.url, arguments.requests, arguments.concurrency, Path(out)
                )
                await nothing_left(lab)
                faults = faults_of(lab, numbers, arguments.requests)
        failed += bool(faults)
        sys.stdout.write(
            f"{name}: {'; '.join(faults) or 'ok'}: {_average(numbers, 'request_count'):g} requests, "
            f"{_average(numbers, 'request_throughput'):.1f} a second, "
            f"TTFT {_average(numbers, 'time_to_first_token'):.1f} ms, "
            f"between tokens {_average(numbers, 'inter_token_latency'):.2f} ms, ledger zero\n"
        )
        sys.stdout.flush()
    return failed


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, required=True, help="virtual environment with aiperf")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--concurrency", type=int, default=8)
    return 1 if asyncio.run(run(parser.parse_args())) else 0


if __name__ == "__main__":
    sys.exit(main())
