"""The read-only pages: who is in the fleet, what load each rank carries, and what became of a request."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec

from pdrouter.core.fleet import Endpoint, Role
from pdrouter.core.load import EndpointLoad, RankLoad
from pdrouter.core.router import Router
from pdrouter.core.story import Stories
from pdrouter.errors import UnknownRequest

_COUNTED: Mapping[Role, str] = {
    Role.PREFILL: "prefill_count",
    Role.DECODE: "decode_count",
    Role.REGULAR: "regular_count",
}


def workers_page(router: Router) -> bytes:
    """Return ``GET /workers``, in the shape of sglang-router."""
    workers = [worker_of(router, endpoint) for endpoint in router.fleet]
    stats = dict.fromkeys(_COUNTED.values(), 0)
    for endpoint in router.fleet:
        stats[_COUNTED[endpoint.role]] += 1
    return msgspec.json.encode({"workers": workers, "total": len(workers), "stats": stats})


def loads_page(router: Router, now_s: float) -> bytes:
    """Return ``GET /get_loads``: tokens by endpoint, -1 where nothing is known."""
    router.load.expire(now_s)
    return msgspec.json.encode(
        {
            "workers": [
                {"worker": load.endpoint.url, "load": round(load.comparable_tokens) if _is_known(load) else -1}
                for load in router.load.endpoints.values()
            ]
        }
    )


def fleet_page(router: Router, now_s: float) -> bytes:
    """Return ``GET /debug/fleet``: every rank with reported, ledger and effective load, and the report's age."""
    router.load.expire(now_s)
    return msgspec.json.encode(
        {
            "live_decisions": len(router.live),
            "endpoints": [_endpoint(router, load, now_s) for load in router.load.endpoints.values()],
        }
    )


def story_page(router: Router, quoted_id: bytes, now_s: float) -> bytes:
    """Return ``GET /debug/story/ID``: all that is known of a request's lives.

    Raises: UnknownRequest.
    """
    request_id = unquote_to_bytes(quoted_id).decode("latin-1")  # as intake reads the header
    lives = router.journal.story(request_id, now_s)
    if not lives:
        limit = router.journal.limit
        kept = f"it keeps the last {limit} decisions" if limit else "it is off (journal_decisions)"
        raise UnknownRequest(f"the journal doesn't know the request {request_id[:256]!r}; {kept}")
    return msgspec.json.encode(Stories(request_id, lives))


def models_page(router: Router) -> bytes:
    """Return ``GET /v1/models`` in OpenAI's shape."""
    models = [{"id": m, "object": "model", "created": 0, "owned_by": "pdrouter"} for m in sorted(router.fleet.models)]
    return msgspec.json.encode({"object": "list", "data": models})


def readiness_page(router: Router, *, is_draining: bool) -> tuple[int, bytes]:
    """Return ``GET /readiness``: ready needs a ready pair or regular endpoint for every known model."""
    if is_draining:
        return 503, msgspec.json.encode({"status": "not ready", "reason": "draining"})
    fleet = router.fleet
    total, healthy = len(fleet), sum(fleet.is_ready(e.address) for e in fleet)
    models: list[str | None] = sorted(fleet.models) if len(fleet.models) > 1 else [None]  # type: ignore[assignment]
    lacking = [m for m in models if not fleet.ready(Role.PREFILL, m) and not fleet.ready(Role.REGULAR, m)]
    if not lacking:
        return 200, msgspec.json.encode({"status": "ready", "healthy_workers": healthy, "total_workers": total})
    reason = "; ".join(router.why_nobody(model) for model in lacking)
    return 503, msgspec.json.encode({"status": "not ready", "reason": reason})


def _is_known(load: EndpointLoad) -> bool:
    return load.is_reported or load.ledger_requests > 0


def worker_of(router: Router, endpoint: Endpoint) -> dict[str, Any]:
    """Return one entry of ``GET /workers``."""
    load = router.load.endpoints[endpoint.address]
    return {
        "id": endpoint.address,
        "url": endpoint.url,
        "model_id": endpoint.model or "unknown",
        "priority": 50,
        "cost": 1.0,
        "worker_type": endpoint.role.value,
        "is_healthy": router.fleet.is_ready(endpoint.address),
        "load": load.ledger_requests,
        "connection_mode": "HTTP",
        "bootstrap_port": endpoint.bootstrap_port,
        "metadata": {
            "dp_size": str(endpoint.dp_size),
            "engine": endpoint.engine,
            "group": endpoint.group,
            "version": endpoint.version or "unknown",
            "out": router.fleet.why_out(endpoint.address) or "",
        },
        "job_status": None,
    }


def _endpoint(router: Router, load: EndpointLoad, now_s: float) -> dict[str, Any]:
    endpoint = load.endpoint
    return {
        "address": endpoint.address,
        "role": endpoint.role.value,
        "engine": endpoint.engine,
        "version": endpoint.version,
        "group": endpoint.group,
        "model": endpoint.model,
        "is_ready": router.fleet.is_ready(endpoint.address),
        "out": router.fleet.why_out(endpoint.address),
        "unassigned": {"tokens": load.unassigned.tokens, "requests": load.unassigned.requests},
        "ranks": [_rank(rank, now_s) for rank in load.ranks],
    }


def _rank(rank: RankLoad, now_s: float) -> dict[str, Any]:
    report = rank.report
    return {
        "rank": rank.key.rank,
        "reported": None if report is None else {"tokens": report.tokens, "requests": report.requests},
        "report_age_s": rank.age_s(now_s),
        "ledger": {"tokens": rank.account.tokens, "requests": rank.account.requests},
        "effective": {"tokens": rank.effective_tokens, "requests": rank.effective_requests},
    }
