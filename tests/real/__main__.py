"""``make test-vllm``: a regular vLLM, a prefill/decode pair, and one of two ranks each, behind the router.

Ends with 0 if all held.
"""

import argparse
import asyncio
import contextlib
import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from tests.real.checks import Fleet, check_common
from tests.real.network import enter
from tests.real.pair_checks import check_by_hand, check_pair, check_transfers, external_tokens
from tests.real.processes import VLLM_START_S, Server, router, vllm
from tests.real.rank_checks import RANKS, check_ranks, check_ranks_seen
from tests.real.record import Record

TABLE_WIDTH = 140
MODULE = "tests.real"

_QUICK = ["--worker-load-check-interval", "0.5", "--health-check-interval-secs", "1"]


def main() -> int:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--venv", type=Path, required=True, help="the environment with vLLM and the model")
    parser.add_argument("--only", choices=("regular", "pair", "ranks"), help="one part alone")
    parser.add_argument("--logs", type=Path, help="where logs are kept; unset: nowhere")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    record = Record(Console(width=TABLE_WIDTH))
    if not enter(MODULE, sys.argv[1:]):
        record.tell("no network of its own (not root): ports may be taken while an engine starts")
    with contextlib.ExitStack() as stack:
        folder = args.logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        for name, run in (("regular", run_regular), ("pair", run_pair), ("ranks", run_ranks)):
            if args.only in (None, name):
                try:
                    run(record, args.venv, folder)
                except RuntimeError as error:  # one that doesn't come up
                    record.check("it comes up", False, str(error))
    record.show()
    record.tell(record.verdict("test-vllm"))
    return 0 if record.is_good else 1


def run_regular(record: Record, venv: Path, folder: Path) -> None:
    """One vLLM that does both, as ``vllm`` and as any server with OpenAI's API."""
    record.begin("regular")
    with vllm(venv, folder, "regular", None) as engine:
        wait(record, engine)
        for kind in ("vllm", "openai"):
            record.begin(f"regular, --engine {kind}")
            flags = ["--engine", kind, "--worker", engine.url, *_QUICK]
            with router(folder, f"router-{kind}", flags) as front:
                asyncio.run(check_common(Fleet(record, front, [engine])))


def run_pair(record: Record, venv: Path, folder: Path) -> None:
    """A prefill and a decode engine whose KV goes by NIXL."""
    record.begin("pair, NIXL")
    with vllm(venv, folder, "prefill", "kv_producer") as prefill, vllm(venv, folder, "decode", "kv_consumer") as decode:
        wait(record, prefill, decode)
        flags = ["--engine", "vllm", "--kv-transport", "nixl", "--disaggregation", "always"]
        flags += ["--prefill", prefill.url, "--decode", decode.url, *_QUICK]
        with router(folder, "router-pair", flags) as front:
            asyncio.run(check_all_of_pair(Fleet(record, front, [prefill, decode]), prefill, decode))


def run_ranks(record: Record, venv: Path, folder: Path) -> None:
    """A pair of two data-parallel ranks each, behind a router that is there before them, and one that comes later."""
    record.begin("ranks, NIXL")
    with (
        vllm(venv, folder, "prefill-ranks", "kv_producer", RANKS) as prefill,
        vllm(venv, folder, "decode-ranks", "kv_consumer", RANKS) as decode,
    ):
        flags = ["--engine", "vllm", "--kv-transport", "nixl", "--disaggregation", "always"]
        flags += ["--prefill", prefill.url, "--decode", decode.url, *_QUICK]
        with router(folder, "router-early", flags, VLLM_START_S) as early:
            wait(record, prefill, decode)  # one of them alone can be ready before the other
            asyncio.run(check_ranks_seen(Fleet(record, early, [prefill, decode]), "started before the engines"))
        with router(folder, "router-ranks", flags) as later:
            asyncio.run(check_ranks(Fleet(record, later, [prefill, decode]), prefill, decode))


async def check_all_of_pair(fleet: Fleet, prefill: Server, decode: Server) -> None:
    """Check the pair by hand first: if that fails, it isn't the router."""
    check_by_hand(fleet, prefill, decode)
    before = external_tokens(decode)
    await check_pair(fleet, prefill, decode)
    await check_common(fleet)
    check_transfers(fleet, prefill, decode, before)


def wait(record: Record, *servers: Server) -> None:
    """Wait until vLLM answers."""
    record.tell(f"starting vLLM: {', '.join(server.name for server in servers)}")
    for server in servers:
        server.wait_until_answers("/health", VLLM_START_S)
        record.tell(f"{server.name} answers")


if __name__ == "__main__":
    sys.exit(main())
