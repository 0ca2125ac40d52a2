"""What the demo watches: the load of every emulated rank, and the router's ledger.

Reads ``/v1/loads`` of the engines and ``/debug/fleet`` of the router; knows nothing of processes or displays.
"""

import asyncio
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec

from pdrouter.errors import RouterError
from pdrouter.upstream.pool import Origin, Pool, PoolLimits
from pdrouter.upstream.resolver import Resolver

_NAMES_TTL_S = 30.0
_LIMITS = PoolLimits(
    connect_timeout_s=5.0,
    idle_timeout_s=4.0,
    max_idle=2,
    max_connections=4,
    read_buffer_bytes=262_144,
    max_header_bytes=65_536,
)
_REPLY_BYTES = 1_048_576
_TIMEOUT_S = 5.0


class RankLoad(msgspec.Struct, frozen=True, kw_only=True, rename={"capacity_tokens": "max_total_num_tokens"}):
    """One rank now. ``num_total_tokens``: KV in use and prompts that wait for theirs."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_waiting_uncached_tokens: int
    num_used_tokens: int
    num_total_tokens: int
    capacity_tokens: int
    total_prefill_uncached_tokens: int


class EndpointLoads(msgspec.Struct, frozen=True):
    """All ranks of one endpoint now."""

    name: str
    role: str
    ranks: list[RankLoad]


class _Loads(msgspec.Struct, frozen=True):
    loads: list[RankLoad]


class _Held(msgspec.Struct, frozen=True):
    tokens: float = 0.0
    requests: float = 0.0


class _LedgerRank(msgspec.Struct, frozen=True):
    ledger: _Held


class _LedgerEndpoint(msgspec.Struct, frozen=True):
    unassigned: _Held
    ranks: list[_LedgerRank]


class _FleetPage(msgspec.Struct, frozen=True):
    live_decisions: int
    endpoints: list[_LedgerEndpoint]


class Site:
    """One HTTP server that is asked now and then."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        origin = Origin(parts.hostname or "", parts.port or 80)
        self._pool = Pool(origin, _LIMITS, Resolver(_NAMES_TTL_S))
        self._host = str(origin)

    async def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body. Raises: UpstreamError, PoolExhausted, TimeoutError."""
        async with asyncio.timeout(_TIMEOUT_S):
            exchange = await self._pool.send(f"GET {path} HTTP/1.1\r\nhost: {self._host}\r\n\r\n".encode())
            try:
                return await exchange.head(), await exchange.read_all(_REPLY_BYTES)
            finally:
                exchange.close()

    async def aclose(self) -> None:
        """End its connections."""
        await self._pool.aclose()


class Watched:
    """An engine: its name in the table, its role, where it is."""

    def __init__(self, name: str, role: str, url: str) -> None:
        self.name = name
        self.role = role
        self.site = Site(url)

    async def loads(self) -> EndpointLoads:
        """Return the loads of its ranks, none if it doesn't answer."""
        try:
            _, body = await self.site.get("/v1/loads?include=core")
            ranks = msgspec.json.decode(body, type=_Loads).loads
        except (RouterError, TimeoutError, msgspec.MsgspecError):
            ranks = []
        return EndpointLoads(self.name, self.role, ranks)


async def ledger_total(router: Site) -> float:
    """Return live decisions + tokens + requests in the router's ledger: 0 when nothing is held."""
    _, body = await router.get("/debug/fleet")
    page = msgspec.json.decode(body, type=_FleetPage)
    held = [rank.ledger for endpoint in page.endpoints for rank in endpoint.ranks]
    held += [endpoint.unassigned for endpoint in page.endpoints]
    return page.live_decisions + sum(account.tokens + account.requests for account in held)


class Imbalance:
    """Tokens on the fullest rank of a role over those on the mean rank, both averaged over all samples."""

    def __init__(self) -> None:
        self._most: dict[str, float] = {}
        self._mean: dict[str, float] = {}

    def add(self, endpoints: Sequence[EndpointLoads]) -> None:
        """Take in one sample."""
        for role in {endpoint.role for endpoint in endpoints}:
            tokens = [r.num_total_tokens for e in endpoints if e.role == role for r in e.ranks]
            if tokens:
                self._most[role] = self._most.get(role, 0.0) + max(tokens)
                self._mean[role] = self._mean.get(role, 0.0) + sum(tokens) / len(tokens)

    def of(self, role: str) -> float | None:
        """Return max/mean of a role; 1 is perfect, the number of ranks the worst."""
        mean = self._mean.get(role)
        return self._most[role] / mean if mean else None


def prefilled_imbalance(endpoints: Sequence[EndpointLoads]) -> float | None:
    """Return tokens computed so far by the busiest prefill rank over those of the mean one."""
    tokens = [r.total_prefill_uncached_tokens for e in endpoints if e.role == "prefill" for r in e.ranks]
    return max(tokens) * len(tokens) / sum(tokens) if any(tokens) else None
