"""CPU that a router process spends per request and per streamed chunk: pdrouter beside sglang-router.

Both route the same requests to the same trivial workers as one prefill/decode pair, in the same run, taking
turns, so that a noisy machine disturbs both. An answer that is not exactly right fails the benchmark.
README.md says what is measured and how to read it.
"""

import argparse
import asyncio
import json
import shlex
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import uvloop
from rich.console import Console

from _cases import make_cases
from _load import Case, Outcome, run_load
from _report import Sample, Samples, as_json, make_rows, make_table, provenance
from _routers import PEER, Router, pdrouter, peer_python, sglang_router, worker

ROOT = Path(__file__).resolve().parent.parent
START_S = 60.0
PROBE_S = 3.0
RUN_DEADLINE_S = 60.0
WARM_UP_SHARE = 0.2
# A large request costs some four times a small one, a stream takes a second: runs of like length.
REQUESTS_SHARE = {"small": 1.0, "large": 0.25, "stream": 0.008}


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=6000, help="small requests in a run; others in proportion")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each case through each router")
    parser.add_argument("--connections", type=int, default=16, help="connections, one request in flight on each")
    parser.add_argument("--only", choices=list(REQUESTS_SHARE), help="one case alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--without-peer", action="store_true", help=f"leave {PEER} out, and do not install it")
    parser.add_argument("--without-pdrouter", action="store_true", help="measure the peer alone")
    parser.add_argument("--peer-venv", type=Path, default=ROOT / ".venv-peers", help=f"where {PEER} lives")
    parser.add_argument(
        "--router-command",
        default=shlex.join([sys.executable, "-m", "pdrouter", "serve"]),
        metavar="COMMAND",
        help="started with --host, --port 0, --prefill URL PORT and --decode URL behind it",
    )
    args = parser.parse_args()
    if args.without_peer and args.without_pdrouter:
        parser.error("nothing is left to measure")
    if min(args.requests, args.rounds, args.connections) < 1:
        parser.error("--requests, --rounds and --connections are at least 1")
    return args


def _requests(case: str, args: argparse.Namespace) -> int:
    """Return how many requests a run has: whole turns of all connections."""
    connections: int = args.connections
    turns: int = max(1, round(args.requests * REQUESTS_SHARE[case] / connections))
    return connections * turns


async def _load(router: Router, case: Case, requests: int, connections: int) -> Outcome:
    """Send the requests over kept connections, but each stream over a new one.

    A router that leaves Nagle's algorithm on sends the chunks of a connection's later streams in lumps (Linux
    acknowledges at once only while a connection is young). On new connections all routers send every chunk.
    """
    at_once = connections if case.name == "stream" else requests
    outcome = Outcome()
    for _ in range(0, requests, at_once):
        outcome.add(await run_load(router.port, case, at_once, connections, RUN_DEADLINE_S))
    return outcome


async def _sample(router: Router, case: Case, args: argparse.Namespace) -> Sample:
    requests = _requests(case.name, args)
    before_s = router.cpu_s()
    outcome = await _load(router, case, requests, args.connections)
    cpu_us = (router.cpu_s() - before_s) / requests * 1e6
    if outcome.failed:
        kinds = "; ".join(f"{count} x {kind}" for kind, count in outcome.failures.most_common(5))
        print(f"{router.name}, {case.name}: {outcome.failed} of {requests} failed: {kinds}", file=sys.stderr)
    return Sample(cpu_us, outcome)


async def _warm_up(router: Router, cases: list[Case], args: argparse.Namespace) -> None:
    """Wait for a right answer (the router has found its workers), then load the router for a moment."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + START_S
    while (outcome := await run_load(router.port, cases[0], 1, 1, PROBE_S)).failed:
        if loop.time() > deadline_s:
            kinds = ", ".join(outcome.failures)
            raise RuntimeError(f"{router.name} gives no right answer: {kinds}; it wrote:\n{router.log_tail()}")
        await asyncio.sleep(0.1)
    for case in cases:
        requests = max(args.connections, round(_requests(case.name, args) * WARM_UP_SHARE))
        await _load(router, case, requests, args.connections)


async def _measure(routers: list[Router], args: argparse.Namespace) -> Samples:
    cases = make_cases()
    # A stream's cost before its first chunk is that of a small request.
    wanted = {None: list(cases), "stream": ["small", "stream"]}.get(args.only, [args.only])
    for router in routers:
        await _warm_up(router, [cases[name] for name in wanted], args)
    samples: Samples = {name: {router.name: [] for router in routers} for name in wanted}
    for _ in range(args.rounds):
        for name in wanted:
            for router in routers:
                samples[name][router.name].append(await _sample(router, cases[name], args))
    return samples


def main() -> int:
    """Measure, print the table, return 1 when a request failed or a router did not come up."""
    args = _parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        peer = None if args.without_peer else peer_python(args.peer_venv)
        with ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            ports = stack.enter_context(worker())
            routers: list[Router] = []
            if not args.without_pdrouter:
                command = shlex.split(args.router_command)
                routers.append(stack.enter_context(pdrouter(command, ports, scratch, START_S)))
            if peer:
                routers.append(stack.enter_context(sglang_router(peer, ports, scratch, START_S)))
            samples = uvloop.run(_measure(routers, args))
    except KeyboardInterrupt:
        return 130
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    rows, origin = make_rows(samples), provenance(ROOT)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(make_table(rows))
    for name, value in origin.items():
        print(f"{name + ':':9} {value}")
    if args.json:
        args.json.write_text(json.dumps(as_json(rows, origin), indent=1) + "\n")
    failed = sum(figures.failed for row in rows.values() for figures in row.routers.values())
    if failed:
        print(f"benchmark failed: {failed} requests without a right answer", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
