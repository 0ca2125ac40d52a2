"""What waiting in the router is good for: the recorded conversations over eight prefill ranks, in virtual time.

Each rank reads one prompt after another and keeps all that it has read. Router, gate and admission are the real ones.
"""

import heapq
import itertools
from collections.abc import Iterator

import msgspec
import pytest

from pdrouter.core import events
from pdrouter.core.admission import Admission, Admitted
from pdrouter.core.cost import prefill_s, profile_from
from pdrouter.core.decision import Decision
from pdrouter.core.gate import Gate, GateOptions
from pdrouter.core.holders import cached_tokens
from pdrouter.core.ledger import RankKey
from pdrouter.core.line import Waiting
from pdrouter.core.request import RequestFacts
from pdrouter.core.router import Router
from pdrouter.references import profile_entries
from pdrouter.sim.workload import TRACE_BLOCK_TOKENS, TRACE_TICK_S, Planned, Scale, load_excerpt, plan

from .builders import decide, decode, make_options, make_router, prefill, prefill_of
from .waiting import INFINITY, OPTIONS

PROFILE = profile_from(profile_entries()["llama31-70b-h100-tp4-sglang-fp8"])
RANKS = 8
STEP_S = 0.012
FIFO_AGING = 1e6


class Run(msgspec.Struct):
    """Times to the first token, in order; and the most that waited at once."""

    ttft_s: list[float]
    most_waiting: int

    def at(self, share: float) -> float:
        """Return a quantile."""
        return self.ttft_s[int(share * len(self.ttft_s))]


class Replay:
    """One course of the trace through one router."""

    def __init__(self, load: float, *, max_queue_s: float | None, aging_rate: float) -> None:
        options = make_options(policy="least_work", profile=PROFILE)
        self.router: Router = make_router([prefill("p", dp_size=RANKS), decode("d", dp_size=RANKS)], options)
        gates = GateOptions(max_running=None, max_queue_s=max_queue_s, max_kv_share=None)
        bounds = msgspec.structs.replace(
            OPTIONS, max_waiting=10**6, max_waiting_bytes=10**9, max_wait_s=1e9, aging_rate=aging_rate
        )
        gate = Gate(gates, self.router.work, self.router.live)
        self.admission: Admission[tuple[RequestFacts, Planned]] = Admission(bounds, gate)
        self.read: dict[RankKey, set[int]] = {}
        self.free_s: dict[RankKey, float] = {}
        self.agenda: list[tuple[float, int, Planned | Decision | None]] = []
        self.serials = itertools.count()
        self.run = Run([], 0)
        for one in arrivals(load):
            self.at(one.at_s, one)

    def at(self, now_s: float, what: Planned | Decision | None) -> None:
        """Let something happen at a moment: an arrival, the end of a prompt or of an answer, or a look at the gate."""
        heapq.heappush(self.agenda, (now_s, next(self.serials), what))

    def play(self) -> Run:
        """Return what came of all requests."""
        while self.agenda:
            now_s, _, what = heapq.heappop(self.agenda)
            if isinstance(what, Planned):
                self.arrive(what, now_s)
            elif what is not None and what.first_token_at_s is None:
                self.router.observe(events.FirstTokenSeen(what), now_s)
                self.at(now_s + STEP_S * (what.facts.max_output_tokens or 0), what)
            elif what is not None:
                self.router.settle(what, now_s)
            self.release(now_s)
        self.router.validate()
        assert not len(self.admission)
        self.run.ttft_s.sort()
        return self.run

    def arrive(self, one: Planned, now_s: float) -> None:
        """Let a request come."""
        facts = RequestFacts(
            request_id="",
            prompt_tokens=one.prompt_tokens,
            prefix_blocks=tuple(block + 1 for block in one.blocks),
            block_tokens=float(TRACE_BLOCK_TOKENS),
            max_output_tokens=one.output_tokens,
        )
        cached = max(cached_tokens(self.router.prefixes, facts).values(), default=0)
        waiting = Waiting(
            request=(facts, one),
            model=None,
            priority=0,
            tenant=None,
            weight=1.0,
            work_s=prefill_s(PROFILE, one.prompt_tokens - cached, cached),
            size_bytes=1,
            deadline_s=INFINITY,
        )
        if isinstance(self.admission.offer(waiting, now_s), Admitted):
            self.start(facts, one, now_s)
        self.run.most_waiting = max(self.run.most_waiting, len(self.admission))

    def release(self, now_s: float) -> None:
        """Let those go whose turn it is, and look again when time alone lets the next one go."""
        while (waiting := self.admission.release(now_s)) is not None:
            self.start(*waiting.request, now_s)
        wake_at_s = self.admission.wake_at_s(now_s)
        if wake_at_s < (self.agenda[0][0] if self.agenda else INFINITY):
            self.at(wake_at_s, None)

    def start(self, facts: RequestFacts, one: Planned, now_s: float) -> None:
        """Place a request; its rank reads it after those before it."""
        decision = decide(self.router, facts, now_s)
        key = prefill_of(decision).reservation.account.key
        read = self.read.setdefault(key, set())
        blocks = len(list(itertools.takewhile(read.__contains__, one.blocks)))
        read.update(one.blocks)
        cached = min(blocks * TRACE_BLOCK_TOKENS, one.prompt_tokens - 1)
        begun_s = max(now_s, self.free_s.get(key, 0.0))
        self.free_s[key] = begun_s + prefill_s(PROFILE, one.prompt_tokens - cached, cached)
        self.run.ttft_s.append(self.free_s[key] - one.at_s)
        self.at(self.free_s[key], decision)


def arrivals(load: float) -> Iterator[Planned]:
    """Return the trace at such a speed that its prompts, if nothing were cached, were ``load`` times what ranks do."""
    rows = load_excerpt()
    work_s = sum(prefill_s(PROFILE, row.input_length, 0) for row in rows)
    span_s = rows[-1].timestamp / 1000 + TRACE_TICK_S
    faster = load * RANKS * span_s / work_s
    return plan(rows, span_s / faster, Scale(lengths=1, arrivals=faster))


def replay(load: float, *, max_queue_s: float | None = 0.0, aging_rate: float = 0.1) -> Run:
    """Return what came of the trace."""
    return Replay(load, max_queue_s=max_queue_s, aging_rate=aging_rate).play()


@pytest.fixture(scope="module")
def without() -> Run:
    """The fleet just beyond what it can do, where nobody waits in the router."""
    return replay(1.1, max_queue_s=None)


def test_least_work_first_gains_where_ranks_are_busy(without: Run) -> None:
    """Half of the requests and nine in ten are served far sooner; the slowest in a hundred pay a bounded part."""
    ordered = replay(1.1)
    assert without.most_waiting == 0
    assert ordered.most_waiting > 5
    assert ordered.at(0.5) < 0.6 * without.at(0.5)
    assert ordered.at(0.9) < 0.85 * without.at(0.9)
    assert ordered.at(0.99) < 1.35 * without.at(0.99)


def test_the_order_gains_not_the_waiting(without: Run) -> None:
    """In the order of their coming nobody gains by it, nor loses."""
    in_order = replay(1.1, aging_rate=FIFO_AGING)
    for share in (0.5, 0.9, 0.99):
        assert in_order.at(share) == pytest.approx(without.at(share), rel=0.15)


def test_aging_bounds_the_longest_wait() -> None:
    """Far beyond what the fleet can do long prompts pay for short ones; the more of it, the less they do."""
    worst_s = [replay(1.5, aging_rate=rate).ttft_s[-1] for rate in (0.0, 0.3, 1.0)]
    assert worst_s[0] > 1.2 * worst_s[1] > 1.4 * worst_s[2]


def test_nobody_loses_while_there_is_room() -> None:
    """Below saturation it neither helps nor harms."""
    without, ordered = replay(0.5, max_queue_s=None), replay(0.5)
    for share in (0.5, 0.9, 0.99):
        assert ordered.at(share) < 1.05 * without.at(share)
