"""GET changes nothing in the core, whatever the path: a scrape or a look at a page can't move a request."""

import time
from typing import Any
from urllib.parse import quote

from pdrouter.core.events import LoadReported
from pdrouter.core.load import RankReport
from pdrouter.proxy.openapi import document
from tests.core.builders import decide, facts
from tests.lab import CHAT, chat, make_lab, until
from tests.state import state_of

STILL: dict[str, Any] = {
    "disable_health_check": True,
    "worker_load_check_interval": 3600,
    "report_max_age_secs": 0.05,
    "cb_failure_threshold": 1,
    "cb_timeout_duration_secs": 0.01,
}
"""Nothing happens by itself, but what is due by now is not done yet: a report is too old, a breaker may half-open."""


def paths() -> set[str]:
    """Return every path that answers GET, its parameters open."""
    told: Any = document()["paths"]
    return {path for path, item in told.items() if "get" in item}


async def test_every_get_path_changes_nothing() -> None:
    """With an old report, an open breaker, and requests that live, have ended, and couldn't be placed."""
    async with make_lab(1, 2, **STILL) as lab:
        core = lab.core
        await until(lambda: all(rank.report for load in core.load.endpoints.values() for rank in load.ranks))
        request_id = (await lab.post(CHAT, chat("x"))).headers["x-request-id"]
        await lab.post(CHAT, chat("x", data_parallel_rank=7))
        live = decide(core, facts(100), time.monotonic())
        failed = decide(core, facts(100), time.monotonic())
        await lab.decodes[1].stop()
        await lab.post(CHAT, chat("x"))
        address = lab.prefills[0].url.removeprefix("http://")
        ranks = [RankReport(rank, tokens=2e6, requests=2.0) for rank in range(2)]
        now_s = time.monotonic()
        core.observe(LoadReported(address, ranks, now_s), now_s)
        await until(lambda: time.monotonic() > now_s + 0.1)
        assert core.load.endpoints[address].ranks[0].report is not None
        core.fleet.ways(None, facts(1))
        before = state_of(core)
        asked = 0
        for path in sorted(paths()):
            for method in ("GET", "HEAD"):
                one = path.format(request_id=quote(request_id), worker_id=address, model_id="emulated")
                reply = await lab.get(one, method)
                assert reply.status in (200, 404), (one, reply.status)
                assert state_of(core) == before, (method, one)
                asked += 1
        assert asked > 25
        for decision in (live, failed):
            core.settle(decision, time.monotonic())
