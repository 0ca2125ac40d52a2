"""Pages over live fleets, and who serves: models, roles, groups, fallback, nobody."""

import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from pdrouter.sim.emulator import EmulatorSettings, start_emulator
from tests.lab import CHAT, Lab, ScriptedEngine, chat, fault, gather, make_lab, route_to, until


@contextlib.asynccontextmanager
async def two_models(**flags: Any) -> AsyncIterator[Lab]:
    """Run a router over a pair for model a and a regular engine for model b."""
    async with (
        start_emulator(EmulatorSettings(role="prefill", model="a", speed=100.0)) as prefill,
        start_emulator(EmulatorSettings(role="decode", model="a", speed=100.0)) as decode,
        start_emulator(EmulatorSettings(role="regular", model="b", speed=100.0)) as worker,
        route_to([prefill], [decode], [worker], **flags) as lab,
    ):
        yield lab


async def test_models() -> None:
    """Each model is listed, goes to its own engines, and an unknown one is 404 with the known ones."""
    async with two_models() as lab:
        page = (await lab.get("/v1/models")).json()
        assert (page["object"], [m["id"] for m in page["data"]]) == ("list", ["a", "b"])
        assert all(m["object"] == "model" for m in page["data"])
        on_a = await lab.post(CHAT, chat("x", model="a"))
        on_b = await lab.post(CHAT, chat("x", model="b"))
        assert on_a.headers["x-pdrouter-prefill"]
        assert "x-pdrouter-prefill" not in on_b.headers
        assert [e.snapshot().total_requests for e in lab.emulators] == [1, 1, 1]
        reply = await lab.post(CHAT, chat("x", model="c"))
        assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")
        assert "a, b" in reply.error["message"]
        await lab.settled()


async def test_one_model_leaves_names_to_its_engines() -> None:
    """In a fleet of one model any name passes, for engines know their own adapters."""
    async with make_lab() as lab:
        assert (await lab.post(CHAT, chat("x", model="adapter"))).status == 200


async def test_regular_workers() -> None:
    """Regular engines serve alone: no handshake, no prefill header, load over all ranks."""
    async with make_lab(0, 0, 2, engine={"dp_size": 2, "speed": 20.0}) as lab:
        replies = await gather(*(lab.post(CHAT, chat(f"alone {i}", stream=bool(i % 2))) for i in range(8)))
        assert [reply.status for reply in replies] == [200] * 8
        assert not [r for r in replies if "x-pdrouter-prefill" in r.headers]
        assert [e.snapshot().requests_by_rank for e in lab.workers] == [[2, 2], [2, 2]]
        await lab.settled()


async def test_regular_fallback() -> None:
    """When no pair is ready, a regular engine serves; when one is again, the pair does."""
    flags: dict[str, Any] = {"health_failure_threshold": 1, "health_success_threshold": 1}
    async with make_lab(1, 1, 1, **flags) as lab:
        decode = lab.decodes[0]
        assert "x-pdrouter-prefill" in (await lab.post(CHAT, chat("x"))).headers
        await fault(decode, "status", "/health")
        await until(lambda: not lab.core.fleet.is_ready(decode.url[7:]))
        assert "x-pdrouter-prefill" not in (await lab.post(CHAT, chat("x"))).headers
        decode.faults.clear()
        await until(lambda: lab.core.fleet.is_ready(decode.url[7:]))
        assert "x-pdrouter-prefill" in (await lab.post(CHAT, chat("x"))).headers
        await lab.settled()


async def test_nobody_is_ready() -> None:
    """Without a ready pair it is 503, with who was there and why each was out; /readiness says the same."""
    async with (
        start_emulator(EmulatorSettings(role="prefill", speed=100.0)) as prefill,
        start_emulator(EmulatorSettings(role="decode", speed=100.0)) as decode,
    ):
        await fault(decode, "status", "/health", status=503)
        async with route_to([prefill], [decode], waits=False) as lab:
            await until(lambda: lab.core.fleet.is_ready(prefill.url[7:]))
            await until(lambda: "503" in (lab.core.fleet.why_out(decode.url[7:]) or ""))
            reply = await lab.post(CHAT, chat("x"))
            assert (reply.status, reply.error["code"], reply.error["type"]) == (503, "no_ready_pair", "server_error")
            assert int(reply.headers["retry-after"]) >= 1
            assert f"no decode endpoint is ready (1 known: {decode.url[7:]} not reached" in reply.error["message"]
            page = await lab.get("/readiness")
            assert (page.status, page.json()["status"]) == (503, "not ready")
            assert f"{decode.url[7:]} not reached" in page.json()["reason"]
            assert (await lab.get("/health")).status == 200
            assert prefill.snapshot().total_requests == 0
            assert lab.is_ledger_zero


async def test_an_empty_fleet() -> None:
    """A router without engines runs, isn't ready, and says that it knows nobody."""
    async with route_to(waits=False) as lab:
        assert (await lab.get("/readiness")).status == 503
        assert (await lab.get("/liveness")).status == 200
        assert (await lab.get("/v1/models")).json()["data"] == []
        reply = await lab.post(CHAT, chat("x"))
        assert (reply.status, reply.error["message"]) == (503, "no endpoint is known")


@pytest.mark.invariant("I6")
async def test_groups_are_not_mixed() -> None:
    """A prefill engine is paired with engines of its own group only."""
    async with make_lab(2, 2) as engines:
        prefill = [{"url": e.url, "group": f"g{i}"} for i, e in enumerate(engines.prefills)]
        decode = [{"url": e.url, "group": f"g{i}"} for i, e in enumerate(engines.decodes)]
        async with route_to(prefill=prefill, decode=decode, waits=False) as lab:
            await lab.ready()
            replies = await gather(*(lab.post(CHAT, chat(f"pair {i}")) for i in range(12)))
        group = {e.url[7:]: i for side in (engines.prefills, engines.decodes) for i, e in enumerate(side)}
        for reply in replies:
            assert reply.status == 200
            first, second = (reply.headers[f"x-pdrouter-{leg}"].partition(";")[0] for leg in ("prefill", "decode"))
            assert group[first] == group[second]


async def test_readiness_counts() -> None:
    """/readiness tells how many engines are healthy, of how many."""
    async with make_lab(1, 2, 1) as lab:
        counts = {"healthy_workers": 4, "total_workers": 4}
        model: dict[str, object] = {"id": "emulated", "is_served": True, "reason": None, "warnings": [], **counts}
        assert (await lab.get("/readiness")).json() == {"status": "ready", **counts, "models": [model]}


@pytest.mark.parametrize(("rule", "statuses"), [("any", [200, 200, 503, 200]), ("all", [200, 503, 503, 503])])
async def test_readiness_by_model(rule: str, statuses: list[int]) -> None:
    """One broken model doesn't take the router out, unless that is wanted; each model is told of, with its reason."""
    flags: dict[str, Any] = {"health_failure_threshold": 1, "health_success_threshold": 1, "readiness": rule}
    async with two_models(**flags) as lab:
        decode, worker = lab.decodes[0], lab.workers[0]
        seen = [(await lab.get("/readiness")).status]
        await fault(decode, "status", "/health")
        await until(lambda: not lab.core.fleet.is_ready(decode.url[7:]))
        page = await lab.get("/readiness")
        seen.append(page.status)
        a, b = page.json()["models"]
        assert (a["id"], a["is_served"], a["healthy_workers"], a["total_workers"]) == ("a", False, 1, 2)
        assert f"no decode endpoint of model 'a' is ready (1 known: {decode.url[7:]}" in a["reason"]
        counts = {"healthy_workers": 1, "total_workers": 1}
        assert b == {"id": "b", "is_served": True, "reason": None, "warnings": [], **counts}
        assert (page.json()["healthy_workers"], page.json()["total_workers"]) == (2, 3)
        assert page.json().get("reason") == (None if rule == "any" else a["reason"])
        assert (await lab.post(CHAT, chat("x", model="b"))).status == 200
        await fault(worker, "status", "/health")
        await until(lambda: not lab.core.fleet.is_ready(worker.url[7:]))
        page = await lab.get("/readiness")
        seen.append(page.status)
        assert page.json()["reason"] == "; ".join(model["reason"] for model in page.json()["models"])
        worker.faults.clear()
        await until(lambda: lab.core.fleet.is_ready(worker.url[7:]))
        seen.append((await lab.get("/readiness")).status)
        assert seen == statuses


@pytest.mark.parametrize("disaggregation", ["auto", "never", "always"])
async def test_a_decode_engine_that_reads_prompts_serves_its_model(disaggregation: str) -> None:
    """Readiness is that of requests: a model is served where one is answered without a prefill endpoint."""
    settings = EmulatorSettings(engine="vllm", role="decode", kv_connector="nixl", speed=100.0)
    flags: dict[str, Any] = {"engine": "vllm", "disaggregation": disaggregation, "health_failure_threshold": 1}
    async with (
        start_emulator(msgspec.structs.replace(settings, role="prefill")) as prefill,
        start_emulator(settings) as decode,
        route_to([prefill], [decode], **flags) as lab,
    ):
        await fault(prefill, "status", "/health")
        await until(lambda: not lab.core.fleet.is_ready(prefill.url[7:]))
        assert (await lab.get("/readiness")).status == 200
        assert (await lab.post(CHAT, chat("x"))).status == 200


async def test_workers_page() -> None:
    """/workers lists every engine in sglang-router's shape."""
    async with make_lab(1, 2, 1) as lab:
        page = (await lab.get("/workers")).json()
        assert (page["total"], page["stats"]) == (4, {"prefill_count": 1, "decode_count": 2, "regular_count": 1})
        by_url = {w["url"]: w for w in page["workers"]}
        worker = by_url[lab.prefills[0].url]
        assert (worker["worker_type"], worker["is_healthy"], worker["model_id"]) == ("prefill", True, "emulated")
        assert worker["bootstrap_port"] == lab.prefills[0].bootstrap_port
        assert worker["metadata"]["dp_size"] == "2"
        assert worker["load"] == 0


async def test_loads_and_fleet_while_busy() -> None:
    """/get_loads and /debug/fleet show reported, ledger and effective load while a request runs, and zero after."""
    async with make_lab(engine={"speed": 2.0}, worker_load_check_interval=0.05) as lab:
        async with await lab.start(CHAT, chat("word " * 100, 10_000, stream=True)) as call:
            await call.head()
            loads = lab.core.load.endpoints
            decode = lab.decodes[0].url[7:]
            await until(lambda: any(r.report and (r.report.requests or 0) == 1 for r in loads[decode].ranks))
            fleet = (await lab.get("/debug/fleet")).json()
            assert fleet["live_decisions"] == 1
            (endpoint,) = [e for e in fleet["endpoints"] if e["address"] == decode]
            (rank,) = [r for r in endpoint["ranks"] if r["ledger"]["requests"]]
            assert rank["ledger"]["tokens"] >= 100
            assert rank["effective"]["requests"] == rank["reported"]["requests"] == 1
            assert 0 <= rank["report_age_s"] < 5
            shown = {w["worker"]: w["load"] for w in (await lab.get("/get_loads")).json()["workers"]}
            assert shown[f"http://{decode}"] >= 100
        await lab.settled()
        await until(lambda: all(r.effective_requests == 0 for load in loads.values() for r in load.ranks))


async def test_unknown_loads() -> None:
    """An engine that never told its load, and has no work of ours, shows -1."""
    async with ScriptedEngine(None, {}).listen() as worker, route_to((), (), [worker]) as lab:
        assert (await lab.get("/get_loads")).json() == {"workers": [{"worker": worker.url, "load": -1}]}


async def test_story() -> None:
    """A request's life by its id, whatever is in it; an id that nobody sent is 404 with a code of its own."""
    async with make_lab() as lab:
        for request_id, quoted in (("plain-1", "plain-1"), ("a/b?c %\xe9", "a%2Fb%3Fc%20%25%E9")):
            asked = chat("x", tokens=40, stream=True, stream_options={"include_usage": True})
            await lab.post(CHAT, asked, {"x-request-id": request_id})
            page = await lab.get(f"/debug/story/{quoted}?x=1")
            assert (page.status, page.headers["content-type"]) == (200, "application/json")
            (life,) = page.json()["lives"]
            assert (page.json()["request_id"], life["outcome"]) == (request_id, "answered")
            assert [leg["kind"] for leg in life["legs"]] == ["prefill", "decode"]
            assert life["legs"][0]["endpoint"] == lab.prefills[0].url[7:]
            what = [moment["what"].split()[0] for moment in life["moments"]]
            told = [word for word in what if word != "prefill"]  # whose news come before the end, or too late
            assert told == ["decided", "first", "answer", "usage:", "settled:"]
            assert [m["after_s"] for m in life["moments"]] == sorted(m["after_s"] for m in life["moments"])
        assert (await lab.get("/debug/story/")).status == 404
        reply = await lab.get("/debug/story/nobody")
        assert (reply.status, reply.error["code"]) == (404, "unknown_request")
        assert "last 10000 decisions" in reply.error["message"]
        assert (await lab.post("/debug/story/plain-1", {})).status == 405
        await lab.settled()


async def test_story_of_a_failure() -> None:
    """What went wrong on the way is in the story, and so is why a request wasn't placed."""
    async with make_lab() as lab:
        await fault(lab.decodes[0], "status")
        await lab.post(CHAT, chat("x"), {"x-request-id": "failed"})
        (life,) = (await lab.get("/debug/story/failed")).json()["lives"]
        assert (life["outcome"], "answered 5" in life["message"]) == ("engine_reply", True)
        await lab.post(CHAT, chat("x", data_parallel_rank=7), {"x-request-id": "nowhere"})
        (life,) = (await lab.get("/debug/story/nowhere")).json()["lives"]
        assert (life["outcome"], life["legs"]) == ("invalid_rank", [])
        await lab.settled()


async def test_story_without_a_journal() -> None:
    """Where none is kept, the page says so."""
    async with make_lab(journal_decisions=0) as lab:
        await lab.post(CHAT, chat("x"), {"x-request-id": "a"})
        reply = await lab.get("/debug/story/a")
        assert (reply.status, "it is off" in reply.error["message"]) == (404, True)


async def test_shadow_policy() -> None:
    """A policy that looks on is counted and told, and takes no load."""
    async with make_lab(2, 2, policy="round_robin", shadow_policy="least_work") as lab:
        await gather(*(lab.post(CHAT, chat("x" * 400), {"x-request-id": "a"}) for _ in range(6)))
        lives = (await lab.get("/debug/story/a")).json()["lives"]
        assert [life["shadow"]["policy"] for life in lives] == ["least_work"] * 6
        results = Counter(life["shadow"]["result"] for life in lives)
        metrics = (await lab.get("/metrics")).body.decode()
        for result in ("same", "other_endpoint", "other_rank", "none"):
            assert f'pdrouter_shadow_decisions_total{{result="{result}"}} {results[result]:.1f}' in metrics
        assert [e.snapshot().total_requests for e in lab.prefills] == [3, 3]
        await lab.settled()
