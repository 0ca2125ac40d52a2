"""Names of models over live engines: aliases, adapters, colons and slashes; and the pages that list them."""

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest

from tests.lab import CHAT, GENERATE, Lab, ScriptedEngine, always, chat, route_to

Card = Mapping[str, object]

ANSWER = {
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}],
    "kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [1], "remote_engine_id": "e"},
}
BASE: Card = {
    "id": "m",
    "object": "model",
    "created": 7,
    "owned_by": "vllm",
    "root": "/models/m",
    "parent": None,
    "max_model_len": 4096,
    "permission": [{"id": "p"}],
}
ALIAS: Card = {**BASE, "id": "gpt-3.5-turbo"}
SQL: Card = {"id": "sql", "created": 8, "owned_by": "vllm", "root": "/lora/sql", "parent": "m"}
PAIRS = [[BASE], [BASE, SQL]]


def listing(role: str | None, cards: Sequence[Card], answer: object = ANSWER) -> ScriptedEngine:
    """Return an engine that lists these ids."""
    scripts = {"/v1/models": always(200, {"object": "list", "data": list(cards)})}
    scripts |= dict.fromkeys((CHAT, GENERATE), always(200, answer))
    scripts |= {"/version": always(200, {"version": "0.32.0"}), "/metrics": always(200, b"")}
    return ScriptedEngine(role, scripts, {"served_model_name": cards[0]["id"], "version": "0.5.23"})


@contextlib.asynccontextmanager
async def pairs(engine: str, *cards: Sequence[Card]) -> AsyncIterator[tuple[Lab, list[ScriptedEngine]]]:
    """Run a router over a pair for each list of ids; return the prefill engines, then the decode engines."""
    flags: dict[str, Any] = {"disaggregation": "always"}
    owned = [[{**card, "owned_by": engine} for card in each] for each in cards]
    sides = [listing(role, each) for role in ("prefill", "decode") for each in owned]
    async with contextlib.AsyncExitStack() as stack:
        for side in sides:
            await stack.enter_async_context(side.listen())
        prefills, decodes = sides[: len(cards)], sides[len(cards) :]
        yield await stack.enter_async_context(route_to(prefills, decodes, engine=engine, **flags)), sides


@contextlib.asynccontextmanager
async def workers(*cards: Sequence[Card], **flags: Any) -> AsyncIterator[tuple[Lab, list[ScriptedEngine]]]:
    """Run a router over a regular engine with OpenAI's API for each list of ids."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(listing(None, each).listen()) for each in cards]
        yield await stack.enter_async_context(route_to((), (), engines, engine="openai", **flags)), engines


def asked(engines: Sequence[ScriptedEngine], path: str = CHAT) -> list[int]:
    """Return how many requests each engine got."""
    return [len(engine.asked_for(path)) for engine in engines]


@pytest.mark.invariant("I6")
async def test_an_adapter_goes_to_the_pair_that_has_it() -> None:
    """And nowhere else, however often; its name reaches the engines as the client wrote it."""
    async with pairs("vllm", *PAIRS) as (lab, engines):
        replies = [await lab.post(CHAT, chat(f"x{n}", model="sql")) for n in range(6)]
        assert [reply.status for reply in replies] == [200] * 6
        assert asked(engines) == [0, 6, 0, 6]
        assert {request.json()["model"] for e in engines for request in e.asked_for(CHAT)} == {"sql"}
        assert (await lab.post(CHAT, chat("x", model="m"))).status == 200


@pytest.mark.invariant("I6")
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"model": "m:sql"}),
        (CHAT, {"model": "m", "lora_path": "sql"}),
        (CHAT, {"model": "m", "lora_path": ["sql"]}),
        (GENERATE, {"lora_path": "sql"}),
        (GENERATE, {"lora_path": [None, "sql"], "text": ["a", "b"]}),
    ],
)
async def test_an_adapter_of_sglang(path: str, fields: Mapping[str, object]) -> None:
    """SGLang lists ``sql`` and is asked for ``m:sql``, or for ``lora_path`` beside any model."""
    async with pairs("sglang", *PAIRS) as (lab, engines):
        body = chat("x") if path == CHAT else {"text": "x"}
        for _ in range(4):
            assert (await lab.post(path, {**body, **fields})).status == 200
        assert asked(engines, path) == [0, 4, 0, 4]


async def test_an_alias_is_the_model() -> None:
    """All endpoints serve it, and what they hold of a prompt is known whatever name it came under."""
    async with pairs("vllm", [BASE, ALIAS], [BASE, ALIAS]) as (lab, engines):
        text = "the same prompt " * 400
        for name in ("m", "gpt-3.5-turbo", "m", "gpt-3.5-turbo"):
            assert (await lab.post(CHAT, chat(text, model=name))).status == 200
        assert sorted(asked(engines[:2])) == [0, 4]


async def test_a_prompt_of_an_adapter_isnt_the_models() -> None:
    """Its KV is another's: nothing of it is expected to be cached."""
    async with workers([BASE, SQL]) as (lab, _):
        text = "the same prompt " * 400
        predicted: list[bool] = []
        for name in ("m", "m", "sql", "sql"):
            reply = await lab.post(CHAT, chat(text, model=name), {"x-request-id": f"{name}{len(predicted)}"})
            assert reply.status == 200
            lives = (await lab.get(f"/debug/story/{name}{len(predicted)}")).json()["lives"]
            predicted.append(lives[0]["prefix_tokens"] > 0)
        assert predicted == [False, True, False, True]


@pytest.mark.parametrize("name", ["org/gpt-oss:120b", "s3://bucket/model"])
async def test_names_with_colons_and_slashes(name: str) -> None:
    """They are found whole, as is an adapter behind another colon."""
    base = {**BASE, "owned_by": "sglang"}
    cards: Sequence[Card] = [{**base, "id": name}, {"id": "sql", "parent": name}]
    async with (
        listing(None, cards).listen() as one,
        listing(None, [{**base, "id": "other"}]).listen() as two,
        route_to((), (), [one, two]) as lab,
    ):
        for model in (name, f"{name}:sql"):
            assert (await lab.post(CHAT, chat("x", model=model))).status == 200
        assert asked([one, two]) == [2, 0]
        assert (await lab.post(CHAT, chat("x", model=name.upper()))).status == 404


@pytest.mark.parametrize(("flags", "status"), [({}, 200), ({"accept_any_model": False}, 404)])
async def test_a_name_that_nobody_lists(flags: Mapping[str, Any], status: int) -> None:
    """In a fleet of one model it goes on, as it does through sglang-router 0.3.2, unless the setting says no."""
    async with workers([BASE], [BASE], **flags) as (lab, engines):
        reply = await lab.post(CHAT, chat("x", model="zzz"))
        assert reply.status == status
        assert sum(asked(engines)) == (status == 200)
        if status == 404:
            assert (reply.error["code"], reply.error["param"]) == ("model_not_found", "model")


async def test_the_page_of_all_models() -> None:
    """Each id once, with what its engine tells of it; made again when something has changed."""
    async with workers([BASE, SQL], [BASE, ALIAS], [{"id": "n"}]) as (lab, _):
        data = (await lab.get("/v1/models")).json()["data"]
        assert [card["id"] for card in data] == ["gpt-3.5-turbo", "m", "n", "sql"]
        told = {key: value for key, value in BASE.items() if key != "permission"}
        assert data[1] == told
        assert data[3] == {**told, **SQL, "max_model_len": None}
        assert data[2] == {
            "id": "n",
            "object": "model",
            "created": 0,
            "owned_by": "pdrouter",
            "root": None,
            "parent": None,
            "max_model_len": None,
        }


@pytest.mark.parametrize("quoted", ["org/m:1", "org%2Fm%3A1", "org%2fm:1"])
async def test_the_page_of_one_model(quoted: str) -> None:
    """By its id, written in any way that a URL allows; HEAD has no body, and POST isn't for it."""
    async with workers([{**BASE, "id": "org/m:1"}]) as (lab, _):
        reply = await lab.get(f"/v1/models/{quoted}")
        assert (reply.status, reply.json()["id"], reply.json()["max_model_len"]) == (200, "org/m:1", 4096)
        assert (await lab.get(f"/v1/models/{quoted}", "HEAD")).status == 200
        assert (await lab.post(f"/v1/models/{quoted}", {})).status == 405


@pytest.mark.parametrize("quoted", ["zzz", "m%2F", "%ff%fe", "%00", "x" * 4000])
async def test_the_page_of_a_model_that_isnt_there(quoted: str) -> None:
    """404 in OpenAI's shape, with its code."""
    async with workers([BASE]) as (lab, _):
        reply = await lab.get(f"/v1/models/{quoted}")
        error = reply.error
        assert (reply.status, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert error["type"] == "invalid_request_error"
        assert len(error["message"]) < 400
