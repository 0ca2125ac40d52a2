"""Engines that tell more with time, or something else than the settings say: they are asked again, and judged by it."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.lab import CHAT, Lab, ScriptedEngine, always, chat, hang, route_to, until

QUICK: dict[str, Any] = {
    "worker_load_check_interval": 0.02,
    "health_check_interval_secs": 60,
    "worker_startup_check_interval": 0.02,
}
"""Only what asks for a description leads to one."""


def out(lab: Lab, engine: ScriptedEngine) -> str | None:
    """Return why an engine is out."""
    return lab.core.fleet.why_out(engine.url[7:])


def gauges(*ranks: int) -> bytes:
    """Return the metrics of a vLLM server that shows so many of its ranks."""
    lines = ["process_start_time_seconds 1.0"]
    for rank in ranks:
        lines.append(f'vllm:num_requests_running{{engine="{rank}",model_name="m"}} 0.0')
        lines.append(f'vllm:num_requests_waiting{{engine="{rank}",model_name="m"}} 0.0')
    return "\n".join(lines).encode() + b"\n"


def loads(ranks: int) -> dict[str, object]:
    """Return a load reply of an SGLang server with so many ranks."""
    return {
        "loads": [
            {"dp_rank": r, "num_running_reqs": 0, "num_waiting_reqs": 0, "num_total_tokens": 0} for r in range(ranks)
        ]
    }


@contextlib.asynccontextmanager
async def vllm(metrics: bytes, **flags: Any) -> AsyncIterator[tuple[ScriptedEngine, Lab]]:
    """Run a router over one vLLM server."""
    scripts = {
        "/v1/models": always(200, {"object": "list", "data": [{"id": "m", "owned_by": "vllm"}]}),
        "/version": always(200, {"version": "0.32.0"}),
        "/metrics": always(200, metrics),
        CHAT: always(200, {}),
    }
    async with (
        ScriptedEngine(None, scripts).listen() as engine,
        route_to(worker=[{"url": engine.url, "engine": "vllm"}], **QUICK | flags) as lab,
    ):
        yield engine, lab


def dp_size(lab: Lab) -> int:
    """Return the number of ranks of the one endpoint."""
    (endpoint,) = lab.core.fleet
    return endpoint.dp_size


async def test_gauges_that_come_late() -> None:
    """A vLLM server that had none when it was first asked is described again, and both of its ranks are used."""
    async with vllm(b"") as (engine, lab):
        assert dp_size(lab) == 1
        engine.scripts["/metrics"] = always(200, gauges(0, 1))
        await until(lambda: dp_size(lab) == 2)
        for _ in range(4):
            assert (await lab.post(CHAT, chat("x"))).status == 200
        ranks = [
            b"x-data-parallel-rank: %d" % rank in asked.head for asked in engine.asked_for(CHAT) for rank in (0, 1)
        ]
        assert sum(ranks) == 4
        assert lab.router.service.members.counts["restarted"] == 0


async def test_gauges_of_some_ranks_come_first() -> None:
    """A report of a rank that isn't known leads to another description; the engine hasn't restarted by that."""
    async with vllm(gauges(0)) as (engine, lab):
        assert (await lab.post(CHAT, chat("word " * 2000))).status == 200
        entries = lab.core.prefixes.entries
        assert entries
        for ranks in (2, 4):
            engine.scripts["/metrics"] = always(200, gauges(*range(ranks)))
            await until(lambda ranks=ranks: dp_size(lab) == ranks)  # type: ignore[misc]
            await until(lambda: all(rank.report for load in lab.core.load.endpoints.values() for rank in load.ranks))
        assert lab.router.service.members.counts["restarted"] == 0
        assert lab.core.prefixes.entries == entries


async def test_ranks_of_a_deployment_come_late() -> None:
    """The first rank of an endpoint is learned again, too."""
    async with vllm(b"") as (engine, lab):
        engine.scripts["/metrics"] = always(200, gauges(4, 5))
        await until(lambda: dp_size(lab) == 2)
        assert [endpoint.rank_base for endpoint in lab.core.fleet] == [4]


async def test_an_sglang_server_that_grows() -> None:
    """Any engine that reports a rank which isn't known is described again."""
    info = {"dp_size": 1, "version": "0.5.23", "served_model_name": "m", "disaggregation_mode": "null"}
    async with (
        ScriptedEngine(None, {"/v1/loads": always(200, loads(1))}, info).listen() as engine,
        route_to((), (), [engine], **QUICK) as lab,
    ):
        asked = len(engine.asked_for("/server_info"))
        engine.info["dp_size"] = 2
        engine.scripts["/v1/loads"] = always(200, loads(2))
        await until(lambda: dp_size(lab) == 2)
        assert len(engine.asked_for("/server_info")) == asked + 1


async def test_fewer_ranks_than_are_reported() -> None:
    """Is a contradiction: told once in the log and on the pages until it is mended; the engine is used all the same."""
    info = {"dp_size": 1, "version": "0.5.23", "served_model_name": "m", "disaggregation_mode": "null"}
    async with (
        ScriptedEngine(None, {"/v1/loads": always(200, loads(1)), CHAT: always(200, {})}, info).listen() as engine,
        route_to((), (), [engine], **QUICK) as lab,
    ):
        with capture_logs() as told:
            engine.scripts["/v1/loads"] = always(200, loads(2))
            await until(lambda: len(engine.asked_for("/server_info")) > 4)
            (worker,) = (await lab.get("/workers")).json()["workers"]
            (endpoint,) = (await lab.get("/debug/fleet")).json()["endpoints"]
            (model,) = (await lab.get("/readiness")).json()["models"]
        reason = "load reports name rank 1, but only rank 0 is known"
        assert (worker["metadata"]["warning"], endpoint["warning"], endpoint["out"]) == (reason, reason, None)
        assert model["warnings"] == [f"{worker['id']}: {reason}"]
        assert [line["reason"] for line in told if line["log_level"] == "warning"] == [reason]
        assert (await lab.post(CHAT, chat("x"))).status == 200
        engine.info["dp_size"] = 2
        await until(lambda: [one.warning for one in lab.core.fleet] == [None])
        assert dp_size(lab) == 2


async def test_pages_that_disagree_on_ranks() -> None:
    """What the parts of one reply disagree about is told as well."""
    info = {"dp_size": 1, "internal_states": [{}, {}], "served_model_name": "m", "disaggregation_mode": "null"}
    async with ScriptedEngine(None, {}, info).listen() as engine, route_to((), (), [engine], **QUICK) as lab:
        (worker,) = (await lab.get("/workers")).json()["workers"]
        assert "dp_size 1, entries of internal_states 2" in worker["metadata"]["warning"]
        assert dp_size(lab) == 2


async def test_an_engine_that_never_tells_all_is_in_use() -> None:
    """Nor does it matter if it no more answers the question, as long as it is healthy."""
    async with vllm(b"", health_check_timeout_secs=0.05, health_failure_threshold=1) as (engine, lab):
        for script in (hang, always(500, b""), always(200, b"no metrics")):
            engine.scripts["/version"] = script
            asked = len(engine.asked_for("/version"))
            await until(lambda asked=asked: len(engine.asked_for("/version")) > asked + 1)  # type: ignore[misc]
            assert out(lab, engine) is None
        assert (await lab.post(CHAT, chat("x"))).status == 200


@pytest.mark.parametrize(
    ("fixed", "info", "reason"),
    [
        ({"dp_size": 2}, {"dp_size": 4}, "configured dp_size 2, reports 4"),
        ({"dp_size": 2}, {"dp_size": 1}, "configured dp_size 2, reports 1"),
        (
            {"bootstrap_port": 8998},
            {"disaggregation_bootstrap_port": 8999},
            "configured bootstrap_port 8998, reports 8999",
        ),
        (
            {"bootstrap_port": 8998, "dp_size": 3},
            {"disaggregation_bootstrap_port": 8999, "disaggregation_mode": "null"},
            (
                "configured bootstrap_port 8998, reports 8999; configured dp_size 3, reports 1; "
                "configured role prefill, reports regular"
            ),
        ),
    ],
)
async def test_an_engine_that_contradicts_the_settings(
    fixed: dict[str, Any], info: dict[str, Any], reason: str
) -> None:
    """Isn't ready, and the reason says both; once it agrees it is."""
    async with ScriptedEngine("prefill", {}).listen() as engine:
        agreed, engine.info = engine.info, engine.info | info
        entry = {"url": engine.url} | fixed
        async with route_to(prefill=[entry], waits=False, **QUICK) as lab:
            await until(lambda: out(lab, engine) == reason)
            assert reason in (await lab.get("/readiness")).json()["reason"]
            assert reason in (await lab.post(CHAT, chat("x"))).error["message"]
            engine.info = agreed | {"dp_size": fixed.get("dp_size", 1), "disaggregation_bootstrap_port": 8998}
            await until(lambda: out(lab, engine) is None)


@pytest.mark.parametrize(
    ("configured", "owner", "reported"),
    [
        ("sglang", "vllm", "vllm"),
        ("vllm", "sglang", "sglang"),
        ("vllm", "tensorrt_llm", "trtllm"),
        ("trtllm", "sglang", "sglang"),
        ("sglang", "sglang", None),
        ("sglang", "a gateway", None),
        ("vllm", None, None),
        ("openai", "vllm", None),
    ],
)
async def test_an_engine_of_another_kind(configured: str, owner: str | None, reported: str | None) -> None:
    """By who owns the models that it lists; who isn't known contradicts nothing, and ``openai`` is any kind."""
    models = {"object": "list", "data": [{"id": "m", "owned_by": owner}]}
    entry = {"url": "", "engine": configured}
    async with ScriptedEngine(None, {"/v1/models": always(200, models)}).listen() as engine:
        entry["url"] = engine.url
        async with route_to(worker=[entry], waits=False, **QUICK) as lab:
            reason = reported and f"configured engine {configured}, reports {reported}"
            await until(lambda: out(lab, engine) == reason)


async def test_a_bootstrap_port_of_a_decode_engine_counts_nothing() -> None:
    """Each SGLang server tells one, whatever it does."""
    async with (
        ScriptedEngine("decode", {}, {"disaggregation_bootstrap_port": 8998}).listen() as engine,
        route_to(decode=[engine.url], waits=False, **QUICK) as lab,
    ):
        await until(lambda: out(lab, engine) is None)
        assert [endpoint.bootstrap_port for endpoint in lab.core.fleet] == [None]


async def test_a_contradiction_takes_an_engine_out_at_once() -> None:
    """Found in use: an engine that came back as something else isn't asked three times."""
    flags = QUICK | {"health_failure_threshold": 3, "health_success_threshold": 1}
    info = {"dp_size": 1, "version": "0.5.23", "served_model_name": "m", "disaggregation_mode": "null"}
    async with (
        ScriptedEngine(None, {"/v1/loads": always(200, loads(1))}, info).listen() as engine,
        route_to(worker=[{"url": engine.url, "dp_size": 1}], **flags) as lab,
    ):
        engine.info = info | {"dp_size": 2, "disaggregation_mode": "decode"}
        engine.scripts["/v1/loads"] = always(200, loads(2))
        reason = "configured dp_size 1, reports 2; configured role regular, reports decode"
        await until(lambda: out(lab, engine) == reason)
