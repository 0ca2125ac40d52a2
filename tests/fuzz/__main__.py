"""``make fuzz``: gives each target its share of the time, and ends with 0 if none of them found anything.

``python -m tests.fuzz TARGET ...`` runs one target with libFuzzer's own arguments, such as a file to be tried again.
"""

import argparse
import importlib
import logging
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
FOUND = Path(".fuzz")
"""Where what the fuzzer learns and finds is kept between runs."""

_READING = ("pdrouter.proxy.intake", "pdrouter.proxy.prompts", "pdrouter.proxy.bodies", "pdrouter.proxy.reading")

TARGETS: Mapping[str, Sequence[str]] = {
    "front": ("pdrouter.proxy",),
    "intake": (*_READING, "pdrouter.core.tokens"),
    "splice": (*_READING, "pdrouter.engines"),
    "stream": ("pdrouter.proxy.flight", "pdrouter.proxy.relay", "pdrouter.proxy.legs", "pdrouter.engines"),
    "samples": ("pdrouter.engines.samples", "pdrouter.engines.raw_json", "pdrouter.engines.sse"),
    "replies": ("pdrouter.engines", "pdrouter.core.load"),
    "forms": ("pdrouter.proxy.forms", "python_multipart"),
    "wire": ("pdrouter.upstream",),
}
"""Each target, and of which modules it is told what ran."""

_LIMITS = ("-timeout=20", "-rss_limit_mb=1024", "-max_len=4096", "-len_control=20")
_GRACE_S = 60


def main() -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", nargs="?", choices=TARGETS, help="one alone; unset: all")
    parser.add_argument("--seconds", type=float, default=60, help="how long, all targets together")
    args, rest = parser.parse_known_args()
    if rest and args.target:
        fuzz(args.target, rest)
    FOUND.mkdir(exist_ok=True)
    names = [args.target] if args.target else list(TARGETS)
    results = [run(name, max(1, round(args.seconds / len(names)))) for name in names]
    is_good = None not in results
    runs = sum(result or 0 for result in results)
    sys.stdout.write(f"fuzz: {'ok' if is_good else 'FAILED'} targets={len(names)} runs={runs}\n")
    return 0 if is_good else 1


def run(name: str, seconds: int) -> int | None:
    """Let a process of its own look for so long; return how many inputs it tried, ``None`` if it found something."""
    sys.stdout.write(f"fuzz: {name}, {seconds} s ... ")
    sys.stdout.flush()
    kept, log, began_s = FOUND / name, FOUND / f"{name}.log", time.monotonic()
    kept.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.fuzz", name, f"-max_total_time={seconds}", "-print_final_stats=1", *_LIMITS]
    with log.open("wb") as output:
        ended = subprocess.run(
            [*command, f"-artifact_prefix={FOUND / name}-", str(kept), str(CORPUS / name)],
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=seconds + _GRACE_S,
            check=False,
        )
    told = log.read_text("utf-8", "replace")
    tried = re.search(r"number_of_executed_units: (\d+)", told)
    if ended.returncode or tried is None:
        sys.stdout.write(f"failed ({log})\n{told[-4000:]}\n")
        return None
    sys.stdout.write(f"ok, {tried[1]} inputs in {time.monotonic() - began_s:.0f} s, {len(list(kept.iterdir()))} kept\n")
    return int(tried[1])


def fuzz(name: str, arguments: Sequence[str]) -> None:
    """Look, in this process, until the time is over or something is found."""
    import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: PLC0415

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with atheris.instrument_imports(include=list(TARGETS[name])):
        target = importlib.import_module(f"tests.fuzz.{name}")
    atheris.Setup([f"fuzz-{name}", *arguments], target.one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
