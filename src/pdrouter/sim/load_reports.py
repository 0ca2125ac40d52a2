"""Load reports of an emulated SGLang: ``/v1/loads``, ``/get_load``, ``/metrics``; exact, or as old as asked for.

Field names are those of SGLang 0.5. Rates are told in real time, as a caller sees them.
"""

from collections.abc import Callable, Collection

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdrouter.sim.faults import FaultRule
from pdrouter.sim.job import RankLoad
from pdrouter.sim.live_engine import LiveEngine
from pdrouter.sim.load_samples import LoadSamples


class LoadReports:
    """Reports of one engine."""

    def __init__(self, engine: LiveEngine, samples: LoadSamples) -> None:
        self._engine = engine
        self._samples = samples

    def v1(self, include: Collection[str], rules: list[FaultRule]) -> dict[str, object]:
        """Reply of ``/v1/loads`` with the sections asked for (none named: all)."""
        sample = self._samples.told(rules)
        loads = [self._v1_rank(load, include) for load in sample.loads]
        settings = self._engine.settings
        reply: dict[str, object] = {"timestamp": sample.wall.isoformat(), "version": settings.version}
        if settings.sglang.sums_loads:
            reply["dp_rank_count"] = len(loads)
            reply["aggregate"] = {"total_reqs": sum(load.running + _queued(load) for load in sample.loads)}
        return reply | {"loads": _spoil(loads, rules)}

    def legacy(self, rules: list[FaultRule]) -> list[dict[str, object]]:
        """Reply of ``/get_load``."""
        loads: list[dict[str, object]] = [
            {
                "dp_rank": load.rank,
                "num_reqs": load.running + _queued(load),
                "num_waiting_reqs": _queued(load),
                "num_tokens": load.total_tokens,
            }
            for load in self._samples.told(rules).loads
        ]
        return _spoil(loads, rules)

    def metrics(self) -> bytes:
        """Text of ``/metrics``."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Metrics(self._engine))
        return generate_latest(registry)

    def _v1_rank(self, load: RankLoad, include: Collection[str]) -> dict[str, object]:
        engine = self._engine
        speed = engine.settings.speed
        report: dict[str, object] = {
            "dp_rank": load.rank,
            "num_running_reqs": load.running,
            "num_waiting_reqs": _queued(load),
            "num_waiting_uncached_tokens": load.waiting_uncached_tokens,
            "num_used_tokens": load.used_tokens,
            "num_total_tokens": load.total_tokens,
            "num_active_tokens": load.used_tokens,
            "max_total_num_tokens": load.capacity_tokens,
            "max_running_requests": load.max_running,
            "token_usage": round(load.used_tokens / load.capacity_tokens, 4),
            "gen_throughput": round(load.gen_tokens_per_s * speed, 2),
            "cache_hit_rate": round(load.cache_hit_rate, 4),
            "utilization": -1.0 if engine.settings.role == "prefill" else round(load.running / load.max_running, 4),
            "total_prefill_uncached_tokens": load.prefill_uncached_tokens,
            "total_prefill_busy_us": int(load.prefill_busy_s * 1e6 / speed),
        }
        report = {name: value for name, value in report.items() if engine.settings.sglang.tells_load(name)}
        if engine.settings.role == "regular" and _wants("disagg", include):
            report["disaggregation"] = {"mode": "null"}
        elif _wants("disagg", include):
            report["disaggregation"] = {
                "mode": engine.settings.role,
                "prefill_bootstrap_queue_reqs": load.bootstrap,
                "prefill_inflight_queue_reqs": load.inflight,
                "decode_prealloc_queue_reqs": load.prealloc,
                "decode_transfer_queue_reqs": load.transfer,
                "decode_retracted_queue_reqs": load.retracted,
                "kv_transfer_speed_gb_s": _transfer_gb_s(engine) * speed,
                "kv_transfer_latency_ms": 0.0,
            }
        if _wants("queues", include):
            report["queues"] = {"waiting": load.waiting, "grammar": 0, "paused": 0, "retracted": load.retracted}
        return report


def _queued(load: RankLoad) -> int:
    # As SGLang counts: the waiting queue, and the queues before it of the PD role.
    return load.waiting + load.bootstrap + load.prealloc + load.retracted


def _wants(section: str, include: Collection[str]) -> bool:
    return not include or section in include or "all" in include


def _transfer_gb_s(engine: LiveEngine) -> float:
    profile = engine.profile
    return profile.kv_bytes_per_token / (profile.kv_transfer_us_per_token * 1e3)


def _spoil(loads: list[dict[str, object]], rules: list[FaultRule]) -> list[dict[str, object]]:
    for rule in rules:
        if rule.kind != "bad_load":
            continue
        if rule.mode == "missing":
            loads = loads[:-1]
            continue
        bad = float("nan") if rule.mode == "nan" else -1
        loads = [
            {key: bad if key.startswith(("num_", "token_")) else value for key, value in load.items()} for load in loads
        ]
    return loads


_GAUGES: tuple[tuple[str, str, Callable[[RankLoad], float]], ...] = (
    ("sglang:num_running_reqs", "Requests running", lambda load: load.running),
    ("sglang:num_queue_reqs", "Requests waiting", lambda load: load.waiting),
    ("sglang:num_used_tokens", "Tokens of KV in use", lambda load: load.used_tokens),
    ("sglang:token_usage", "Share of KV in use", lambda load: load.used_tokens / load.capacity_tokens),
    ("sglang:cache_hit_rate", "Share of prompt tokens found in cache", lambda load: load.cache_hit_rate),
    ("sglang:num_prefill_bootstrap_queue_reqs", "Bootstrap queue", lambda load: load.bootstrap),
    ("sglang:num_prefill_inflight_queue_reqs", "Inflight queue", lambda load: load.inflight),
    ("sglang:num_decode_prealloc_queue_reqs", "Prealloc queue", lambda load: load.prealloc),
    ("sglang:num_decode_transfer_queue_reqs", "Transfer queue", lambda load: load.transfer),
    ("sglang:num_retracted_reqs", "Retracted requests that wait", lambda load: load.retracted),
)


class _Metrics(Collector):
    """Reads the engine's loads when scraped."""

    def __init__(self, engine: LiveEngine) -> None:
        self._engine = engine

    def collect(self) -> list[Metric]:
        """Series of all ranks."""
        settings = self._engine.settings
        loads = self._engine.loads()
        labels = ["model_name", "dp_rank"]
        families: list[Metric] = []
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=labels)
            for load in loads:
                gauge.add_metric([settings.model, str(load.rank)], value(load))
            families.append(gauge)
        rate = GaugeMetricFamily("sglang:gen_throughput", "Tokens generated per second", labels=labels)
        total = CounterMetricFamily("sglang:generation_tokens", "Tokens generated", labels=labels)
        retracted = CounterMetricFamily("sglang:num_retracted_requests", "Requests retracted", labels=labels)
        for load in loads:
            retracted.add_metric([settings.model, str(load.rank)], load.preemptions)
            rate.add_metric([settings.model, str(load.rank)], load.gen_tokens_per_s * settings.speed)
            total.add_metric([settings.model, str(load.rank)], load.generated_tokens)
        return [*families, rate, total, retracted]
