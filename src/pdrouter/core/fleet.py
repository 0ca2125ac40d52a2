"""The fleet: endpoints, their roles and groups, who is ready, and who may be paired with whom.

It knows nothing of load (``load.py``). Identity is the address, so that an endpoint described anew stays itself.
"""

from collections.abc import Iterable, Iterator
from enum import StrEnum

import msgspec

from pdrouter.errors import InvariantViolation


class Role(StrEnum):
    """What an endpoint does for a request: read the prompt, write the answer, or both (regular)."""

    PREFILL = "prefill"
    DECODE = "decode"
    REGULAR = "regular"


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One engine server.

    ``address`` is ``host:port``. ``model`` is ``None`` until the engine has told it. Endpoints may be paired when
    engine, KV transport, group and model agree (I6). ``version`` and ``bootstrap_port`` are the engine's own.
    ``profile`` names the timing it is expected to have (``cost.py``).
    """

    address: str
    host: str
    port: int
    role: Role
    engine: str = "sglang"
    kv_transport: str = "bootstrap"
    group: str = ""
    model: str | None = None
    dp_size: int = 1
    bootstrap_port: int | None = None
    version: str | None = None
    profile: str | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self.address}"

    def serves(self, model: str | None) -> bool:
        """Whether a request for ``model`` may go there; one that isn't known may serve any."""
        return model is None or self.model is None or self.model == model

    def pairs_with(self, other: "Endpoint") -> bool:
        """Whether KV can go from this prefill endpoint to that decode endpoint (I6)."""
        return (
            self.engine == other.engine
            and self.kv_transport == other.kv_transport
            and self.group == other.group
            and (self.model is None or other.serves(self.model))
        )


class Fleet:
    """All endpoints by address, with the reason why those out are out."""

    def __init__(self) -> None:
        self._endpoints: dict[str, Endpoint] = {}
        self._out: dict[str, str] = {}
        self._ready: dict[tuple[Role, str | None], tuple[Endpoint, ...]] = {}
        self._partners: dict[tuple[str, str | None], tuple[Endpoint, ...]] = {}
        self._models: frozenset[str] | None = None

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self._endpoints.values())

    def __len__(self) -> int:
        return len(self._endpoints)

    def get(self, address: str) -> Endpoint | None:
        """Return the endpoint at an address, if it is known."""
        return self._endpoints.get(address)

    def put(self, endpoint: Endpoint, *, out: str | None = None) -> None:
        """Add an endpoint or describe it anew; ``out`` says why it can't be used yet (new ones only)."""
        if endpoint.address not in self._endpoints and out is not None:
            self._out[endpoint.address] = out
        self._endpoints[endpoint.address] = endpoint
        self._forget_pools()

    def remove(self, address: str) -> None:
        """Forget an endpoint."""
        self._endpoints.pop(address, None)
        self._out.pop(address, None)
        self._forget_pools()

    def set_ready(self, address: str, out: str | None) -> None:
        """Take an endpoint in (``None``) or out, with the reason."""
        if address not in self._endpoints:
            return
        if out is None:
            self._out.pop(address, None)
        else:
            self._out[address] = out
        self._forget_pools()

    def why_out(self, address: str) -> str | None:
        """Return the reason why an endpoint can't be used, ``None`` if it is ready."""
        return self._out.get(address)

    def is_ready(self, address: str) -> bool:
        """Whether an endpoint takes requests."""
        return address in self._endpoints and address not in self._out

    def ready(self, role: Role, model: str | None) -> tuple[Endpoint, ...]:
        """Return the ready endpoints of a role that may serve a model; for prefill only those with a ready partner."""
        pool = self._ready.get((role, model))
        if pool is None:
            pool = self._ready[role, model] = tuple(self._pool(role, model))
        return pool

    def partners(self, prefill: Endpoint, model: str | None) -> tuple[Endpoint, ...]:
        """Return the ready decode endpoints that a prefill endpoint may be paired with."""
        partners = self._partners.get((prefill.address, model))
        if partners is None:
            pool = self.ready(Role.DECODE, model)
            partners = tuple(d for d in pool if prefill.pairs_with(d))
            self._partners[prefill.address, model] = partners
        return partners

    @property
    def models(self) -> frozenset[str]:
        """The models that are served, as far as the engines have told."""
        if self._models is None:
            self._models = frozenset(e.model for e in self._endpoints.values() if e.model is not None)
        return self._models

    def check_pair(self, prefill: Endpoint, decode: Endpoint) -> None:
        """Hold I6 for a decision.

        Raises: InvariantViolation when one isn't ready or they can't be paired.
        """
        for endpoint in (prefill, decode):
            if not self.is_ready(endpoint.address):
                raise InvariantViolation(f"{endpoint.address} was chosen though it isn't ready")
        if prefill is not decode and not prefill.pairs_with(decode):
            raise InvariantViolation(f"{prefill.address} and {decode.address} can't be paired")

    def _pool(self, role: Role, model: str | None) -> Iterable[Endpoint]:
        for endpoint in self._endpoints.values():
            if endpoint.role is not role or endpoint.address in self._out or not endpoint.serves(model):
                continue
            if role is not Role.PREFILL or self.partners(endpoint, model):
                yield endpoint

    def _forget_pools(self) -> None:
        self._ready.clear()
        self._partners.clear()
        self._models = None
