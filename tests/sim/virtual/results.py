"""Small builders of results."""

from typing import Any

import msgspec

from pdrouter.sim.virtual.figures import Curves, Figures
from pdrouter.sim.virtual.sweep import Result


def make_figures(**changes: Any) -> Figures:
    """Return figures of which all that aren't named are 1."""
    fields = dict.fromkeys(Figures.__struct_fields__, 1.0) | {"requests": 10, "rejected": 0, "preemptions": 2} | changes
    return msgspec.convert(fields, Figures)


def make_result(title: str, policy: str, seed: int = 0, rate_per_s: float = 5.0, **figures: Any) -> Result:
    """Return a result with curves for the first seed."""
    curves = None
    if not seed:
        percentiles = [0.01 * (i + 1) for i in range(101)]
        curves = Curves(ttft_s=percentiles, token_s=percentiles, prefill_work=[[5, 0, 1], [3, 0, 9]], slot_s=2.0)
    return Result(title, policy, seed, rate_per_s, 1.0, make_figures(**figures), curves)
