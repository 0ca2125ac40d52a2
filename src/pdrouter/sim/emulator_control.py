"""Endpoints of the emulated server that don't generate: information, loads, abort, cache, faults, snapshot."""

from collections.abc import Awaitable, Callable

import msgspec

from pdrouter.sim.emulator_settings import EngineError
from pdrouter.sim.faults import FaultRule, Faults
from pdrouter.sim.http_exchange import Exchange
from pdrouter.sim.live_engine import LiveEngine
from pdrouter.sim.load_reports import LoadReports

Handler = Callable[[Exchange, list[FaultRule]], Awaitable[None]]
Routes = dict[str, dict[str, Handler]]


class _AbortBody(msgspec.Struct, frozen=True):
    rid: str | None = None
    abort_all: bool = False


class Control:
    """Handlers over one engine. ``bootstrap_port`` is set when it is known."""

    def __init__(self, engine: LiveEngine, reports: LoadReports, faults: Faults) -> None:
        self.bootstrap_port: int | None = None
        self._settings = engine.settings
        self._engine = engine
        self._reports = reports
        self._faults = faults

    def routes(self) -> Routes:
        """Handlers by path and method."""
        table: Routes = {}
        for path in ("/health", "/health_generate"):
            table[path] = {"GET": self._healthy}
        for path in ("/server_info", "/get_server_info"):
            table[path] = {"GET": self._server_info}
        for path in ("/model_info", "/get_model_info"):
            table[path] = {"GET": self._model_info}
        if self._settings.load_api in {"both", "v1"}:
            table["/v1/loads"] = {"GET": self._loads}
        if self._settings.load_api in {"both", "legacy"}:
            table["/get_load"] = {"GET": self._legacy_load}
        table["/v1/models"] = {"GET": self._models}
        table["/metrics"] = {"GET": self._metrics}
        table["/abort_request"] = {"POST": self._abort}
        table["/flush_cache"] = {"POST": self._flush, "GET": self._flush}
        table["/_snapshot"] = {"GET": self._show}
        if self._settings.faults_enabled:
            table["/_fault"] = {"POST": self._add_faults, "DELETE": self._clear_faults}
        return table

    async def _healthy(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        await exchange.reply(200, b"")

    async def _server_info(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        settings, engine = self._settings, self._engine
        role = None if settings.role == "regular" else settings.role
        await exchange.reply_json(
            200,
            {
                "model_path": engine.profile.model,
                "served_model_name": settings.model,
                "tp_size": engine.profile.tp,
                "dp_size": settings.dp_size,
                "disaggregation_mode": role,
                "disaggregation_bootstrap_port": self.bootstrap_port,
                "load_balance_method": "follow_bootstrap_room" if role == "prefill" else "round_robin",
                "version": settings.server_version,
                "max_total_num_tokens": engine.kv_capacity_tokens,
                "max_running_requests": engine.profile.max_batch,
                "max_prefill_tokens": 2 * engine.profile.prefill_chunk_tokens,
                "chunked_prefill_size": engine.profile.prefill_chunk_tokens,
                "stream_interval": settings.stream_interval,
                "emulator_profile": settings.profile,
                "emulator_speed": settings.speed,
            },
        )

    async def _model_info(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        path = self._engine.profile.model
        info = {"model_path": path, "tokenizer_path": path, "is_generation": True}
        await exchange.reply_json(200, info)

    async def _models(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        name = self._settings.model
        card = {"id": name, "object": "model", "created": 0, "owned_by": "sglang", "root": name}
        await exchange.reply_json(200, {"object": "list", "data": [card]})

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
        self._engine.abort_matching(body.rid or "", is_all=body.abort_all)
        await exchange.reply(200, b"")

    async def _flush(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        is_done = self._engine.flush_cache()
        text = b"Cache flushed.\n" if is_done else b"Cache not flushed: there are requests.\n"
        await exchange.reply(200 if is_done else 400, text, b"text/plain; charset=utf-8")

    async def _show(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        snapshot = self._engine.snapshot()
        shown = msgspec.structs.asdict(snapshot)
        shown["ranks"] = [rank._asdict() for rank in snapshot.ranks]
        shown["is_idle"] = snapshot.is_idle
        shown["received"] = list(self._engine.received)
        await exchange.reply_json(200, shown)

    async def _add_faults(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        try:
            self._faults.add(await exchange.read())
        except msgspec.MsgspecError as error:
            await exchange.fail(EngineError(400, "bad_fault", f"invalid fault: {error}"))
            return
        self._reports.keep(self._faults.load_age_s())
        await exchange.reply_json(200, {"rules": len(self._faults.rules)})

    async def _clear_faults(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        self._faults.clear()
        self._reports.keep(0.0)
        await exchange.reply_json(200, {"rules": 0})


def _encode_load(value: object, rules: list[FaultRule]) -> bytes:
    # Python's own JSON writes NaN for not-a-number; msgspec would write null.
    encoded = msgspec.json.encode(value)
    is_nan = any(rule.kind == "bad_load" and rule.mode == "nan" for rule in rules)
    return encoded.replace(b":null", b":NaN") if is_nan else encoded
