"""Any OpenAI-compatible engine as a kind: chat and text completions, and nothing that tells its load or its ranks.

Requests are read as vLLM reads them, without its headers and without legs.
"""

from collections.abc import Mapping, Sequence

from pdrouter.sim.call import Api, Call
from pdrouter.sim.emulator_kind import PlainFailures, Routes
from pdrouter.sim.emulator_replies import DONE, ChatReply, CompletionReply, OpenAiReply, Reply, event
from pdrouter.sim.emulator_settings import EngineError
from pdrouter.sim.faults import FaultRule
from pdrouter.sim.http_exchange import Exchange
from pdrouter.sim.live_engine import LiveEngine
from pdrouter.sim.load_samples import LoadSamples
from pdrouter.sim.ticket import Ticket
from pdrouter.sim.vllm.connector import Connector
from pdrouter.sim.vllm.requests import read_call

_APIS: Mapping[str, Api] = {"/v1/chat/completions": Api.CHAT, "/v1/completions": Api.COMPLETION}


class OpenAiKind(PlainFailures):
    """The endpoints that every engine has."""

    paths = _APIS.keys()
    load_paths: frozenset[str] = frozenset()

    def __init__(self, engine: LiveEngine, _samples: LoadSamples) -> None:
        assert isinstance(engine.handshake, Connector)  # noqa: S101 (narrows the type)
        self._settings = engine.settings
        self._connector = engine.handshake

    def read(self, path: str, raw: bytes, _headers: Mapping[str, str]) -> Call:
        """Read and check a request. Raises: ``EngineError``."""
        return read_call(_APIS[path], raw, {}, self._settings, self._connector)

    def reply(self, call: Call, tickets: Sequence[Ticket]) -> Reply:
        """Make the format of its answer."""
        kind = _PlainChatReply if call.api is Api.CHAT else _PlainCompletionReply
        return kind(call, tickets, has_prompt_logprobs=True)

    def error_body(self, error: EngineError) -> dict[str, object]:
        """Return the error object."""
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        return {"error": {"message": error.message, "type": kind, "param": None, "code": error.code}}

    def error_event(self, error: EngineError) -> bytes:
        """Return an error in the middle of a stream, and its end."""
        return event(self.error_body(error)) + DONE

    def routes(self) -> Routes:
        """Handlers by path and method."""
        return {"/health": {"GET": self._healthy}, "/v1/models": {"GET": self._models}}

    async def _healthy(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        await exchange.reply(200, b"")

    async def _models(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        card = {"id": self._settings.model, "object": "model", "created": 0, "owned_by": "openai"}
        await exchange.reply_json(200, {"object": "list", "data": [card]})


class _PlainReply(OpenAiReply):
    def _extra(self) -> dict[str, object]:
        return {}

    def _choice_extra(self) -> dict[str, object]:
        return {}

    def _message_extra(self) -> dict[str, object]:
        return {}


class _PlainChatReply(_PlainReply, ChatReply):
    """``/v1/chat/completions``."""


class _PlainCompletionReply(_PlainReply, CompletionReply):
    """``/v1/completions``."""
