"""Load polls: both paths, none, nonsense, and when a report was true."""

import json
import time
from datetime import UTC, datetime
from typing import Any

import pytest

from pdrouter.core.load import RankLoad
from tests.lab import (
    CHAT,
    Asked,
    Lab,
    ScriptedEngine,
    always,
    chat,
    fault,
    gather,
    hang,
    http,
    make_lab,
    route_to,
    until,
)

QUICK: dict[str, Any] = {"worker_load_check_interval": 0.02}


def ranks(lab: Lab) -> list[RankLoad]:
    """Return the load of all ranks."""
    return [rank for load in lab.core.load.endpoints.values() for rank in load.ranks]


def reported(lab: Lab) -> bool:
    """Tell whether every rank has a report in use."""
    return all(rank.report is not None for rank in ranks(lab))


@pytest.mark.parametrize("load_api", ["both", "v1", "legacy"])
async def test_both_load_paths(load_api: str) -> None:
    """Loads come from the new path, or from the old one where there is no new one."""
    async with make_lab(0, 0, 1, engine={"load_api": load_api, "speed": 2.0}, **QUICK) as lab:
        async with await lab.start(CHAT, chat("x" * 400, 10_000, stream=True)) as call:
            await call.head()
            await until(lambda: reported(lab) and sum(r.report.requests or 0 for r in ranks(lab) if r.report) == 1)
            assert sum(r.effective_requests for r in ranks(lab)) == 1
            assert sum(r.report.tokens or 0 for r in ranks(lab) if r.report) >= 100
        await lab.settled()


async def test_the_path_that_answers_is_remembered() -> None:
    """An engine without the new path isn't asked for it at every poll."""
    old = [{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}]
    async with ScriptedEngine(None, {"/get_load": always(200, old)}).listen() as engine:
        async with route_to((), (), [engine], **QUICK):
            await until(lambda: len(engine.asked_for("/get_load")) >= 5)
        assert len(engine.asked_for("/v1/loads")) == 1


async def test_an_upgraded_engine_is_asked_anew() -> None:
    """When the remembered path is gone, the other one is tried."""
    old = [{"dp_rank": 0, "num_reqs": 0, "num_tokens": 7}]
    new = {"loads": [{"dp_rank": 0, "num_running_reqs": 0, "num_total_tokens": 9}]}
    async with (
        ScriptedEngine(None, {"/get_load": always(200, old)}).listen() as engine,
        route_to((), (), [engine], **QUICK) as lab,
    ):
        await until(lambda: reported(lab))
        engine.scripts = {"/v1/loads": always(200, new)}
        await until(lambda: any(r.report is not None and r.report.tokens == 9 for r in ranks(lab)))


async def test_no_load_path_at_all() -> None:
    """Without reports the ledger alone spreads the requests, and the polls are counted as failed."""
    async with make_lab(0, 0, 2, engine={"load_api": "none", "speed": 20.0}, **QUICK) as lab:
        replies = await gather(*(lab.post(CHAT, chat(f"none {i}", 400)) for i in range(8)))
        assert [reply.status for reply in replies] == [200] * 8
        assert [e.snapshot().requests_by_rank for e in lab.workers] == [[2, 2], [2, 2]]
        await until(lambda: lab.core.missing_reports.get("status 404", 0) >= 2)
        assert not any(rank.report for rank in ranks(lab))
        await lab.settled()


NONSENSE = [
    b"",
    b"null",
    b"{}",
    b"[1]",
    b"<html>busy</html>",
    b'{"loads": 7}',
    b'{"loads": [{"dp_rank": 0, "num_total_tokens": NaN}]}',
    b'{"loads": [{"dp_rank": "zero"}]}',
    json.dumps([{"dp_rank": 0, "num_reqs": -1, "num_tokens": -1}]).encode(),
    json.dumps([{"dp_rank": 99, "num_reqs": 1, "num_tokens": 1}]).encode(),
    json.dumps([{"num_reqs": 1, "num_tokens": 1}]).encode(),
    json.dumps([{"dp_rank": 0}]).encode(),
    b'[{"dp_rank": 0, "num_reqs": 1e999, "num_tokens": 1e999}]',
]


async def test_nonsense_is_no_report() -> None:
    """What can't be a load is no report: counted, never smaller than others, and requests go on."""
    scripts = {"/v1/loads": always(500, b""), CHAT: always(200, {})}
    async with ScriptedEngine(None, scripts).listen() as engine, route_to((), (), [engine], **QUICK) as lab:
        for body in NONSENSE:
            before = _refused(lab)
            engine.scripts["/v1/loads"] = always(200, body)
            polls = len(engine.asked_for("/v1/loads"))
            await until(lambda polls=polls: len(engine.asked_for("/v1/loads")) >= polls + 3)  # type: ignore[misc]
            assert _refused(lab) > before, body
            for rank in ranks(lab):
                assert rank.report is None or (rank.report.tokens is None and rank.report.requests is None), body
                assert rank.effective_tokens == rank.effective_requests == 0, body
            assert (await lab.post(CHAT, chat("x"))).status == 200
            assert lab.is_ledger_zero


def _refused(lab: Lab) -> int:
    return sum(lab.core.missing_reports.values()) + sum(lab.core.load.rejected_reports.values())


@pytest.mark.parametrize("mode", ["negative", "nan", "missing"])
async def test_bad_loads_of_an_engine(mode: str) -> None:
    """-1, NaN and missing ranks are no reports of those ranks; requests still spread evenly."""
    async with make_lab(0, 0, 1, engine={"dp_size": 4, "speed": 20.0}, **QUICK) as lab:
        await fault(lab.workers[0], "bad_load", mode=mode)
        await until(lambda: bool(lab.core.load.rejected_reports or lab.core.missing_reports) or mode == "missing")
        replies = await gather(*(lab.post(CHAT, chat(f"bad {i}")) for i in range(8)))
        assert [reply.status for reply in replies] == [200] * 8
        assert lab.workers[0].snapshot().requests_by_rank == [2, 2, 2, 2]
        await lab.settled()


@pytest.mark.invariant("I9")
async def test_a_report_that_is_too_long() -> None:
    """It is cut off by its bytes, before anything of it is read."""
    load = {"dp_rank": 0, "num_running_reqs": 0, "num_total_tokens": 9, "filler": "x" * (1 << 20)}
    async with (
        ScriptedEngine(None, {"/v1/loads": always(200, {"loads": [load]})}).listen() as engine,
        route_to((), (), [engine], **QUICK) as lab,
    ):
        await until(lambda: any("1048576 bytes" in reason for reason in lab.core.missing_reports))
        assert not reported(lab)


@pytest.mark.parametrize("script", [always(500, b"no"), hang])
async def test_a_poll_that_fails_leaves_the_last_report(script: Any) -> None:
    """A poll that fails or hangs is counted, and the last report stands until it is too old."""
    good = {"loads": [{"dp_rank": 0, "num_running_reqs": 0, "num_total_tokens": 9}]}
    flags: dict[str, Any] = QUICK | {"load_check_timeout_secs": 0.05, "report_max_age_secs": 0.3}
    async with (
        ScriptedEngine(None, {"/v1/loads": always(200, good)}).listen() as engine,
        route_to((), (), [engine], **flags) as lab,
    ):
        await until(lambda: reported(lab))
        engine.scripts["/v1/loads"] = script
        await until(lambda: sum(lab.core.missing_reports.values()) >= 1)

        def is_forgotten() -> bool:
            lab.core.load.expire(time.monotonic())
            return ranks(lab)[0].report is None

        assert not is_forgotten()
        await until(is_forgotten)
        engine.scripts["/v1/loads"] = always(200, good)
        await until(lambda: reported(lab))


def stamped(shift_s: float, *, is_text: bool) -> Any:
    """Return a script whose reports carry a time stamp that far from now."""

    async def answer(asked: Asked) -> bytes:
        at_s = time.time() + shift_s
        stamp: object = datetime.fromtimestamp(at_s, UTC).isoformat() if is_text else at_s
        loads = [{"dp_rank": 0, "num_running_reqs": 1, "num_total_tokens": 9}]
        return http(200, {"timestamp": stamp, "loads": loads})

    return answer


@pytest.mark.parametrize("is_text", [False, True])
@pytest.mark.invariant("I11")
async def test_the_moment_of_a_report(is_text: bool) -> None:
    """A report counts from the engine's own stamp; one from the future counts from the poll."""
    async with ScriptedEngine(None, {}).listen() as engine, route_to((), (), [engine], **QUICK) as lab:
        for shift_s, youngest_s, oldest_s in ((-5.0, 5.0, 5.5), (-1.0, 1.0, 1.5), (0.0, 0.0, 0.5), (3600.0, 0.0, 0.5)):
            engine.scripts["/v1/loads"] = stamped(shift_s, is_text=is_text)
            polls = len(engine.asked_for("/v1/loads"))
            await until(lambda polls=polls: len(engine.asked_for("/v1/loads")) >= polls + 3)  # type: ignore[misc]
            age_s = ranks(lab)[0].age_s(time.monotonic())
            assert age_s is not None
            assert youngest_s - 0.01 <= age_s <= oldest_s, shift_s


@pytest.mark.invariant("I11")
async def test_a_report_that_was_old_at_birth_has_no_weight() -> None:
    """A stamp older than the age limit, as of a clock that stands, is no report."""
    async with (
        ScriptedEngine(None, {"/v1/loads": stamped(-3600.0, is_text=False)}).listen() as engine,
        route_to((), (), [engine], **QUICK) as lab,
    ):
        await until(lambda: len(engine.asked_for("/v1/loads")) >= 3)
        lab.core.load.expire(time.monotonic())
        assert ranks(lab)[0].effective_tokens == 0


@pytest.mark.invariant("I11")
async def test_late_reports_dont_hide_new_work() -> None:
    """While reports lag, effective load has the running requests once: neither lost nor twice."""
    async with make_lab(0, 0, 1, engine={"dp_size": 1, "speed": 2.0}, **QUICK) as lab:
        await fault(lab.workers[0], "late_load", seconds=0.3)
        calls = [await lab.start(CHAT, chat(f"late {i}", 10_000, stream=True)) for i in range(3)]
        for call in calls:
            await call.head()
        (rank,) = ranks(lab)
        until_s = time.monotonic() + 0.8
        await until(lambda: rank.effective_requests != 3 or time.monotonic() > until_s)
        assert rank.effective_requests == 3
        for call in calls:
            await call.leave()
        await lab.settled()
        assert rank.effective_requests == 0


async def test_an_engine_that_is_out_isnt_asked() -> None:
    """No load is polled from an engine that isn't ready."""
    scripts = {"/health": always(500, b"")}
    async with ScriptedEngine(None, scripts).listen() as engine, route_to((), (), [engine], waits=False, **QUICK):
        await until(lambda: len(engine.asked_for("/health")) >= 4)
        assert not engine.asked_for("/v1/loads")
