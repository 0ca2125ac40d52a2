"""``make test-sglang``: a prefill/decode pair of real SGLang behind the router, in both kinds of DP; 0 if all held."""

import argparse
import asyncio
import contextlib
import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from tests.real.network import enter
from tests.real.processes import router
from tests.real.record import Record
from tests.real.sglang.answer_checks import check_answers
from tests.real.sglang.ending_checks import ABORT_AGAIN_S, check_failures, check_leaving
from tests.real.sglang.name_checks import check_names
from tests.real.sglang.pair import Pair
from tests.real.sglang.rank_checks import check_legs, check_ranks
from tests.real.sglang.servers import ATTENTION, PLAIN, START_S, Kind, pair

TABLE_WIDTH = 140
MODULE = "tests.real.sglang"

_QUICK = ["--worker-load-check-interval", "0.5", "--health-check-interval-secs", "2"]
_QUICK += ["--cb-timeout-duration-secs", "5", "--abort-retry-delay-secs", str(ABORT_AGAIN_S)]


def main() -> int:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--venv", type=Path, required=True, help="the environment with SGLang and the models")
    parser.add_argument("--only", choices=("plain", "attention"), help="one kind of DP alone")
    parser.add_argument("--logs", type=Path, help="where logs are kept; unset: nowhere")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    record = Record(Console(width=TABLE_WIDTH))
    if not enter(MODULE, sys.argv[1:]):
        record.tell("no network of its own (not root): torch and Mooncake listen on all interfaces while this runs")
    with contextlib.ExitStack() as stack:
        folder = args.logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        for name, kind in (("plain", PLAIN), ("attention", ATTENTION)):
            if args.only in (None, name):
                try:
                    run(record, args.venv, folder, kind)
                except RuntimeError as error:  # one that doesn't come up
                    record.check("it comes up", False, str(error))
    record.show()
    record.tell(record.verdict("test-sglang"))
    return 0 if record.is_good else 1


def run(record: Record, venv: Path, folder: Path, kind: Kind) -> None:
    """Check one kind of data parallelism."""
    record.begin(kind.name)
    with pair(venv, folder, kind) as (prefill, decode):
        for server in (prefill, decode):
            server.wait_until_answers("/health", START_S)
            record.tell(f"{server.name} answers")
        flags = ["--engine", "sglang", "--prefill", prefill.url, "--decode", decode.url, *_QUICK]
        with router(folder, f"{kind.model}-router", flags) as front:
            asyncio.run(check(Pair(record, front, prefill, decode), kind))


async def check(fleet: Pair, kind: Kind) -> None:
    """Check the pair by hand, then through the router."""
    await check_legs(fleet)
    await check_ranks(fleet)
    await check_names(fleet, kind)
    await check_answers(fleet)
    await check_leaving(fleet)
    await check_failures(fleet)
    await fleet.hold("the ledger is zero at the end", fleet.idle)


if __name__ == "__main__":
    sys.exit(main())
