"""One rank of an engine fails while its neighbours are well: it goes out alone, and comes back by a probe."""

import asyncio
import itertools
from typing import Any

import pytest

from pdrouter.core.ledger import RankKey
from pdrouter.sim.emulator import Emulator
from tests.faults.checks import NEIGHBOURS, is_right, neighbours, nothing_left
from tests.lab import CHAT, Lab, Reply, chat, fault, make_lab, mend

RANK, RANKS = 2, 4
ENGINE = {"dp_size": RANKS, "speed": 200.0}
FOR_GOOD: dict[str, Any] = {"cb_failure_threshold": 3, "cb_timeout_duration_secs": 600.0}
SOON: dict[str, Any] = {"cb_failure_threshold": 3, "cb_success_threshold": 2, "cb_timeout_duration_secs": 0.1}


def side_of(lab: Lab, side: str) -> Emulator:
    """Return the engine of a side."""
    return (lab.prefills if side == "prefill" else lab.decodes)[0]


def ranks_out(lab: Lab) -> list[RankKey]:
    """Return the ranks that are out."""
    return [RankKey(address, rank) for address, ranks in lab.core.fleet.ranks_out.items() for rank in ranks]


async def ask(lab: Lab, text: str) -> Reply | None:
    """Send a streamed request; return the reply if it failed, and check what was answered well."""
    reply = await lab.post(CHAT, chat(text, 20, stream=True))
    if reply.status != 200 or "[DONE]" not in reply.pieces:
        return reply
    assert is_right(reply, text, 20)
    return None


async def ask_many(lab: Lab, text: str, number: int) -> int:
    """Send requests at once; return how many failed."""
    replies = await asyncio.gather(*(ask(lab, f"{text} {i}") for i in range(number)))
    return number - replies.count(None)


async def until_out(lab: Lab, emulator: Emulator) -> None:
    """Send requests until the rank is out: as many failed as it takes, the others were answered."""
    key, failed = RankKey(emulator.url[7:], RANK), 0
    for number in range(60):
        if key in ranks_out(lab):
            break
        failed += await ask(lab, f"before {number}") is not None
    assert key in ranks_out(lab)
    assert failed == FOR_GOOD["cb_failure_threshold"]


@pytest.mark.invariant("I6")
@pytest.mark.parametrize(
    ("side", "kind", "fields"),
    [
        ("prefill", "status", {"status": 500}),
        ("prefill", "reset", {}),
        ("decode", "status", {"status": 503}),
        ("decode", "reset", {}),
        ("decode", "half_stream", {"after_chunks": 0}),
        ("prefill", "hang", {}),
        ("decode", "hang", {}),
    ],
)
async def test_a_rank_that_fails_alone_is_out_alone(side: str, kind: str, fields: dict[str, Any]) -> None:
    """Whatever it fails with: its neighbours take all requests and answer them, and whoever looks is told."""
    flags = FOR_GOOD | {"policy": "round_robin"}
    if kind == "hang":  # who isn't at fault is known by what it does for others
        flags |= {"policy": "random", "rank_policy": "random", "seed": 3, "first_token_timeout_secs": 1.0}
    async with make_lab(engine=ENGINE, **flags) as lab, nothing_left(lab):
        emulator = side_of(lab, side)
        address = emulator.url[7:]
        await fault(emulator, kind, rank=RANK, **fields)
        await until_out(lab, emulator)
        assert ranks_out(lab) == [RankKey(address, RANK)]
        before = emulator.snapshot().requests_by_rank
        await neighbours(lab)
        after = emulator.snapshot().requests_by_rank
        taken = [now - then for now, then in zip(after, before, strict=True)]
        assert taken[RANK] == 0
        assert sum(taken) == NEIGHBOURS

        (worker,) = [w for w in (await lab.get("/workers")).json()["workers"] if w["id"] == address]
        assert worker["is_healthy"]
        assert worker["metadata"]["out"] == ""
        assert worker["metadata"]["ranks_out"].startswith("rank 2 breaker open (3 failures in a row: ")
        (shown,) = [e for e in (await lab.get("/debug/fleet")).json()["endpoints"] if e["address"] == address]
        assert [rank["out"] is not None for rank in shown["ranks"]] == [False, False, True, False]
        page = (await lab.get("/metrics")).body.decode()
        for rank, is_ready in enumerate((1.0, 1.0, 0.0, 1.0)):
            labels = f'endpoint="{address}",rank="{rank}",role="{side}"'
            assert f"pdrouter_rank_ready{{{labels}}} {is_ready}\n" in page
        assert 'pdrouter_breakers_total{event="opened"} 1.0\n' in page
        reply = await lab.post(CHAT, chat("there"), {"x-data-parallel-rank": str(RANK)})
        assert (reply.status, reply.error["code"]) == (503, "no_ready_pair")
        assert reply.error["message"].startswith(f"rank 2 of no {side} endpoint is ready ({address} breaker open (3")
        assert (await lab.post(CHAT, chat("here"), {"x-data-parallel-rank": "1"})).status == 200


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_it_comes_back_by_a_probe(side: str) -> None:
    """While the fault lasts each probe opens it again, and the neighbours go on; once it is mended, it is in."""
    async with make_lab(engine=ENGINE, **SOON) as lab, nothing_left(lab):
        emulator, counts = side_of(lab, side), lab.core.outcomes.breakers.counts
        await fault(emulator, "status", rank=RANK)
        await until_out(lab, emulator)
        failed, texts = 0, map(str, itertools.count())  # each text is new: a repeated one is sent where it was read
        while counts["opened"] < 3:
            failed += await ask_many(lab, f"meanwhile {next(texts)}", 4)
        assert failed == counts["opened"] - 1 == counts["probes"]
        await mend(emulator)
        while ranks_out(lab) or counts["closed"] < 1:
            assert await ask(lab, f"mended {next(texts)}") is None
        before = emulator.snapshot().requests_by_rank[RANK]
        assert not await ask_many(lab, "after", 2 * RANKS)
        assert emulator.snapshot().requests_by_rank[RANK] > before


async def test_with_further_attempts_no_client_notices() -> None:
    """What fails on the rank is tried on a neighbour, before it is out and by its probes."""
    flags = SOON | {"disable_retries": False, "retry_initial_backoff_ms": 1}
    async with make_lab(engine=ENGINE, **flags) as lab, nothing_left(lab):
        for emulator in (*lab.prefills, *lab.decodes):
            await fault(emulator, "status", rank=RANK)
        for number in range(60):
            assert await ask(lab, f"unaware {number}") is None
        assert len(lab.core.fleet.ranks_out) == 2 or lab.core.outcomes.breakers.counts["half_opened"]
        assert lab.core.outcomes.breakers.counts["opened"] >= 2


async def test_when_all_ranks_fail_the_endpoint_is_out() -> None:
    """By its own breaker, after as many failures as without ranks, if the only one of its role may be out at all."""
    async with make_lab(engine=ENGINE, healthy_panic_threshold=0, **FOR_GOOD) as lab, nothing_left(lab):
        await fault(lab.decodes[0], "status", times=3)
        for number in range(3):
            assert await ask(lab, f"failing {number}") is not None
        reply = await lab.post(CHAT, chat("nobody"))
        assert reply.status == 503
        assert f"(1 known: {lab.decodes[0].url[7:]} breaker open (3 failures in a row: " in reply.error["message"]
