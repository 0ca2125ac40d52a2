"""What releases of SGLang do differently, by version. Read from the released packages 0.5.6 to 0.5.23.

docs/engines.md has each rule with its source and its test.
"""

from collections.abc import Mapping
from functools import lru_cache

import msgspec


class SglangVersion(msgspec.Struct, frozen=True):
    """What a version does.

    ``takes_routed``: has ``routed_dp_rank``, ``disagg_prefill_dp_rank``, ``X-Data-Parallel-Rank`` (0.5.10).
    ``takes_openai_rank``: reads ``data_parallel_rank`` on OpenAI's endpoints too (0.5.7).
    ``compares_rooms``: a prefill fails a request whose room doesn't fit its rank (0.5.11) ...
    ``exempts_named``: ... unless it has ``disagg_prefill_dp_rank`` (0.5.16).
    ``always_follows``: prefill and decode ranks are always those that the rooms give, if none is named (up to 0.5.7).
    ``takes_overrides``: has the ``x-override-*`` headers, where they are switched on (0.5.15).
    ``splits_dp_size``: with DP attention ``dp_size`` is 1 and ``attn_dp_size`` the number of ranks (0.5.22).
    ``has_loads``, ``has_get_load``: has ``/v1/loads`` (0.5.8), still has ``/get_load`` (up to 0.5.20).
    ``sums_loads``: ``/v1/loads`` has ``dp_rank_count`` and ``aggregate`` (up to 0.5.13). ``unknown_loads``: fields of a
    rank's load that it doesn't tell yet.
    ``refuses_streams``: OpenAI's endpoints refuse a bad request before a stream begins (0.5.10), and
    ``streams_errors``: write an error event where a stream fails, before that a chunk with the finish reason abort.
    ``codes_errors``: the error event of a refused ``/generate`` stream has a code (0.5.13).
    ``has_messages``: has ``/v1/messages`` (0.5.9).
    ``pairs_responses``, ``pairs_messages``: these read room and ranks (0.5.20, 0.5.22).
    """

    takes_routed: bool
    takes_openai_rank: bool
    compares_rooms: bool
    exempts_named: bool
    always_follows: bool
    takes_overrides: bool
    splits_dp_size: bool
    has_loads: bool
    has_get_load: bool
    sums_loads: bool
    unknown_loads: frozenset[str]
    refuses_streams: bool
    streams_errors: bool
    codes_errors: bool
    has_messages: bool
    pairs_responses: bool
    pairs_messages: bool

    def tells_load(self, name: str) -> bool:
        """Whether ``/v1/loads`` has a field."""
        return name not in self.unknown_loads


_LOADS_SINCE: Mapping[str, int] = {
    "num_total_tokens": 11,
    "num_waiting_uncached_tokens": 13,
    "num_active_tokens": 17,
    "total_prefill_uncached_tokens": 17,
    "total_prefill_busy_us": 17,
}
"""Since which 0.5.x ``/v1/loads`` has a field (``managers/load_snapshot.py``, before ``managers/io_struct.py``)."""


@lru_cache(maxsize=64)
def sglang_version(text: str) -> SglangVersion:
    """Return what the release of that name does."""
    parts = [int(part) if part.isdigit() else 0 for part in text.split(".")[:3]]

    def since(minor: int) -> bool:
        return parts >= [0, 5, minor]

    return SglangVersion(
        takes_routed=since(10),
        takes_openai_rank=since(7),
        compares_rooms=since(11),
        exempts_named=since(16),
        always_follows=not since(8),
        takes_overrides=since(15),
        splits_dp_size=since(22),
        has_loads=since(8),
        has_get_load=not since(21),
        sums_loads=not since(14),
        unknown_loads=frozenset(name for name, minor in _LOADS_SINCE.items() if not since(minor)),
        refuses_streams=since(10),
        streams_errors=since(10),
        codes_errors=since(13),
        has_messages=since(9),
        pairs_responses=since(20),
        pairs_messages=since(22),
    )
