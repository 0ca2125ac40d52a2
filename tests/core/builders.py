"""Small builders for tests of the core: a fleet in a line, a request in a line."""

import random
from collections.abc import Iterable, Sequence

import msgspec

from pdrouter.config import Settings
from pdrouter.core import events
from pdrouter.core.cost import NEUTRAL
from pdrouter.core.decision import Decision, Placement, Rejection
from pdrouter.core.drains import DrainRates
from pdrouter.core.ejections import EjectionOptions
from pdrouter.core.fleet import Disaggregation, Endpoint, Role
from pdrouter.core.ledger import Account, RankKey
from pdrouter.core.load import RankReport
from pdrouter.core.names import Names
from pdrouter.core.policies.base import PolicyOptions
from pdrouter.core.policies.books import Books
from pdrouter.core.profiles import Profiles
from pdrouter.core.request import RequestFacts
from pdrouter.core.router import Router, RouterOptions
from pdrouter.core.work import WorkIndex
from pdrouter.errors import RouterError
from pdrouter.options import ancestors, breaker_options, ejection_options

_SETTINGS = Settings()

NO_LIMIT = EjectionOptions(most=1.0, panic=0.0)
"""Breakers take out whatever they want."""


def make_options(*, policy: str = "minimum_tokens", seed: int = 1, **changes: object) -> RouterOptions:
    """Return the core's settings as they are by default, apart from the policies and ``changes``."""
    options = RouterOptions(
        policy=policy,
        prefill_policy=policy,
        decode_policy=policy,
        rank_policy="least_work" if policy == "least_work" else "minimum_tokens",
        disaggregation=Disaggregation(_SETTINGS.disaggregation),
        accept_any_model=_SETTINGS.accept_any_model,
        breaker=breaker_options(_SETTINGS),
        ejections=ejection_options(_SETTINGS),
        entrance=None,
        report_max_age_s=_SETTINGS.report_max_age_secs,
        visible_delay_s=_SETTINGS.report_visible_delay_secs,
        history_events=_SETTINGS.ledger_history_events,
        bytes_per_token=_SETTINGS.bytes_per_token,
        max_models=4,
        prefix_bytes=_SETTINGS.prefix_index_bytes,
        prefix_block_tokens=_SETTINGS.prefix_block_bytes / _SETTINGS.bytes_per_token,
        output_tokens=_SETTINGS.default_output_tokens,
        profile=NEUTRAL,
        profiles={},
        chance=random.Random(seed),
        load_aware_spread_requests=_SETTINGS.load_aware_spread_requests,
        load_aware_sigma=_SETTINGS.load_aware_sigma,
        ancestors=ancestors(_SETTINGS),
        journal_decisions=100,
    )
    return msgspec.structs.replace(options, **changes)


def make_policy_options(seed: int) -> PolicyOptions:
    """Return the policies' settings as they are by default."""
    return PolicyOptions(
        chance=random.Random(seed),
        load_aware_spread_requests=_SETTINGS.load_aware_spread_requests,
        load_aware_sigma=_SETTINGS.load_aware_sigma,
        work=WorkIndex(Profiles(NEUTRAL, {}), Names(takes_any=True)),
        drains=DrainRates(),
        books=Books(),
        ancestors=ancestors(_SETTINGS),
    )


def make_endpoint(address: str, role: Role, *, dp_size: int = 1, **fields: object) -> Endpoint:
    """Return an endpoint; its host and port follow from its address."""
    host, _, port = address.partition(":")
    endpoint = Endpoint(address=address, host=host, port=int(port or 80), role=role, dp_size=dp_size)
    return msgspec.structs.replace(endpoint, **fields)


def prefill(address: str, *, dp_size: int = 1, **fields: object) -> Endpoint:
    """Return a prefill endpoint."""
    return make_endpoint(address, Role.PREFILL, dp_size=dp_size, **fields)


def decode(address: str, *, dp_size: int = 1, **fields: object) -> Endpoint:
    """Return a decode endpoint."""
    return make_endpoint(address, Role.DECODE, dp_size=dp_size, **fields)


def regular(address: str, *, dp_size: int = 1, **fields: object) -> Endpoint:
    """Return a regular endpoint."""
    return make_endpoint(address, Role.REGULAR, dp_size=dp_size, **fields)


def make_router(endpoints: Iterable[Endpoint], options: RouterOptions | None = None) -> Router:
    """Return a router whose endpoints are all ready."""
    router = Router(options or make_options())
    for endpoint in endpoints:
        router.observe(events.EndpointJoined(endpoint), 0.0)
    return router


def facts(tokens: int = 100, **fields: object) -> RequestFacts:
    """Return a request."""
    return msgspec.structs.replace(RequestFacts(request_id="r", prompt_tokens=tokens), **fields)


def decide(router: Router, request: RequestFacts, now_s: float, avoid: frozenset[RankKey] = frozenset()) -> Decision:
    """Return the decision for a request that can be placed."""
    answer = router.decide(request, now_s, avoid)
    assert isinstance(answer, Decision), answer
    return answer


def reject(router: Router, request: RequestFacts, now_s: float) -> RouterError:
    """Return why a request can't be placed."""
    answer = router.decide(request, now_s)
    assert isinstance(answer, Rejection), answer
    return answer.error


def prefill_of(decision: Decision) -> Placement:
    """Return the prefill leg of a pair."""
    assert decision.prefill is not None
    return decision.prefill


def report(
    router: Router, address: str, tokens: Sequence[float | None], t_s: float, now_s: float | None = None
) -> None:
    """Let an endpoint report its tokens, one number a rank."""
    ranks = [RankReport(rank, tokens=number) for rank, number in enumerate(tokens)]
    router.observe(events.LoadReported(address, ranks, t_s), t_s if now_s is None else now_s)


def report_requests(router: Router, address: str, requests: Sequence[float], t_s: float) -> None:
    """Let an endpoint report its requests, one number a rank."""
    ranks = [RankReport(rank, requests=number) for rank, number in enumerate(requests)]
    router.observe(events.LoadReported(address, ranks, t_s), t_s)


def effective(router: Router, address: str) -> list[float]:
    """Return the effective tokens of an endpoint's ranks."""
    return [rank.effective_tokens for rank in router.load.endpoints[address].ranks]


def make_account(
    *, visible_delay_s: float = 0.0, history_s: float = 30.0, history_events: int = 1000, address: str = "e:1"
) -> Account:
    """Return the account of one rank."""
    return Account(
        RankKey(address, 0), visible_delay_s=visible_delay_s, history_s=history_s, history_events=history_events
    )
