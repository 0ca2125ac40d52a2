"""The read-only pages: who is in the fleet, what load each rank carries, and what became of a request."""

from collections import Counter
from urllib.parse import unquote_to_bytes

import msgspec

from pdrouter import __version__
from pdrouter.core.fleet import Endpoint, Role
from pdrouter.core.ledger import RankKey
from pdrouter.core.names import MAX_SHOWN_CHARS, Card
from pdrouter.core.request import RequestFacts
from pdrouter.core.router import Router
from pdrouter.core.snapshot import EndpointSnapshot
from pdrouter.core.story import Stories
from pdrouter.errors import ModelNotFound, UnknownRequest
from pdrouter.proxy.pages import (
    EndpointPage,
    Fleet,
    Loads,
    Model,
    ModelReadiness,
    Models,
    NotReady,
    Ready,
    Stats,
    Version,
    Worker,
    WorkerLoad,
    Workers,
)

_PLAIN = RequestFacts(request_id="", prompt_tokens=1)
"""What a model is ready for: one prompt and its answer."""

_MAX_LACKING = 8
_MAX_WARNINGS = 8
"""Models whose reasons stand in the one reason for all."""


def workers_page(router: Router) -> bytes:
    """Return ``GET /workers``, in the shape of sglang-router."""
    workers = [worker_of(router, endpoint) for endpoint in router.fleet]
    roles = Counter(endpoint.role for endpoint in router.fleet)
    stats = Stats(roles[Role.PREFILL], roles[Role.DECODE], roles[Role.REGULAR])
    return msgspec.json.encode(Workers(workers, len(workers), stats))


def loads_page(router: Router, now_s: float) -> bytes:
    """Return ``GET /get_loads``: tokens by endpoint, -1 where nothing is known."""
    loads = [
        WorkerLoad(one.endpoint.url, -1 if one.known_tokens is None else round(one.known_tokens))
        for one in router.snapshot(now_s).endpoints
    ]
    return msgspec.json.encode(Loads(loads))


def fleet_page(router: Router, now_s: float) -> bytes:
    """Return ``GET /debug/fleet``: every rank with reported, ledger and effective load, and the report's age."""
    snapshot = router.snapshot(now_s)
    return msgspec.json.encode(Fleet(snapshot.live_decisions, [_endpoint(one) for one in snapshot.endpoints]))


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


def version_page() -> bytes:
    """Return ``GET /version``: the router's own."""
    return msgspec.json.encode(Version(__version__))


class ModelPages:
    """``GET /v1/models`` in OpenAI's shape, made again when a name has changed."""

    def __init__(self, router: Router) -> None:
        self._fleet = router.fleet
        self._version = -1
        self._models: dict[str, Model] = {}
        self._page = b""

    def all(self) -> bytes:
        """Return the page of all models that some endpoint lists."""
        self._renew()
        return self._page

    def one(self, quoted_id: bytes) -> bytes:
        """Return the page of one model.

        Raises: ModelNotFound.
        """
        self._renew()
        model_id = unquote_to_bytes(quoted_id).decode("utf-8", "replace")
        model = self._models.get(model_id)
        if model is None:
            raise ModelNotFound(f"the model {model_id[:MAX_SHOWN_CHARS]!r} is not served", param="model")
        return msgspec.json.encode(model)

    def _renew(self) -> None:
        if self._version == self._fleet.names.version:
            return
        self._version = self._fleet.names.version
        cards = {card.id: card for e in self._fleet for card in e.cards or ([Card(e.model)] if e.model else ())}
        self._models = {name: _model(cards[name]) for name in sorted(cards)}
        self._page = msgspec.json.encode(Models("list", list(self._models.values())))


def _model(card: Card) -> Model:
    return Model(
        id=card.id,
        object="model",
        created=card.created or 0,
        owned_by=card.owned_by or "pdrouter",
        root=card.root,
        parent=card.parent,
        max_model_len=card.max_model_len,
    )


def readiness_page(router: Router, *, is_draining: bool, needs_all: bool) -> tuple[int, bytes]:
    """Return ``GET /readiness``: whether any model can be served, or all (``needs_all``), and of each why not."""
    fleet = router.fleet
    workers = Counter(endpoint.model for endpoint in fleet)
    healthy = Counter(endpoint.model for endpoint in fleet if fleet.is_ready(endpoint.address))
    warnings: dict[str | None, list[str]] = {}
    for endpoint in fleet:
        if endpoint.warning is not None:
            warnings.setdefault(endpoint.model, []).append(f"{endpoint.address}: {endpoint.warning}")
    models = [
        _readiness(router, base, healthy[base], workers[base], warnings.get(base, []))
        for base in sorted(fleet.names.bases)
    ]
    served = [model.is_served for model in models] or [bool(fleet.ways(None, _PLAIN))]
    counts = (healthy.total(), workers.total(), models)
    if is_draining:
        return 503, msgspec.json.encode(NotReady("not ready", *counts, "draining"))
    if all(served) if needs_all else any(served):
        return 200, msgspec.json.encode(Ready("ready", *counts))
    lacking = [model.id for model in models if not model.is_served] if len(models) > 1 else [None]
    reason = "; ".join(router.why_nobody(model) for model in lacking[:_MAX_LACKING])
    return 503, msgspec.json.encode(NotReady("not ready", *counts, reason))


def _readiness(router: Router, model: str, healthy: int, total: int, warnings: list[str]) -> ModelReadiness:
    is_served = bool(router.fleet.ways(model if len(router.fleet.names.bases) > 1 else None, _PLAIN))
    reason = None if is_served else router.why_nobody(model)
    return ModelReadiness(model, is_served, reason, warnings[:_MAX_WARNINGS], healthy, total)


def worker_of(router: Router, endpoint: Endpoint) -> Worker:
    """Return one entry of ``GET /workers``."""
    return Worker(
        id=endpoint.address,
        url=endpoint.url,
        model_id=endpoint.model or "unknown",
        priority=50,
        cost=1.0,
        worker_type=endpoint.role.value,
        is_healthy=router.fleet.is_ready(endpoint.address),
        load=router.load.endpoints[endpoint.address].ledger_requests,
        connection_mode="HTTP",
        bootstrap_port=endpoint.bootstrap_port,
        metadata={
            "dp_size": str(endpoint.dp_size),
            "engine": endpoint.engine,
            "group": endpoint.group,
            "version": endpoint.version or "unknown",
            "out": router.fleet.why_out(endpoint.address) or "",
            "warning": endpoint.warning or "",
            "ranks_out": _ranks_out(router, endpoint.address),
        },
        job_status=None,
    )


def _endpoint(snapshot: EndpointSnapshot) -> EndpointPage:
    endpoint = snapshot.endpoint
    return EndpointPage(
        address=endpoint.address,
        role=endpoint.role.value,
        engine=endpoint.engine,
        version=endpoint.version,
        group=endpoint.group,
        model=endpoint.model,
        is_ready=snapshot.is_ready,
        out=snapshot.out,
        warning=endpoint.warning,
        unassigned=snapshot.unassigned,
        ranks=snapshot.ranks,
    )


def _ranks_out(router: Router, address: str) -> str:
    fleet = router.fleet
    return "; ".join(f"rank {n} {fleet.why_out(RankKey(address, n))}" for n in fleet.ranks_out.get(address, ()))
