"""What TensorRT-LLM tells of its load: gauges at ``/prometheus/metrics``, the newest iterations at ``/metrics``.

One figure for all ranks, as old as reports are. Names: TensorRT-LLM 1.2 (``tensorrt_llm/metrics/collector.py``).
"""

from collections.abc import Sequence
from math import nan

import msgspec

from pdrouter.sim.faults import FaultRule
from pdrouter.sim.job import RankLoad
from pdrouter.sim.load_samples import LoadSamples
from pdrouter.sim.text import BLOCK_TOKENS

_LABELS = 'engine_type="undefined",model_name="undefined"'


class TrtllmMetrics:
    """Load of one engine."""

    def __init__(self, samples: LoadSamples) -> None:
        self._samples = samples

    def gauges(self, rules: list[FaultRule]) -> bytes:
        """Text of ``/prometheus/metrics``."""
        loads = self._samples.told(rules).loads
        values = {
            "trtllm_num_requests_running": float(sum(load.running for load in loads)),
            "trtllm_num_requests_waiting": float(sum(map(_waiting, loads))),
            "trtllm_kv_cache_utilization": _kv_use(loads),
        }
        modes = {rule.mode for rule in rules if rule.kind == "bad_load"}
        if "missing" in modes:
            values = {}
        if modes & {"nan", "negative"}:
            values = dict.fromkeys(values, nan if "nan" in modes else -1.0)
        return "".join(f"# TYPE {name} gauge\n{name}{{{_LABELS}}} {value}\n" for name, value in values.items()).encode()

    def iterations(self, rules: list[FaultRule]) -> bytes:
        """Text of ``/metrics``; an idle engine has had no iteration."""
        loads = self._samples.told(rules).loads
        if all(load.is_idle for load in loads):
            return b"[]"
        blocks = sum(load.capacity_tokens for load in loads) // BLOCK_TOKENS
        used = -(-sum(load.used_tokens for load in loads) // BLOCK_TOKENS)
        stats = {
            "iter": 1,
            "numActiveRequests": sum(load.running for load in loads),
            "numQueuedRequests": sum(map(_waiting, loads)),
            "kvCacheStats": {
                "maxNumBlocks": blocks,
                "usedNumBlocks": used,
                "freeNumBlocks": blocks - used,
                "tokensPerBlock": BLOCK_TOKENS,
            },
        }
        return msgspec.json.encode([stats])


def _waiting(load: RankLoad) -> int:
    return load.waiting + load.prealloc + load.transfer


def _kv_use(loads: Sequence[RankLoad]) -> float:
    return sum(load.used_tokens for load in loads) / sum(load.capacity_tokens for load in loads)
