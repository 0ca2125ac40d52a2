"""SGLang's rooms and ranks by version and kind of DP: the legs of every plan find each other."""

import itertools
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrouter.core.fleet import Role
from pdrouter.core.request import Task
from pdrouter.engines.base import Attempt, with_traits
from pdrouter.engines.sglang import Sglang
from pdrouter.engines.sglang_ranks import MAX_ROOM, RankFields, RoomRule

from .builders import (
    ROOMS,
    decode_leg,
    fields_of,
    make_attempt,
    make_decision,
    make_endpoint,
    make_inbound,
    make_pair,
    place,
    prefill_leg,
)

OLD = ["0.5.6", "0.5.8", "0.5.9.post1"]
UNCHECKED = ["0.5.10", "0.5.10.post1"]
CHECKED = ["0.5.11", "0.5.12", "0.5.14", "0.5.15.post1", "0.5.16", "0.5.18", "0.5.22", "0.5.23", None, "0.0.0.dev1"]


def remainder(told: object, size: int = 4) -> set[int]:
    """Return what the rooms of a leg leave when divided by the number of ranks."""
    rooms = msgspec.convert(told if isinstance(told, list) else [told], list[int])
    return {room % size for room in rooms}


@pytest.mark.parametrize(
    ("version", "dp_attention", "leaves"),
    [
        *((version, False, "rank") for version in OLD),
        *((version, True, "rank") for version in (*OLD, *UNCHECKED, *CHECKED)),
        *((version, False, "zero") for version in CHECKED),
    ],
)
def test_rooms_fit_the_prefill_rank(version: str | None, dp_attention: bool, leaves: str) -> None:
    """Before 0.5.10 the decode engine knows the rank by the room; since 0.5.11 the prefill compares both."""
    for spelling, batch, rank in itertools.product(RankFields, (None, 1, 3), range(4)):
        is_set_old = spelling is RankFields.LEGACY and version in (None, "0.0.0.dev1")
        decision = make_pair(rank, 2, version=version, dp_attention=dp_attention)
        plan = Sglang(spelling).plan(decision, make_inbound(batch=batch), make_attempt(ROOMS[: batch or 1]))
        for leg in (prefill_leg(plan), decode_leg(plan)):
            left = rank if leaves == "rank" or is_set_old else 0
            assert remainder(fields_of(leg)["bootstrap_room"]) == {left}


@pytest.mark.parametrize(
    ("version", "dp_attention", "is_zero"),
    [("0.5.9", False, False), ("0.5.10", False, False), ("0.5.23", False, True), ("0.5.23", True, False)],
)
def test_rooms_where_the_engine_chooses_the_rank(version: str, dp_attention: bool, is_zero: bool) -> None:
    """It chooses by the room; a prefill of replicas refuses all that don't leave 0."""
    attempt = make_attempt([ROOMS[0] + 2])
    decision = make_pair(None, None, version=version, dp_attention=dp_attention)
    room = fields_of(prefill_leg(Sglang(RankFields.AUTO).plan(decision, make_inbound(), attempt)))["bootstrap_room"]
    assert remainder(room) == ({0} if is_zero else {3})


@pytest.mark.parametrize(
    ("named", "headers", "path", "leaves"),
    [
        (b'"routed_dp_rank":3,', b"", "/generate", 3),
        (b'"data_parallel_rank":2,', b"", "/generate", 2),
        (b'"routed_dp_rank":3,"data_parallel_rank":2,', b"", "/v1/completions", 3),
        (b'"routed_dp_rank":3,', b"x-data-parallel-rank: 2\r\n", "/v1/completions", 2),
        (b'"routed_dp_rank":3,', b"x-data-parallel-rank: 2\r\n", "/generate", 3),
        # The engine refuses these, or ignores them.
        (b'"routed_dp_rank":"any",', b"x-data-parallel-rank: any\r\n", "/v1/completions", 1),
        (b'"routed_dp_rank":4,', b"", "/generate", 1),
        (b'"routed_dp_rank":-1,', b"", "/generate", 1),
        (b'"routed_dp_rank":null,', b"", "/generate", 1),
    ],
)
def test_a_room_for_the_rank_that_a_client_names(named: bytes, headers: bytes, path: str, leaves: int) -> None:
    """With ``rank_fields: none`` its own fields go through untouched, and the room fits what the engine reads."""
    decision = make_pair(None, None, version="0.5.23", dp_attention=True)
    inbound = make_inbound(named + b'"text":"hi"}', path=path, fields=["routed_dp_rank"], headers=headers)
    for leg in (plan := Sglang(RankFields.NONE).plan(decision, inbound, make_attempt())).prefill, plan.decode:
        assert leg is not None
        assert remainder(fields_of(leg)["bootstrap_room"]) == {leaves}
        assert bytes(leg.body[1]) == named + b'"text":"hi"}'


def test_an_old_decode_endpoint_without_the_prefills_rank() -> None:
    """It takes the prefill's rank for its own too, so one that it hasn't isn't sent; the room tells it."""
    prefill = place(make_endpoint(Role.PREFILL, version="0.5.9", dp_size=8), 6)
    decode = place(make_endpoint(Role.DECODE, version="0.5.9", dp_size=4), 2)
    plan = Sglang(RankFields.AUTO).plan(make_decision(prefill, decode), make_inbound(), make_attempt())
    fields = fields_of(decode_leg(plan))
    assert fields["decode_dp_rank"] == 2
    assert "data_parallel_rank" not in fields
    assert remainder(fields["bootstrap_room"], 8) == {6}


def test_one_rank_takes_any_room() -> None:
    """Nothing is compared there."""
    plan = Sglang(RankFields.AUTO).plan(make_pair(0, 0, dp_size=1), make_inbound(), make_attempt())
    assert fields_of(prefill_leg(plan))["bootstrap_room"] == ROOMS[0]


@given(st.integers(0, MAX_ROOM), st.integers(1, 4096), st.data())
def test_a_fitted_room_is_one(room: int, size: int, data: st.DataObject) -> None:
    """It leaves what it should and stays within 63 bits."""
    wanted = data.draw(st.integers(0, size - 1))
    fitted = RoomRule(size, wanted).fit(room)
    assert 0 <= fitted <= MAX_ROOM
    assert fitted % size == wanted
    assert RoomRule(size, None).fit(room) == room


def test_fitted_rooms_stay_random() -> None:
    """But for the remainder all 63 bits are: none repeats, and they are spread over the whole range."""
    chance = random.Random(1)
    rooms = [chance.getrandbits(63) for _ in range(4096)]
    fitted = RoomRule(8, 5).fit_all(rooms)
    assert len(set(fitted)) == len(rooms)
    assert {room >> 59 for room in fitted} == set(range(16))


def test_each_attempt_has_rooms_of_its_own() -> None:
    """The rule changes nothing of that."""
    decision = make_pair(version="0.5.23")
    plans = [Sglang(RankFields.AUTO).plan(decision, make_inbound(), Attempt("a", [room])) for room in ROOMS]
    assert len({fields_of(prefill_leg(plan))["bootstrap_room"] for plan in plans}) == len(ROOMS)


@pytest.mark.parametrize(
    ("version", "tasks"),
    [
        ("0.5.23", {Task.GENERATE, Task.RESPONSES, Task.MESSAGES}),
        ("0.5.22", {Task.GENERATE, Task.RESPONSES, Task.MESSAGES}),
        ("0.5.21", {Task.GENERATE, Task.RESPONSES}),
        ("0.5.20", {Task.GENERATE, Task.RESPONSES}),
        ("0.5.19", {Task.GENERATE}),
        ("0.5.6", {Task.GENERATE}),
        ("0.6", {Task.GENERATE, Task.RESPONSES, Task.MESSAGES}),
        (None, {Task.GENERATE}),
        ("0.0.0.dev1", {Task.GENERATE}),
    ],
)
def test_what_a_version_does_in_pairs(version: str | None, tasks: set[Task]) -> None:
    """Responses since 0.5.20, messages since 0.5.22; who doesn't tell isn't trusted with them."""
    for role in Role:
        endpoint = with_traits(Sglang(RankFields.AUTO), make_endpoint(role, version=version))
        assert endpoint.pair_tasks == tasks
        assert endpoint.takes_ranks == (role is not Role.DECODE or version != "0.5.6")
