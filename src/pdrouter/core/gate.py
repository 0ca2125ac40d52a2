"""Tells whether a request may go to an engine now or had better wait until some rank is below its watermark.

It reads what the work index keeps and changes nothing. Asked of the ranks that would be chosen: the first of each heap,
so in O(1), whatever the fleet. The order of those that wait is ``line.py``'s.
"""

from collections.abc import Iterable, Sized
from itertools import chain, islice

import msgspec

from pdrouter.core.places import Domain, Pool
from pdrouter.core.work import WorkIndex

_ALWAYS = float("-inf")
_NEVER = float("inf")

_MOST_POOLS = 16
"""Pools asked, the first free first; if none of them has room for KV as many by least decode load. Chosen."""


class GateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Watermarks, each ``None`` where it doesn't apply; ``config.py`` says what they mean.

    ``max_running`` is requests in the whole router. A prefill rank is below its watermark while what is queued on it
    takes ``max_queue_s`` at most, a decode rank while its KV is in use up to ``max_kv_share`` (of 1); one whose
    capacity isn't known always is.
    """

    max_running: int | None
    max_queue_s: float | None
    max_kv_share: float | None


class Gate:
    """Open while the router may run one more request and a pair of ranks of the model is below its watermarks.

    It is open, too, where nobody is ready, as then waiting doesn't help, and where the index isn't kept (policies
    other than ``least_work``): there only ``max_running`` holds.
    """

    def __init__(self, options: GateOptions, work: WorkIndex, running: Sized) -> None:
        self._work = work
        self._running = running
        self.set_options(options)

    def set_options(self, options: GateOptions) -> None:
        """Use other watermarks."""
        self._options = options
        self._has_watermarks = options.max_queue_s is not None or options.max_kv_share is not None

    def opens_at_s(self, model: str | None) -> float:
        """Return the moment from which it is open by time alone; infinity if something must happen first."""
        most = self._options.max_running
        if most is not None and len(self._running) >= most:  # I9
            return _NEVER
        if not self._has_watermarks:
            return _ALWAYS
        for is_regular in (False, True):
            moments = [self._moment_s(domain) for domain in self._work.domains(model, regular=is_regular)]
            known = [moment_s for moment_s in moments if moment_s is not None]
            if known:
                return min(known)
        return _ALWAYS

    def _moment_s(self, domain: Domain) -> float | None:
        """Return when a pool of a domain is below its watermarks; ``None`` where none has ready ranks."""
        is_anyone_ready = False
        for pool in _promising(domain):
            if pool.prefill and pool.decode:
                if self._has_kv(pool):
                    return self._opens_s(pool)
                is_anyone_ready = True
        return _NEVER if is_anyone_ready else None

    def _opens_s(self, pool: Pool) -> float:
        free_at_s = pool.first_free_s()
        if free_at_s is None or self._options.max_queue_s is None:
            return _ALWAYS
        return free_at_s - self._options.max_queue_s

    def _has_kv(self, pool: Pool) -> bool:
        share = self._options.max_kv_share
        if share is None:
            return True
        for tier in pool.decode.values():
            capacity = tier.pace.profile.kv_capacity_tokens
            if capacity is None or tier.heap.top().item.load.comparable_tokens <= share * capacity:
                return True
        return False


def _promising(domain: Domain) -> Iterable[Pool]:
    """Return pools by when a prefill rank is free; of many the first, then those whose decode ranks have least load."""
    if len(domain.pools) == 1:
        return domain.pools.values()
    free, loaded = domain.by_free.in_order(), domain.by_share.in_order()
    more = _MOST_POOLS if len(domain.pools) > _MOST_POOLS else 0
    return (entry.item for entry in chain(islice(free, _MOST_POOLS), islice(loaded, more)))
