"""The journal: the last decisions, their whole lives, and nothing kept alive by it."""

import gc
from collections.abc import Iterable

import msgspec
import pytest

from pdrouter.core import events
from pdrouter.core.decision import MAX_SHOWN, Why
from pdrouter.core.journal import Journal
from pdrouter.core.policies import POLICIES
from pdrouter.core.router import Router
from pdrouter.core.story import Moment, Stories, Story
from pdrouter.errors import ClientGone, UpstreamTimeout

from .builders import decide, decode, facts, make_options, make_router, prefill, regular, reject, report


def make_pair(policy: str = "minimum_tokens", *, limit: int = 100) -> Router:
    """Return a router over two pairs of two ranks each."""
    fleet = [prefill("p:1", dp_size=2), prefill("p:2", dp_size=2), decode("d:1", dp_size=2), decode("d:2", dp_size=2)]
    return make_router(fleet, make_options(policy=policy, journal_decisions=limit))


def told(router: Router, request_id: str, now_s: float = 100.0) -> Story:
    """Return the only life of a request."""
    (story,) = router.journal.story(request_id, now_s)
    return story


def happened(story: Story) -> list[tuple[float, str]]:
    """Return a story's moments."""
    return [(moment.after_s, moment.what) for moment in story.moments]


def test_a_whole_life() -> None:
    """Decision, first token, growth, usage and end, each with its distance from the decision."""
    router = make_pair()
    report(router, "p:1", [30.0, 10.0], 4.0)
    report(router, "p:2", [30.0, 20.0], 4.0)
    decision = decide(router, facts(100, request_id="a", model="m"), 5.0)
    router.observe(events.FirstTokenSeen(decision), 5.5)
    router.observe(events.TokensGenerated(decision, 16), 6.0)
    router.observe(events.TokensGenerated(decision, 4), 6.5)
    router.observe(events.UsageSeen(decision, 90, 22), 7.0)
    router.settle(decision, 7.25)
    story = told(router, "a", 10.0)
    assert (story.number, story.outcome, story.message, story.decided_ago_s) == (1, "answered", None, 5.0)
    assert (story.model, story.prompt_tokens, story.prefix_tokens) == ("m", 100, 0)
    assert happened(story) == [
        (0.0, "decided"),
        (0.5, "first token"),
        (1.5, "answer grown to 20 tokens"),
        (2.0, "usage: 90 prompt, 22 completion tokens"),
        (2.25, "settled: answered"),
    ]
    first, second = story.legs
    assert (first.kind, first.endpoint, first.rank, first.report_age_s) == ("prefill", "p:1", 1, 1.0)
    assert [(c.name, c.value) for c in first.endpoint_why.candidates] == [("p:1", 10.0), ("p:2", 20.0)]
    assert [(c.name, c.value) for c in first.rank_why.candidates] == [("rank 0", 30.0), ("rank 1", 10.0)]
    assert first.endpoint_why.policy == "minimum_tokens"
    assert "fewest tokens" in first.endpoint_why.sentence
    assert (second.kind, second.report_age_s) == ("decode", None)


def test_notes_stand_where_they_were_made() -> None:
    """What else was seen of a request is told among the rest, each at its moment."""
    router = make_pair()
    decision = decide(router, facts(100, request_id="a"), 5.0)
    router.observe(events.Noted(decision, "KV took 3 s"), 5.25)
    router.observe(events.FirstTokenSeen(decision), 5.5)
    router.observe(events.Noted(decision, "the client reads slowly"), 6.0)
    during = told(router, "a", 6.0)
    router.settle(decision, 7.0)
    expected = [
        (0.0, "decided"),
        (0.25, "KV took 3 s"),
        (0.5, "first token"),
        (1.0, "the client reads slowly"),
    ]
    assert happened(during) == expected
    assert happened(told(router, "a")) == [*expected, (2.0, "settled: answered")]


def test_a_request_that_lives() -> None:
    """It is told as far as it has come."""
    router = make_pair()
    decision = decide(router, facts(request_id="a"), 5.0)
    assert (told(router, "a").outcome, happened(told(router, "a"))) == ("live", [(0.0, "decided")])
    router.observe(events.FirstTokenSeen(decision), 6.0)
    assert happened(told(router, "a")) == [(0.0, "decided"), (1.0, "first token")]


def test_a_failure_is_its_outcome() -> None:
    """The code of what went wrong, and its message."""
    router = make_pair()
    router.settle(decide(router, facts(request_id="a"), 1.0), 3.0, UpstreamTimeout("too slow"))
    router.settle(decide(router, facts(request_id="b"), 1.0), 3.0, ClientGone("left"))
    assert (told(router, "a").outcome, told(router, "a").message) == ("upstream_timeout", "too slow")
    assert happened(told(router, "b")) == [(0.0, "decided"), (2.0, "settled: client_gone")]


def test_a_request_turned_away() -> None:
    """One that couldn't be placed has a story, too: why."""
    router = make_router([])
    reject(router, facts(request_id="a"), 1.0)
    story = told(router, "a", 4.0)
    assert (story.number, story.legs, story.outcome, story.decided_ago_s) == (0, [], "no_ready_pair", 3.0)
    assert story.message == "no endpoint is known"
    assert happened(story) == [(0.0, "turned away")]


def test_an_id_that_occurs_twice_has_two_lives() -> None:
    """All are told, in the order of their decisions, whether they live, have ended or weren't placed."""
    router = make_pair()
    first = decide(router, facts(request_id="a"), 1.0)
    decide(router, facts(request_id="a"), 2.0)
    reject(router, facts(request_id="a", model="m", decode_rank=9), 3.0)
    decide(router, facts(request_id="b"), 4.0)
    router.settle(first, 5.0)
    outcomes = [story.outcome for story in router.journal.story("a", 6.0)]
    assert outcomes == ["answered", "live", "invalid_rank"]
    assert router.journal.story("c", 6.0) == []


@pytest.mark.invariant("I9")
def test_only_the_last_are_kept() -> None:
    """The oldest go, placed or turned away, ended or not; a late end of one that went brings nothing back."""
    router = make_pair(limit=2)
    decisions = [decide(router, facts(request_id=str(n)), float(n)) for n in range(4)]
    for n in range(4, 7):
        reject(router, facts(request_id=str(n), decode_rank=9), float(n))
    known = [n for n in range(7) if router.journal.story(str(n), 9.0)]
    assert (known, router.journal.dropped) == ([2, 3, 5, 6], 3)
    router.settle(decisions[2], 9.0)
    router.settle(decisions[0], 9.0)
    assert (told(router, "2").outcome, router.journal.story("0", 9.0)) == ("answered", [])


def test_off() -> None:
    """0 keeps nothing."""
    router = make_pair(limit=0)
    router.settle(decide(router, facts(request_id="a"), 1.0), 2.0)
    reject(router, facts(request_id="a", decode_rank=9), 3.0)
    assert (router.journal.story("a", 4.0), router.journal.dropped, Journal(0).limit) == ([], 0, 0)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_what_was_seen_stays_as_it_was(policy: str) -> None:
    """Loads that change later don't change a story, while its request lives and after."""
    router = make_pair(policy)
    decision = decide(router, facts(100, request_id="a"), 1.0)
    before = told(router, "a", 2.0)
    for _ in range(5):
        decide(router, facts(5000), 1.0)
    report(router, "p:1", [9e6, 9e6], 1.5)
    assert told(router, "a", 2.0) == before
    router.settle(decision, 2.0)
    after = told(router, "a", 2.0)
    assert (after.legs, after.number) == (before.legs, before.number)
    assert [leg.endpoint_why.sentence for leg in after.legs] == [
        place.endpoint_why.sentence() for place in decision.placements
    ]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_nothing_is_kept_alive(policy: str) -> None:
    """Once a request has ended, its endpoints' loads can go, and its prompt's blocks are forgotten."""
    router = make_pair(policy)
    blocks = tuple(range(10**6, 10**6 + 50))
    decision = decide(router, facts(100, request_id="a", prefix_blocks=blocks, block_tokens=2.0), 1.0)
    router.settle(decision, 2.0)
    kept = [item for item in router.journal._decided if item is not None]
    assert len(kept) == 1
    del decision
    reachable = {type(item).__name__ for item in _reachable(kept)}
    assert reachable.isdisjoint({"Decision", "Reservation", "Account", "EndpointLoad", "RankLoad", "Worker", "Site"})
    assert blocks not in _reachable(kept)


def _reachable(start: Iterable[object]) -> list[object]:
    """Return what hangs on some objects, classes and modules apart."""
    seen: dict[int, object] = {}
    todo: list[object] = list(start)
    while todo:
        item = todo.pop()
        if id(item) not in seen and not isinstance(item, type) and type(item).__name__ not in {"module", "function"}:
            seen[id(item)] = item
            if isinstance(item, msgspec.Struct):  # some are hidden from the collector
                todo += [getattr(item, name) for name in item.__struct_fields__]
            todo += gc.get_referents(item)
    return list(seen.values())


def test_a_choice_among_many_shows_the_chosen() -> None:
    """The first candidates and the one that was taken, with how many more there were."""
    count = MAX_SHOWN + 8
    router = make_router([regular(f"w:{n}") for n in range(count)], make_options(policy="least_request"))
    for n in range(count - 3):
        decide(router, facts(request_id=str(n)), 1.0)
    for number in (2, MAX_SHOWN - 1, count - 4):
        choice = told(router, str(number)).legs[0].endpoint_why
        names = [candidate.name for candidate in choice.candidates]
        assert len(names) == MAX_SHOWN
        assert (f"w:{number}" in names, choice.more) == (True, 8)
        assert choice.sentence.endswith(", 8 more)")


def test_a_story_is_json() -> None:
    """It goes through JSON as it is; a value without end is null."""
    router = make_pair("least_work")
    router.settle(decide(router, facts(request_id="a"), 1.0), 2.0)
    stories = Stories("a", router.journal.story("a", 3.0))
    assert msgspec.json.decode(msgspec.json.encode(stories), type=Stories) == stories
    assert stories.lives[0].moments[0] == Moment(0.0, "decided")


def test_an_infinite_value_is_null() -> None:
    """JSON has no infinity."""
    router = make_pair()
    decision = decide(router, facts(request_id="a"), 1.0)
    why = Why("x", "y", router.load.endpoints["p:1"].ranks, [float("inf"), 2.0])
    decision.decode = msgspec.structs.replace(decision.decode, rank_why=why)
    assert [c.value for c in told(router, "a").legs[1].rank_why.candidates] == [None, 2.0]
