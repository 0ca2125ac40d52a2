"""vLLM's ``/metrics``: one series for each rank, labelled ``engine`` with its number over all servers of a deployment.

Gauges are as old as reports are; counters are of now. Names and labels: vLLM 0.32. With several ranks it has as many
API servers, and then a rank has no gauges before its first request: seen on vLLM 0.32.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdrouter.sim.faults import FaultRule
from pdrouter.sim.job import RankLoad
from pdrouter.sim.live_engine import LiveEngine
from pdrouter.sim.load_samples import LoadSamples
from pdrouter.sim.text import BLOCK_TOKENS
from pdrouter.sim.vllm.connector import Connector

_STARTED = "process_start_time_seconds"
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


def _used_share(load: RankLoad) -> float:
    """Share of a rank's KV that is in use; held blocks of answered prefills are, cached ones without a user aren't."""
    return load.used_tokens / load.capacity_tokens


_GAUGES: Sequence[tuple[str, str, Callable[[RankLoad], float]]] = (
    ("vllm:num_requests_running", "Requests in execution batches", lambda load: load.running),
    ("vllm:num_requests_waiting", "Requests waiting", lambda load: load.waiting + load.prealloc + load.transfer),
    ("vllm:kv_cache_usage_perc", "Share of KV blocks in use; 1 is all", _used_share),
)


class VllmMetrics(Collector):
    """Series of one engine."""

    def __init__(self, engine: LiveEngine, samples: LoadSamples, connector: Connector) -> None:
        self._engine = engine
        self._samples = samples
        self._connector = connector
        self._rules: list[FaultRule] = []
        self._started_unix_s = time.time()

    def text(self, rules: list[FaultRule]) -> bytes:
        """Text of ``/metrics``."""
        self._rules = rules
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> list[Metric]:
        """Series of all ranks."""
        told = [load for load in self._samples.told(self._rules).loads if self._has_gauges(load)]
        gauges = [self._gauge(name, text, {load.rank: value(load) for load in told}) for name, text, value in _GAUGES]
        started = GaugeMetricFamily(_STARTED, "Start time of the process", self._started_unix_s)
        return [*gauges, started, self._by_source(), *self._counters(self._engine.loads()), self._cache_config()]

    def _has_gauges(self, load: RankLoad) -> bool:
        """Whether a rank has worked yet, or is the only one."""
        read = self._connector.prompt_tokens_by_source[load.rank].total()
        return self._engine.settings.dp_size == 1 or bool(read or load.total_tokens or load.running or load.waiting)

    def _label(self, rank: int) -> list[str]:
        settings = self._engine.settings
        return [str(settings.dp_start_rank + rank), settings.model]

    def _gauge(self, name: str, text: str, values: Mapping[int, float]) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=["engine", "model_name"])
        modes = {rule.mode for rule in self._rules if rule.kind == "bad_load"}
        for rank, value in values.items():
            if "missing" in modes and rank == len(values) - 1:
                continue
            bad = float("nan") if "nan" in modes else -1.0
            gauge.add_metric(self._label(rank), bad if modes & {"nan", "negative"} else value)
        return gauge

    def _by_source(self) -> Metric:
        name, text = "vllm:prompt_tokens_by_source", "Prompt tokens by where they came from"
        counter = CounterMetricFamily(name, text, labels=["engine", "model_name", "source"])
        for rank, counts in enumerate(self._connector.prompt_tokens_by_source):
            for source in _SOURCES:
                counter.add_metric([*self._label(rank), source], counts[source])
        return counter

    def _counters(self, loads: list[RankLoad]) -> list[Metric]:
        sources = self._connector.prompt_tokens_by_source
        tables: list[tuple[str, str, Sequence[float]]] = [
            ("vllm:prompt_tokens", "Prompt tokens", [counts.total() for counts in sources]),
            ("vllm:generation_tokens", "Tokens generated", [load.generated_tokens for load in loads]),
            ("vllm:prefix_cache_queries", "Prompt tokens looked for", [counts.total() for counts in sources]),
            ("vllm:prefix_cache_hits", "Prompt tokens found", [counts["local_cache_hit"] for counts in sources]),
            (
                "vllm:external_prefix_cache_hits",
                "Prompt tokens from other engines",
                [counts["external_kv_transfer"] for counts in sources],
            ),
            ("vllm:num_preemptions", "Preemptions", [load.preemptions for load in loads]),
        ]
        if self._connector.is_nixl:
            failed, expired = self._connector.failed_transfers, self._connector.expired_requests
            tables.append(("vllm:nixl_num_failed_transfers", "Failed NIXL transfers", failed))
            tables.append(("vllm:nixl_num_kv_expired_reqs", "Held KV that nobody pulled in time", expired))
        return [self._counter(*table) for table in tables]

    def _counter(self, name: str, text: str, values: Sequence[float]) -> Metric:
        counter = CounterMetricFamily(name, text, labels=["engine", "model_name"])
        for rank, value in enumerate(values):
            counter.add_metric(self._label(rank), value)
        return counter

    def _cache_config(self) -> Metric:
        blocks = self._engine.kv_capacity_tokens // BLOCK_TOKENS
        names = ["block_size", "engine", "num_gpu_blocks", "kv_cache_size_tokens", "enable_prefix_caching"]
        info = GaugeMetricFamily("vllm:cache_config_info", "Information of the KV cache", labels=names)
        for rank in range(self._engine.settings.dp_size):
            tokens = str(blocks * BLOCK_TOKENS)
            info.add_metric([str(BLOCK_TOKENS), self._label(rank)[0], str(blocks), tokens, "True"], 1.0)
        return info
