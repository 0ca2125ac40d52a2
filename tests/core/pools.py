"""Loads for tests of the policies that come from other routers."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from pdrouter.core.decision import Decision, Placement, Why
from pdrouter.core.fleet import Endpoint, Role
from pdrouter.core.ledger import Account, LegKind, RankKey
from pdrouter.core.load import EndpointLoad, LoadView, RankReport
from pdrouter.core.policies.base import Candidate, Policy, PolicyOptions, Question

from .builders import decode, facts, make_policy_options, prefill, regular

SEEDS = range(120)


def busy_pool(counts: Sequence[int], *, dp_size: int = 1, group: str = "g") -> list[EndpointLoad]:
    """Return prefill endpoints ``p0``, ``p1``... on whose rank 0 we hold so many requests; nobody reports."""
    view = LoadView(report_max_age_s=10.0, visible_delay_s=0.0, history_events=1000)
    for number, count in enumerate(counts):
        view.add(prefill(f"p{number}", dp_size=dp_size, group=group))
        hold(view.endpoints[f"p{number}"], count)
    return list(view.endpoints.values())


def hold(load: EndpointLoad, requests: int) -> None:
    """Reserve so many requests on an endpoint's rank 0."""
    for _ in range(requests):
        load.ranks[0].account.reserve(LegKind.PREFILL, 10, 10, 2.0)


Row = tuple[float | None, float | None, float | None]


def telling_pool(rows: Sequence[Row]) -> list[EndpointLoad]:
    """Return decode endpoints ``d0``, ``d1``... that report (requests, tokens per second, share of KV in use)."""
    view = LoadView(report_max_age_s=10.0, visible_delay_s=0.0, history_events=1000)
    for number, (requests, rate, use) in enumerate(rows):
        view.add(decode(f"d{number}"))
        report = RankReport(0, tokens=1.0, requests=requests, throughput_tokens_per_s=rate, kv_use=use)
        if (requests, rate, use) != (None, None, None):
            view.accept(f"d{number}", [report], 1.0, 1.0)
    return list(view.endpoints.values())


def ask(
    role: Role = Role.PREFILL,
    *,
    held: Mapping[str, int] | None = None,
    tokens: int = 100,
    now_s: float = 0.0,
    scope: tuple[str, ...] = ("x",),
    **fields: object,
) -> Question:
    """Return a question about a prompt of which endpoints hold so many tokens on rank 0."""
    cached = {RankKey(address, 0): count for address, count in (held or {}).items()}
    return Question(scope, role, tokens, cached, 50.0, now_s, facts(tokens, **fields))


def options(seed: int = 1, **changes: object) -> PolicyOptions:
    """Return the policies' settings, with changes to those of the policies from other routers."""
    made = make_policy_options(seed)
    return msgspec.structs.replace(made, ancestors=msgspec.structs.replace(made.ancestors, **changes))


def picks(
    make: Callable[[PolicyOptions], Policy], question: Question, pool: Sequence[Candidate], **changes: object
) -> Counter[str]:
    """Return which candidates a new policy picks over many seeds, and how often."""
    return Counter(str(pool[make(options(s, **changes)).choose(question, pool).index].key) for s in SEEDS)


def placed(
    number: int,
    *,
    on: str = "p0",
    rank: int = 0,
    to: str | None = "d0",
    tokens: int = 100,
    blocks: Sequence[int] = (),
    block_tokens: float = 10.0,
    now_s: float = 0.0,
) -> Decision:
    """Return a decision: read on a rank of ``on``, written on rank 0 of ``to``; ``None``: both on one."""
    request = facts(tokens, prefix_blocks=tuple(blocks), block_tokens=block_tokens)
    first = _placement(regular(on) if to is None else prefill(on), rank, tokens)
    last = first if to is None else _placement(decode(to), 0, tokens)
    return Decision(
        number=number,
        facts=request,
        prefill=None if to is None else first,
        decode=last,
        prefix_tokens=0,
        decided_at_s=now_s,
    )


def _placement(endpoint: Endpoint, rank: int, tokens: int) -> Placement:
    kind, why = LegKind(str(endpoint.role)), Why("test", "")
    account = Account(RankKey(endpoint.address, rank), visible_delay_s=0.0, history_s=1.0, history_events=10)
    return Placement(endpoint, kind, rank, account.reserve(kind, tokens, tokens, 0.0), why, why, None)
