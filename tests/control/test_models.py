"""Lists of models: asked again while the router runs, within bounds, and without touching who is ready."""

import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest

from pdrouter.control.models import ModelLists, ModelOptions
from pdrouter.core.names import Card
from tests.lab import CHAT, Asked, Lab, ScriptedEngine, always, chat, http, route_to, until

ANSWER = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}]}
BASE: Mapping[str, object] = {"id": "m", "parent": None, "max_model_len": 4096}
QUICK: Mapping[str, Any] = {"engine": "openai", "models_check_interval_secs": 0.05}


def page(*cards: Mapping[str, object]) -> dict[str, object]:
    """Return what ``/v1/models`` answers."""
    return {"object": "list", "data": list(cards)}


def adapter(name: str) -> Mapping[str, object]:
    """Return the card of an adapter."""
    return {"id": name, "parent": "m"}


@contextlib.asynccontextmanager
async def engine_listing(*cards: Mapping[str, object], **flags: Any) -> AsyncIterator[tuple[Lab, ScriptedEngine]]:
    """Run a router over an engine with OpenAI's API that lists these ids."""
    scripts = {"/v1/models": always(200, page(*cards)), CHAT: always(200, ANSWER)}
    async with (
        ScriptedEngine(None, scripts).listen() as engine,
        route_to((), (), [engine], **{**QUICK, **flags}) as lab,
    ):
        yield lab, engine


def counts(lab: Lab) -> Mapping[str, int]:
    """Return what happened to lists."""
    return lab.router.service.members.lists.counts


async def test_an_adapter_that_is_loaded_is_routable_and_one_that_is_unloaded_isnt() -> None:
    """Without a restart of either side; the base model is served all the while."""
    async with engine_listing(BASE, adapter("one"), accept_any_model=False) as (lab, engine):
        assert (await lab.post(CHAT, chat("x", model="one"))).status == 200
        assert (await lab.post(CHAT, chat("x", model="two"))).status == 404
        engine.scripts["/v1/models"] = always(200, page(BASE, adapter("two")))
        await until(lambda: "two" in next(iter(lab.core.fleet)).names)
        assert [(await lab.post(CHAT, chat("x", model=name))).status for name in ("m", "one", "two")] == [200, 404, 200]
        assert counts(lab)["changed"] == 2


async def test_a_time_stamp_of_each_reply_is_no_news() -> None:
    """Engines write the present time into each list."""
    times = iter(range(10**6))

    async def now(_asked: Asked) -> bytes:
        return http(200, page({"id": "m", "created": next(times)}))

    async with engine_listing(BASE) as (lab, engine):
        engine.scripts["/v1/models"] = now
        asked = counts(lab)["asked"]
        await until(lambda: counts(lab)["asked"] >= asked + 5)
        assert counts(lab)["changed"] <= 2
        created = (await lab.get("/v1/models/m")).json()["created"]
        asked = counts(lab)["asked"]
        await until(lambda: counts(lab)["asked"] >= asked + 3)
        assert (await lab.get("/v1/models/m")).json()["created"] == created


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (500, b"{}"),
        (404, b"{}"),
        (200, b"<html>"),
        (200, b'{"data":[]}'),
        (200, b'{"data":' + b"[" * 10_000),
        (200, json.dumps(page(*({"id": f"a{n}"} for n in range(10_000)))).encode()),
        (200, json.dumps(page({"id": "m", "x": "y" * 3_000_000})).encode()),
    ],
)
@pytest.mark.invariant("I9")
async def test_what_cant_be_read_changes_nothing(status: int, body: bytes) -> None:
    """What was listed before stands, and the engine stays ready."""
    async with engine_listing(BASE, adapter("one")) as (lab, engine):
        engine.scripts["/v1/models"] = always(status, body)
        failed = counts(lab)["failed"]
        await until(lambda: counts(lab)["failed"] >= failed + 3)
        endpoint = next(iter(lab.core.fleet))
        assert endpoint.names == {"m", "one"}
        assert lab.core.fleet.is_ready(endpoint.address)
        assert (await lab.post(CHAT, chat("x", model="one"))).status == 200


@pytest.mark.invariant("I9")
async def test_of_a_long_list_so_many_are_kept() -> None:
    """The first ones; how many weren't is counted."""
    cards = [adapter(f"a{n}") for n in range(20)]
    async with engine_listing(BASE, *cards, max_models_per_endpoint=8) as (lab, _):
        assert next(iter(lab.core.fleet)).names == {"m", *(f"a{n}" for n in range(7))}
        assert len((await lab.get("/v1/models")).json()["data"]) == 8
        assert counts(lab)["left_out"] == 13
        assert 'pdrouter_model_lists_total{event="left_out"} 13.0' in (await lab.get("/metrics")).body.decode()


async def test_an_engine_that_is_out_isnt_asked() -> None:
    """Until it is ready again; then its list is taken in at once."""
    flags = {"health_failure_threshold": 1, "health_success_threshold": 1}
    async with engine_listing(BASE, **flags) as (lab, engine):
        address = engine.url[7:]
        engine.scripts["/health"] = always(500, b"")
        await until(lambda: not lab.core.fleet.is_ready(address))
        engine.scripts["/v1/models"] = always(200, page(BASE, adapter("late")))
        asked = counts(lab)["asked"]
        probes = len(engine.asked_for("/health"))
        await until(lambda: len(engine.asked_for("/health")) >= probes + 3)
        assert counts(lab)["asked"] == asked
        engine.scripts["/health"] = always(200, b"")
        await until(lambda: lab.core.fleet.is_ready(address))
        assert "late" in next(iter(lab.core.fleet)).names


@pytest.mark.parametrize(
    ("body", "is_readable"),
    [
        (b"{}" * 72, True),
        (b"{}" * 73, False),
        (b"x" * (65_536 + 2048), True),
        (b"x" * (65_536 + 2049), False),
    ],
)
@pytest.mark.invariant("I9")
def test_the_bounds_of_a_reply(body: bytes, is_readable: bool) -> None:
    """By bytes and by objects, before anything is read."""
    lists = ModelLists(ModelOptions(1.0, 2))
    assert lists.is_readable(body) is is_readable
    assert lists.counters()["too_long"] == (not is_readable)


def test_only_a_change_is_counted() -> None:
    """Ids that are left out of a list that stays the same are counted once."""
    lists = ModelLists(ModelOptions(1.0, 2))
    listed: Sequence[Card] = (Card("a"), Card("b"), Card("c"))
    kept = lists.take((), tuple(listed))
    assert kept == (Card("a"), Card("b"))
    assert lists.take(kept, tuple(listed)) == kept
    assert (lists.counters()["changed"], lists.counters()["left_out"]) == (1, 1)
