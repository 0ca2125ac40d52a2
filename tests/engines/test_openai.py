"""Any OpenAI-compatible engine: the body as it came."""

from pdrouter.core.fleet import Role
from pdrouter.core.names import Card
from pdrouter.engines.base import Described
from pdrouter.engines.openai import OpenAi

from .builders import body_of, lines_of, make_attempt, make_decision, make_endpoint, make_inbound, place


def test_a_request_goes_through() -> None:
    """Nothing is added to the body; the id is told by header."""
    inbound = make_inbound(b'"prompt":"hi","rid":"mine"}', path="/v1/completions")
    place_ = place(make_endpoint(Role.REGULAR, dp_size=1), 0)
    plan = OpenAi().plan(make_decision(None, place_), inbound, make_attempt())
    assert plan.prefill is None
    assert plan.decode is not None
    assert body_of(plan.decode) == b'{"prompt":"hi","rid":"mine"}'
    assert "x-request-id: r-1" in lines_of(plan.decode.head)
    assert plan.rid == ""


def test_it_tells_its_model() -> None:
    """The first of a list; what isn't understood is nothing."""
    assert OpenAi().describe("/v1/models", b'{"data":[{"id":"m"},{"id":"lora"}]}') == Described(
        model="m", cards=(Card("m"), Card("lora"))
    )
    assert OpenAi().describe("/v1/models", b'{"data":[]}') is None
    assert OpenAi().describe("/v1/models", b"<html>") is None
