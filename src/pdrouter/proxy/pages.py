"""What the router's own paths answer: the structs that are encoded, and from which ``openapi.py`` derives schemas.

It knows no router; ``workers.py`` and ``fleet_api.py`` fill these, ``replies.py`` tells of failures by them.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from pdrouter.config import EndpointSettings
from pdrouter.core.snapshot import Amount, RankSnapshot


class Failure(Struct, frozen=True):
    """What failed, in OpenAI's words; ``code`` is stable, ``param`` names the field at fault."""

    message: str
    type: str
    code: str
    param: str | None


class ErrorReply(Struct, frozen=True):
    """A failure in OpenAI's shape."""

    error: Failure


class AnthropicFailure(Struct, frozen=True):
    """What failed, in Anthropic's words and, beyond them, with its stable code."""

    type: str
    message: str
    code: str


class AnthropicError(Struct, frozen=True):
    """A failure in Anthropic's shape."""

    type: Literal["error"]
    error: AnthropicFailure


class ResponsesError(Struct, frozen=True):
    """A failure in a stream of ``/v1/responses``."""

    type: Literal["error"]
    code: str
    message: str
    param: str | None
    sequence_number: int


class Refusal(Struct, frozen=True):
    """A failure of the workers API, in the shape of sglang-router's."""

    error: str
    code: str


class Version(Struct, frozen=True):
    """The router's version, in the shape of vLLM's page."""

    version: str


class Model(Struct, frozen=True):
    """A model that some endpoint lists, or an adapter of one (``parent``), as the engine tells it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str | None
    parent: str | None
    max_model_len: int | None


class Models(Struct, frozen=True):
    """All models."""

    object: Literal["list"]
    data: list[Model]


class Worker(Struct, frozen=True):
    """An endpoint, in the shape of sglang-router's; ``load`` is its requests."""

    id: str
    url: str
    model_id: str
    priority: int
    cost: float
    worker_type: str
    is_healthy: bool
    load: int
    connection_mode: str
    bootstrap_port: int | None
    metadata: dict[str, str]
    job_status: None


class Generating(Struct, frozen=True):
    """The endpoints that were asked to generate a token, and did."""

    status: Literal["ok"]
    workers: list[str]


class Stats(Struct, frozen=True):
    """Endpoints by role."""

    prefill_count: int
    decode_count: int
    regular_count: int


class Workers(Struct, frozen=True):
    """All endpoints."""

    workers: list[Worker]
    total: int
    stats: Stats


class Urls(Struct, frozen=True):
    """All endpoints, by URL."""

    urls: list[str]


class NewWorker(EndpointSettings, frozen=True, kw_only=True):
    """An endpoint that is to join. ``priority``, ``cost`` and ``labels`` have no effect."""

    worker_type: Literal["prefill", "decode", "regular"] = "regular"
    model_id: str | None = None
    priority: int | None = None
    cost: float | None = None
    labels: dict[str, str] | None = None


class Accepted(Struct, frozen=True):
    """A change of the fleet that takes effect soon."""

    status: Literal["accepted"]
    worker_id: str
    url: str
    location: str
    message: str


class NotFlushed(Struct, frozen=True):
    """An endpoint whose cache couldn't be flushed, and why."""

    worker: str
    error: str


class Flushed(Struct, frozen=True):
    """Whose caches were flushed."""

    status: Literal["success", "partial_success"]
    total_workers: int
    successful: list[str]
    failed: list[NotFlushed]


class WorkerLoad(Struct, frozen=True):
    """An endpoint's load in tokens, -1 where nothing is known."""

    worker: str
    load: int


class Loads(Struct, frozen=True):
    """The load of every endpoint."""

    workers: list[WorkerLoad]


class ModelReadiness(Struct, frozen=True):
    """Whether requests for a base model can be served now; if not, ``reason`` says why.

    ``warnings`` say of some endpoints what doesn't add up in what their engines tell.
    """

    id: str
    is_served: bool
    reason: str | None
    warnings: list[str]
    healthy_workers: int
    total_workers: int


class Ready(Struct, frozen=True):
    """Any model can be served, or with ``readiness: all`` every model that some endpoint has."""

    status: Literal["ready"]
    healthy_workers: int
    total_workers: int
    models: list[ModelReadiness]


class NotReady(Struct, frozen=True):
    """No model can be served, with ``readiness: all`` some model; or the router stops."""

    status: Literal["not ready"]
    healthy_workers: int
    total_workers: int
    models: list[ModelReadiness]
    reason: str


class EndpointPage(Struct, frozen=True):
    """An endpoint with its ranks; ``out`` says why it takes nothing, ``unassigned`` is the load of no known rank.

    ``warning`` says what doesn't add up in what its engine tells.
    """

    address: str
    role: str
    engine: str
    version: str | None
    group: str
    model: str | None
    is_ready: bool
    out: str | None
    warning: str | None
    unassigned: Amount
    ranks: Sequence[RankSnapshot]


class Fleet(Struct, frozen=True):
    """Every endpoint, and how many decisions are live."""

    live_decisions: int
    endpoints: list[EndpointPage]
