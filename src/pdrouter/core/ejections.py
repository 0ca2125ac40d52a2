"""How much of a role breakers may take out: a share of it, and nothing while too little of it is left.

A request that every engine fails would open every breaker, and everybody would get 503 for it. So a breaker's word to
take an endpoint or a rank out is a wish; which wishes hold is judged here, for all endpoints of one role and model.
Source: Envoy's outlier detection (``max_ejection_percent``, one host at least) and its ``healthy_panic_threshold``.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import msgspec

from pdrouter.core.fleet import BREAKER, DRAIN, HEALTH, Endpoint, Fleet, Role
from pdrouter.core.ledger import RankKey

Name = str | RankKey
"""An endpoint's address, or a rank."""

_Pool = tuple[Role, str | None]

_ROUNDING = 1e-9


class EjectionOptions(msgspec.Struct, frozen=True):
    """Shares of a role, 1 being all: ``most`` may be out; with less than ``panic`` left no breaker takes any out."""

    most: float
    panic: float


class Ejections:
    """The wishes of all breakers, the oldest first. A rank counts as the share that it is of its endpoint.

    ``counts``: ``overflow``, wishes that didn't hold as there were too many; ``panic``, how often none held any more.
    """

    def __init__(self, options: EjectionOptions, fleet: Fleet) -> None:
        self.counts = Counter(overflow=0, panic=0)
        self._options = options
        self._fleet = fleet
        self._wishes: dict[Name, str] = {}
        self._overflow: set[Name] = set()
        self._in_panic: set[_Pool] = set()

    @property
    def is_idle(self) -> bool:
        """Whether no breaker wants anything out."""
        return not self._wishes

    def wish(self, name: Name, out: str | None) -> Iterator[tuple[Name, str | None]]:
        """A breaker wants its endpoint or rank out, with the reason, or not any more (``None``).

        Yield what has to change: who goes out, with the reason, and who comes in again.
        """
        if out is not None:
            self._wishes[name] = out
        elif self._wishes.pop(name, None) is not None:
            self._overflow.discard(name)
            yield name, None
        yield from self.judge()

    def judge(self) -> Iterator[tuple[Name, str | None]]:
        """Yield what has to change as the fleet is now; a look at each endpoint while a breaker wants anything."""
        pools: dict[_Pool, list[Name]] = {}
        for name in list(self._wishes):
            endpoint = self._fleet.get(_address(name))
            if endpoint is None or (isinstance(name, RankKey) and name.rank >= endpoint.dp_size):
                del self._wishes[name]
                self._overflow.discard(name)
            else:
                pools.setdefault(_pool(endpoint), []).append(name)
        self._in_panic &= pools.keys()
        for pool, names in pools.items():
            held = self._held(pool, names)
            for name in names:
                wanted = self._wishes[name] if name in held else None
                if self._fleet.why_out(name, BREAKER) != wanted:
                    yield name, wanted

    def _held(self, pool: _Pool, names: Sequence[Name]) -> Collection[Name]:
        """Return the wishes that hold."""
        members = {endpoint.address: endpoint for endpoint in self._fleet if _pool(endpoint) == pool}
        most, total = max(1.0, self._options.most * len(members)) + _ROUNDING, 0.0
        out: dict[str, float] = {}  # the share of each endpoint that is out
        held: set[Name] = set()
        for name in names:
            address = _address(name)
            share, before = _share(name, members[address]), out.get(address, 0.0)
            more = min(share, 1.0 - before)  # an endpoint that is out is out once, with its ranks
            if total + more <= most:
                total += more
                out[address] = before + more
                held.add(name)
                self._overflow.discard(name)
            elif name not in self._overflow:
                self._overflow.add(name)
                self.counts["overflow"] += 1
        return () if self._is_panic(pool, list(members.values()), out) else held

    def _is_panic(self, pool: _Pool, members: Sequence[Endpoint], out: dict[str, float]) -> bool:
        """Whether too little would be left."""
        others = {e.address for e in members if any(self._fleet.why_out(e.address, s) for s in (HEALTH, DRAIN))}
        left = len(members) - len(others) - sum(share for address, share in out.items() if address not in others)
        is_panic = left < self._options.panic * len(members) - _ROUNDING
        if is_panic and pool not in self._in_panic:
            self.counts["panic"] += 1
        (self._in_panic.add if is_panic else self._in_panic.discard)(pool)
        return is_panic


def _pool(endpoint: Endpoint) -> _Pool:
    return endpoint.role, endpoint.model


def _share(name: Name, endpoint: Endpoint) -> float:
    """Return how much of its endpoint a name is."""
    return 1.0 if isinstance(name, str) else 1.0 / endpoint.dp_size


def _address(name: Name) -> str:
    return name if isinstance(name, str) else name.endpoint
