"""An adapter that is asked for by the id that SGLang lists reaches the engine in the words that it understands."""

import msgspec
import pytest

from pdrouter.core.decision import Decision
from pdrouter.core.fleet import Role
from pdrouter.core.names import Card
from pdrouter.engines.sglang import Sglang
from pdrouter.engines.sglang_ranks import RankFields
from pdrouter.errors import DuplicateField

from .builders import body_of, decode_leg, make_attempt, make_decision, make_endpoint, make_inbound, place
from .builders import prefill_leg as prefill_leg_of

CARDS = (Card("m"), Card("ad", parent="m", names=("m:ad",)), Card("alias"))
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


def asked(model: str | None, *, is_pair: bool = True, adapter: str | None = None, **fields: object) -> Decision:
    """Return a decision for a request that names a model, at engines that list an adapter."""
    told = {"model": "m", "cards": CARDS} | fields
    prefill = place(make_endpoint(Role.PREFILL, **told), 1) if is_pair else None
    decode = place(make_endpoint(Role.DECODE if is_pair else Role.REGULAR, **told), 0)
    decision = make_decision(prefill, decode)
    decision.facts = msgspec.structs.replace(decision.facts, model=model, adapter=adapter)
    return decision


def sent(decision: Decision, path: str, body: dict[str, object]) -> list[dict[str, object]]:
    """Return what each leg says of model and adapter; the bodies have no field twice."""
    raw = msgspec.json.encode(body)
    plan = Sglang(RankFields.AUTO).plan(decision, make_inbound(raw[1:], path=path), make_attempt())
    legs = [decode_leg(plan)] if plan.prefill is None else [prefill_leg_of(plan), decode_leg(plan)]
    for leg in legs:
        assert all(body_of(leg).count(b'"%b":' % name) <= 1 for name in (b"model", b"lora_path"))
    read = [msgspec.json.decode(body_of(leg), type=dict[str, object]) for leg in legs]
    return [{name: fields[name] for name in ("model", "lora_path", "x") if name in fields} for fields in read]


@pytest.mark.parametrize("is_pair", [True, False])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/generate"])
def test_its_own_id_is_told_beside_the_model(path: str, is_pair: bool) -> None:
    """The model stays, so that the answer repeats the client's word for it."""
    legs = sent(asked("ad", is_pair=is_pair), path, {"model": "ad", "x": 1})
    assert legs == [{"model": "ad", "x": 1, "lora_path": "ad"}] * len(legs)


@pytest.mark.parametrize("is_pair", [True, False])
def test_messages_know_the_models_name_alone(is_pair: bool) -> None:
    """There is no other field for it there."""
    legs = sent(asked("ad", is_pair=is_pair), MESSAGES, {"model": "ad", "x": 1})
    assert legs == [{"model": "m:ad", "x": 1}] * len(legs)


@pytest.mark.parametrize(
    ("model", "adapter", "body"),
    [
        ("m", None, {"model": "m"}),
        ("alias", None, {"model": "alias"}),
        ("m:ad", None, {"model": "m:ad"}),
        ("nobody", None, {"model": "nobody"}),
        (None, None, {}),
        ("m", "ad", {"model": "m", "lora_path": "ad"}),
        ("ad", "other", {"model": "ad", "lora_path": "other"}),
    ],
)
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_other_names_go_on_as_they_came(
    path: str, model: str | None, adapter: str | None, body: dict[str, object]
) -> None:
    """SGLang understands them itself, or they aren't an adapter's."""
    assert sent(asked(model, adapter=adapter), path, body) == [body, body]


def test_a_null_beside_it_counts_as_nothing() -> None:
    """It doesn't stand there twice, of which the engine would take one."""
    assert sent(asked("ad"), CHAT, {"model": "ad", "lora_path": None}) == [{"model": "ad", "lora_path": "ad"}] * 2


def test_responses_and_opaque_bodies_stay() -> None:
    """Responses know no adapters, and an opaque body isn't ours to change."""
    assert sent(asked("ad"), "/v1/responses", {"model": "ad"}) == [{"model": "ad"}] * 2
    opaque = make_inbound(b'"model":"ad"}', path="/v1/embeddings", is_opaque=True)
    plan = Sglang(RankFields.AUTO).plan(asked("ad", is_pair=False), opaque, make_attempt())
    assert b"lora_path" not in body_of(decode_leg(plan))


def test_an_id_that_needs_escapes() -> None:
    """It stays the same id."""
    name = 'a"d\n'
    cards = (Card("m"), Card(name, parent="m", names=(f"m:{name}",)))
    assert sent(asked(name, cards=cards), CHAT, {"model": name})[0]["lora_path"] == name


def test_a_field_of_ours_that_stands_twice_is_refused() -> None:
    """As where the router writes any other field."""
    inbound = make_inbound(b'"lora_path":null,"model":"ad","lora_path":null}', path=CHAT)
    with pytest.raises(DuplicateField):
        Sglang(RankFields.AUTO).plan(asked("ad"), inbound, make_attempt())
