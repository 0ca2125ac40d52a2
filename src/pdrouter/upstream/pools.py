"""The pools of all endpoints, one each, made on first use."""

from pdrouter.core.fleet import Endpoint
from pdrouter.upstream.pool import Origin, Pool, PoolLimits


class Pools:
    """Pool by address."""

    def __init__(self, limits: PoolLimits) -> None:
        self._limits = limits
        self._pools: dict[str, Pool] = {}

    def get(self, endpoint: Endpoint) -> Pool:
        """Return the pool of an endpoint."""
        pool = self._pools.get(endpoint.address)
        if pool is None:
            pool = self._pools[endpoint.address] = Pool(Origin(endpoint.host, endpoint.port), self._limits)
        return pool

    def counters(self) -> dict[str, int]:
        """Return what happened to connections, all pools together."""
        totals = dict.fromkeys(("opened", "reused", "retired", "repeated", "exhausted"), 0)
        for pool in self._pools.values():
            statistics = pool.statistics()
            for event in totals:
                totals[event] += getattr(statistics, event)
        return totals

    async def aclose(self) -> None:
        """End all connections."""
        pools, self._pools = list(self._pools.values()), {}
        for pool in pools:
            await pool.aclose()
