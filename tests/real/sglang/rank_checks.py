"""What must hold of ranks: all are seen and reached, and the engines count what the router says."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Mapping

from tests.real.asking import page
from tests.real.sglang.answer_checks import TOKENS, gather_at_once
from tests.real.sglang.asking import GENERATE, unique
from tests.real.sglang.pair import Found, Pair
from tests.real.sglang.servers import RANKS, count_in_log

AT_ONCE = 32
STORY = "The river ran down from the hills, past the mill and the old stone bridge, and on to the town. " * 3
BURST = 7
MOST_BURSTS = 20
PROBES = 20
"""Most probes of the router's while a check lasts."""

CONFLICT = "follow_bootstrap_room conflict"
"""What SGLang writes when a room and the prefill's rank disagree."""

RANK_PAIRS = list(itertools.product(range(RANKS), repeat=2))


async def check_legs(pair: Pair) -> None:
    """Check the pair by hand first: if that fails, it isn't the router."""
    for ranks in RANK_PAIRS:
        await pair.hold(f"by hand: ranks {ranks[0]} and {ranks[1]}", lambda r=ranks: _by_hand(pair, r))  # type: ignore[misc]


async def check_ranks(pair: Pair) -> None:
    """Check that the router sees and reaches all ranks."""
    await pair.hold("all ranks are seen", lambda: _seen(pair))
    for ranks in RANK_PAIRS:
        await pair.hold(f"the client's ranks {ranks[0]} and {ranks[1]}", lambda r=ranks: _named(pair, r))  # type: ignore[misc]
    await pair.hold(f"{AT_ONCE} at once", lambda: _at_once(pair))
    await pair.hold(f"{AT_ONCE} are spread over the ranks", lambda: _spread(pair))
    await pair.hold("the router chooses each pair of ranks", lambda: all_are_chosen(pair))
    await pair.hold("no room disagrees with its rank", lambda: _no_conflict(pair))


async def _by_hand(pair: Pair, ranks: tuple[int, int]) -> Found:
    reply = await pair.by_hand(GENERATE, GENERATE.body(unique(STORY), TOKENS), *ranks)
    held = reply.status == 200 and reply.json()["meta_info"]["dp_rank"] == ranks[1]
    return held, str(GENERATE.read(reply)) if held else str(reply)


async def _seen(pair: Pair) -> Found:
    endpoints = page(f"{pair.router.url}/debug/fleet")["endpoints"]
    seen = {endpoint["role"]: len(endpoint["ranks"]) for endpoint in endpoints}
    return seen == {"prefill": RANKS, "decode": RANKS}, str(seen)


async def _named(pair: Pair, ranks: tuple[int, int]) -> Found:
    """A rank that the client names serves it: the decode engine says so, and the prefill's counter grows."""
    before = await _prefilled(pair)
    body = GENERATE.body(unique(STORY), TOKENS, disagg_prefill_dp_rank=ranks[0], routed_dp_rank=ranks[1])
    reply = await pair.client.post(GENERATE.path, body)
    if reply.status != 200:
        return False, str(reply)
    told = reply.json()["meta_info"]
    expected = [told["prompt_tokens"] - told["cached_tokens"] if rank == ranks[0] else 0 for rank in range(RANKS)]
    grown = await _growth(pair, before, expected)
    held = _agree(grown, expected) and (told["dp_rank"], reply.ranks) == (ranks[1], ranks)
    return held, f"decode rank {told['dp_rank']}, prefill ranks read {grown}, router says {reply.ranks}"


async def _at_once(pair: Pair) -> Found:
    began_s = time.monotonic()
    replies = await gather_at_once(pair, AT_ONCE)
    whole = [api.read(reply) for api, reply in replies if reply.status == 200]
    good = [answer for answer in whole if all(answer.texts) and None not in answer.reasons]
    bad = [f"; {api.name}: {reply}" for api, reply in replies if reply.status != 200]
    ranks = Counter(reply.ranks for _, reply in replies if reply.status == 200)
    seen = f"{len(good)} whole in {time.monotonic() - began_s:.1f} s, by ranks {told_of(ranks)}"
    return len(good) == AT_ONCE, seen + "".join(bad[:1])


async def _spread(pair: Pair) -> Found:
    """The ranks of the decode engine's own answers and the prefill's counters agree with what the router says."""
    before = await _prefilled(pair)
    bodies = [GENERATE.body(unique(f"{n} {STORY}"), TOKENS) for n in range(AT_ONCE)]
    replies = await asyncio.gather(*(pair.client.post(GENERATE.path, body) for body in bodies))
    if failed := [reply for reply in replies if reply.status != 200]:
        return False, f"{len(failed)} failed, such as {failed[0]}"
    told = [reply.json()["meta_info"] for reply in replies]
    expected = [0] * RANKS
    for reply, info in zip(replies, told, strict=True):
        expected[reply.ranks[0]] += info["prompt_tokens"] - info["cached_tokens"]
    grown = await _growth(pair, before, expected)
    agree = [info["dp_rank"] for info in told] == [reply.ranks[1] for reply in replies] and _agree(grown, expected)
    reached = Counter(reply.ranks for reply in replies)
    shares = [
        [sum(n for ranks, n in reached.items() if ranks[side] == rank) for rank in range(RANKS)] for side in (0, 1)
    ]
    seen = f"by ranks {told_of(reached)}; read {grown}, router says {expected}"
    return agree and min(*shares[0], *shares[1]) >= AT_ONCE // RANKS // 2, seen


async def all_are_chosen(pair: Pair) -> Found:
    """Of answers of different lengths that overlap, each pair of ranks gets some."""
    reached = Counter[tuple[int, int]]()
    bursts = 0
    while set(reached) != set(RANK_PAIRS) and bursts < MOST_BURSTS:
        bursts += 1
        bodies = [GENERATE.body(unique(f"{n} {STORY}"), TOKENS * (1 + n % 5)) for n in range(BURST)]
        replies = await asyncio.gather(*(pair.client.post(GENERATE.path, body) for body in bodies))
        if failed := [reply for reply in replies if reply.status != 200]:
            return False, str(failed[0])
        said = [reply.json()["meta_info"]["dp_rank"] for reply in replies]
        if said != [reply.ranks[1] for reply in replies]:
            return False, f"the engine says decode ranks {said}"
        reached.update(reply.ranks for reply in replies)
    return set(reached) == set(RANK_PAIRS), f"by ranks {told_of(reached)} in {bursts} bursts"


def told_of(reached: Mapping[tuple[int, int], int]) -> str:
    """Return how many requests each pair of ranks has got, in words."""
    return ", ".join(f"{prefill}-{decode}: {count}" for (prefill, decode), count in sorted(reached.items()))


async def _prefilled(pair: Pair) -> list[int]:
    """Return the tokens that each prefill rank has read."""
    return [int(load["total_prefill_uncached_tokens"]) for load in await pair.loads(pair.prefill)]


async def _growth(pair: Pair, before: list[int], expected: list[int]) -> list[int]:
    """Return what each prefill rank has read since, once that agrees with what is expected or a second has passed."""
    deadline_s = time.monotonic() + 1
    while True:
        grown = [now - then for now, then in zip(await _prefilled(pair), before, strict=True)]
        if _agree(grown, expected) or time.monotonic() > deadline_s:
            return grown


def _agree(grown: list[int], expected: list[int]) -> bool:
    """Whether ranks have read what the router says, and a token for each probe: an idle SGLang makes one for it."""
    return all(0 <= seen - said <= PROBES for seen, said in zip(grown, expected, strict=True))


async def _no_conflict(pair: Pair) -> Found:
    count = count_in_log(pair.prefill, CONFLICT)
    return count == 0, f"{count} in the prefill engine's log"
