"""Endpoints that no real engine has: faults on demand, and what the engine holds."""

import msgspec

from pdrouter.sim.emulator_kind import Routes
from pdrouter.sim.emulator_settings import EngineError
from pdrouter.sim.faults import FaultRule, Faults
from pdrouter.sim.http_exchange import Exchange
from pdrouter.sim.live_engine import LiveEngine
from pdrouter.sim.load_samples import LoadSamples


class Control:
    """Handlers over one engine of any kind."""

    def __init__(self, engine: LiveEngine, samples: LoadSamples, faults: Faults) -> None:
        self._engine = engine
        self._samples = samples
        self._faults = faults

    def routes(self) -> Routes:
        """Handlers by path and method."""
        table: Routes = {"/_snapshot": {"GET": self._show}}
        if self._engine.settings.faults_enabled:
            table["/_fault"] = {"POST": self._add_faults, "DELETE": self._clear_faults}
        return table

    async def _show(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        snapshot = self._engine.snapshot()
        shown = msgspec.structs.asdict(snapshot)
        shown["ranks"] = [msgspec.structs.asdict(rank) for rank in snapshot.ranks]
        shown["is_idle"] = snapshot.is_idle
        shown["received"] = list(self._engine.received)
        await exchange.reply_json(200, shown)

    async def _add_faults(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        try:
            self._faults.add(await exchange.read())
        except msgspec.MsgspecError as error:
            await exchange.fail(EngineError(400, "bad_fault", f"invalid fault: {error}"))
            return
        self._samples.keep(self._faults.load_age_s())
        await exchange.reply_json(200, {"rules": len(self._faults.rules)})

    async def _clear_faults(self, exchange: Exchange, _rules: list[FaultRule]) -> None:
        self._faults.clear()
        self._samples.keep(0.0)
        await exchange.reply_json(200, {"rules": 0})
