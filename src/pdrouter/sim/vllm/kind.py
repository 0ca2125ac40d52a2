"""vLLM as a kind of engine: its endpoints joined with its requests, replies and connector.

Requests: ``requests.py``; replies: ``replies.py``; handshakes: ``connector.py``; load: ``metrics.py``.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from pdrouter.sim.call import Api, Call
from pdrouter.sim.emulator_kind import PlainFailures, Routes
from pdrouter.sim.emulator_replies import DONE, Reply, event
from pdrouter.sim.emulator_settings import EngineError
from pdrouter.sim.faults import FaultRule
from pdrouter.sim.http_exchange import Exchange
from pdrouter.sim.live_engine import LiveEngine
from pdrouter.sim.load_samples import LoadSamples
from pdrouter.sim.ticket import Ticket
from pdrouter.sim.vllm.connector import Connector
from pdrouter.sim.vllm.metrics import VllmMetrics
from pdrouter.sim.vllm.mooncake import MooncakeConnector
from pdrouter.sim.vllm.nixl import NixlConnector
from pdrouter.sim.vllm.p2p_nccl import P2pNcclConnector
from pdrouter.sim.vllm.pooling import Pooling
from pdrouter.sim.vllm.replies import make_reply
from pdrouter.sim.vllm.requests import read_call
from pdrouter.sim.vllm.shared_storage import SharedStorageConnector

_APIS: Mapping[str, Api] = {
    "/v1/chat/completions": Api.CHAT,
    "/v1/completions": Api.COMPLETION,
    "/v1/responses": Api.RESPONSES,
    "/v1/messages": Api.MESSAGES,
}

_CONNECTORS: Mapping[str, Callable[[LiveEngine], Connector]] = {
    "nixl": NixlConnector,
    "mooncake": MooncakeConnector,
    "p2p_nccl": P2pNcclConnector,
    "shared_storage": SharedStorageConnector,
}


class _AbortBody(msgspec.Struct, frozen=True):
    request_ids: list[str]


def make_connector(engine: LiveEngine) -> Connector:
    """Return the connector that the settings name; prefill and decode engines have NIXL if they name none."""
    name = engine.settings.kv_connector
    if name is None and engine.settings.role == "regular":
        return Connector(engine)
    return _CONNECTORS[name or "nixl"](engine)


class VllmKind(PlainFailures):
    """vLLM's endpoints over one engine."""

    paths = _APIS.keys()
    load_paths = frozenset({"/metrics", "/load"})

    def __init__(self, engine: LiveEngine, samples: LoadSamples) -> None:
        assert isinstance(engine.handshake, Connector)  # noqa: S101 (narrows the type)
        self._settings = engine.settings
        self._engine = engine
        self._connector = engine.handshake
        self._metrics = VllmMetrics(engine, samples, engine.handshake)

    def read(self, path: str, raw: bytes, headers: Mapping[str, str]) -> Call:
        """Read and check a request. Raises: ``EngineError``."""
        return read_call(_APIS[path], raw, headers, self._settings, self._connector)

    def reply(self, call: Call, tickets: Sequence[Ticket]) -> Reply:
        """Make the format of its answer."""
        return make_reply(call, tickets, tells_cached_tokens=self._settings.tells_cached_tokens)

    def error_body(self, error: EngineError) -> dict[str, object]:
        """Return the error object."""
        kind = "NotFoundError" if error.status == 404 else error.kind
        return {"error": {"message": error.message, "type": kind, "param": None, "code": error.status}}

    def error_event(self, error: EngineError) -> bytes:
        """Return an error in the middle of a stream, and its end."""
        return event(self.error_body(error)) + DONE

    def routes(self) -> Routes:
        """Handlers by path and method."""
        table = Pooling(self._settings, self._engine.count_error).routes()
        table |= {
            "/health": {"GET": self._healthy},
            "/ping": {"GET": self._healthy},
            "/version": {"GET": self._version},
            "/v1/models": {"GET": self._models},
            "/metrics": {"GET": self._tell_metrics},
            "/load": {"GET": self._load},
        }
        if self._settings.takes_aborts:
            table["/abort_requests"] = {"POST": self._abort}
        return table

    async def _healthy(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        await exchange.reply(200, b"")

    async def _version(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        await exchange.reply_json(200, {"version": self._settings.version})

    async def _models(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        card = {
            "id": self._settings.model,
            "object": "model",
            "created": 0,
            "owned_by": "vllm",
            "root": self._engine.profile.model,
            "parent": None,
            "max_model_len": self._engine.kv_capacity_tokens,
            "permission": [],
        }
        await exchange.reply_json(200, {"object": "list", "data": [card]})

    async def _tell_metrics(self, exchange: Exchange, rules: list[FaultRule]) -> None:
        await exchange.reply(200, self._metrics.text(rules), b"text/plain; version=0.0.4; charset=utf-8")

    async def _load(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        # vLLM without the flag answers 0, whatever its load.
        load = self._engine.live_requests if self._settings.tracks_server_load else 0
        await exchange.reply_json(200, {"server_load": load})

    async def _abort(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        try:
            body = msgspec.json.decode(await exchange.read(), type=_AbortBody)
        except msgspec.MsgspecError as error:
            await exchange.fail(EngineError(400, "bad_request", str(error)))
            return
        for request_id in body.request_ids:
            self._engine.abort_matching(request_id)
        await exchange.reply(200, b"")
