"""The priority that an engine gets, where those of a fleet read it in different ways."""

import json

import pytest

from pdrouter.core.fleet import Role
from pdrouter.engines.base import Engine
from pdrouter.engines.sglang import Sglang
from pdrouter.engines.sglang_ranks import RankFields
from pdrouter.engines.vllm import Vllm
from pdrouter.errors import DuplicateField
from tests.engines.builders import (
    body_of,
    decode_leg,
    make_attempt,
    make_decision,
    make_endpoint,
    make_inbound,
    place,
    prefill_leg,
)

SGLANG = Sglang(RankFields.AUTO)


@pytest.mark.parametrize("engine", [SGLANG, Vllm()], ids=["sglang", "vllm"])
@pytest.mark.parametrize("is_low_first", [False, True])
@pytest.mark.parametrize("puts_low_first", [False, True])
@pytest.mark.parametrize(
    ("rest", "sent"),
    [
        (b'"text":"hi", "priority": 3}', 3),
        (b'"priority":3}', 3),
        (b'"priority":"3","text":"hi"}', "3"),
    ],
)
def test_each_engine_gets_the_priority_in_its_own_sense(
    engine: Engine, is_low_first: bool, puts_low_first: bool, rest: bytes, sent: int | str
) -> None:
    """Meant the other way it is negated; else the client's own bytes go through (I10)."""
    inbound = make_inbound(rest, priority=3, is_low_first=is_low_first)
    decision = make_decision(None, place(make_endpoint(Role.REGULAR, puts_low_first=puts_low_first), None))
    leg = decode_leg(engine.plan(decision, inbound, make_attempt()))
    body = json.loads(body_of(leg))
    assert body["priority"] == (sent if is_low_first == puts_low_first else -3)
    assert body.get("text") == json.loads(inbound.body).get("text")
    assert body_of(leg).count(b'"priority"') == 1
    assert b"content-length: %d\r\n" % len(body_of(leg)) in leg.head


def test_both_engines_of_a_pair_get_it_in_their_own_sense() -> None:
    """A prefill that runs with ``--schedule-low-priority-values-first`` beside a decode engine that doesn't."""
    prefill = place(make_endpoint(Role.PREFILL, puts_low_first=True), 1)
    decode = place(make_endpoint(Role.DECODE), 2)
    inbound = make_inbound(b'"text":"hi","priority":-4,"stream":false}', priority=-4, is_low_first=False)
    plan = SGLANG.plan(make_decision(prefill, decode), inbound, make_attempt())
    bodies = [json.loads(body_of(leg)) for leg in (prefill_leg(plan), decode_leg(plan))]
    assert [body["priority"] for body in bodies] == [4, -4]
    assert bodies[0]["bootstrap_room"] == bodies[1]["bootstrap_room"]


def test_a_priority_that_stands_twice_is_refused_where_it_must_change() -> None:
    """An engine may read either."""
    inbound = make_inbound(b'"priority":1,"text":"hi","priority":2}', priority=2)
    decision = make_decision(None, place(make_endpoint(Role.REGULAR, puts_low_first=True), None))
    with pytest.raises(DuplicateField):
        SGLANG.plan(decision, inbound, make_attempt())
