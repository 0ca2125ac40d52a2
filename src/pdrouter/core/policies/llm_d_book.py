"""What llm-d's endpoint picker keeps for its scores (``llm_d.py``, ``llm_d_pd.py``), by pod, which is an endpoint here.

Source: llm-d/llm-d-router ebab687, pkg/epp/framework/plugins/requestcontrol/dataproducer: approximateprefix (blocks
sent, the least recent go first) and inflightload (uncached prompt tokens, until the answer begins).
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Mapping, Sequence

from pdrouter.core.decision import Decision
from pdrouter.core.request import RequestFacts

CAPACITY_TOKENS = 31_250 * 64
"""Blocks that an endpoint is taken to hold, in tokens (I9). Source: defaultLRUCapacityPerServer, minBlockSizeTokens."""

MOST_MATCHED_TOKENS = 131_072
"""No more of a prompt is looked at. Source: defaultMaxPrefixTokens."""


class _Sent:
    """The blocks that an endpoint was sent, each with its tokens, the least recent first."""

    __slots__ = ("blocks", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.blocks: OrderedDict[int, int] = OrderedDict()

    def add(self, block: int, tokens: int) -> None:
        """Take in a block, or send it again."""
        if block in self.blocks:
            self.blocks.move_to_end(block)
        else:
            self.blocks[block] = tokens
            self.tokens += tokens

    def evict(self) -> int:
        """Drop the least recent block and return it."""
        block, tokens = self.blocks.popitem(last=False)
        self.tokens -= tokens
        return block


class LlmDBook:
    """Uncached prompt tokens in flight by endpoint, and what each endpoint was sent."""

    def __init__(self) -> None:
        self.evictions = 0
        self.tokens: Counter[str] = Counter()
        self._reading: dict[int, tuple[str, int]] = {}
        self._sent: defaultdict[str, _Sent] = defaultdict(_Sent)
        self._holders: defaultdict[int, set[str]] = defaultdict(set)

    def placed(self, decision: Decision) -> None:
        """Charge the uncached part of the prompt where it is read; both sides are taken to cache it."""
        facts = decision.facts
        reader = (decision.prefill or decision.decode).endpoint.address
        uncached = facts.prompt_tokens - self.matched_tokens(facts, self.matched(facts).get(reader, 0))
        self._reading[decision.number] = reader, uncached
        self.tokens[reader] += uncached
        for placement in decision.placements:
            self._send(_blocks(facts), max(1, round(facts.block_tokens)), placement.endpoint.address)

    def prefill_ended(self, decision: Decision) -> None:
        """Give the prompt back."""
        reading = self._reading.pop(decision.number, None)
        if reading is not None:
            address, tokens = reading
            self.tokens[address] -= tokens
            if not self.tokens[address]:
                del self.tokens[address]

    def ended(self, decision: Decision) -> None:
        """Give back what is still held."""
        self.prefill_ended(decision)

    def left(self, address: str) -> None:
        """Forget what an endpoint was sent."""
        sent = self._sent.pop(address, None)
        for block in sent.blocks if sent else ():
            self._forget(block, address)

    def matched(self, facts: RequestFacts) -> Mapping[str, int]:
        """Return how many of a prompt's blocks each endpoint was sent, up to the first that nobody was."""
        found: Counter[str] = Counter()
        for block in _blocks(facts):
            holders: Collection[str] = self._holders.get(block, ())
            if not holders:
                break
            found.update(holders)
        return found

    def shares(self, facts: RequestFacts) -> Mapping[str, float]:
        """Return the share of a prompt's blocks that each endpoint was sent; those that were sent none are left out."""
        total = len(_blocks(facts))
        return {address: count / total for address, count in self.matched(facts).items()}

    @staticmethod
    def matched_tokens(facts: RequestFacts, blocks: int) -> int:
        """Return how many tokens so many blocks of a prompt are."""
        return min(facts.prompt_tokens, int(blocks * facts.block_tokens))

    def _send(self, blocks: Sequence[int], block_tokens: int, address: str) -> None:
        sent = self._sent[address]
        for block in blocks:
            sent.add(block, block_tokens)
            self._holders[block].add(address)
        while sent.tokens > CAPACITY_TOKENS:  # I9
            self._forget(sent.evict(), address)
            self.evictions += 1

    def _forget(self, block: int, address: str) -> None:
        holders = self._holders[block]
        holders.discard(address)
        if not holders:
            del self._holders[block]


def _blocks(facts: RequestFacts) -> Sequence[int]:
    """Return the blocks of a prompt that are looked at."""
    blocks = facts.prefix_blocks
    return blocks[: int(MOST_MATCHED_TOKENS // facts.block_tokens)] if facts.block_tokens else ()
