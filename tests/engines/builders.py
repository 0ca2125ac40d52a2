"""Small builders for tests of the engines: an inbound request, an attempt, a decision."""

from collections.abc import Sequence

import msgspec

from pdrouter.core.decision import Decision, Placement, Why
from pdrouter.core.fleet import Endpoint, Role
from pdrouter.core.ledger import Account, LegKind, RankKey, Reservation
from pdrouter.core.request import RequestFacts
from pdrouter.engines.base import Attempt, Inbound, Leg, Plan

ROOMS = (7_000_000_000_000_000_001, 7_000_000_000_000_000_002, 7_000_000_000_000_000_003, 7_000_000_000_000_000_004)
"""Fixed rooms: beyond 2^53, so that a float on the way would show."""


def make_inbound(rest: bytes = b'"text":"hi"}', **fields: object) -> Inbound:
    """Return a plain request to ``/generate``; ``rest`` is its body behind the opening brace."""
    inbound = Inbound(
        path="/generate",
        body=b"{" + rest,
        start=1,
        fields=(),
        headers=b"content-type: application/json\r\n",
        request_id="r-1",
        is_stream=False,
        batch=None,
        rid=None,
        wants_prompt_logprobs=False,
    )
    return msgspec.structs.replace(inbound, **fields)


def make_attempt(rooms: Sequence[int] = ROOMS[:1]) -> Attempt:
    """Return an attempt with a fixed suffix."""
    return Attempt("a1", rooms)


def make_endpoint(role: Role, **fields: object) -> Endpoint:
    """Return an endpoint named by its role."""
    endpoint = Endpoint(
        address=f"{role.value}:30000",
        host=role.value,
        port=30000,
        role=role,
        dp_size=4,
        bootstrap_port=8998,
        version="0.5.10",
    )
    return msgspec.structs.replace(endpoint, **fields)


def place(endpoint: Endpoint, rank: int | None, why: Why | None = None, report_age_s: float | None = None) -> Placement:
    """Return a leg's placement on an endpoint."""
    kind = LegKind(endpoint.role.value)
    account = Account(RankKey(endpoint.address, rank or 0), visible_delay_s=0.0, history_s=1.0, history_events=16)
    why = why or Why("test", "the only one")
    return Placement(endpoint, kind, rank, Reservation(account, kind, 1, 1, 0.0), why, why, report_age_s)


def make_decision(prefill: Placement | None, decode: Placement, request_id: str = "r-1") -> Decision:
    """Return a decision for two placements, or for one that does both."""
    facts = RequestFacts(request_id=request_id, prompt_tokens=12)
    return Decision(number=1, facts=facts, prefill=prefill, decode=decode, prefix_tokens=0, decided_at_s=0.0)


def make_pair(prefill_rank: int | None = 1, decode_rank: int | None = 2, **fields: object) -> Decision:
    """Return a decision for a prefill and a decode endpoint; ``fields`` go to both endpoints."""
    return make_decision(
        place(make_endpoint(Role.PREFILL, **fields), prefill_rank),
        place(make_endpoint(Role.DECODE, **fields), decode_rank),
    )


def prefill_leg(plan: Plan) -> Leg:
    """Return the prefill leg of a plan for two."""
    assert plan.prefill is not None
    return plan.prefill


def decode_leg(plan: Plan) -> Leg:
    """Return the decode leg of a plan that has one from the start."""
    assert plan.decode is not None
    return plan.decode


def body_of(leg: Leg) -> bytes:
    """Return a leg's body as it is sent."""
    return b"".join(leg.body)


def fields_of(leg: Leg) -> dict[str, object]:
    """Return a leg's body as the engine reads it."""
    fields = msgspec.json.decode(body_of(leg), type=dict[str, object])
    assert list(fields).count("rid") == 1
    return fields


def lines_of(head: bytes) -> list[str]:
    """Return a head's lines; a bare line feed is a line end too, as lenient servers see it."""
    assert head.endswith(b"\r\n\r\n")
    return head[:-4].decode().replace("\r\n", "\n").split("\n")
