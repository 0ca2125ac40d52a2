"""Stand-in for SGLang's compiled kernels on a CPU.

Layers use their native torch code where a kernel is missing. One kernel has no such fallback: it is written here. Every
other name can be imported, and raises when it is called.
"""

from collections.abc import Callable
from typing import Any


def assign_req_to_token_pool_cpu(rows: Any, table: Any, starts: Any, ends: Any, locations: Any, _width: int) -> None:
    """Write the KV locations of each request into its row of the table: columns start to end.

    Source: ``assign_req_to_token_pool`` (Triton) in SGLang 0.5.23, ``srt/mem_cache/allocation.py``.
    """
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        count = end - start
        table[row, start:end] = locations[taken : taken + count].to(table.dtype)
        taken += count


def __getattr__(name: str) -> Callable[..., object]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> object:
        raise NotImplementedError(f"the stand-in for sgl_kernel has no {name}")

    return missing
