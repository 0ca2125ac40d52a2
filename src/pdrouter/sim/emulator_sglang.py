"""SGLang as a kind of engine: its endpoints for information, load and abort, joined with its requests and handshake.

Requests: ``emulator_api.py``; handshake: ``sglang_handshake.py``; load: ``load_reports.py``.
"""

from collections.abc import Mapping, Sequence

import msgspec

from pdrouter.sim.call import Api, Call
from pdrouter.sim.emulator_api import DEFAULT_BOOTSTRAP_PORT, read_call
from pdrouter.sim.emulator_kind import Routes
from pdrouter.sim.emulator_replies import DONE, Reply
from pdrouter.sim.emulator_settings import EngineError
from pdrouter.sim.faults import FaultRule
from pdrouter.sim.http_exchange import Exchange
from pdrouter.sim.job import Phase
from pdrouter.sim.live_engine import LiveEngine
from pdrouter.sim.load_reports import LoadReports
from pdrouter.sim.load_samples import LoadSamples
from pdrouter.sim.sglang_failures import MESSAGES, RESPONSES, failed_reply, refused_stream, stream_error
from pdrouter.sim.sglang_replies import make_reply
from pdrouter.sim.text import Prompt, render_chat
from pdrouter.sim.ticket import Ticket

_APIS: Mapping[str, Api] = {
    "/generate": Api.GENERATE,
    "/v1/chat/completions": Api.CHAT,
    "/v1/completions": Api.COMPLETION,
    RESPONSES: Api.RESPONSES,
    MESSAGES: Api.MESSAGES,
}


_WAITING_PHASES = frozenset({Phase.BOOTSTRAP, Phase.INFLIGHT, Phase.PREALLOC, Phase.TRANSFER})


class _AbortBody(msgspec.Struct, frozen=True):
    rid: str | None = None
    abort_all: bool = False


class _CountBody(msgspec.Struct, frozen=True):
    messages: list[dict[str, object]]


class SglangKind:
    """SGLang's endpoints over one engine."""

    load_paths = frozenset({"/v1/loads", "/get_load"})

    def __init__(self, engine: LiveEngine, samples: LoadSamples) -> None:
        self._settings = engine.settings
        self._engine = engine
        self._reports = LoadReports(engine, samples)
        self.paths = _APIS.keys() if self._settings.sglang.has_messages else _APIS.keys() - {MESSAGES}

    def read(self, path: str, raw: bytes, headers: Mapping[str, str]) -> Call:
        """Read and check a request. Raises: ``EngineError``."""
        return read_call(_APIS[path], raw, headers, self._settings)

    def reply(self, call: Call, tickets: Sequence[Ticket]) -> Reply:
        """Make the format of its answer."""
        return make_reply(call, tickets, self._settings)

    def error_reply(self, path: str, error: EngineError) -> tuple[int, object]:
        """Return status and body of a request to an endpoint that failed as a whole."""
        return failed_reply(path, error)

    def refused_stream(self, path: str, raw: bytes, error: EngineError) -> bytes | None:
        """Return the stream that tells a refusal inside a 200; None: it is a status."""
        return refused_stream(path, raw, error, self._settings.sglang)

    def error_event(self, error: EngineError) -> bytes:
        """Return an error in the middle of a stream, and its end."""
        return stream_error(error) + DONE

    def routes(self) -> Routes:
        """Handlers by path and method."""
        table: Routes = {}
        for path in ("/health", "/health_generate"):
            table[path] = {"GET": self._healthy}
        for path in ("/server_info", "/get_server_info"):
            table[path] = {"GET": self._server_info}
        for path in ("/model_info", "/get_model_info"):
            table[path] = {"GET": self._model_info}
        loads = {"/v1/loads": self._loads, "/get_load": self._legacy_load}
        table |= {path: {"GET": loads[path]} for path in self._settings.load_paths}
        table["/v1/models"] = {"GET": self._models}
        table["/metrics"] = {"GET": self._metrics}
        if self._settings.sglang.has_messages:
            table[f"{MESSAGES}/count_tokens"] = {"POST": self._count_tokens}
        table["/abort_request"] = {"POST": self._abort}
        table["/flush_cache"] = {"POST": self._flush, "GET": self._flush}
        return table

    async def _healthy(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        # Source: 0.5.6 to 0.5.23, ``http_server.py``, ``health_generate``: 503 until the warm-up is over.
        await exchange.reply(200 if self._engine.now_s() >= self._settings.start_s else 503, b"")

    async def _server_info(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        settings, engine = self._settings, self._engine
        await exchange.reply_json(
            200,
            {
                "model_path": engine.profile.model,
                "served_model_name": settings.model,
                "tp_size": engine.profile.tp,
                **self._ranks(),
                "disaggregation_mode": self._mode,
                "disaggregation_bootstrap_port": engine.handshake.port or DEFAULT_BOOTSTRAP_PORT,
                "load_balance_method": "follow_bootstrap_room" if settings.follows_rooms else "round_robin",
                "version": settings.version,
                "api_key": settings.api_key,  # the server's arguments, as they are
                "max_total_num_tokens": engine.kv_capacity_tokens,
                "max_running_requests": engine.profile.max_batch,
                "max_prefill_tokens": 2 * engine.profile.prefill_chunk_tokens,
                "chunked_prefill_size": engine.profile.prefill_chunk_tokens,
                "stream_interval": settings.stream_interval,
                "internal_states": [{"last_gen_throughput": 0.0} for _ in range(settings.dp_size)],
                "emulator_profile": settings.profile,
                "emulator_speed": settings.speed,
            },
        )

    @property
    def _mode(self) -> str:
        return "null" if self._settings.role == "regular" else self._settings.role

    def _ranks(self) -> dict[str, object]:
        """Source: ``server_args.py``, since 0.5.22 ``arg_groups/parallel_hook.py``."""
        size, dp_attention = self._settings.dp_size, self._settings.dp_attention
        told: dict[str, object] = {"dp_size": size, "enable_dp_attention": dp_attention}
        if self._settings.sglang.splits_dp_size:
            told |= {"dp_size": 1, "attn_dp_size": size} if dp_attention else {"attn_dp_size": 1}
        return told

    async def _model_info(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        path = self._engine.profile.model
        info = {"model_path": path, "tokenizer_path": path, "is_generation": True, "disaggregation_mode": self._mode}
        await exchange.reply_json(200, info)

    async def _models(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        name = self._settings.model
        card = {"id": name, "object": "model", "created": 0, "owned_by": "sglang", "root": name}
        await exchange.reply_json(200, {"object": "list", "data": [card]})

    async def _count_tokens(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        """Source: ``entrypoints/anthropic/serving.py``, ``handle_count_tokens``, since 0.5.9."""
        try:
            body = msgspec.json.decode(await exchange.read(), type=_CountBody)
        except msgspec.MsgspecError as error:
            await exchange.fail(EngineError(400, "bad_request", f"invalid request: {error}"))
            return
        prompt = Prompt(render_chat(body.messages), self._settings.bytes_per_token)
        await exchange.reply_json(200, {"input_tokens": prompt.tokens})

    async def _loads(self, exchange: Exchange, rules: list[FaultRule]) -> None:
        include = {part for value in exchange.query.get("include", []) for part in value.split(",")}
        await exchange.reply(200, _encode_load(self._reports.v1(include, rules), rules))

    async def _legacy_load(self, exchange: Exchange, rules: list[FaultRule]) -> None:
        await exchange.reply(200, _encode_load(self._reports.legacy(rules), rules))

    async def _metrics(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        await exchange.reply(200, self._reports.metrics(), b"text/plain; version=0.0.4; charset=utf-8")

    async def _abort(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        try:
            body = msgspec.json.decode(await exchange.read(), type=_AbortBody)
        except msgspec.MsgspecError as error:
            await exchange.fail(EngineError(400, "bad_request", f"invalid request: {error}"))
            return
        for ticket in self._engine.live() if body.abort_all else self._engine.named(body.rid or ""):
            self._end(ticket)
        await exchange.reply(200, b"")

    def _end(self, ticket: Ticket) -> None:
        """End a request as an abort does: one that waits for its other leg fails."""
        phase = ticket.job.phase
        if phase not in _WAITING_PHASES:
            self._engine.abort(ticket)
            return
        side = "Decode" if phase in {Phase.PREALLOC, Phase.TRANSFER} else "Prefill"
        text = f"{side} transfer failed for request rank={ticket.rank} req.rid={ticket.rid!r}: Aborted by AbortReq."
        self._engine.fail(ticket, EngineError(500, "aborted", text))

    async def _flush(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        is_done = self._engine.flush_cache()
        text = b"Cache flushed.\n" if is_done else b"Cache not flushed: there are requests.\n"
        await exchange.reply(200 if is_done else 400, text, b"text/plain; charset=utf-8")


def _encode_load(value: object, rules: list[FaultRule]) -> bytes:
    # Python's own JSON writes NaN for not-a-number; msgspec would write null.
    encoded = msgspec.json.encode(value)
    is_nan = any(rule.kind == "bad_load" and rule.mode == "nan" for rule in rules)
    return encoded.replace(b":null", b":NaN") if is_nan else encoded
