"""TensorRT-LLM as a kind of engine: its endpoints joined with its requests, replies and handshake.

Requests: ``requests.py``; replies: ``replies.py``; legs: ``params.py`` and ``handshake.py``; load: ``metrics.py``.
"""

from collections.abc import Mapping, Sequence

from pdrouter.sim.call import Api, Call
from pdrouter.sim.emulator_kind import PlainFailures, Routes
from pdrouter.sim.emulator_replies import DONE, Reply, event
from pdrouter.sim.emulator_settings import EngineError
from pdrouter.sim.faults import FaultRule
from pdrouter.sim.http_exchange import Exchange
from pdrouter.sim.live_engine import LiveEngine
from pdrouter.sim.load_samples import LoadSamples
from pdrouter.sim.ticket import Ticket
from pdrouter.sim.trtllm.handshake import TrtllmHandshake
from pdrouter.sim.trtllm.metrics import TrtllmMetrics
from pdrouter.sim.trtllm.replies import make_reply
from pdrouter.sim.trtllm.requests import read_call

_APIS: Mapping[str, Api] = {"/v1/chat/completions": Api.CHAT, "/v1/completions": Api.COMPLETION}
_TEXT = b"text/plain; version=0.0.4; charset=utf-8"


class TrtllmKind(PlainFailures):
    """TensorRT-LLM's endpoints over one engine."""

    paths = _APIS.keys()
    load_paths = frozenset({"/metrics", "/prometheus/metrics"})

    def __init__(self, engine: LiveEngine, samples: LoadSamples) -> None:
        assert isinstance(engine.handshake, TrtllmHandshake)  # noqa: S101 (narrows the type)
        self._settings = engine.settings
        self._handshake = engine.handshake
        self._metrics = TrtllmMetrics(samples)

    def read(self, path: str, raw: bytes, _headers: Mapping[str, str]) -> Call:
        """Read and check a request. Raises: ``EngineError``."""
        return read_call(_APIS[path], raw, self._settings)

    def reply(self, call: Call, tickets: Sequence[Ticket]) -> Reply:
        """Make the format of its answer."""
        return make_reply(call, tickets, self._settings.bytes_per_token)

    def error_body(self, error: EngineError) -> dict[str, object]:
        """Return the error object."""
        return {"object": "error", "message": error.message, "type": error.kind, "param": None, "code": error.status}

    def error_event(self, error: EngineError) -> bytes:
        """Return an error in the middle of a stream, and its end."""
        return event(self.error_body(error)) + DONE

    def routes(self) -> Routes:
        """Handlers by path and method."""
        return {
            "/health": {"GET": self._healthy},
            "/version": {"GET": self._version},
            "/v1/models": {"GET": self._models},
            "/server_info": {"GET": self._server_info},
            "/metrics": {"GET": self._iterations},
            "/prometheus/metrics": {"GET": self._gauges},
        }

    async def _healthy(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        await exchange.reply(200, b"")

    async def _version(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        await exchange.reply_json(200, {"version": self._settings.version})

    async def _models(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        card = {"id": self._settings.model, "object": "model", "created": 0, "owned_by": "tensorrt_llm"}
        await exchange.reply_json(200, {"object": "list", "data": [card]})

    async def _server_info(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        rank = 0 if self._settings.dp_size == 1 else None
        told = {"ctx_dp_rank": rank, "ctx_info_endpoint": [self._handshake.endpoint]}
        await exchange.reply_json(200, {"disaggregated_params": told})

    async def _iterations(self, exchange: Exchange, rules: list[FaultRule]) -> None:
        await exchange.reply(200, self._metrics.iterations(rules))

    async def _gauges(self, exchange: Exchange, rules: list[FaultRule]) -> None:
        await exchange.reply(200, self._metrics.gauges(rules), _TEXT)
