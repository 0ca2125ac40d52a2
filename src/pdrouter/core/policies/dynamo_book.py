"""What Dynamo's KV router keeps for its cost (``dynamo.py``): active prefill, active blocks, and an approximate tree.

Source: ai-dynamo/dynamo 1.6.1, lib/kv-router: sequences/single.rs (active load), indexer/pruning.rs (the tree, as it is
without KV events). Its blocks are counted in tokens here, and output blocks aren't, as by its default. Where
one endpoint does both, requests that share a prompt's blocks hold them once; its decode router assumes no reuse.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from pdrouter.core.decision import Decision
from pdrouter.core.ledger import RankKey
from pdrouter.core.request import RequestFacts

TTL_S = 120.0
"""A block is taken to be cached for so long after it was last sent. Source: PruneConfig."""

MAX_BLOCKS = 2**20
"""Blocks in the tree, of all ranks together (I9); those sent longest ago go first, of one prompt its end."""


class _Held(NamedTuple):
    """What a request holds where its answer is written: tokens of its own, and blocks that others may share."""

    rank: RankKey
    tokens: int
    blocks: Sequence[int]


class _Shared:
    """A block that live requests hold on a rank, and how many do."""

    __slots__ = ("sharers", "tokens")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.sharers = 0


class DynamoBook:
    """Prefill tokens and prompt blocks of live requests by rank, and what each rank was sent lately.

    ``known`` are the ranks of which it knows anything.
    """

    def __init__(self) -> None:
        self.evictions = 0
        self.known: set[RankKey] = set()
        self.prefill_tokens: Counter[RankKey] = Counter()
        self.active_tokens: Counter[RankKey] = Counter()
        self._reading: dict[int, tuple[RankKey, int]] = {}
        self._held: dict[int, _Held] = {}
        self._shared: dict[tuple[RankKey, int], _Shared] = {}
        self._sent_at_s: OrderedDict[tuple[RankKey, int], float] = OrderedDict()  # what was sent longest ago first

    def placed(self, decision: Decision) -> None:
        """Charge the prompt's uncached part where it is read, and all of it where it is held."""
        facts, now_s = decision.facts, decision.decided_at_s
        reader = (decision.prefill or decision.decode).reservation.account.key
        uncached = facts.prompt_tokens - self.overlap_tokens(facts, reader, now_s)
        self.known.add(reader)
        self._reading[decision.number] = reader, uncached
        self.prefill_tokens[reader] += uncached
        self._send(facts.prefix_blocks, reader, now_s)

        writer = decision.decode.reservation.account.key
        self.known.add(writer)
        blocks = facts.prefix_blocks if decision.prefill is None else ()
        block_tokens = round(facts.block_tokens)
        own = max(0, facts.prompt_tokens - len(blocks) * block_tokens)
        self._held[decision.number] = _Held(writer, own, blocks)
        self.active_tokens[writer] += own
        for block in blocks:
            shared = self._shared.get((writer, block))
            if shared is None:
                shared = self._shared[writer, block] = _Shared(block_tokens)
                self.active_tokens[writer] += block_tokens
            shared.sharers += 1

    def prefill_ended(self, decision: Decision) -> None:
        """Give the prefill back."""
        reading = self._reading.pop(decision.number, None)
        if reading is not None:
            _take(self.prefill_tokens, *reading)

    def ended(self, decision: Decision) -> None:
        """Give all back; a shared block goes with the last that holds it."""
        self.prefill_ended(decision)
        rank, tokens, blocks = self._held.pop(decision.number)
        for block in blocks:
            shared = self._shared[rank, block]
            shared.sharers -= 1
            if not shared.sharers:
                del self._shared[rank, block]
                tokens += shared.tokens
        _take(self.active_tokens, rank, tokens)

    def left(self, address: str) -> None:
        """Forget what an endpoint was sent; costs by the size of the tree."""
        self.known = {rank for rank in self.known if rank.endpoint != address}
        for entry in [entry for entry in self._sent_at_s if entry[0].endpoint == address]:
            del self._sent_at_s[entry]

    def overlap_tokens(self, facts: RequestFacts, rank: RankKey, now_s: float) -> int:
        """Return how much of a prompt a rank was sent lately."""
        if rank not in self.known:
            return 0
        depth, sent_at_s = 0, self._sent_at_s
        for block in facts.prefix_blocks:
            if sent_at_s.get((rank, block), -TTL_S) + TTL_S <= now_s:
                break
            depth += 1
        return min(facts.prompt_tokens, int(depth * facts.block_tokens))

    def added_tokens(self, facts: RequestFacts, rank: RankKey) -> int:
        """Return what a prompt would add to those that a rank holds for live requests."""
        added, held = facts.prompt_tokens, self._shared
        for block in facts.prefix_blocks if held else ():
            shared = held.get((rank, block))
            if shared is None:
                break
            added -= shared.tokens
        return max(0, added)

    def _send(self, blocks: Sequence[int], rank: RankKey, now_s: float) -> None:
        sent_at_s = self._sent_at_s
        for block in reversed(blocks):
            sent_at_s[rank, block] = now_s
            sent_at_s.move_to_end((rank, block))
        while sent_at_s and next(iter(sent_at_s.values())) + TTL_S <= now_s:
            sent_at_s.popitem(last=False)
        while len(sent_at_s) > MAX_BLOCKS:  # I9
            sent_at_s.popitem(last=False)
            self.evictions += 1


def _take(counter: Counter[RankKey], rank: RankKey, tokens: int) -> None:
    """Take tokens back, and the entry with the last of them."""
    counter[rank] -= tokens
    if not counter[rank]:
        del counter[rank]
