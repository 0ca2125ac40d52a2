"""``llm_d`` and ``llm_d_pd``: scores computed by hand, and the book behind them."""

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest

from pdrouter.core.fleet import Role
from pdrouter.core.load import EndpointLoad, LoadView, RankReport
from pdrouter.core.policies import llm_d_book as module
from pdrouter.core.policies.base import Policy, PolicyOptions, Question
from pdrouter.core.policies.llm_d import LlmD, queue_scores
from pdrouter.core.policies.llm_d_book import LlmDBook
from pdrouter.core.policies.llm_d_pd import LlmDPd

from .builders import decide, decode, facts, make_options, make_router, prefill
from .pools import ask, busy_pool, options, placed

TEN = tuple(range(10))
Told = tuple[float | None, float | None]


def polled_pool(rows: Sequence[Told], *, dp_size: int = 1) -> list[EndpointLoad]:
    """Return prefill endpoints ``p0``, ``p1``..., each rank of which reports (waiting requests, share of KV in use)."""
    view = LoadView(report_max_age_s=10.0, visible_delay_s=0.0, history_events=100)
    for number, (waiting, use) in enumerate(rows):
        view.add(prefill(f"p{number}", dp_size=dp_size))
        if (waiting, use) != (None, None):
            ranks = [RankReport(r, tokens=1.0, waiting_requests=waiting, kv_use=use) for r in range(dp_size)]
            view.accept(f"p{number}", ranks, 1.0, 1.0)
    return list(view.endpoints.values())


def with_book() -> tuple[PolicyOptions, LlmDBook]:
    """Return options and the book that their policies read."""
    made = options()
    return made, made.books.of(LlmDBook)


def about(blocks: Sequence[int] = TEN, role: Role = Role.PREFILL) -> Question:
    """Return a question about a prompt of blocks of ten tokens."""
    return ask(role, tokens=10 * len(blocks), prefix_blocks=tuple(blocks), block_tokens=10.0)


def sent(book: LlmDBook, blocks: Mapping[str, int]) -> None:
    """Let endpoints have been sent so many of the ten blocks, and have answered."""
    for number, (address, count) in enumerate(blocks.items()):
        job = placed(number, on=address, tokens=10 * count, blocks=TEN[:count])
        book.placed(job)
        book.ended(job)


class TestDefault:
    """Queue 2, KV 2, prefix 3; what lacks of 7 is compared."""

    @pytest.mark.parametrize(
        ("waiting", "scores"),
        [
            ((0, 5, 10), [1.0, 0.5, 0.0]),
            ((2, 3), [1.0, 0.0]),
            ((4, 4), [1.0, 1.0]),
            ((0, None, 4), [1.0, 0.0, 0.0]),
            ((None, None), [0.0, 0.0]),
            ((3, None), [1.0, 0.0]),
        ],
    )
    def test_the_queue_score(self, waiting: Sequence[float | None], scores: Sequence[float]) -> None:
        """The shortest 1, the longest 0, none for those that don't tell."""
        assert queue_scores(waiting) == scores

    @pytest.mark.parametrize(
        ("rows", "blocks", "lacking"),
        [
            pytest.param(((0, 0.5), (10, 0.9)), {"p1": 10}, [2 * 0.5 + 3, 2 + 2 * 0.9], id="a whole match wins"),
            pytest.param(((0, 0.5), (10, 0.9)), {"p1": 9}, [4.0, 2 + 1.8 + 0.3], id="0.9 of it doesn't"),
            pytest.param(((5, 0.0), (5, 1.0)), {"p1": 6}, [3.0, 2 + 1.2], id="an empty KV is worth two thirds"),
            pytest.param(((0, 0.0), (None, None)), {}, [3.0, 7.0], id="one that doesn't tell scores nothing"),
        ],
    )
    def test_the_sum(self, rows: Sequence[Told], blocks: Mapping[str, int], lacking: Sequence[float]) -> None:
        """By hand; the least lacking is chosen."""
        made, book = with_book()
        sent(book, blocks)
        pick = LlmD(made).choose(about(), polled_pool(rows))
        assert pick.why.values == pytest.approx(lacking)
        assert pick.index == min(range(2), key=lambda i: lacking[i])

    def test_ranks_of_a_pod_are_one(self) -> None:
        """Queues add up, KV is the mean; unless all tell, none does."""
        made, _ = with_book()
        pool = polled_pool(((2, 0.5), (3, 0.5)), dp_size=2)
        assert list(LlmD(made).choose(about(), pool).why.values) == [4.0, 6.0]
        pool[0].ranks[1].drop()
        assert list(LlmD(made).choose(about(), pool).why.values) == [7.0, 4.0]

    def test_what_was_sent_since_a_report_is_not_seen(self) -> None:
        """Nor is the ledger."""
        made, book = with_book()
        pool = polled_pool(((0, 0.0), (1, 0.0)))
        book.placed(placed(1, on="p0", tokens=99_000))
        assert {LlmD(made).choose(about(), pool).index for _ in range(5)} == {0}

    @pytest.mark.parametrize("make", [LlmD, LlmDPd])
    @pytest.mark.parametrize("role", Role)
    def test_ties_take_turns(self, make: type[LlmD | LlmDPd], role: Role) -> None:
        """Each gets as much."""
        policy: Policy = make(options())
        pool = polled_pool(((1, 0.5),) * 4)
        assert Counter(policy.choose(about(role=role), pool).index for _ in range(20)) == dict.fromkeys(range(4), 5)

    def test_ranks_can_be_candidates(self) -> None:
        """They share their pod's prefix and have queues of their own."""
        made, book = with_book()
        sent(book, {"p0": 5})
        pool = polled_pool(((1, 0.5),), dp_size=3)
        pool[0].ranks[2].drop()
        assert list(LlmD(made).choose(about(), pool[0].ranks).why.values) == [2.5, 2.5, 5.5]


class TestPd:
    """Sticky until saturated, then tokens; decode by requests."""

    def test_only_the_sticky_stay(self) -> None:
        """From 0.8 of the prompt on, whatever they have to read."""
        made, book = with_book()
        sent(book, {"p0": 8, "p1": 7})
        book.placed(placed(9, on="p0", tokens=200_000))
        pick = LlmDPd(made).choose(about(), busy_pool((9, 0, 0)))
        assert (pick.index, list(pick.why.values)) == (0, [200_020, 30, 100])

    def test_below_the_threshold_tokens_decide(self) -> None:
        """Those in flight and what this request would add."""
        made, book = with_book()
        sent(book, {"p0": 7})
        book.placed(placed(9, on="p0", tokens=71))
        pick = LlmDPd(made).choose(about(), busy_pool((0, 0)))
        assert (pick.index, list(pick.why.values)) == (1, [101, 100])
        book.prefill_ended(placed(9))
        assert LlmDPd(made).choose(about(), busy_pool((0, 0))).index == 0

    @pytest.mark.parametrize(("tokens", "index"), [(286_704, 0), (286_705, 1)])
    def test_saturation_breaks_it(self, tokens: int, index: int) -> None:
        """At 15928 tokens a second 18 s are 286704 tokens more than the least loaded other has."""
        made, book = with_book()
        sent(book, {"p0": 10})
        book.placed(placed(8, on="p0", tokens=tokens + 50))
        book.placed(placed(9, on="p1", tokens=50))
        pick = LlmDPd(made).choose(about(), busy_pool((0, 0)))
        assert pick.index == index
        assert ("saturated" in pick.why.rule) is bool(index)

    def test_the_speed_is_a_setting(self) -> None:
        """A slower engine is saturated earlier."""
        made = options(llm_d_prefill_tokens_per_s=100.0)
        book = made.books.of(LlmDBook)
        sent(book, {"p0": 10})
        book.placed(placed(8, on="p0", tokens=1801))
        assert LlmDPd(made).choose(about(), busy_pool((0, 0))).index == 1

    def test_where_all_are_sticky_tokens_decide(self) -> None:
        """Their penalty has no other to be set against."""
        made, book = with_book()
        sent(book, {"p0": 10, "p1": 8})
        book.placed(placed(9, on="p0", tokens=900_000))
        assert LlmDPd(made).choose(about(), busy_pool((0, 0))).index == 1

    def test_beyond_4194304_tokens_all_are_alike(self) -> None:
        """They take turns."""
        made, book = with_book()
        for number, (address, tokens) in enumerate((("p0", 9_000_000), ("p1", 5_000_000))):
            book.placed(placed(number, on=address, tokens=tokens))
        policy = LlmDPd(made)
        assert [policy.choose(about(), busy_pool((0, 0))).index for _ in range(4)] == [0, 1, 0, 1]

    def test_decode_counts_requests(self) -> None:
        """Those that we hold, whatever else is known."""
        made, book = with_book()
        book.placed(placed(9, to="p1", tokens=9000, blocks=TEN))
        assert LlmDPd(made).choose(about(role=Role.DECODE), busy_pool((2, 1, 3))).index == 1


class TestBook:
    """Blocks sent and tokens in flight, by endpoint."""

    def test_both_sides_are_taken_to_cache(self) -> None:
        """The prompt is read on one and held on the other."""
        _, book = with_book()
        book.placed(placed(1, blocks=TEN))
        assert book.shares(about().facts) == {"p0": 1.0, "d0": 1.0}

    def test_only_the_uncached_part_is_in_flight(self) -> None:
        """Where it is read, until the answer begins or the request ends."""
        _, book = with_book()
        jobs = [placed(1, tokens=50, blocks=TEN[:5]), placed(2, blocks=TEN), placed(3, on="r", to=None, tokens=7)]
        for job in jobs:
            book.placed(job)
        assert book.tokens == {"p0": 50 + 50, "r": 7}
        book.prefill_ended(jobs[0])
        book.ended(jobs[0])
        assert book.tokens == {"p0": 50, "r": 7}
        for job in jobs[1:]:
            book.ended(job)
        assert book.tokens == {}

    def test_a_match_goes_on_while_anybody_has_the_block(self) -> None:
        """As published: a gap of its own doesn't end an endpoint's match."""
        _, book = with_book()
        book.placed(placed(1, on="p0", to="d0", blocks=[0, 2]))
        book.placed(placed(2, on="p1", to="d1", blocks=[0, 1]))
        assert book.matched(about([0, 1, 2, 3]).facts) == {"p0": 2, "d0": 2, "p1": 2, "d1": 2}

    def test_no_more_than_131072_tokens_are_looked_at(self) -> None:
        """So longer prompts that begin alike are the same."""
        _, book = with_book()
        request = facts(300_000, prefix_blocks=(1, 2, 3), block_tokens=100_000.0)
        book.placed(placed(1, to="d0", tokens=300_000, blocks=(1, 8, 9), block_tokens=100_000.0))
        assert book.shares(request) == {"p0": 1.0, "d0": 1.0}
        assert book.shares(facts(5)) == {}

    @pytest.mark.invariant("I9")
    def test_it_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The least recent go first, the beginning of a prompt before its end; it is counted."""
        monkeypatch.setattr(module, "CAPACITY_TOKENS", 100)
        _, book = with_book()
        book.placed(placed(1, on="p0", to=None, blocks=TEN))
        book.placed(placed(2, on="p0", to=None, tokens=10, blocks=[0]))
        book.placed(placed(3, on="p0", to=None, tokens=10, blocks=[77]))
        assert book.evictions == 1
        assert book.matched(about().facts) == {"p0": 1}
        assert book.matched(about([0, 2, 77]).facts) == {"p0": 3}

    def test_an_endpoint_that_left_is_forgotten(self) -> None:
        """The others' blocks stay, and one that was sent none may leave, too."""
        _, book = with_book()
        sent(book, {"p0": 3, "p1": 2})
        for address in ("p0", "d0", "nobody"):
            book.left(address)
        assert book.matched(about().facts) == {"p1": 2}
        assert len(book._holders) == 2

    @pytest.mark.parametrize("policy", ["llm_d", "llm_d_pd"])
    def test_a_conversation_stays_where_it_began(self, policy: str) -> None:
        """Through the router: what was sent there is held there, on both sides where the profile looks at it."""
        router = make_router([prefill("p0"), prefill("p1"), decode("d0")], make_options(policy=policy))
        homes: dict[int, str] = {}
        for turn in range(3):
            for talk in (100, 200):
                blocks = tuple(range(talk, talk + 10 + turn))
                decision = decide(router, facts(10 * len(blocks), prefix_blocks=blocks, block_tokens=10.0), float(turn))
                assert decision.prefill is not None
                assert homes.setdefault(talk, decision.prefill.endpoint.address) == decision.prefill.endpoint.address
                router.settle(decision, float(turn))
        assert set(homes.values()) == {"p0", "p1"}
