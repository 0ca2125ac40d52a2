"""Virtual time against real time: the same requests through the HTTP emulators and a live router.

Both take turns over endpoints and ranks, so that decisions are the same and only the worlds are compared.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from tests.lab import GENERATE, Lab, make_lab
from tests.sim.virtual.builders import make_trace, pairs, simulate

from pdrouter.sim.profiles import DEFAULT_PROFILE, load_profiles
from pdrouter.sim.simulator import SimulatorSettings
from pdrouter.sim.text import BLOCK_TOKENS
from pdrouter.sim.virtual.figures import percentile
from pdrouter.sim.virtual.trace import Request
from pdrouter.sim.workload import TRACE_BLOCK_TOKENS, Planned, Scale, load_excerpt, plan

SPEED = 1.5
SECONDS = 16.0
"""Of the engines' time."""

RANKS = 2
TURNS: dict[str, Any] = {
    "policy": "round_robin", "prefill_policy": "round_robin", "decode_policy": "round_robin",
    "rank_policy": "round_robin",
}  # fmt: skip
WITHIN = 0.10
LATE_S = 0.01
LAST_CHUNK = b"0\r\n\r\n"


class Measured(NamedTuple):
    """One answer, in the engines' time; ``late_s`` is how much later than planned it was asked for."""

    ttft_s: float
    token_s: float
    late_s: float = 0.0


def planned() -> list[Planned]:
    """Return the excerpt's first requests, with an eighth of each answer."""
    rows = load_excerpt()
    return [
        Planned(p.at_s, p.blocks, p.block_tokens, p.prompt_tokens, max(2, p.output_tokens // 8))
        for p in plan(rows, SECONDS, Scale(lengths=1, arrivals=1.2))
    ]


def simulated(requests: Sequence[Planned]) -> list[Measured]:
    """Return what the simulator says; its blocks are as small as the emulator's."""
    parts = TRACE_BLOCK_TOKENS // BLOCK_TOKENS
    trace = make_trace(
        [
            Request(
                p.at_s,
                p.prompt_tokens,
                p.output_tokens,
                tuple(b * parts + i for b in p.blocks for i in range(parts))[: p.prompt_tokens // BLOCK_TOKENS],
            )
            for p in requests
        ],
        BLOCK_TOKENS,
    )
    run = simulate(
        trace, pairs(2, 2, ranks=RANKS, profile=DEFAULT_PROFILE), load_profiles(), SimulatorSettings(), **TURNS
    )
    return [Measured(answer.ttft_s, answer.token_s) for answer in run.answers]


async def measured(lab: Lab, requests: Sequence[Planned]) -> list[Measured]:
    """Send each at its moment, and time what comes back."""
    prompts = [json.dumps({
        "text": p.prompt(), "stream": True,
        "sampling_params": {"max_new_tokens": p.output_tokens, "ignore_eos": True},
    }).encode() for p in requests]  # fmt: skip
    start_s = time.monotonic() + 0.1

    async def send(request: Planned, body: bytes) -> Measured:
        sent_s = start_s + request.at_s / SPEED
        await asyncio.sleep(sent_s - time.monotonic())
        late_s = (time.monotonic() - sent_s) * SPEED
        async with await lab.start(GENERATE, body) as call, asyncio.timeout(3 * SECONDS / SPEED):
            assert await call.head() == 200
            tail = await call.some()
            first_s = time.monotonic()
            while not tail.endswith(LAST_CHUNK):
                tail = tail[-len(LAST_CHUNK) :] + await call.some()
            token_s = (time.monotonic() - first_s) * SPEED / (request.output_tokens - 1)
            return Measured((first_s - sent_s) * SPEED, token_s, late_s)

    return await asyncio.gather(*map(send, requests, prompts))


@pytest.mark.slow
@pytest.mark.timeout(60)
async def test_virtual_and_real_time_agree() -> None:
    """Time to first token and time per token have the same percentiles, within 10 %."""
    requests = planned()
    expected = simulated(requests)
    engine: dict[str, Any] = {"dp_size": RANKS, "speed": SPEED, "profile": DEFAULT_PROFILE, "stream_interval": 8}
    async with make_lab(2, 2, engine=engine, health_check_interval_secs=5.0, **TURNS) as lab:
        found = await measured(lab, requests)
    assert len(found) == len(expected) > 50
    late_s = percentile(sorted(m.late_s for m in found), 0.9)
    if late_s > LATE_S:
        pytest.skip(f"this machine is too busy to measure: one request in ten was {late_s * 1000:.0f} ms late")
    for values in ("ttft_s", "token_s"):
        one, other = (sorted(getattr(m, values) for m in side) for side in (found, expected))
        for share in (0.25, 0.5, 0.75, 0.9):
            assert percentile(one, share) == pytest.approx(percentile(other, share), rel=WITHIN), (values, share)
