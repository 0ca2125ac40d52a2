"""Microseconds of CPU for ``decide`` and ``settle`` together, by size of the fleet.

The fleet is loaded (two requests live for each pair of ranks, the oldest settled as new ones come), every rank has
reported, and the prefix index is full. Prompts share their first half with a few hundred others.

Run: ``python benchmarks/decide.py [--json FILE]``.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections import deque
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pdrouter.config import Settings
from pdrouter.core import events
from pdrouter.core.decision import Decision
from pdrouter.core.fleet import Endpoint, Role
from pdrouter.core.ledger import RankKey
from pdrouter.core.load import RankReport
from pdrouter.core.request import RequestFacts
from pdrouter.core.router import Router
from pdrouter.options import router_options

sys.path.insert(0, str(Path(__file__).parent))
from _report import provenance

RANKS = (10, 100, 1_000, 10_000)
GROUPS = (64, 1)
PROMPT_BYTES = (1024, 130 * 1024)
DP_SIZE = 5
BLOCK_BYTES = Settings().prefix_block_bytes
BYTES_PER_TOKEN = 4


class Row(msgspec.Struct):
    """One line of the result."""

    ranks: int
    groups: int
    prompt_bytes: int
    median_us: float
    p99_us: float


def make_router(ranks: int, groups: int, policy: str, profile: str = "") -> Router:
    """Return a fleet, half prefill and half decode, whose ranks have all reported."""
    options = router_options(Settings(policy=policy, rank_policy=policy, seed=1))  # type: ignore[arg-type]
    router = Router(options)
    for number in range(ranks // DP_SIZE):
        role = Role.PREFILL if number % 2 else Role.DECODE
        endpoint = Endpoint(
            address=f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}:80",
            host="10.0.0.1",
            port=80,
            role=role,
            group=f"g{number // 2 % groups}",
            model="m",
            dp_size=DP_SIZE,
            profile=profile or None,
        )
        router.observe(events.EndpointJoined(endpoint), 0.0)
        reports = [RankReport(rank, 0.0, 0.0) for rank in range(DP_SIZE)]
        router.observe(events.LoadReported(endpoint.address, reports, 0.0), 0.0)
    return router


def fill_prefixes(router: Router, rng: random.Random) -> None:
    """Bring the prefix index to its bound."""
    keys = [RankKey(e.address, rank) for e in router.fleet if e.role is Role.PREFILL for rank in range(e.dp_size)]
    while not router.prefixes.evictions:
        router.prefixes.insert([rng.getrandbits(62) for _ in range(256)], rng.choice(keys))


def make_facts(rng: random.Random, prompt_bytes: int) -> RequestFacts:
    """Return a request whose first half is one of 256 prefixes."""
    tokens = prompt_bytes // BYTES_PER_TOKEN
    blocks = prompt_bytes // BLOCK_BYTES
    shared = rng.randrange(256)
    return RequestFacts(
        request_id="benchmark",
        model="m",
        prompt_tokens=tokens,
        prefix_blocks=tuple(
            hash((shared, n)) & (2**62 - 1) if n < blocks // 2 else rng.getrandbits(62) for n in range(blocks)
        ),
        block_tokens=BLOCK_BYTES / BYTES_PER_TOKEN,
        max_output_tokens=256,
    )


def measure(router: Router, rng: random.Random, prompt_bytes: int, count: int) -> list[float]:
    """Return the microseconds of each decide + settle in a steady state."""
    live: deque[Decision] = deque()
    target = max(20, sum(e.dp_size for e in router.fleet))
    now_s, taken = 1.0, []
    for number in range(target + count):
        request = make_facts(rng, prompt_bytes)
        now_s += 0.001
        began = time.perf_counter_ns()
        decision = router.decide(request, now_s, is_admitted=True)
        decided = time.perf_counter_ns() - began
        assert isinstance(decision, Decision)
        live.append(decision)
        if len(live) > target // 2:
            router.observe(events.FirstTokenSeen(live[-(target // 4)]), now_s)
        if len(live) > target:
            began = time.perf_counter_ns()
            router.settle(live.popleft(), now_s)
            if number >= target:
                taken.append((decided + time.perf_counter_ns() - began) / 1000)
    while live:
        router.settle(live.popleft(), now_s)
    return taken


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON too")
    parser.add_argument("--policy", default="least_work", help="policy to measure (default least_work)")
    parser.add_argument("--profile", default="", help="profile of all endpoints (default: the neutral one)")
    parser.add_argument("--count", type=int, default=2000, help="decisions measured for each row (default 2000)")
    args = parser.parse_args()
    rows = []
    gc.disable()
    cases = [(r, g) for g in GROUPS for r in RANKS]
    with Progress(transient=True) as progress:
        task = progress.add_task("deciding", total=len(cases) * len(PROMPT_BYTES))
        for ranks, groups in cases:
            rng = random.Random(1)
            router = make_router(ranks, groups, args.policy, args.profile)
            fill_prefixes(router, rng)
            for prompt_bytes in PROMPT_BYTES:
                taken = sorted(measure(router, rng, prompt_bytes, args.count))
                p99 = taken[int(len(taken) * 0.99)]
                rows.append(Row(ranks, groups, prompt_bytes, round(statistics.median(taken), 1), round(p99, 1)))
                progress.advance(task)
            del router
            gc.collect()
    table = Table(title=f"decide + settle, policy {args.policy}, microseconds")
    for name in ("ranks", "groups", "prompt", "median", "p99"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row.ranks:,}", str(row.groups), f"{row.prompt_bytes:,} B", f"{row.median_us:.1f}", f"{row.p99_us:.1f}"
        )
    console = Console()
    console.print(table)
    facts = provenance(Path(__file__).parents[1])
    for name, value in facts.items():
        console.print(f"{name + ':':10}{value}", highlight=False)
    if args.json is not None:
        args.json.write_text(json.dumps({"rows": msgspec.to_builtins(rows), **facts}) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
