"""What must hold of a real vLLM pair with data-parallel ranks: all are seen and reached, and counters agree.

vLLM tells of its ranks by the ``engine`` label of ``/metrics``, which has none yet when ``/health`` first answers.
"""

import asyncio
import itertools
import time
import uuid
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tests.real.asking import metric, page
from tests.real.checks import STORY, Fleet
from tests.real.pair_checks import check_by_hand, external_tokens
from tests.real.processes import MODEL, Server

RANKS = 2
AT_ONCE = 16
TOKENS = 8
FEWEST_TOKENS = 64
"""Of each prompt: few, for a CPU that takes seconds for some hundred."""

SEEN_S = 20.0
"""Longest time until a router has heard of ranks that an engine told only after its first answer."""

COUNTED_S = 5.0
"""Longest time until an engine's counters tell of what it has answered."""

_POLL_S = 0.1
_RANK_PAIRS = list(itertools.product(range(RANKS), range(RANKS)))
_REQUESTS = "vllm:request_success_total"
_TOKENS = "vllm:prompt_tokens_total"

_Counts = list[list[float]]
"""Of the prefill and of the decode engine, a count of each rank."""


async def check_ranks_seen(fleet: Fleet, when: str) -> None:
    """Check that a router knows all ranks."""
    await fleet.hold(f"all ranks are seen by a router {when}", lambda: _seen(fleet))


async def check_ranks(fleet: Fleet, prefill: Server, decode: Server) -> None:
    """Check the ranks by hand, then through the router."""
    for ranks in _RANK_PAIRS:
        check_by_hand(fleet, prefill, decode, ranks)
    await check_ranks_seen(fleet, "started after the engines")
    for ranks in _RANK_PAIRS:
        await fleet.hold(f"the client's ranks {ranks[0]} and {ranks[1]}", lambda r=ranks: _named(fleet, r))  # type: ignore[misc]
    before = external_tokens(decode)
    await fleet.hold(f"{AT_ONCE} at once: each pair of ranks, counters agree", lambda: _at_once(fleet))
    moved = external_tokens(decode) - before
    fleet.record.check("KV moved for each", moved >= AT_ONCE * FEWEST_TOKENS, f"{moved:g} tokens")
    failed = [metric(engine.url, "vllm:nixl_num_failed_transfers_total") for engine in fleet.engines]
    fleet.record.check("no transfer failed", not any(failed), f"{failed[0]:g} and {failed[1]:g}")
    await fleet.hold("nothing is left, the ledger is zero", fleet.idle)


async def _seen(fleet: Fleet) -> tuple[bool, str]:
    began_s = time.monotonic()
    while True:
        endpoints = page(f"{fleet.router.url}/debug/fleet")["endpoints"]
        seen = {endpoint["role"]: len(endpoint["ranks"]) for endpoint in endpoints}
        took_s = time.monotonic() - began_s
        if seen == {"prefill": RANKS, "decode": RANKS} or took_s > SEEN_S:
            return took_s <= SEEN_S, f"{seen} after {took_s:.1f} s"
        await asyncio.sleep(_POLL_S)


async def _named(fleet: Fleet, ranks: tuple[int, int]) -> tuple[bool, str]:
    """Ranks that the client names serve it, as the engines count."""
    requests = _counters(fleet, _REQUESTS)
    seen, _ = await _ask(fleet, 0, disagg_prefill_dp_rank=ranks[0], routed_dp_rank=ranks[1])
    agree, told = await _agree(fleet, _REQUESTS, requests, _shares({ranks: 1}))
    return agree and seen == ranks, f"the router says {seen}; {told}"


async def _at_once(fleet: Fleet) -> tuple[bool, str]:
    requests, tokens = _counters(fleet, _REQUESTS), _counters(fleet, _TOKENS)
    began_s = time.monotonic()
    replies = await asyncio.gather(*(_ask(fleet, number) for number in range(AT_ONCE)))
    took_s = time.monotonic() - began_s
    reached, read = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for ranks, prompt_tokens in replies:
        reached[ranks] += 1
        read[ranks] += prompt_tokens
    by_pair = ", ".join(f"{prefill}-{decode}: {count}" for (prefill, decode), count in sorted(reached.items()))
    agree, told = await _agree(fleet, _REQUESTS, requests, _shares(reached))
    agree_too, told_too = await _agree(fleet, _TOKENS, tokens, _shares(read))
    held = agree and agree_too and set(reached) == set(_RANK_PAIRS)
    return held, f"in {took_s:.1f} s, by ranks {by_pair}; requests: {told}; prompt tokens: {told_too}"


async def _ask(fleet: Fleet, number: int, **more: Any) -> tuple[tuple[int, int], int]:
    """Ask something fresh; return the ranks that the router says it chose, and the tokens of the prompt."""
    raw = await fleet.client.completions.with_raw_response.create(
        model=MODEL,
        prompt=f"{number} {uuid.uuid4()} {STORY[:300]}",
        max_tokens=TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True, **more},
    )
    usage = raw.parse().usage
    assert usage is not None, "the answer has no usage"
    assert usage.completion_tokens == TOKENS, f"{usage.completion_tokens} tokens, not {TOKENS}"
    chosen = [int(raw.headers[f"x-pdrouter-{side}"].rpartition("rank=")[2]) for side in ("prefill", "decode")]
    return (chosen[0], chosen[1]), usage.prompt_tokens


def _shares(counts: dict[tuple[int, int], int]) -> _Counts:
    """Return what each rank of both sides has of counts by pair of ranks."""
    return [
        [float(sum(n for ranks, n in counts.items() if ranks[side] == rank)) for rank in range(RANKS)]
        for side in (0, 1)
    ]


def _counters(fleet: Fleet, name: str) -> _Counts:
    return [[metric(engine.url, name, engine=str(rank)) for rank in range(RANKS)] for engine in fleet.engines]


async def _agree(fleet: Fleet, name: str, before: _Counts, expected: _Counts) -> tuple[bool, str]:
    """Tell whether the engines have counted since what the router says, once they do or some time has passed."""
    deadline_s = time.monotonic() + COUNTED_S
    while True:
        now = _counters(fleet, name)
        grown = [[new - old for new, old in zip(*sides, strict=True)] for sides in zip(now, before, strict=True)]
        if grown == expected or time.monotonic() > deadline_s:
            return grown == expected, f"the engines count {_told(grown)}, the router {_told(expected)}"
        await asyncio.sleep(_POLL_S)


def _told(counts: Iterable[Iterable[float]]) -> str:
    return " and ".join("/".join(f"{count:g}" for count in side) for side in counts)
