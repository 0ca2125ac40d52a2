"""Engines that want a key: it goes along with every request to them, and is shown nowhere."""

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from pdrouter.proxy.openapi import document
from pdrouter.sim.emulator import Emulator, EmulatorSettings, start_emulator
from tests.lab import CHAT, Lab, ScriptedEngine, always, chat, connect, make_settings, route_to, until

PREFILL_KEY, DECODE_KEY, OTHER_KEY = "sk-prefill-5a5a5a", "sk-decode-5a5a5a", "sk-other-5a5a5a"
QUICK: dict[str, Any] = {"worker_load_check_interval": 0.05, "health_success_threshold": 1}


def out(lab: Lab, engine: Any) -> str:
    """Return why an engine is out."""
    return lab.core.fleet.why_out(engine.url[7:]) or ""


@contextlib.asynccontextmanager
async def pair(engine: str = "sglang", key: str | None = None) -> AsyncIterator[tuple[Emulator, Emulator]]:
    """Run a pair of engines that want keys: their own, or one for both."""
    keys = (key or PREFILL_KEY, key or DECODE_KEY)
    settings = [
        EmulatorSettings(engine=engine, role=role, speed=100.0, dp_size=2, api_key=one)  # type: ignore[arg-type]
        for role, one in zip(("prefill", "decode"), keys, strict=True)
    ]
    async with start_emulator(settings[0]) as prefill, start_emulator(settings[1]) as decode:
        yield prefill, decode


def entries(
    engines: tuple[Emulator, Emulator], engine: str = "sglang", more: tuple[Mapping[str, Any], ...] = ({}, {})
) -> dict[str, Any]:
    """Return the settings of a pair, with ``more`` of each side."""
    sides = zip(("prefill", "decode"), engines, more, strict=True)
    return {side: [{"url": one.url, "engine": engine} | dict(others)] for side, one, others in sides}


async def serves(lab: Lab, engines: tuple[Emulator, Emulator], headers: Mapping[str, str] | None = None) -> None:
    """Hold that a pair is described, reports its load, answers, and is rid of whom its client has left."""
    await lab.ready()
    assert [endpoint.dp_size for endpoint in lab.core.fleet] == [2, 2]
    loads = lab.core.load.endpoints
    await until(lambda: all(rank.report for load in loads.values() for rank in load.ranks))
    assert (await lab.post(CHAT, chat("x"), headers)).status == 200
    reply = await lab.post(CHAT, chat("x", stream=True), headers)
    assert (reply.status, reply.pieces[-1]) == (200, "[DONE]")
    async with await lab.start(CHAT, chat("x", 100_000, stream=True), headers=headers) as call:
        assert await call.head() == 200
    await until(lambda: all(engine.snapshot().is_idle for engine in engines))
    await until(lambda: lab.is_ledger_zero)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
async def test_a_key_for_all(engine: str) -> None:
    """On probes, descriptions, load polls, legs and aborts; the client needs none."""
    async with (
        pair(engine, OTHER_KEY) as engines,
        route_to(**entries(engines, engine), engine_api_key=OTHER_KEY, **QUICK) as lab,
    ):
        await serves(lab, engines)


async def test_keys_of_endpoints(tmp_path: Path) -> None:
    """An endpoint's own goes before that of all, from a file as well."""
    file = tmp_path / "key"
    file.write_text(f"{DECODE_KEY}\n")
    async with pair() as engines:
        keys = ({"api_key": PREFILL_KEY}, {"api_key_file": str(file)})
        async with route_to(**entries(engines, more=keys), engine_api_key=OTHER_KEY, **QUICK) as lab:
            await serves(lab, engines)


async def test_a_key_for_all_from_a_file(tmp_path: Path) -> None:
    """Its white space doesn't count."""
    file = tmp_path / "key"
    file.write_text(f"  {OTHER_KEY}\n\n")
    async with (
        pair(key=OTHER_KEY) as engines,
        route_to(**entries(engines), engine_api_key_file=str(file), **QUICK) as lab,
    ):
        await serves(lab, engines)


async def test_the_router_s_key_is_theirs_if_none_is_set() -> None:
    """As in sglang-router; so that engines and router have one key, however a client sends it."""
    async with pair(key=OTHER_KEY) as engines, route_to(**entries(engines), api_key=OTHER_KEY, **QUICK) as lab:
        for headers in ({"authorization": f"Bearer {OTHER_KEY}"}, {"x-api-key": OTHER_KEY}):
            await serves(lab, engines, headers)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (None, "the engine refused our key: none is set (engine_api_key); /server_info answered 401"),
        ("sk-wrong", "the engine refused our key; /server_info answered 401"),
    ],
)
async def test_a_key_that_is_refused(given: str | None, reason: str) -> None:
    """The engine isn't ready, and the reason says so; with the right key it is."""
    async with (
        pair(key=OTHER_KEY) as engines,
        route_to(**entries(engines), engine_api_key=given, waits=False, **QUICK) as lab,
    ):
        for engine in engines:
            await until(lambda engine=engine: out(lab, engine).endswith(reason))  # type: ignore[misc]
        assert "refused our key" in (await lab.post(CHAT, chat("x"))).error["message"]
        for engine in engines:
            path = f"/workers/{engine.url[7:]}"
            async with await connect(lab.url) as call:
                call.send("PUT", path, b'{"api_key":"%b"}' % OTHER_KEY.encode(), {})
                assert (await call.finish()).status == 202
        await serves(lab, engines)


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("path", ["/health", "/server_info", "/v1/models"])
async def test_wherever_it_is_refused(path: str, status: int) -> None:
    """On a probe as on any description."""
    async with (
        ScriptedEngine(None, {path: always(status, {})}).listen() as engine,
        route_to((), (), [engine], waits=False, engine_api_key=OTHER_KEY, **QUICK) as lab,
    ):
        await until(lambda: f"the engine refused our key; {path} answered {status}" in out(lab, engine))


async def test_a_key_that_is_taken_back() -> None:
    """An engine whose load poll refuses our key is out at once."""
    flags = QUICK | {"health_check_interval_secs": 60}
    async with ScriptedEngine(None, {}).listen() as engine, route_to((), (), [engine], **flags) as lab:
        for path in ("/v1/loads", "/get_load", "/server_info"):
            engine.scripts[path] = always(401, {"error": "Unauthorized"})
        await until(lambda: "the engine refused our key" in out(lab, engine))


async def test_which_key_goes_along_with_a_request() -> None:
    """The engine's own, and nothing of the client's; with forward_client_key the client's, if it has one."""
    theirs = {"authorization": "Bearer client", "x-api-key": "client-too"}
    async with ScriptedEngine(None, {CHAT: always(200, {})}).listen() as engine:
        for flags, sent in (
            ({"engine_api_key": OTHER_KEY}, [f"authorization: Bearer {OTHER_KEY}"]),
            ({"engine_api_key": OTHER_KEY, "forward_client_key": True}, [f"{k}: {v}" for k, v in theirs.items()]),
            ({}, [f"{k}: {v}" for k, v in theirs.items()]),
        ):
            async with route_to((), (), [engine], **flags, **QUICK) as lab:
                assert (await lab.post(CHAT, chat("x"), theirs)).status == 200
                assert (await lab.post("/v1/embeddings", {"input": "x"}, theirs)).status == 404
                for asked in (engine.asked_for(CHAT)[-1], engine.asked_for("/v1/embeddings")[-1]):
                    assert [
                        line for line in lines(asked.head) if line.startswith(("authorization", "x-api-key"))
                    ] == sent
                assert (await lab.post(CHAT, chat("x"))).status == 200
                alone = "authorization" in engine.asked_for(CHAT)[-1].head.decode()
                assert alone is ("engine_api_key" in flags)


def lines(head: bytes) -> list[str]:
    """Return the lines of a request's head."""
    return head.decode().split("\r\n")


async def test_clients_that_bring_their_own_keys() -> None:
    """With forward_client_key an engine may refuse to tell of itself: the settings stand, and clients are served."""
    async with pair(key=OTHER_KEY) as engines:
        told = {"dp_size": 2, "model": "emulated"}
        fixed = (told | {"bootstrap_port": engines[0].bootstrap_port}, told)
        async with route_to(**entries(engines, more=fixed), forward_client_key=True, **QUICK) as lab:
            assert (await lab.post(CHAT, chat("x"))).status == 401
            assert (await lab.post(CHAT, chat("x"), {"authorization": f"Bearer {OTHER_KEY}"})).status == 200


async def test_the_workers_api() -> None:
    """A key comes along with an endpoint; one that names a file is refused; none of the settings goes to strangers."""
    async with (
        pair() as (prefill, decode),
        ScriptedEngine(None, {}).listen() as stranger,
        route_to(waits=False, engine_api_key=OTHER_KEY, **QUICK) as lab,
    ):
        for engine, role, key in ((prefill, "prefill", PREFILL_KEY), (decode, "decode", DECODE_KEY)):
            reply = await lab.post("/workers", {"url": engine.url, "worker_type": role, "api_key": key})
            assert reply.status == 202
        await serves(lab, (prefill, decode))
        for fields in ({"api_key_file": "/etc/hostname"}, {"api_key": "a b"}, {"api_key": ""}, {"api_key": 5}):
            reply = await lab.post("/workers", {"url": stranger.url} | fields)
            assert (reply.status, "api_key" in reply.json()["error"]) == (400, True)
        assert (await lab.post(f"/add_worker?url={stranger.url}", {})).status == 202
        await until(lambda: not out(lab, stranger))
        assert not any(b"authorization" in asked.head for asked in stranger.asked)


async def test_an_endpoint_that_a_key_holder_adds() -> None:
    """Gets the key for all: only who has the router's key can add one."""
    async with pair(key=OTHER_KEY) as engines:
        mine = {"authorization": "Bearer mine"}
        async with route_to(waits=False, engine_api_key=OTHER_KEY, api_key="mine", **QUICK) as lab:
            for engine, role in zip(engines, ("prefill", "decode"), strict=True):
                added = {"url": engine.url, "worker_type": role}
                assert (await lab.post("/workers", added, mine)).status == 202
            await serves(lab, engines, mine)


async def test_a_cache_is_flushed_and_a_server_asked() -> None:
    """With the key, and of what is told nothing of it: SGLang tells its arguments, its key among them."""
    async with (
        pair(key=OTHER_KEY) as engines,
        route_to(**entries(engines), engine_api_key=OTHER_KEY, **QUICK) as lab,
    ):
        await lab.ready()
        assert (await lab.post("/flush_cache", {})).status == 200
        for path in ("/server_info", "/get_server_info"):
            reply = await lab.get(path)
            assert (reply.status, reply.json()["api_key"]) == (200, "(secret)")


async def test_keys_are_shown_nowhere(tmp_path: Path) -> None:
    """Not in logs, whatever their level, nor on any page, nor in an error or a value's own text."""
    file = tmp_path / "key"
    file.write_text(DECODE_KEY)
    with capture_logs() as told:
        async with pair() as engines:
            keys = ({"api_key": PREFILL_KEY}, {"api_key_file": str(file)})
            flags = QUICK | {"engine_api_key": OTHER_KEY, "log_level": "debug"}
            async with route_to(**entries(engines, more=keys), **flags) as lab:
                await serves(lab, engines)
                reply = await lab.post(CHAT, chat("x"))
                texts = [str(reply.headers)]
                paths: Any = document()["paths"]
                parameters = {"request_id": reply.headers["x-request-id"], "worker_id": engines[0].url[7:]}
                parameters["model_id"] = "emulated"
                for path in (path for path, item in paths.items() if "get" in item):
                    one = path.format_map(parameters)
                    texts.append((await lab.get(one)).body.decode())
                texts.append(repr(lab.router.service.settings))
                texts.append(repr(list(lab.core.fleet)))
                await engines[1].stop()
                texts.append((await lab.post(CHAT, chat("x"))).body.decode())
                texts.append((await lab.post("/flush_cache", {})).body.decode())
    texts.append(repr(told))
    for text in texts:
        assert "5a5a5a" not in text


def test_a_file_without_a_key(tmp_path: Path) -> None:
    """Stops the start: a file that isn't there, is empty, or has something else than a key in it."""
    file = tmp_path / "key"
    for text in (None, "", "two words", "käse", "x" * 70_000):
        if text is not None:
            file.write_text(text)
        with pytest.raises(Exception, match=str(file)) as error:
            make_settings({"engine_api_key_file": str(file)})
        assert "two words" not in str(error.value)
    file.write_text("b")
    with pytest.raises(Exception, match="set one of them"):
        make_settings({"engine_api_key": "a", "engine_api_key_file": str(file)})
