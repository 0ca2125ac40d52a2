"""The pools of all endpoints, one each, made on first use."""

from pdrouter.core.fleet import Endpoint
from pdrouter.upstream.pool import Origin, Pool, PoolLimits
from pdrouter.upstream.resolver import Resolver

_EVENTS = ("opened", "reused", "retired", "repeated", "exhausted")


class Pools:
    """Pool by address."""

    def __init__(self, limits: PoolLimits, resolver: Resolver) -> None:
        self._limits = limits
        self._resolver = resolver
        self._pools: dict[str, Pool] = {}
        self._past = dict.fromkeys(_EVENTS, 0)  # of pools that are gone

    def get(self, endpoint: Endpoint) -> Pool:
        """Return the pool of an endpoint."""
        pool = self._pools.get(endpoint.address)
        if pool is None:
            origin = Origin(endpoint.host, endpoint.port)
            pool = self._pools[endpoint.address] = Pool(origin, self._limits, self._resolver, self.retire_idle)
        return pool

    def retire_idle(self) -> bool:
        """Close all idle connections, as there is no open file left; return whether there were any."""
        return sum(pool.retire_idle() for pool in self._pools.values()) > 0

    def counters(self) -> dict[str, int]:
        """Return what happened to connections, all pools together."""
        totals = dict(self._past)
        for pool in self._pools.values():
            _add(totals, pool)
        return totals

    async def forget(self, address: str) -> None:
        """End all connections to an endpoint, and what was kept for it."""
        pool = self._pools.pop(address, None)
        if pool is not None:
            self._resolver.forget(pool.origin.host)
            await pool.aclose()
            _add(self._past, pool)

    async def aclose(self) -> None:
        """End all connections."""
        pools, self._pools = list(self._pools.values()), {}
        for pool in pools:
            await pool.aclose()


def _add(totals: dict[str, int], pool: Pool) -> None:
    statistics = pool.statistics()
    for event in _EVENTS:
        totals[event] += getattr(statistics, event)
