"""The OpenAPI document: it has all paths and all errors, and is the same as what the router does."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from pdrouter import __version__, errors
from pdrouter.errors import ClientGone, NotFound, RouterError
from pdrouter.proxy import openapi
from pdrouter.proxy.bodies import Api
from pdrouter.proxy.fleet_api import code_of
from tests.lab import CHAT, chat, get, make_lab, route_to

CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, RouterError)]


def all_in(part: object) -> Iterator[dict[str, Any]]:
    """Return all objects of the document."""
    if isinstance(part, dict):
        yield part
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from all_in(inner)


@pytest.fixture(scope="module")
def told() -> Any:
    """The document as a client reads it."""
    return json.loads(openapi.page())


async def test_it_is_a_page() -> None:
    """A router gives it to anybody, as JSON."""
    async with route_to(waits=False, api_key="secret") as lab:
        reply = await get(lab.url, "/openapi.json")
        assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
        assert (reply.json()["openapi"], reply.json()["info"]["version"]) == ("3.1.0", __version__)
        assert len(reply.body) < 100_000


async def test_it_has_every_path(told: Any) -> None:
    """All that the router serves, and no more."""
    async with route_to(waits=False) as lab:
        app = lab.router.service.app
        served = {path.decode() for path in [*app._apis, *app._pages, *app._fleet_api._paths]}
    by_id = {"/workers/{worker_id}", "/debug/story/{request_id}", "/v1/models/{model_id}"}
    assert set(told["paths"]) == served | by_id


def test_all_that_it_names_is_there(told: Any) -> None:
    """No reference leads nowhere, and no component is left over."""
    named = {part["$ref"] for part in all_in(told) if "$ref" in part}
    known = {f"#/components/{kind}/{name}" for kind in ("schemas", "responses") for name in told["components"][kind]}
    events_only = {"#/components/schemas/ResponsesError"}
    assert known - events_only == named


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if kind not in (ClientGone, NotFound)])
def test_every_failure_is_told(told: Any, kind: type[RouterError]) -> None:
    """Its code stands under its status somewhere, as the workers API writes it where only that one tells of it."""
    told_at: set[tuple[str, str]] = set()
    operations = [o for path in told["paths"].values() for o in path.values() if isinstance(o, dict)]
    for status, reply in (item for operation in operations for item in operation["responses"].items()):
        whole = told["components"]["responses"][reply["$ref"].split("/")[-1]] if "$ref" in reply else reply
        told_at |= {(status, code) for part in all_in(whole) if "enum" in part for code in part["enum"]}
    codes = (kind.code, code_of(kind))
    assert told_at & {(status, code) for status in (str(kind.status), "default") for code in codes}


def test_what_is_read_of_bodies(told: Any) -> None:
    """Each inference path names what the router reads, and lets all else through."""
    for api in Api:
        (content,) = told["paths"][api]["post"]["requestBody"]["content"].values()
        schema = told["components"]["schemas"][content["schema"]["$ref"].split("/")[-1]]
        assert {"model", "stream"} <= set(schema["properties"])
        assert "additionalProperties" not in schema
    assert told["components"]["schemas"]["NewWorker"]["required"] == ["url"]
    assert "required" not in told["components"]["schemas"]["ChangedWorker"]


async def test_pages_have_the_fields_that_are_told(told: Any) -> None:
    """With a pair at work, each page has just the properties of its schema."""
    schemas = told["components"]["schemas"]
    async with make_lab(1, 1) as lab:
        reply = await lab.post(CHAT, chat("x"))
        pages = {
            path: (await lab.get(path)).json()
            for path in ("/v1/models", "/workers", "/get_loads", "/debug/fleet", "/readiness", "/list_workers")
        }
        pages["/debug/story/{request_id}"] = (await lab.get(f"/debug/story/{reply.headers['x-request-id']}")).json()
    for path, page in pages.items():
        replied = told["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
        assert set(page) == set(schemas[replied.split("/")[-1]]["properties"]), path
    assert set(pages["/workers"]["workers"][0]) == set(schemas["Worker"]["properties"])
    assert set(pages["/debug/fleet"]["endpoints"][0]["ranks"][0]) == set(schemas["RankSnapshot"]["properties"])
