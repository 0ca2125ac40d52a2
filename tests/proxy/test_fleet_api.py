"""The workers API: endpoints join, change, are drained and leave while the router runs."""

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import quote

import pytest

from pdrouter.sim.emulator import EmulatorSettings, start_emulator
from tests.lab import CHAT, Lab, Reply, ScriptedEngine, always, chat, connect, make_lab, route_to, until


async def call(
    lab: Lab, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
) -> Reply:
    """Send a request and read its reply."""
    async with await connect(lab.url) as one:
        one.send(method, path, b"" if body is None else json.dumps(body).encode(), headers or {})
        return await one.finish()


@contextlib.asynccontextmanager
async def empty_lab(**flags: Any) -> AsyncIterator[Lab]:
    """Run a router without engines."""
    async with route_to(waits=False, **flags) as lab:
        yield lab


async def test_a_pair_joins_and_leaves() -> None:
    """Endpoints that are added serve as any other, and are gone when they are removed and idle."""
    async with (
        start_emulator(EmulatorSettings(role="prefill", speed=100.0)) as prefill,
        start_emulator(EmulatorSettings(role="decode", speed=100.0)) as decode,
        empty_lab() as lab,
    ):
        for engine, role in ((prefill, "prefill"), (decode, "decode")):
            asked: dict[str, object] = {
                "url": engine.url,
                "worker_type": role,
                "model_id": None,
                "priority": 50,
                "labels": {},
            }
            asked |= {"bootstrap_port": None} if role == "decode" else {}
            reply = await call(lab, "POST", "/workers", asked)
            assert (reply.status, reply.json()["status"]) == (202, "accepted")
            assert reply.headers["location"] == f"/workers/{engine.url[7:]}"
            page = await call(lab, "GET", reply.headers["location"])
            assert (page.status, page.json()["worker_type"], page.json()["url"]) == (200, role, engine.url)
        await lab.ready()
        assert (await lab.post(CHAT, chat("x"))).status == 200
        assert (await call(lab, "GET", "/list_workers")).json() == {"urls": [prefill.url, decode.url]}
        for engine in (prefill, decode):
            assert (await call(lab, "DELETE", f"/workers/{quote(engine.url, safe='')}")).status == 202
        await until(lambda: not len(lab.core.fleet))
        assert (await call(lab, "GET", "/workers")).json()["total"] == 0
        assert (await lab.post(CHAT, chat("x"))).status == 503
        assert lab.is_ledger_zero


async def test_a_worker_that_is_removed_ends_its_streams() -> None:
    """It takes nothing new, its stream goes on to the end, and then it is gone, its connections too."""
    async with make_lab(0, 0, 2, engine={"speed": 4.0, "dp_size": 1}, shutdown_grace_period_secs=60) as lab:
        async with await lab.start(CHAT, chat("x", 200, stream=True)) as stream:
            await stream.head()
            (busy,) = [w for w in lab.workers if w.snapshot().total_requests]
            (other,) = [w for w in lab.workers if w is not busy]
            assert (await call(lab, "DELETE", f"/workers/{busy.url[7:]}")).status == 202
            told = (await call(lab, "GET", f"/workers/{busy.url[7:]}")).json()
            assert (told["is_healthy"], told["metadata"]["out"]) == (False, "draining")
            for n in range(4):
                assert (await lab.post(CHAT, chat(f"{n}", 2))).status == 200
            assert (busy.snapshot().total_requests, other.snapshot().total_requests) == (1, 4)
            assert (await stream.finish()).is_whole
        await until(lambda: lab.core.fleet.get(busy.url[7:]) is None)
        await until(lambda: busy.url[7:] not in lab.router.service.pools._pools)
        assert lab.is_ledger_zero


async def test_the_time_to_leave_is_bounded() -> None:
    """A stream that outlasts the grace period fails, and the worker is gone."""
    async with make_lab(0, 0, 1, engine={"speed": 2.0}, shutdown_grace_period_secs=0.2) as lab:
        async with await lab.start(CHAT, chat("x", 100_000, stream=True)) as stream:
            await stream.head()
            await call(lab, "DELETE", f"/workers/{lab.workers[0].url[7:]}")
            reply = await stream.finish()
            assert (reply.is_whole, json.loads(reply.pieces[-1])["error"]["type"]) == (False, "server_error")
        await until(lambda: not len(lab.core.fleet) and lab.are_engines_idle)
        assert lab.is_ledger_zero


async def test_draining_and_back() -> None:
    """A worker can be drained without leaving, and be used again; one that is leaving stays if it is added again."""
    async with make_lab(0, 0, 1) as lab:
        path = f"/workers/{lab.workers[0].url[7:]}"
        assert (await call(lab, "PUT", path, {"draining": True})).status == 202
        reply = await lab.post(CHAT, chat("x"))
        assert (reply.status, "draining" in reply.error["message"]) == (503, True)
        assert (await call(lab, "PUT", path, {"draining": False})).status == 202
        assert (await lab.post(CHAT, chat("x"))).status == 200
        async with await lab.start(CHAT, chat("x", 100_000, stream=True)) as stream:
            await stream.head()
            lab.router.service.members.part(lab.workers[0].url[7:], 60)
            assert (await lab.post(CHAT, chat("x"))).status == 503
            parting = lab.router.service.members._members[lab.workers[0].url[7:]].parting
            assert parting is not None
            assert (await call(lab, "POST", "/workers", {"url": lab.workers[0].url})).status == 202
            await until(parting.done)
            assert (parting.cancelled(), len(lab.core.fleet)) == (True, 1)
            assert (await lab.post(CHAT, chat("x"))).status == 200
        await lab.settled()


async def test_a_change_keeps_load_and_ranks() -> None:
    """What is said of a worker can change under its streams; what isn't named stays."""
    async with make_lab(0, 0, 1, engine={"speed": 2.0, "dp_size": 4}) as lab:
        address = lab.workers[0].url[7:]
        async with await lab.start(CHAT, chat("x", 10_000, stream=True)) as stream:
            await stream.head()
            reply = await call(lab, "PUT", f"/workers/{address}", {"group": "g", "priority": 7})
            assert reply.status == 202
            (endpoint,) = lab.core.fleet
            assert (endpoint.group, endpoint.dp_size, endpoint.model) == ("g", 4, "emulated")
            assert lab.core.load.endpoints[address].ledger_requests == 1
            assert lab.core.fleet.is_ready(address)
            assert (await call(lab, "PUT", f"/workers/{address}", {"model_id": "other"})).status == 202
            (endpoint,) = lab.core.fleet
            assert (endpoint.group, endpoint.model) == ("g", "other")
        await lab.settled()


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/workers", {}, 400, "BAD_REQUEST"),
        ("POST", "/workers", {"url": "nowhere"}, 400, "BAD_REQUEST"),
        ("POST", "/workers", {"url": "http://a:1", "worker_type": "both"}, 400, "BAD_REQUEST"),
        ("POST", "/workers", {"url": "http://a:1", "colour": "red"}, 400, "BAD_REQUEST"),
        ("POST", "/workers", {"url": "http://a:1", "api_key": "k k"}, 400, "BAD_REQUEST"),
        ("POST", "/workers", {"url": "http://a:1", "api_key_file": "/etc/hostname"}, 400, "BAD_REQUEST"),
        ("POST", "/workers", {"url": "http://a:1", "kv_transport": "nixl"}, 400, "BAD_REQUEST"),
        ("POST", "/workers", [], 400, "BAD_REQUEST"),
        ("GET", "/workers/a:1", None, 404, "WORKER_NOT_FOUND"),
        ("PUT", "/workers/a:1", {}, 404, "WORKER_NOT_FOUND"),
        ("DELETE", "/workers/a:1", None, 404, "WORKER_NOT_FOUND"),
        ("POST", "/remove_worker?url=http://a:1", None, 404, "WORKER_NOT_FOUND"),
        ("POST", "/remove_worker", None, 404, "WORKER_NOT_FOUND"),
        ("POST", "/add_worker", None, 400, "BAD_REQUEST"),
        ("GET", "/add_worker", None, 405, "METHOD_NOT_ALLOWED"),
        ("PATCH", "/workers/a:1", None, 404, "WORKER_NOT_FOUND"),
    ],
)
async def test_what_cant_be(method: str, path: str, body: object, status: int, code: str) -> None:
    """Is refused with a code, and nothing has changed."""
    async with empty_lab() as lab:
        reply = await call(lab, method, path, body)
        assert (reply.status, set(reply.json()), reply.json()["code"]) == (status, {"error", "code"}, code)
        assert not len(lab.core.fleet)


async def test_what_cant_be_with_a_worker() -> None:
    """An address twice, another address, another method."""
    async with make_lab(0, 0, 1) as lab:
        url = lab.workers[0].url
        assert (await call(lab, "POST", "/workers", {"url": url})).status == 400
        assert (await call(lab, "PUT", f"/workers/{url[7:]}", {"url": "http://b:2"})).status == 400
        assert (await call(lab, "PUT", f"/workers/{url[7:]}", {"draining": "yes"})).status == 400
        reply = await call(lab, "PATCH", f"/workers/{url[7:]}")
        assert (reply.status, reply.headers["allow"]) == (405, "GET, HEAD, PUT, DELETE")
        assert [endpoint.url for endpoint in lab.core.fleet] == [url]


async def test_the_older_paths() -> None:
    """Add and remove by query."""
    async with start_emulator(EmulatorSettings(speed=100.0)) as worker, empty_lab() as lab:
        assert (await call(lab, "POST", f"/add_worker?url={quote(worker.url, safe='')}")).status == 202
        await lab.ready()
        assert (await lab.post(CHAT, chat("x"))).status == 200
        assert (await call(lab, "POST", f"/remove_worker?url={worker.url}")).status == 202
        await until(lambda: not len(lab.core.fleet))


async def test_the_key() -> None:
    """With a key, whoever doesn't bring it may read pages and no more."""
    async with make_lab(0, 0, 1, api_key="secret") as lab:
        path = f"/workers/{lab.workers[0].url[7:]}"
        for headers in ({}, {"authorization": "secret"}, {"authorization": "Bearer other"}):
            for method, where in (("POST", "/workers"), ("DELETE", path), ("POST", "/flush_cache")):
                reply = await call(lab, method, where, {}, headers)
                assert (reply.status, reply.json()["code"]) == (401, "UNAUTHORIZED")
            reply = await lab.post(CHAT, chat("x"), headers)
            assert (reply.status, reply.error["code"]) == (401, "unauthorized")
            assert (await call(lab, "GET", path, None, headers)).status == 200
        right = {"authorization": "Bearer secret"}
        assert (await lab.post(CHAT, chat("x"), right)).status == 200
        assert (await call(lab, "PUT", path, {"draining": True}, right)).status == 202


async def test_flush() -> None:
    """All caches are flushed, what was known of them is forgotten, and who couldn't is told."""
    async with (
        ScriptedEngine(None, {"/flush_cache": always(200, b""), CHAT: always(200, {})}).listen() as good,
        ScriptedEngine(None, {"/flush_cache": always(400, b""), CHAT: always(200, {})}).listen() as bad,
        route_to((), (), [good, bad], policy="round_robin") as lab,
    ):
        for _ in range(2):
            assert (await lab.post(CHAT, chat("word " * 2000))).status == 200
        known = lab.core.prefixes.entries
        reply = await call(lab, "POST", "/flush_cache")
        assert (reply.status, reply.json()["successful"]) == (206, [good.url])
        assert reply.json()["failed"] == [{"worker": bad.url, "error": "it answered 400"}]
        assert 0 < lab.core.prefixes.entries < known
        bad.scripts["/flush_cache"] = always(200, b"")
        assert (await call(lab, "POST", "/flush_cache")).status == 200
        assert lab.core.prefixes.entries == 0


async def test_what_an_engine_tells() -> None:
    """Is passed on from one that is ready; without one it is an error."""
    async with make_lab(0, 0, 1) as lab:
        reply = await call(lab, "GET", "/server_info")
        assert (reply.status, reply.json()["dp_size"]) == (200, 2)
    async with empty_lab() as lab:
        assert (await call(lab, "GET", "/server_info")).status == 503


async def test_engines_that_generate() -> None:
    """One pair is asked, or a regular engine; one without the page is asked for its health; what fails is named."""
    async with make_lab(2, 2, 1) as lab:
        reply = await call(lab, "GET", "/health_generate")
        assert (reply.status, reply.json()["status"]) == (200, "ok")
        assert reply.json()["workers"] == [lab.prefills[0].url, lab.decodes[0].url]
    async with (
        ScriptedEngine(None, {"/health_generate": always(503, b"")}).listen() as engine,
        route_to((), (), [engine]) as lab,
    ):
        reply = await call(lab, "GET", "/health_generate")
        assert (reply.status, reply.json()["error"]) == (503, f"{engine.url[7:]}: it answered 503")
        engine.scripts["/health_generate"] = always(404, b"")
        reply = await call(lab, "GET", "/health_generate")
        assert (reply.status, reply.json()["workers"]) == (200, [engine.url])
    async with empty_lab() as lab:
        assert (await call(lab, "GET", "/health_generate")).status == 503


async def test_a_caller_that_leaves() -> None:
    """Before its answer has come, does no harm."""
    async with make_lab(0, 0, 1) as lab:
        async with await connect(lab.url) as one:
            one.send("POST", "/flush_cache", b"", {})
        assert (await lab.post(CHAT, chat("x"))).status == 200
        await lab.settled()


@pytest.mark.parametrize("depth", [2, 500, 940, 950, 960, 100_000])
@pytest.mark.parametrize("field", ["worker_type", "url", "dp_size", "draining", "model_id", "api_key"])
async def test_what_is_nested_where_nothing_is(field: str, depth: int) -> None:
    """However deep, it is refused as the client's mistake."""
    deep = b"[" * depth + b"]" * depth
    async with make_lab(0, 0, 1) as lab, await connect(lab.url) as one:
        for method, path in (("POST", "/workers"), ("PUT", f"/workers/{lab.workers[0].url[7:]}")):
            one.send(method, path, b'{"url": "http://127.0.0.1:1", "%b": %b}' % (field.encode(), deep), {})
            reply = await one.finish()
            assert (reply.status, reply.json()["code"]) == (400, "BAD_REQUEST")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"{",
        b'"\\ud800"',
        b'{"url": "\xff"}',
        b'{"url": "http://a:1", "dp_size": %b}' % (b"1" * 5000),
        b'{"url": "http://a:1", "dp_size": 1e999}',
        b'{"url": "http://a:%b"}' % (b"1" * 5000),
        b'{"worker_type": {"a": "b"}}',
        b'{"url": {"a": "b"}}',
        b'{"%b": 1}' % (b"a" * 10_000),
    ],
)
async def test_bodies_that_make_no_sense(body: bytes) -> None:
    """Are refused as the client's mistake, and one that is too large before it was read."""
    async with empty_lab(max_payload_size=20_000) as lab, await connect(lab.url) as one:
        one.send("POST", "/workers", body, {})
        reply = await one.finish()
        assert (reply.status, reply.json()["code"]) == (400, "BAD_REQUEST")
        one.send("POST", "/workers", body + b" " * 20_001, {})
        reply = await one.finish()
        assert (reply.status, reply.json()["code"]) == (413, "PAYLOAD_TOO_LARGE")
        assert not len(lab.core.fleet)


async def test_methods_that_a_path_has() -> None:
    """A refusal names all of them, and a page that can be read can be asked for its head."""
    async with empty_lab() as lab:
        for path, methods in (
            ("/workers", "GET, HEAD, POST"),
            ("/list_workers", "GET, HEAD"),
            ("/flush_cache", "POST"),
        ):
            reply = await call(lab, "PATCH", path)
            assert (reply.status, reply.headers["allow"]) == (405, methods)
        async with await connect(lab.url) as one:
            one.send("HEAD", "/list_workers", b"", {})
            assert await one.head() == 200


async def test_an_added_worker_that_is_leaving_cant_be_changed() -> None:
    """What was said of it is forgotten already."""
    async with start_emulator(EmulatorSettings(speed=2.0)) as worker, empty_lab(shutdown_grace_period_secs=60) as lab:
        assert (await call(lab, "POST", "/workers", {"url": worker.url})).status == 202
        await lab.ready()
        path = f"/workers/{worker.url[7:]}"
        async with await lab.start(CHAT, chat("x", 100_000, stream=True)) as stream:
            await stream.head()
            assert (await call(lab, "DELETE", path)).status == 202
            reply = await call(lab, "PUT", path, {"group": "h"})
            told = {"error": f"{path[9:]} is leaving; add it anew", "code": "BAD_REQUEST"}
            assert (reply.status, reply.json()) == (400, told)
