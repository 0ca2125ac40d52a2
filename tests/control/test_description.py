"""Descriptions of one engine: whether one is whole, when the next is due, what contradicts, who is another process."""

import math
from typing import Any

import msgspec
import pytest

from pdrouter.control.description import Description, contradictions, unknown_rank
from pdrouter.core.fleet import Role
from tests.core.builders import prefill, regular

FIRST_S = 1.0
WHOLE = frozenset({"model", "dp_size"})


def described(description: Description, now_s: float, told: Any, *, before: int = 1, after: int = 1) -> float:
    """Take in a description of an endpoint; return in how many seconds the next is due."""
    description.begin(now_s, FIRST_S)
    description.take(regular("e:1", dp_size=before), regular("e:1", dp_size=after), told)
    return description.due_s - now_s


def test_a_whole_description_is_the_last() -> None:
    """Whatever else is told."""
    assert described(Description(WHOLE), 5.0, WHOLE | {"version"}) == math.inf


def test_what_is_missing_is_asked_for_less_and_less_often() -> None:
    """In twice the time again and again, up to a bound; once it is told, not at all."""
    description, now_s, waits = Description(WHOLE), 5.0, []
    for _ in range(9):
        waits.append(described(description, now_s, {"model"}))
        now_s += waits[-1]
    assert waits == [1, 1, 2, 4, 8, 16, 32, 64, 64]
    assert described(description, now_s, WHOLE, after=2) == math.inf


def test_nobody_answers() -> None:
    """A description that is begun and doesn't come is due again as late."""
    description = Description(WHOLE)
    described(description, 0.0, {"model"})
    for wait_s in (1, 2, 4):
        now_s = description.due_s
        description.begin(now_s, FIRST_S)
        assert description.due_s - now_s == wait_s


def test_an_unknown_rank_is_asked_for_at_once_and_then_less_often() -> None:
    """However often it is reported, or comes and goes."""
    description, asked = Description(WHOLE), []
    described(description, 0.0, WHOLE)
    for tenth in range(1, 2000):
        now_s = tenth / 10
        if description.reported(9 if tenth % 7 else None, now_s):
            asked.append(now_s)
            described(description, now_s, WHOLE)
    assert len(asked) < 12
    assert asked[0] < 2.5
    description.reported(9, 1e6)
    assert description.due_s <= 1e6


def test_growth_is_found_soon_however_long_the_last_one_took() -> None:
    """With ranks that were found the waiting begins anew."""
    description, now_s = Description(WHOLE), 0.0
    for _ in range(9):
        now_s += described(description, now_s, {"model"})
    description.reported(1, now_s)
    assert described(description, now_s, WHOLE, before=1, after=2) == math.inf
    assert description.reported(2, now_s + 64.0)
    assert described(description, now_s + 64.0, WHOLE, before=2, after=2) == 1
    assert not description.reported(2, now_s + 64.5)


def test_fewer_ranks_than_are_reported() -> None:
    """Is said once, as long as it is so; so is what the engine's own pages disagree about."""
    description = Description(WHOLE)
    described(description, 0.0, WHOLE)
    assert not description.warn(regular("e:1"), None)
    description.reported(1, 1.0)
    described(description, 1.0, WHOLE)
    assert description.warn(regular("e:1"), None)
    assert description.warning == "load reports name rank 1, but only rank 0 is known"
    assert not description.warn(regular("e:1"), None)
    description.reported(5, 9.0)
    described(description, 9.0, WHOLE)
    assert description.warn(regular("e:1", dp_size=2, rank_base=3), None)
    assert description.warning == "load reports name rank 5, but only ranks 3 to 4 are known"
    description.reported(None, 19.0)
    described(description, 19.0, WHOLE)
    assert description.warn(regular("e:1"), "dp_size 1, internal_states 2")
    assert description.warning == "dp_size 1, internal_states 2"
    assert description.warn(regular("e:1"), None)
    assert description.warning is None


@pytest.mark.parametrize(
    ("changes", "is_in_use", "change"),
    [
        ({}, True, None),
        ({"version": "2"}, True, "version"),
        ({"dp_size": 1}, True, "dp_size"),
        ({"dp_size": 4}, True, None),
        ({"dp_size": 4}, False, "dp_size"),
        ({"dp_size": 4, "kv_capacity_tokens": 50}, True, None),
        ({"dp_size": 4, "version": "2"}, True, "version"),
        ({"kv_capacity_tokens": 50}, True, "kv_capacity_tokens"),
        ({"rank_base": 2}, True, None),
    ],
)
def test_another_process(changes: dict[str, Any], is_in_use: bool, change: str | None) -> None:
    """Something lasting that was told is another; ranks may come while it runs, and bring other figures along."""
    description = Description(WHOLE)
    before = regular("e:1", dp_size=2, version="1", kv_capacity_tokens=100)
    description.take(regular("e:1"), before, {"dp_size", "version", "kv_capacity_tokens"})
    after = msgspec.structs.replace(before, **changes)
    assert description.changed(before, after, is_in_use=is_in_use) == change
    description.forget()
    assert description.changed(before, after, is_in_use=is_in_use) is None


def test_unknown_ranks() -> None:
    """Ranks are numbered over a whole deployment where several endpoints share one; less than 0 is no rank."""
    alone, second = regular("e:1", dp_size=2), regular("e:1", dp_size=2, rank_base=2)
    assert [unknown_rank(alone, ranks) for ranks in ((), (0, 1), (1, 2, 3), (-1, 0))] == [None, None, 2, None]
    assert [unknown_rank(second, ranks) for ranks in ((2, 3), (0, 1), (3, 4))] == [None, 0, 4]


def test_contradictions() -> None:
    """Each names what was configured and what is reported; what the settings leave open can't be contradicted."""
    endpoint = prefill("p:1", dp_size=2, bootstrap_port=8998)
    told = {"role": Role.DECODE, "dp_size": 4, "bootstrap_port": 9000, "model": "m"}
    assert list(contradictions(endpoint, {"dp_size", "bootstrap_port", "model"}, told)) == [
        "configured bootstrap_port 8998, reports 9000",
        "configured dp_size 2, reports 4",
        "configured role prefill, reports decode",
    ]
    assert list(contradictions(endpoint, (), told)) == ["configured role prefill, reports decode"]
    assert list(contradictions(endpoint, {"dp_size", "bootstrap_port"}, {})) == []
    without = msgspec.structs.replace(endpoint, bootstrap_port=None)
    assert list(contradictions(without, {"bootstrap_port"}, {"bootstrap_port": 9000})) == []
    worker = regular("e:1", bootstrap_port=8998)
    assert list(contradictions(worker, {"bootstrap_port"}, {"bootstrap_port": 9000})) == []
