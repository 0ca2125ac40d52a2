"""The pools of all endpoints."""

from pdrouter.config import Settings
from pdrouter.core.fleet import Endpoint, Role
from pdrouter.options import pool_limits
from pdrouter.upstream.pools import Pools
from pdrouter.upstream.resolver import Resolver
from tests.lab import ScriptedEngine, until

GET = b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"


async def test_an_endpoint_that_is_gone() -> None:
    """Its connections are closed, and what was counted of them stays."""
    async with ScriptedEngine(None, {}).listen() as engine:
        address = engine.url[7:]
        endpoint = Endpoint(address=address, host="127.0.0.1", port=int(address[10:]), role=Role.REGULAR)
        pools = Pools(pool_limits(Settings()), Resolver(30.0))
        for _ in range(2):
            exchange = await pools.get(endpoint).send(GET)
            assert await exchange.head() == 200
            await exchange.read_all(100)
            exchange.close()
        before = pools.counters()
        assert (before["opened"], before["reused"], engine.open_connections) == (1, 1, 1)
        await pools.forget(address)
        await until(lambda: engine.open_connections == 0)
        after = pools.counters()
        assert (after["opened"], after["reused"]) == (1, 1)
        await pools.forget(address)
        assert pools.counters() == after
        await pools.aclose()
