"""What engines with OpenAI's API tell of themselves."""

import json

import pytest

from pdrouter.core.names import Card
from pdrouter.engines.about import described, listed
from pdrouter.engines.base import Described


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v1/models", b'{"data":[{"id":"m"},{"id":"n"}]}', Described(model="m", cards=(Card("m"), Card("n")))),
        ("/v1/models", b'{"data":[]}', None),
        ("/version", b'{"version":"1.2"}', Described(version="1.2")),
    ],
)
def test_model_and_version(path: str, body: bytes, told: Described | None) -> None:
    """Of several models the first; nothing where there is none."""
    assert described(path, body) == told


VLLM = {
    "object": "list",
    "data": [
        {"id": "lora", "object": "model", "created": 2, "owned_by": "vllm", "root": "/l", "parent": "m"},
        {"id": "m", "created": 1, "owned_by": "vllm", "root": "/m", "parent": None, "max_model_len": 4096,
         "permission": [{"id": "modelperm-1", "object": "model_permission"}]},
    ],
}  # fmt: skip


def test_what_is_told_of_each_id() -> None:
    """All that OpenAI's page has, in order; the base model is the first id without a parent."""
    told = listed(json.dumps(VLLM).encode())
    assert told == Described(
        model="m", cards=(Card("lora", 2, "vllm", "/l", "m"), Card("m", 1, "vllm", "/m", None, 4096))
    )


def test_an_adapter_may_have_a_name_beside_its_id() -> None:
    """Made of its model and its id; what stands in either is taken as it is."""
    body = json.dumps({"data": [{"id": "m"}, {"id": "{id}", "parent": "m"}]}).encode()
    told = listed(body, "{parent}:{id}")
    assert told is not None
    assert told.cards is not None
    assert [card.names for card in told.cards] == [(), ("m:{id}",)]


@pytest.mark.parametrize(
    ("card", "kept"),
    [
        ({"id": 5}, None),
        ({"id": None}, None),
        ({"id": ""}, None),
        ({"id": "x" * 257}, None),
        ({"id": "x" * 256}, Card("x" * 256)),
        ({"id": "a", "created": -1, "max_model_len": 2**63}, Card("a")),
        ({"id": "a", "created": True, "max_model_len": 1.5}, Card("a")),
        ({"id": "a", "owned_by": 5, "root": ["/"], "parent": {}}, Card("a")),
        ({"id": "a", "owned_by": "x" * 257, "root": "/" * 4097, "parent": "x" * 257}, Card("a")),
    ],
)
@pytest.mark.invariant("I9")
def test_what_cant_be_isnt_told(card: dict[str, object], kept: Card | None) -> None:
    """An id of another type or without end is left out, and any other fact by itself."""
    told = listed(json.dumps({"data": [card, {"id": "m"}]}).encode())
    assert told is not None
    assert told.cards == ((Card("m"),) if kept is None else (kept, Card("m")))


@pytest.mark.parametrize("path", ["/v1/models", "/version"])
@pytest.mark.parametrize("body", [b"", b"null", b"<html>", b'{"data":5}', b'{"version":5}', b"\xff", b"[" * 100_000])
def test_what_isnt_such_a_page(path: str, body: bytes) -> None:
    """It tells nothing, and breaks nothing."""
    assert described(path, body) is None
