"""One small request to an engine, with a time limit; over connections of its own, apart from the traffic's."""

import asyncio

from pdrouter.core.fleet import Endpoint
from pdrouter.engines.base import request_head
from pdrouter.errors import UpstreamTimeout
from pdrouter.upstream.pools import Pools

_HEADERS = b"accept: application/json\r\n"


class Prober:
    """Asks engines."""

    def __init__(self, pools: Pools, max_reply_bytes: int) -> None:
        self._pools = pools
        self._max_reply_bytes = max_reply_bytes

    async def get(self, endpoint: Endpoint, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Return status and body; raises as ``ask`` does."""
        return await self.ask("GET", endpoint, path, timeout_s)

    async def ask(self, method: str, endpoint: Endpoint, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Return status and body.

        Raises: UpstreamError, PoolExhausted; UpstreamTimeout after ``timeout_s``.
        """
        try:
            async with asyncio.timeout(timeout_s):
                exchange = await self._pools.get(endpoint).send(request_head(method, path, endpoint, _HEADERS, 0))
                try:
                    status = await exchange.head()
                    return status, await exchange.read_all(self._max_reply_bytes)
                finally:
                    exchange.close()
        except TimeoutError as error:
            raise UpstreamTimeout(f"no answer to {path} within {timeout_s:g} s") from error
