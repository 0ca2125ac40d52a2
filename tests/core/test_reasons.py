"""Why nobody can serve a request, in words."""

from typing import Any

import pytest

from pdrouter.core.fleet import BREAKER, DRAIN, HEALTH, Disaggregation, Endpoint, Fleet
from pdrouter.core.reasons import why_never, why_nobody
from pdrouter.core.request import RequestFacts, Task
from tests.core.builders import decode, prefill, regular


def fleet_of(*endpoints: Endpoint) -> Fleet:
    """Return a fleet of these."""
    fleet = Fleet(Disaggregation.AUTO, takes_any=True)
    for endpoint in endpoints:
        fleet.put(endpoint)
    return fleet


def test_each_with_its_own_cause() -> None:
    """Of the role that lacks only: a breaker, a drain, both."""
    fleet = fleet_of(*(prefill(name, model="m") for name in "abc"), decode("d", model="m"), prefill("x", model="n"))
    fleet.set_ready("a", "breaker open (10 failures in a row)", BREAKER)
    fleet.set_ready("b", "draining", DRAIN)
    fleet.set_ready("c", "3 health checks failed in a row", HEALTH)
    fleet.set_ready("c", "draining", DRAIN)
    assert why_nobody(fleet, "m") == (
        "no prefill endpoint of model 'm' is ready (3 known: a breaker open (10 failures in a row); b draining; "
        "c 3 health checks failed in a row; draining)"
    )


@pytest.mark.parametrize(
    ("endpoints", "words"),
    [
        ([], "no endpoint of model 'm' is known"),
        ([prefill("p", model="other")], "no endpoint of model 'm' is known"),
        ([decode("d")], "no prefill endpoint of model 'm' is known"),
        ([regular("w")], "no ready endpoint of model 'm' can do this (1 known)"),
    ],
)
def test_whoever_isnt_there(endpoints: list[Endpoint], words: str) -> None:
    """Is named as such."""
    assert why_nobody(fleet_of(*endpoints), "m") == words


def asked(task: Task = Task.RESPONSES, **fields: object) -> RequestFacts:
    """Return a request of a kind."""
    return RequestFacts(request_id="r", prompt_tokens=1, task=task, **fields)  # type: ignore[arg-type]


PAIR: Any = {"version": "0.5.18"}
ABLE = frozenset({Task.GENERATE, Task.RESPONSES})


@pytest.mark.parametrize(
    ("endpoints", "facts"),
    [
        ([prefill("p", **PAIR), decode("d", **PAIR)], asked()),
        ([prefill("p", **PAIR), decode("d", **PAIR)], asked(Task.MESSAGES)),
        # Each side must be able to.
        ([prefill("p", pair_tasks=ABLE, **PAIR), decode("d", **PAIR)], asked()),
        ([prefill("p", **PAIR), decode("d", pair_tasks=ABLE, **PAIR)], asked()),
        # Those that can must be able to meet.
        (
            [
                *(prefill("p", pair_tasks=ABLE, group="a", **PAIR), decode("d", group="a", **PAIR)),
                *(prefill("q", group="b", **PAIR), decode("e", pair_tasks=ABLE, group="b", **PAIR)),
            ],
            asked(),
        ),
        ([prefill("p", pairs_lists=False, **PAIR), decode("d", **PAIR)], asked(Task.GENERATE, is_list=True, prompts=2)),
    ],
)
def test_what_no_readiness_would_change(endpoints: list[Endpoint], facts: RequestFacts) -> None:
    """It is told with the endpoints and their versions, ready or not."""
    fleet = fleet_of(*endpoints)
    for out in (None, "3 health checks failed in a row"):
        fleet.set_ready("p", out)
        why = why_never(fleet, "m", facts)
        assert why is not None
        assert why.startswith(f"the fleet can't serve {facts.task} requests")
        assert "no regular endpoint" in why
        assert " is sglang 0.5.18" in why


@pytest.mark.parametrize(
    ("endpoints", "facts"),
    [
        ([], asked()),
        ([prefill("p", **PAIR)], asked()),
        ([decode("d", **PAIR)], asked()),
        ([prefill("p", group="a", **PAIR), decode("d", group="b", **PAIR)], asked()),
        ([prefill("p", pair_tasks=ABLE, **PAIR), decode("d", pair_tasks=ABLE, **PAIR)], asked()),
        ([prefill("p", **PAIR), decode("d", **PAIR), regular("w")], asked()),
        ([prefill("p", **PAIR), decode("d", reads_prompts=True, **PAIR)], asked()),
        ([prefill("p", model="n", **PAIR), decode("d", model="n", **PAIR)], asked()),
        ([prefill("p", **PAIR), decode("d", **PAIR)], asked(Task.READ)),
        ([prefill("p", **PAIR), decode("d", **PAIR)], asked(Task.OTHER)),
        ([decode("d", **PAIR)], asked(Task.OTHER)),
        ([prefill("p", **PAIR), decode("d", **PAIR)], asked(Task.GENERATE)),
        ([prefill("p", **PAIR), decode("d", **PAIR)], asked(Task.GENERATE, copies=2, prompts=2)),
    ],
)
def test_what_may_be_served_some_day(endpoints: list[Endpoint], facts: RequestFacts) -> None:
    """By endpoints that are out, or that may join."""
    assert why_never(fleet_of(*endpoints), "m", facts) is None


def test_an_endpoint_that_has_not_told_its_version() -> None:
    """While it is out nobody knows what it can do; once it is ready that is known."""
    fleet = fleet_of(prefill("p"), decode("d", **PAIR))
    fleet.set_ready("p", "not reached yet")
    assert why_never(fleet, "m", asked()) is None
    fleet.set_ready("p", None)
    assert "p is sglang of an unknown version; d is sglang 0.5.18" in (why_never(fleet, "m", asked()) or "")


def test_counting_needs_an_engine_that_has_it() -> None:
    """One in the fleet is enough, whatever its role and whether it is ready; the others are named."""
    lacking = [prefill("p", **PAIR), decode("d", **PAIR)]
    why = why_never(fleet_of(*lacking), "m", asked(Task.COUNT))
    assert why == (
        "the fleet can't count the tokens of messages: no engine has it (p is sglang 0.5.18; d is sglang 0.5.18)"
    )
    for able in (prefill("q", counts_messages=True, **PAIR), regular("w", counts_messages=True, **PAIR)):
        fleet = fleet_of(*lacking, able)
        fleet.set_ready(able.address, "3 health checks failed in a row")
        assert why_never(fleet, "m", asked(Task.COUNT)) is None
