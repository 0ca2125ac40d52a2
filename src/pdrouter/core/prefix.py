"""Which rank likely holds which prefix of a prompt: a bounded radix tree over chained block hashes.

A prompt is cut into blocks; each block's hash includes all before it, so that equal hashes mean equal prefixes, and two
runs of blocks are compared by their ends. A node is a run that the same ranks hold as a whole; the ranks of a node are
among those of its parent. So a lookup costs by nodes, not by blocks, and the longest matches are found first.
Whoever computed the hashes (signed, 64 bits), the index takes them as they are.
"""

import heapq
from array import array
from collections.abc import Sequence
from typing import TypeVar

import xxhash

from pdrouter.core.ledger import RankKey
from pdrouter.errors import InvariantViolation

T = TypeVar("T")

_BLOCK_BYTES = 8
_NODE_BYTES = 420
_HOLD_BYTES = 200
_RANK_BYTES = 900
"""What each takes in CPython, tables at their mean filling; measured (tests/core/test_prefix_memory.py)."""

_PROMPT_SHARE = 2
"""One prompt gets at most this part of the memory: a half."""


def block_hashes(blocks: Sequence[bytes | memoryview], seed: bytes) -> tuple[int, ...]:
    """Return the chained hashes of a prompt's blocks; ``seed`` separates what must not match."""
    digest = xxhash.xxh3_64_intdigest
    chained = digest(seed)
    hashes = array("Q", [chained := digest(block, chained) for block in blocks])
    return tuple(memoryview(hashes).cast("B").cast("q"))


class _Link:
    """A place in the order of last use, a ring: each rank has one, and it begins and ends at the rank itself."""

    __slots__ = ("newer", "older")

    def __init__(self) -> None:
        self.newer: _Link = self
        self.older: _Link = self

    def put_behind(self, older: "_Link") -> None:
        """Come next after ``older``."""
        self.older, self.newer = older, older.newer
        older.newer.older = self
        older.newer = self

    def take_out(self) -> None:
        """Leave the ring."""
        self.older.newer = self.newer
        self.newer.older = self.older


class _Holder(_Link):
    """A rank and what it holds; in the ring a node always comes after those that hang on it.

    ``read`` is the newest insert whose blocks it is known to have read.
    """

    __slots__ = ("blocks", "capacity", "holds", "is_queued", "key", "read")

    def __init__(self, key: RankKey) -> None:
        super().__init__()
        self.key = key
        self.capacity: int | None = None
        self.blocks = 0
        self.holds: dict[_Node, _Hold] = {}
        self.is_queued = False
        self.read = 0

    def oldest(self) -> "_Hold | None":
        """Return what was used longest ago."""
        return self.newer if isinstance(self.newer, _Hold) else None


class _Node:
    """A run of blocks behind ``parent``; ``branches`` is how many nodes hang on its end."""

    __slots__ = ("branches", "holds", "parent", "run")

    def __init__(self, run: "array[int]", parent: "_Node | None") -> None:
        self.run = run
        self.parent = parent
        self.branches = 0
        self.holds: list[_Hold] = []


class _Hold(_Link):
    """That a rank holds a node; ``slot`` is its place in the node's list, ``used`` the last insert that used it."""

    __slots__ = ("holder", "node", "slot", "used")

    def __init__(self, holder: _Holder, node: _Node, older: _Link, used: int) -> None:
        self.holder = holder
        self.node = node
        self.used = used
        self.slot = len(node.holds)
        node.holds.append(self)
        holder.holds[node] = self
        self.put_behind(older)


class _Path:
    """The nodes that a prompt begins with, each with the number of blocks up to its end.

    ``inside`` is how many blocks of the last node match where not all do, else 0.
    """

    __slots__ = ("depth", "inside", "steps")

    def __init__(self, steps: list[tuple[_Node, int]], depth: int, inside: int) -> None:
        self.steps = steps
        self.depth = depth
        self.inside = inside


class Match:
    """Which ranks hold how many leading blocks of one prompt; good until the index changes."""

    __slots__ = ("_holders", "_path", "_turn")

    def __init__(self, path: _Path, holders: dict[RankKey, _Holder], turn: int) -> None:
        self._path = path
        self._holders = holders
        self._turn = turn

    @property
    def ranks(self) -> int:
        """How many ranks hold any."""
        steps = self._path.steps
        return len(steps[0][0].holds) if steps else 0

    def of(self, rank: RankKey) -> int:
        """Return how many leading blocks a rank holds; O(nodes)."""
        holder = self._holders.get(rank)
        if holder is not None:
            for node, depth in reversed(self._path.steps):
                if node in holder.holds:
                    return depth
        return 0

    def longest(self, limit: int) -> dict[RankKey, int]:
        """Return the ranks that hold most, at most ``limit``, longest first; of equals others at each turn.

        A node's ranks are among its parent's: where there are as many, they are the same and are passed over, and
        ``limit`` of them always suffice to fill up. So a prefix that all ranks hold costs what ``limit`` ranks do.
        """
        matched: dict[RankKey, int] = {}
        deeper = 0
        for node, depth in reversed(self._path.steps):
            holds = node.holds
            if len(holds) == deeper:
                continue
            deeper = len(holds)
            keys = [hold.holder.key for hold in window(holds, self._turn, limit)]
            fresh = [key for key in keys if key not in matched] if matched else keys
            matched |= dict.fromkeys(fresh[: limit - len(matched)], depth)
            if len(matched) == limit:
                break
        return matched


class PrefixIndex:
    """Which ranks hold which blocks, in at most ``max_bytes`` of memory (I9); the least recently used goes first.

    ``entries`` counts pairs of a block and a rank that holds it, ``evictions`` those that went for want of room, in
    memory or in a rank's capacity, ``inserts`` the inserts: each one's number.
    """

    def __init__(self, max_bytes: int) -> None:
        self.entries = 0
        self.evictions = 0
        self.inserts = 0
        self.used_bytes = 0
        self._max_bytes = max_bytes
        self._most_blocks = max(1, max_bytes // (_PROMPT_SHARE * _BLOCK_BYTES))
        self._nodes: dict[int, _Node] = {}  # by the first block of the run
        self._holders: dict[RankKey, _Holder] = {}
        self._endpoints: dict[str, list[_Holder]] = {}
        self._oldest: list[tuple[int, int, _Holder]] = []  # a heap; a rank's entry is never younger than the rank
        self._pushes = 0

    def find(self, blocks: Sequence[int]) -> Match:
        """Look a prompt up."""
        return Match(self._walk(blocks), self._holders, self.inserts)

    def match(self, blocks: Sequence[int]) -> dict[RankKey, int]:
        """Return how many leading blocks each rank holds, longest first; ranks that hold none are left out."""
        found = self.find(blocks)
        return found.longest(found.ranks)

    def insert(self, blocks: Sequence[int], rank: RankKey) -> bool:
        """Remember that ``rank`` holds these leading blocks, as far as they fit.

        Return whether all that it held of them before is known to have been read.
        """
        if not blocks:
            return True
        holder = self._holder(rank)
        most = self._most_blocks if holder.capacity is None else min(self._most_blocks, holder.capacity)
        if len(blocks) > most:
            self.evictions += len(blocks) - most
            blocks = blocks[:most]
        self.inserts += 1
        path = self._walk(blocks)
        nodes = [node for node, _ in path.steps]
        rest = blocks[path.depth :]
        if path.inside and (rest or nodes[-1] not in holder.holds):
            nodes[-1] = self._split(nodes[-1], path.inside)
        if rest and not self._extend(nodes, rest, holder):
            nodes.append(self._add(rest, nodes[-1] if nodes else None))
        used = 0
        for node in reversed(nodes):  # a chain's end is older than its beginning, so that it goes first
            before = self._use(node, holder)
            used = used or before
        self._fit(holder)
        return used <= holder.read

    def read(self, rank: RankKey, insert: int) -> None:
        """Take in that ``rank`` has read the blocks of the insert with this number, and of those before it."""
        holder = self._holders.get(rank)
        if holder is not None:
            holder.read = max(holder.read, insert)

    def correct(self, blocks: Sequence[int], rank: RankKey, held_blocks: int, since_insert: int | None = None) -> None:
        """Take in that ``rank`` holds so many of these leading blocks and no more.

        What hangs on those that it doesn't hold is dropped, too; ``since_insert``: but not what was used by the insert
        of that number or later. A rank that nothing was said of stays unknown.
        """
        holder = self._holders.get(rank)
        if holder is None:
            return
        if held_blocks > self.find(blocks).of(rank):
            self.insert(blocks[:held_blocks], rank)
            return
        lost: list[_Node] = []
        start = 0
        for node, depth in self._walk(blocks).steps:
            if depth > held_blocks and node in holder.holds:
                if start < held_blocks:
                    self._split(node, held_blocks - start)
                lost.append(node)
            start = depth
        if any(node.branches > (node is not lost[-1]) for node in lost):
            gone = set(lost)
            lost = [node for node in holder.holds if _hangs_on(node, gone)]
        for node in lost:
            if since_insert is None or holder.holds[node].used < since_insert:
                self._drop(holder.holds[node])
        self._fit(holder)

    def set_capacity(self, rank: RankKey, blocks: int | None) -> None:
        """Let ``rank`` hold at most so many blocks, ``None``: any number."""
        holder = self._holder(rank)
        holder.capacity = blocks
        self._fit(holder)

    def forget(self, endpoint: str) -> None:
        """Drop all that was known of an endpoint's ranks; it left. Costs by what they hold."""
        for holder in self._endpoints.pop(endpoint, ()):
            for hold in list(holder.holds.values()):
                self._drop(hold)
            del self._holders[holder.key]
            self.used_bytes -= _RANK_BYTES
        if len(self._oldest) > 2 * len(self._holders):  # at least half are of ranks that are gone
            self._oldest = [entry for entry in self._oldest if self._holders.get(entry[2].key) is entry[2]]
            heapq.heapify(self._oldest)

    def validate(self) -> None:
        """Check the books: sizes, and that what a rank holds begins at the beginning.

        Raises: InvariantViolation.
        """
        holds = [hold for holder in self._holders.values() for hold in holder.holds.values()]
        nodes = {hold.node for hold in holds}
        used_bytes = sum(_NODE_BYTES + _BLOCK_BYTES * len(node.run) for node in nodes)
        used_bytes += _HOLD_BYTES * len(holds) + _RANK_BYTES * len(self._holders)
        if (used_bytes, sum(len(hold.node.run) for hold in holds)) != (self.used_bytes, self.entries):
            raise InvariantViolation(f"the prefix index holds {used_bytes} bytes, {self.used_bytes} are on its books")
        if any(hold.node.parent and hold.node.parent not in hold.holder.holds for hold in holds):
            raise InvariantViolation("the prefix index has a chain without its beginning")

    def _holder(self, rank: RankKey) -> _Holder:
        holder = self._holders.get(rank)
        if holder is None:
            holder = self._holders[rank] = _Holder(rank)
            self._endpoints.setdefault(rank.endpoint, []).append(holder)
            self.used_bytes += _RANK_BYTES
        return holder

    def _walk(self, blocks: Sequence[int]) -> _Path:
        steps: list[tuple[_Node, int]] = []
        depth, length = 0, len(blocks)
        while depth < length and (node := self._nodes.get(blocks[depth])) is not None:
            run = node.run
            end = depth + len(run)
            if end > length or run[-1] != blocks[end - 1]:
                inside = _shared(run, blocks, depth)
                depth += inside
                steps.append((node, depth))
                return _Path(steps, depth, inside)
            depth = end
            steps.append((node, depth))
        return _Path(steps, depth, 0)

    def _add(self, blocks: Sequence[int], parent: _Node | None) -> _Node:
        node = _Node(array("q", blocks), parent)
        if parent is not None:
            parent.branches += 1
        self._nodes[blocks[0]] = node
        self.used_bytes += _NODE_BYTES + _BLOCK_BYTES * len(blocks)
        return node

    def _extend(self, nodes: Sequence[_Node], blocks: Sequence[int], holder: _Holder) -> bool:
        """Lengthen the last node, if it is the rank's alone and nothing hangs on it; else return ``False``."""
        if not nodes or nodes[-1].branches or len(nodes[-1].holds) != 1 or nodes[-1] not in holder.holds:
            return False
        nodes[-1].run.extend(blocks)
        holder.blocks += len(blocks)
        self.entries += len(blocks)
        self.used_bytes += _BLOCK_BYTES * len(blocks)
        return True

    def _split(self, node: _Node, length: int) -> _Node:
        """Cut a node in two and return the upper part; costs by the node's ranks."""
        upper = _Node(node.run[:length], node.parent)
        upper.branches = 1
        node.run, node.parent = node.run[length:], upper
        self._nodes[node.run[0]] = node
        self._nodes[upper.run[0]] = upper
        for hold in node.holds:
            _Hold(hold.holder, upper, hold, hold.used)
        self.used_bytes += _NODE_BYTES + _HOLD_BYTES * len(node.holds)
        return upper

    def _use(self, node: _Node, holder: _Holder) -> int:
        """Let a rank use a node; return which insert did so last, 0 if none."""
        hold = holder.holds.get(node)
        if hold is not None:
            used, hold.used = hold.used, self.inserts
            hold.take_out()
            hold.put_behind(holder.older)
            return used
        _Hold(holder, node, holder.older, self.inserts)
        holder.blocks += len(node.run)
        self.entries += len(node.run)
        self.used_bytes += _HOLD_BYTES
        if not holder.is_queued:
            holder.is_queued = True
            self._queue(holder, self.inserts)
        return 0

    def _fit(self, holder: _Holder) -> None:
        """Make room in a rank's capacity, then in memory."""
        if holder.capacity is not None:
            while holder.blocks > holder.capacity and (hold := holder.oldest()) is not None:
                self._evict(hold, holder.blocks - holder.capacity)
        while self.used_bytes > self._max_bytes and self._oldest:
            self._evict_oldest()

    def _evict_oldest(self) -> None:
        """Drop what was used longest ago on any rank, or learn that a rank's oldest is younger than was thought."""
        used, _, holder = heapq.heappop(self._oldest)
        hold = holder.oldest()
        if hold is not None and hold.used <= used:
            self._evict(hold, len(hold.node.run))
            hold = holder.oldest()
        holder.is_queued = hold is not None
        if hold is not None:
            self._queue(holder, hold.used)

    def _queue(self, holder: _Holder, used: int) -> None:
        self._pushes += 1  # ranks of equal age go in the order in which they came
        heapq.heappush(self._oldest, (used, self._pushes, holder))

    def _evict(self, hold: _Hold, blocks: int) -> None:
        """Drop a hold; of a run that is the rank's alone, no more than so many blocks from its end."""
        node = hold.node
        if blocks < len(node.run) and len(node.holds) == 1 and not node.branches:
            del node.run[-blocks:]
            hold.holder.blocks -= blocks
            self.entries -= blocks
            self.used_bytes -= _BLOCK_BYTES * blocks
        else:
            blocks = len(node.run)
            self._drop(hold)
        self.evictions += blocks

    def _drop(self, hold: _Hold) -> None:
        node, holder = hold.node, hold.holder
        del holder.holds[node]
        hold.take_out()
        last = node.holds.pop()
        if last is not hold:
            node.holds[hold.slot] = last
            last.slot = hold.slot
        holder.blocks -= len(node.run)
        self.entries -= len(node.run)
        self.used_bytes -= _HOLD_BYTES
        if not node.holds:
            self._remove(node)

    def _remove(self, node: _Node) -> None:
        if self._nodes.get(node.run[0]) is node:  # another's, should two hashes ever be the same
            del self._nodes[node.run[0]]
        if node.parent is not None:
            node.parent.branches -= 1
        self.used_bytes -= _NODE_BYTES + _BLOCK_BYTES * len(node.run)


def _shared(run: Sequence[int], blocks: Sequence[int], start: int) -> int:
    """Return how many blocks of a run agree with those from ``start``; the first does, and after a difference none."""
    low, high = 1, min(len(run), len(blocks) - start)
    while low < high:
        middle = (low + high + 1) // 2
        if run[middle - 1] == blocks[start + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def window(items: Sequence[T], turn: int, length: int) -> Sequence[T]:
    """Return ``length`` of more items, beginning elsewhere at each turn; all if there aren't more."""
    if len(items) <= length:
        return items
    start = turn * length % len(items)
    return [*items[start : start + length], *items[: max(0, start + length - len(items))]]


def _hangs_on(node: _Node | None, lost: set[_Node]) -> bool:
    while node is not None and node not in lost:
        node = node.parent
    return node is not None
