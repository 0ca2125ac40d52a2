"""``dynamo``: costs computed by hand, and the book behind them."""

from collections import Counter
from collections.abc import Sequence

import pytest

from pdrouter.core import events
from pdrouter.core.fleet import Role
from pdrouter.core.ledger import UNASSIGNED, RankKey
from pdrouter.core.policies import dynamo_book as module
from pdrouter.core.policies.base import PolicyOptions, Question
from pdrouter.core.policies.dynamo import Dynamo
from pdrouter.core.policies.dynamo_book import TTL_S, DynamoBook
from pdrouter.core.router import Router, RouterOptions

from .builders import decide, decode, facts, make_options, make_router, prefill, prefill_of, regular
from .pools import ask, busy_pool, options, placed

P0, P1, D0 = RankKey("p0", 0), RankKey("p1", 0), RankKey("d0", 0)
TEN = tuple(range(10))


def with_book() -> tuple[PolicyOptions, DynamoBook]:
    """Return options and the book that their policies read."""
    made = options()
    return made, made.books.of(DynamoBook)


def costs(made: PolicyOptions, question: Question, counts: Sequence[int] = (0, 0), *, dp_size: int = 1) -> list[float]:
    """Return the costs of endpoints ``p0``, ``p1``..., whose ledgers hold so many requests."""
    return list(Dynamo(made).choose(question, busy_pool(counts, dp_size=dp_size)).why.values)


class TestPrefill:
    """Active prefill and the prompt, less what is there."""

    def test_the_cost(self) -> None:
        """p0 reads 100 and was sent 3 of 10 blocks; p1 reads nothing and has none: 100 + 100 - 30 against 100."""
        made, book = with_book()
        book.placed(placed(1, tokens=100, blocks=[0, 1, 2, 90, 91]))
        question = ask(prefix_blocks=TEN, block_tokens=10.0)
        assert costs(made, question) == [170, 100]
        book.prefill_ended(placed(1))
        assert costs(made, question) == [70, 100]

    def test_a_burst_of_one_prompt_ties(self) -> None:
        """While the first is being read, waiting for it costs what reading anew does; ties go by chance."""
        made, book = with_book()
        book.placed(placed(1, blocks=TEN))
        question = ask(prefix_blocks=TEN, block_tokens=10.0)
        pool, policy = busy_pool((0, 0)), Dynamo(made)
        found = Counter(policy.choose(question, pool).index for _ in range(100))
        assert costs(made, question) == [100, 100]
        assert min(found[0], found[1]) > 30

    def test_only_the_uncached_part_is_charged(self) -> None:
        """The second request finds 30 of its 100 tokens there."""
        _, book = with_book()
        book.placed(placed(1, tokens=30, blocks=[0, 1, 2]))
        book.placed(placed(2, tokens=100, blocks=TEN))
        assert book.prefill_tokens[P0] == 30 + 70

    def test_neither_ledger_nor_reports_count(self) -> None:
        """It has its own bookkeeping."""
        made, _ = with_book()
        assert costs(made, ask(held={"p0": 90}), (9, 0)) == [100, 100]


class TestDecode:
    """Active prompts and the prompt; no credit, no reuse, no growth."""

    def test_the_cost(self) -> None:
        """Two prompts of the same blocks are held twice, though the newest would be a match."""
        made, book = with_book()
        for number in (1, 2):
            book.placed(placed(number, on="x", to="p0", blocks=TEN))
        assert costs(made, ask(Role.DECODE, tokens=40, prefix_blocks=TEN[:4], block_tokens=10.0)) == [240, 40]
        book.prefill_ended(placed(1))
        assert book.active_tokens[P0] == 200
        book.ended(placed(1))
        assert costs(made, ask(Role.DECODE, tokens=40)) == [140, 40]

    def test_generated_tokens_do_not_count(self) -> None:
        """Output blocks aren't tracked by default; so the next request still takes the other rank."""
        router = make_router([prefill("p0"), decode("d0", dp_size=2)], dynamo_options())
        first = decide(router, facts(60), 1.0)
        router.observe(events.TokensGenerated(first, 5000), 2.0)
        second = decide(router, facts(60), 3.0)
        assert sorted(second.decode.rank_why.values) == [60, 120]


class TestRegular:
    """Both on one endpoint: shared blocks are held once."""

    def test_the_cost(self) -> None:
        """r0 reads 100 and holds 100: 100 + 100 - 80 + 100 + 20; the other 100 + 100."""
        made, book = with_book()
        book.placed(placed(1, on="p0", to=None, blocks=TEN))
        question = ask(Role.REGULAR, prefix_blocks=(*TEN[:8], 50, 51), block_tokens=10.0)
        assert costs(made, question) == [100 + 100 - 80 + 100 + 20, 200]
        book.prefill_ended(placed(1))
        assert costs(made, question) == [140, 200]

    def test_a_shared_block_goes_with_the_last(self) -> None:
        """In whatever order they end, and nothing is left."""
        _, book = with_book()
        jobs = [placed(1, on="p0", to=None, tokens=105, blocks=TEN), placed(2, on="p0", to=None, blocks=(*TEN[:5], 77))]
        for job in jobs:
            book.placed(job)
        assert book.active_tokens[P0] == 105 + 100 - 50
        book.ended(jobs[0])
        assert book.active_tokens[P0] == 100
        book.ended(jobs[1])
        assert not book.active_tokens
        assert not book.prefill_tokens
        assert book.added_tokens(jobs[0].facts, P0) == 105


class TestTree:
    """What was sent lately, by time and by size."""

    def test_a_block_is_forgotten_after_its_time(self) -> None:
        """Counted from when it was last sent."""
        _, book = with_book()
        request = placed(1, blocks=TEN).facts
        book.placed(placed(1, blocks=TEN))
        book.placed(placed(2, blocks=TEN[:4], now_s=50.0))
        assert book.overlap_tokens(request, P0, TTL_S - 0.01) == 100
        assert book.overlap_tokens(request, P0, TTL_S) == 40
        assert book.overlap_tokens(request, P0, TTL_S + 50.0) == 0

    def test_what_is_forgotten_takes_no_room(self) -> None:
        """It goes with the next that is sent."""
        _, book = with_book()
        book.placed(placed(1, blocks=TEN))
        book.placed(placed(2, on="p1", blocks=[1], now_s=TTL_S))
        assert list(book._sent_at_s) == [(P1, 1)]
        assert book.evictions == 0

    def test_a_match_ends_at_the_first_gap(self) -> None:
        """Blocks behind one that isn't there are no prefix."""
        _, book = with_book()
        book.placed(placed(1, blocks=[0, 1, 2]))
        assert book.overlap_tokens(placed(2, blocks=[0, 9, 2]).facts, P0, 1.0) == 10

    def test_no_more_than_the_prompt_matches(self) -> None:
        """Blocks are of an estimated size."""
        _, book = with_book()
        book.placed(placed(1, blocks=[0, 1]))
        assert book.overlap_tokens(placed(2, tokens=15, blocks=[0, 1]).facts, P0, 1.0) == 15

    @pytest.mark.invariant("I9")
    def test_it_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What was sent longest ago goes first, of one prompt its end; it is counted."""
        monkeypatch.setattr(module, "MAX_BLOCKS", 12)
        _, book = with_book()
        book.placed(placed(1, blocks=TEN))
        book.placed(placed(2, on="p1", blocks=[1, 2, 3, 4], now_s=1.0))
        request = placed(3, blocks=TEN).facts
        assert (book.evictions, book.overlap_tokens(request, P0, 1.0)) == (2, 80)

    def test_what_is_sent_again_is_new(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The other prompt goes in its place."""
        monkeypatch.setattr(module, "MAX_BLOCKS", 12)
        _, book = with_book()
        for number, blocks in enumerate((range(6), range(10, 16), range(6), [20, 21])):
            book.placed(placed(number, blocks=blocks, now_s=float(number)))
        assert book.overlap_tokens(placed(8, blocks=range(6)).facts, P0, 3.0) == 60
        assert book.overlap_tokens(placed(9, blocks=range(10, 16)).facts, P0, 3.0) == 40

    def test_an_endpoint_that_left_is_forgotten(self) -> None:
        """The tree of the others stays."""
        _, book = with_book()
        for number, on in enumerate(("p0", "p1")):
            book.placed(placed(number, on=on, blocks=TEN))
        book.left("p0")
        assert [key for key, _ in book._sent_at_s] == [P1] * 10


def dynamo_options() -> RouterOptions:
    """Return the core's settings with the policy on endpoints and ranks."""
    return make_options(policy="dynamo", rank_policy="dynamo")


class TestRanks:
    """Its unit is a rank of a worker."""

    def test_an_endpoint_is_worth_its_best_rank(self) -> None:
        """One idle rank beats a lower total."""
        made, book = with_book()
        book.placed(placed(1, on="p0", rank=0, tokens=500))
        book.placed(placed(2, on="p1", rank=0, tokens=50))
        book.placed(placed(3, on="p1", rank=1, tokens=50))
        assert costs(made, ask(), dp_size=2) == [100, 150]

    def test_endpoint_and_rank_are_one_choice(self) -> None:
        """Through the router: a conversation goes on where it was, on its rank."""
        router = make_router([prefill("p0", dp_size=2), prefill("p1", dp_size=2), decode("d0")], dynamo_options())
        homes = []
        for start in range(0, 40, 10):
            blocks = tuple(range(start, start + 10))
            decision = decide(router, facts(100, prefix_blocks=blocks, block_tokens=10.0), 1.0)
            homes.append(prefill_of(decision).reservation.account.key)
        assert len(set(homes)) == 4
        settle_all(router)
        for start in range(0, 40, 10):
            blocks = (*range(start, start + 10), 99)
            decision = decide(router, facts(110, prefix_blocks=blocks, block_tokens=10.0), 5.0)
            assert prefill_of(decision).reservation.account.key == homes[start // 10]
            assert min(prefill_of(decision).rank_why.values) == 10
            router.observe(events.FirstTokenSeen(decision), 5.0)

    def test_work_whose_rank_the_engine_chose(self) -> None:
        """It is on all ranks alike, and so is what it left there."""
        made, book = with_book()
        job = placed(1, on="p0", rank=UNASSIGNED, blocks=TEN)
        book.placed(job)
        question = ask(prefix_blocks=TEN, block_tokens=10.0)
        assert costs(made, question, dp_size=2) == [50, 100]
        book.ended(job)
        assert costs(made, question, dp_size=2) == [0, 100]

    def test_regular_endpoints_through_the_router(self) -> None:
        """And everything is given back."""
        router = make_router([regular("r0", dp_size=2), regular("r1")], dynamo_options())
        for number in range(9):
            decide(router, facts(100, prefix_blocks=(number % 2, 5), block_tokens=50.0), 1.0)
        book = router.books.of(DynamoBook)
        assert sum(book.active_tokens.values()) > 0
        settle_all(router)
        assert (+book.active_tokens, +book.prefill_tokens) == (Counter(), Counter())


def settle_all(router: Router) -> None:
    """End all that lives."""
    for decision in list(router.live.values()):
        router.observe(events.FirstTokenSeen(decision), 4.0)
        router.settle(decision, 4.0)
