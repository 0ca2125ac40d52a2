"""The fleet: endpoints, their roles and groups, who is ready, and who may be paired with whom.

It knows nothing of load (``load.py``). Identity is the address, so that an endpoint described anew stays itself.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum

import msgspec

from pdrouter.core.ledger import RankKey
from pdrouter.core.names import Card, Names, names_of
from pdrouter.core.request import RequestFacts, Task
from pdrouter.errors import InvariantViolation, RouterError
from pdrouter.setting import Secret

HEALTH = "health"
BREAKER = "breaker"
DRAIN = "drain"
"""Who may take an endpoint or a rank out: health checks, its breaker, whoever wants it to take nothing new."""

RANKS = "ranks"
"""Who takes an endpoint out while each of its ranks is out by itself."""

_MAX_NAMED = 4
"""Ranks whose reasons are told where all are out."""


class Role(StrEnum):
    """What an endpoint does for a request: read the prompt, write the answer, or both (regular)."""

    PREFILL = "prefill"
    DECODE = "decode"
    REGULAR = "regular"


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One engine server.

    ``address`` is ``host:port``. ``model`` is the base model, ``None`` until the engine has told it. ``cards`` are the
    ids that the engine lists, ``names`` what requests may call them. Endpoints may be paired when engine, KV transport,
    group and model agree (I6). ``version`` and ``bootstrap_port`` are the engine's own.
    ``warning`` says what doesn't add up in what it tells, though it can be used.
    ``profile`` names the timing it is expected to have (``cost.py``), ``gpu`` what it runs on.
    ``dp_size`` is the number of its data-parallel ranks; ``dp_attention`` says that they share one tensor-parallel
    group (SGLang's DP attention) instead of being replicas.
    ``rank_base`` is the first of its ranks among those of its deployment (global), where several endpoints share one;
    ranks are local everywhere else. ``kv_capacity_tokens`` is that of one rank. ``kv_address`` is where its KV
    transport listens, ``kv_engine_ids`` what that calls its ranks.
    ``api_key`` is what its engine wants to be shown.
    ``pair_tasks`` are those that its engine does in two legs; ``pairs_lists`` says that it does so for a list of
    prompts, ``pairs_copies`` for several answers to one, ``reads_prompts`` that a decode endpoint can do the whole task
    alone, ``takes_ranks`` that a request runs on the rank that it names, ``reports_lag`` that its load reports may show
    work later than they say, ``tells_transfer`` that a decode endpoint counts as cached what came from a prefill,
    ``counts_messages`` that it may tell the number of tokens in messages, ``puts_low_first`` that of two ``priority``
    fields the lower goes first.
    """

    address: str
    host: str
    port: int
    role: Role
    engine: str = "sglang"
    kv_transport: str = "bootstrap"
    group: str = ""
    model: str | None = None
    cards: tuple[Card, ...] = ()
    names: frozenset[str] = frozenset()
    dp_size: int = 1
    dp_attention: bool = False
    bootstrap_port: int | None = None
    version: str | None = None
    warning: str | None = None
    profile: str | None = None
    gpu: str | None = None
    rank_base: int = 0
    kv_capacity_tokens: int | None = None
    kv_address: str | None = None
    kv_engine_ids: tuple[str, ...] = ()
    api_key: Secret | None = None
    pair_tasks: frozenset[Task] = frozenset({Task.GENERATE})
    pairs_lists: bool = True
    pairs_copies: bool = False
    reads_prompts: bool = False
    takes_ranks: bool = True
    reports_lag: bool = False
    tells_transfer: bool = False
    counts_messages: bool = False
    puts_low_first: bool = False

    def __post_init__(self) -> None:
        """Derive its names; also when it is described again."""
        msgspec.structs.force_setattr(self, "names", frozenset(names_of(self.model, self.cards)))

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self.address}"

    def serves(self, model: str | None) -> bool:
        """Whether a request for ``model`` may go there; one that isn't known may serve any."""
        return model is None or self.model is None or model in self.names

    def parts(self, facts: RequestFacts) -> bool:
        """Whether its engine does a request in two legs."""
        if facts.task not in self.pair_tasks:
            return False
        return (self.pairs_lists or not facts.is_list) and (self.pairs_copies or facts.copies == 1)

    def pairs_with(self, other: "Endpoint") -> bool:
        """Whether KV can go from this prefill endpoint to that decode endpoint (I6)."""
        return (
            self.engine == other.engine
            and self.kv_transport == other.kv_transport
            and self.group == other.group
            and (self.model is None or other.serves(self.model))
        )


class Way(StrEnum):
    """How a request may be served: by a pair, or by one endpoint of a role."""

    PAIR = "pair"
    REGULAR = "regular"
    DECODE = "decode"
    PREFILL = "prefill"


ROLE_OF: Mapping[Way, Role] = {
    Way.PAIR: Role.PREFILL,
    Way.REGULAR: Role.REGULAR,
    Way.DECODE: Role.DECODE,
    Way.PREFILL: Role.PREFILL,
}
"""The role of the endpoint that is chosen first."""


class Disaggregation(StrEnum):
    """When a pair serves a request that one endpoint could serve as well; ``config.py`` says what they mean."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class Fleet:
    """All endpoints by address, with the reason why those out are out.

    ``ranks_out`` are, by address, the ranks that are out by themselves; an endpoint without any isn't in it.
    """

    def __init__(self, disaggregation: Disaggregation, *, takes_any: bool) -> None:
        self.names = Names(takes_any=takes_any)
        self.ranks_out: dict[str, Sequence[int]] = {}
        self._disaggregation = disaggregation
        self._ways: dict[tuple[str | None, Task, bool, bool, bool], tuple[Way, ...]] = {}
        self._endpoints: dict[str, Endpoint] = {}
        self._out: dict[str | RankKey, dict[str, str]] = {}
        self._puts_low_first: dict[str | None, bool] = {}
        self._alone: dict[tuple[Role, str | None], tuple[Endpoint, ...]] = {}
        self._ready: dict[tuple[Role, str | None], tuple[Endpoint, ...]] = {}
        self._partners: dict[tuple[str, str | None], tuple[Endpoint, ...]] = {}

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
            self._out[endpoint.address] = {HEALTH: out}
        self._endpoints[endpoint.address] = endpoint
        self.names.put(endpoint.address, endpoint.model, endpoint.cards)
        for rank in self.ranks_out.get(endpoint.address, ()):
            if rank >= endpoint.dp_size:
                del self._out[RankKey(endpoint.address, rank)]
        self._judge_ranks(endpoint)
        self._forget_pools()

    def remove(self, address: str) -> None:
        """Forget an endpoint."""
        self._endpoints.pop(address, None)
        self._out.pop(address, None)
        self.names.remove(address)
        for rank in self.ranks_out.pop(address, ()):
            del self._out[RankKey(address, rank)]
        self._forget_pools()

    def set_ready(self, key: str | RankKey, out: str | None, source: str = HEALTH) -> None:
        """Let a source take an endpoint or a rank out, with the reason, or not any more (``None``).

        A rank is in when no source takes it out; an endpoint, when one of its ranks is in as well.
        """
        endpoint = self._endpoints.get(key if isinstance(key, str) else key.endpoint)
        if endpoint is not None and (isinstance(key, str) or key.rank < endpoint.dp_size):
            self._note(key, out, source)
            self._judge_ranks(endpoint)
            self._forget_pools()

    def why_out(self, key: str | RankKey, source: str | None = None) -> str | None:
        """Return why an endpoint, or a rank by itself, can't be used, by one source or all; ``None`` if it can."""
        reasons = self._out.get(key, {})
        return "; ".join(reasons.values()) or None if source is None else reasons.get(source)

    def is_ready(self, address: str) -> bool:
        """Whether an endpoint takes requests, on some rank at least."""
        return address in self._endpoints and address not in self._out

    def ready(self, role: Role, model: str | None) -> tuple[Endpoint, ...]:
        """Return the ready endpoints of a role that may serve a model; for prefill only those with a ready partner."""
        pool = self._ready.get((role, model))
        if pool is None:
            pool = self._ready[role, model] = tuple(self._pool(role, model))
        return pool

    def alone(self, role: Role, model: str | None) -> tuple[Endpoint, ...]:
        """Return the ready endpoints of a role that may serve a model without a partner."""
        pool = self._alone.get((role, model))
        if pool is None:
            every = self._endpoints.values()
            pool = self._alone[role, model] = tuple(e for e in every if e.role is role and self._may_serve(e, model))
        return pool

    def able(self, role: Role, model: str | None, task: Task) -> tuple[Endpoint, ...]:
        """Return those of ``alone`` whose engines have a task that needs one endpoint."""
        pool = self.alone(role, model)
        return pool if task is not Task.COUNT else tuple(e for e in pool if e.counts_messages)

    def ways(self, model: str | None, facts: RequestFacts) -> tuple[Way, ...]:
        """Return the ways in which a request may be served now, the preferred first where their times aren't known."""
        key = (model, facts.task, facts.is_list, facts.copies == 1, facts.is_whole)
        ways = self._ways.get(key)
        if ways is None:
            ways = self._ways[key] = tuple(self._find_ways(model, facts))
        return ways

    def puts_low_first(self, base: str | None) -> bool:
        """Whether engines of a base model, or all if it isn't known, read ``priority`` so; else where most do."""
        puts = self._puts_low_first.get(base)
        if puts is None:
            several = [e.puts_low_first for e in self if base is None or e.model == base]
            puts = self._puts_low_first[base] = 2 * sum(several) > len(several)
        return puts

    def splits(self, facts: RequestFacts) -> bool:
        """Whether several answers to a prompt take a request for each: only pairs can serve it, one at a time."""
        if facts.copies == 1:
            return False
        try:
            model = self.names.target(facts.model, facts.adapter).name
        except RouterError:  # the decision will say so
            return False
        one = msgspec.structs.replace(facts, copies=1, prompts=facts.prompts // facts.copies)
        return not self.ways(model, facts) and Way.PAIR in self.ways(model, one)

    def partners(self, prefill: Endpoint, model: str | None) -> tuple[Endpoint, ...]:
        """Return the ready decode endpoints that a prefill endpoint may be paired with."""
        partners = self._partners.get((prefill.address, model))
        if partners is None:
            pool = self.ready(Role.DECODE, model)
            partners = tuple(d for d in pool if prefill.pairs_with(d))
            self._partners[prefill.address, model] = partners
        return partners

    def check_pair(self, prefill: Endpoint, decode: Endpoint, model: str | None) -> None:
        """Hold I6 for a decision.

        Raises: InvariantViolation when one isn't ready or doesn't serve the model, or they can't be paired.
        """
        for endpoint in (prefill, decode):
            if not self.is_ready(endpoint.address):
                raise InvariantViolation(f"{endpoint.address} was chosen though it isn't ready")
            if not endpoint.serves(model):
                raise InvariantViolation(f"{endpoint.address} was chosen though it doesn't serve {model!r}")
        if prefill is not decode and not prefill.pairs_with(decode):
            raise InvariantViolation(f"{prefill.address} and {decode.address} can't be paired")

    def check_rank(self, key: RankKey) -> None:
        """Hold I6 for the rank of a leg.

        Raises: InvariantViolation when it isn't ready.
        """
        if key in self._out:
            raise InvariantViolation(f"rank {key.rank} of {key.endpoint} was chosen though it isn't ready")

    def _note(self, key: str | RankKey, out: str | None, source: str) -> None:
        reasons = self._out.setdefault(key, {})
        if out is None:
            reasons.pop(source, None)
        else:
            reasons[source] = out
        if not reasons:
            del self._out[key]

    def _judge_ranks(self, endpoint: Endpoint) -> None:
        """See which ranks are out by themselves; while all are, their endpoint is."""
        address = endpoint.address
        keys = [key for rank in range(endpoint.dp_size) if (key := RankKey(address, rank)) in self._out]
        if keys:
            self.ranks_out[address] = [key.rank for key in keys]
        else:
            self.ranks_out.pop(address, None)
        self._note(address, self._name_ranks(keys) if len(keys) == endpoint.dp_size else None, RANKS)

    def _name_ranks(self, keys: Sequence[RankKey]) -> str:
        causes = [f"rank {key.rank} {self.why_out(key)}" for key in keys[:_MAX_NAMED]]
        more = f" and {len(keys) - _MAX_NAMED} more" if len(keys) > _MAX_NAMED else ""
        return f"all its ranks are out: {', '.join(causes)}{more}"

    def _find_ways(self, model: str | None, facts: RequestFacts) -> Iterator[Way]:
        task = facts.task
        is_ready = {role: bool(self.able(role, model, task)) for role in Role}
        if task in (Task.READ, Task.COUNT, Task.OTHER):
            order = (Way.REGULAR, Way.PREFILL) if task is Task.READ else (Way.REGULAR, Way.PREFILL, Way.DECODE)
            yield from (way for way in order if is_ready[ROLE_OF[way]])
            return
        pairs = () if facts.is_whole else self.ready(Role.PREFILL, model)
        decodes = self.alone(Role.DECODE, model)
        is_paired = bool(pairs) and all(e.parts(facts) for e in (*pairs, *decodes))
        whole = [Way.REGULAR] if is_ready[Role.REGULAR] else []
        if decodes and all(d.reads_prompts for d in decodes):
            whole.append(Way.DECODE)
        if is_paired and not (whole and self._disaggregation is Disaggregation.NEVER):
            yield Way.PAIR
        if not is_paired or self._disaggregation is not Disaggregation.ALWAYS:
            yield from whole

    def _pool(self, role: Role, model: str | None) -> Iterable[Endpoint]:
        for endpoint in self.alone(role, model):
            if role is not Role.PREFILL or self.partners(endpoint, model):
                yield endpoint

    def _may_serve(self, endpoint: Endpoint, model: str | None) -> bool:
        return endpoint.address not in self._out and endpoint.serves(model)

    def _forget_pools(self) -> None:
        self._ways.clear()
        self._puts_low_first.clear()
        self._alone.clear()
        self._ready.clear()
        self._partners.clear()
