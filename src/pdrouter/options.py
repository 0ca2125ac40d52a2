"""From the settings to what each part is made of: its options, in its own words and units. Nothing is built here."""

import random
from typing import Final, cast

from pdrouter.config import Settings
from pdrouter.control.health import HealthOptions
from pdrouter.control.load_monitor import LoadOptions
from pdrouter.control.members import WatchOptions
from pdrouter.control.models import ModelOptions
from pdrouter.core.admission import AdmissionOptions
from pdrouter.core.breaker import BreakerOptions
from pdrouter.core.chooser import PolicyTable
from pdrouter.core.cost import NEUTRAL, profile_from
from pdrouter.core.ejections import EjectionOptions
from pdrouter.core.entrance import EntranceOptions
from pdrouter.core.fleet import Disaggregation
from pdrouter.core.gate import GateOptions
from pdrouter.core.policies import ENGINE, POLICIES, RANK_POLICIES
from pdrouter.core.policies.base import Ancestors
from pdrouter.core.policies.dynamo import Dynamo
from pdrouter.core.policies.least_work import LeastWork
from pdrouter.core.policies.minimum_tokens import MinimumTokens
from pdrouter.core.profiles import ProfileRule
from pdrouter.core.retry import RetryOptions
from pdrouter.core.router import RouterOptions
from pdrouter.core.shadow import ShadowOptions
from pdrouter.plugins import load_policies
from pdrouter.proxy.access import Access
from pdrouter.proxy.cors import Cors
from pdrouter.proxy.credentials import identity
from pdrouter.proxy.deadlines import TimeLimits
from pdrouter.proxy.dispatch import DispatchOptions
from pdrouter.proxy.intake import IntakeOptions
from pdrouter.proxy.limits import ClientLimits
from pdrouter.proxy.listener import DrainOptions
from pdrouter.proxy.reading import ReadingOptions
from pdrouter.proxy.suspects import SuspectOptions
from pdrouter.references import profile_entries, profile_rule
from pdrouter.upstream.pool import PoolLimits

_MAX_MODELS = 1024
"""Models whose rates are learned (I9)."""

_RETRY_BURST_S = 10.0
"""How long unused retries are saved up; chosen."""


LIVE: Final = frozenset(
    {
        "prefill",
        "decode",
        "worker",
        "engine",
        "kv_transport",
        "engine_api_key",
        "engine_api_key_file",
        "drain_notice_secs",
        "shutdown_grace_period_secs",
        "decision_headers",
        "pd_fallback",
        "request_timeout_secs",
        "prefill_timeout_secs",
        "first_token_timeout_secs",
        "stream_idle_timeout_secs",
        "upstream_max_reply_bytes",
        "retry_max_retries",
        "disable_retries",
        "retry_initial_backoff_ms",
        "retry_max_backoff_ms",
        "retry_backoff_multiplier",
        "retry_jitter_factor",
        "retry_budget_share",
        "retry_budget_per_sec",
        "max_concurrent_requests",
        "admission_max_queue_secs",
        "admission_max_kv_share",
        "admission_aging_rate",
        "queue_size",
        "queue_max_bytes",
        "queue_timeout_secs",
        "max_payload_size",
        "client_max_connections",
        "client_max_connections_per_address",
        "client_max_head_bytes",
        "client_max_headers",
        "client_max_target_bytes",
        "client_head_timeout_secs",
        "client_body_timeout_secs",
        "client_body_bytes_per_s",
        "client_idle_timeout_secs",
        "client_write_timeout_secs",
        "client_write_buffer_bytes",
        "client_write_budget_bytes",
        "client_body_budget_bytes",
        "worker_load_check_interval",
        "load_check_timeout_secs",
        "worker_startup_check_interval",
        "models_check_interval_secs",
        "max_models_per_endpoint",
        "health_check_interval_secs",
        "health_check_timeout_secs",
        "health_check_endpoint",
        "health_failure_threshold",
        "health_success_threshold",
    }
)
"""The settings that can change in a running router."""


def router_options(settings: Settings) -> RouterOptions:
    """Return the settings of the core."""
    profiles = {name: profile_from(entry) for name, entry in profile_entries().items()}
    rank_policy = _rank_policy(settings)
    return RouterOptions(
        policy=settings.policy,
        prefill_policy=settings.prefill_policy or settings.policy,
        decode_policy=settings.decode_policy or settings.policy,
        rank_policy=rank_policy,
        disaggregation=Disaggregation(settings.disaggregation),
        accept_any_model=settings.accept_any_model,
        breaker=breaker_options(settings),
        ejections=ejection_options(settings),
        entrance=entrance_options(settings),
        report_max_age_s=settings.report_max_age_secs,
        visible_delay_s=settings.report_visible_delay_secs,
        history_events=settings.ledger_history_events,
        bytes_per_token=settings.bytes_per_token,
        max_models=_MAX_MODELS,
        prefix_bytes=settings.prefix_index_bytes,
        prefix_block_tokens=settings.prefix_block_bytes / settings.bytes_per_token,
        output_tokens=settings.default_output_tokens,
        profile=profiles[settings.profile] if settings.profile else NEUTRAL,
        profiles=profiles,
        profile_rules=[ProfileRule(*profile_rule(text)) for text in settings.profile_for],
        chance=random.Random(settings.seed),  # noqa: S311
        load_aware_spread_requests=settings.load_aware_spread_requests,
        load_aware_sigma=settings.load_aware_sigma,
        ancestors=ancestors(settings),
        journal_decisions=settings.journal_decisions,
        shadow=_shadow_options(settings, rank_policy),
        plugins=_plugins(settings),
    )


def _plugins(settings: Settings) -> PolicyTable:
    """Return the policies of other packages, if one is named.

    Raises: ConfigError.
    """
    names = {settings.policy, settings.prefill_policy, settings.decode_policy, settings.shadow_policy} - {None}
    return {} if names <= POLICIES.keys() else cast("PolicyTable", load_policies(POLICIES))


def _rank_policy(settings: Settings) -> str:
    if settings.rank_fields == "none":
        return ENGINE
    if settings.dp_minimum_tokens_scheduler:
        return MinimumTokens.name
    follows = settings.policy in (LeastWork.name, Dynamo.name)
    return settings.rank_policy or (settings.policy if follows else MinimumTokens.name)


def _shadow_options(settings: Settings, rank_policy: str) -> ShadowOptions | None:
    """Return who looks on: the policy named, for ranks as well where it can choose them and the router does."""
    name = settings.shadow_policy
    if name is None:
        return None
    chooses_ranks = name in RANK_POLICIES and rank_policy != ENGINE
    chance = random.Random(settings.seed)  # noqa: S311
    return ShadowOptions(policy=name, rank_policy=name if chooses_ranks else rank_policy, chance=chance)


def ancestors(settings: Settings) -> Ancestors:
    """Return the settings of the policies that come from other routers."""
    return Ancestors(
        load_aware_generation=settings.load_aware_generation,
        minimum_tokens_published=settings.minimum_tokens_published,
        cache_threshold=settings.cache_threshold,
        balance_abs_threshold=settings.balance_abs_threshold,
        balance_rel_threshold=settings.balance_rel_threshold,
        max_idle_s=settings.max_idle_secs,
        assignment_mode=settings.assignment_mode,
        bucket_adjust_interval_s=settings.bucket_adjust_interval_secs,
        llm_d_prefill_tokens_per_s=settings.llm_d_prefill_tokens_per_s,
    )


def pool_limits(settings: Settings) -> PoolLimits:
    """Return the bounds of the connections to one engine."""
    return PoolLimits(
        connect_timeout_s=settings.connect_timeout_secs,
        idle_timeout_s=settings.upstream_idle_timeout_secs,
        max_idle=settings.upstream_max_idle,
        max_connections=settings.upstream_max_connections,
        read_buffer_bytes=settings.upstream_read_buffer_bytes,
        max_header_bytes=settings.upstream_max_header_bytes,
    )


def client_limits(settings: Settings) -> ClientLimits:
    """Return the bounds of clients' connections and requests."""
    return ClientLimits(
        max_payload_bytes=settings.max_payload_size,
        max_connections=settings.client_max_connections,
        max_connections_per_address=settings.client_max_connections_per_address,
        max_head_bytes=settings.client_max_head_bytes,
        max_headers=settings.client_max_headers,
        max_target_bytes=settings.client_max_target_bytes,
        head_timeout_s=settings.client_head_timeout_secs,
        body_timeout_s=settings.client_body_timeout_secs,
        body_bytes_per_s=settings.client_body_bytes_per_s,
        idle_timeout_s=settings.client_idle_timeout_secs,
        write_timeout_s=settings.client_write_timeout_secs,
        write_buffer_bytes=settings.client_write_buffer_bytes,
        write_budget_bytes=settings.client_write_budget_bytes,
        body_budget_bytes=settings.client_body_budget_bytes,
    )


def access(settings: Settings) -> Access:
    """Return who may use the API and change the fleet."""
    return Access(
        api_key=settings.api_key,
        allowed_hosts=frozenset(name.lower().encode() for name in (settings.host, *settings.allowed_hosts)),
        origins=frozenset(origin.encode() for origin in settings.cors_allowed_origins) - {b"*"},
        is_open=settings.open_workers_api,
    )


def cors(settings: Settings) -> Cors | None:
    """Return which origins may call from a browser, if any."""
    origins = settings.cors_allowed_origins
    return Cors(frozenset(origin.encode() for origin in origins)) if origins else None


def intake_options(settings: Settings) -> IntakeOptions:
    """Return the settings of the intake."""
    return IntakeOptions(
        request_id_headers=tuple(name.lower().encode() for name in settings.request_id_headers),
        forwarded=frozenset(name.encode() for name in settings.forward_headers),
        reading=ReadingOptions(
            inline_bytes=settings.body_inline_bytes,
            image_tokens=settings.image_tokens,
            prefix_block_bytes=settings.prefix_block_bytes,
        ),
        owns_ranks=settings.rank_fields != "none",
        priority_header=settings.priority_header.lower().encode(),
        tenant_header=settings.tenant_header.lower().encode(),
        rate_header=settings.rate_limit_key_header.lower().encode(),
        tenant_weights=_tenant_weights(settings),
        max_priority=settings.max_client_priority,
        takes_any_tenant=settings.tenants == "all",
        keeps_credentials=settings.forward_client_key,
        salts_tenants=settings.cache_salt == "tenant",
    )


def _tenant_weights(settings: Settings) -> dict[bytes, float]:
    """Return the weights of tenants by their names, a key in its one spelling."""
    header = settings.tenant_header.lower().encode()
    parts = [secret.reveal().rpartition("=") for secret in settings.tenant_weights]
    named = {name.encode("latin-1", "replace"): float(weight) for name, _, weight in parts}
    return {identity({header: name}, header): weight for name, weight in named.items()}


def entrance_options(settings: Settings) -> EntranceOptions | None:
    """Return the settings of the queue; there is none where nothing ever lets a request wait."""
    return queue_options(settings) if settings.admission or settings.max_concurrent_requests >= 0 else None


def queue_options(settings: Settings) -> EntranceOptions:
    """Return the settings of a queue that is there."""
    most = settings.max_concurrent_requests
    return EntranceOptions(
        AdmissionOptions(
            max_waiting=settings.queue_size,
            max_waiting_bytes=settings.queue_max_bytes,
            max_wait_s=settings.queue_timeout_secs,
            aging_rate=settings.admission_aging_rate,
            rate_per_s=None,
            rate_burst=1.0,
        ),
        GateOptions(
            max_running=most if most >= 0 else None,
            max_queue_s=settings.admission_max_queue_secs if settings.admission else None,
            max_kv_share=settings.admission_max_kv_share if settings.admission else None,
        ),
    )


def breaker_options(settings: Settings) -> BreakerOptions:
    """Return the settings of the breakers."""
    return BreakerOptions(
        failure_threshold=settings.cb_failure_threshold,
        success_threshold=settings.cb_success_threshold,
        open_s=settings.cb_timeout_duration_secs,
        window_s=settings.cb_window_duration_secs,
        is_disabled=settings.disable_circuit_breaker,
    )


def ejection_options(settings: Settings) -> EjectionOptions:
    """Return how much breakers may take out."""
    return EjectionOptions(settings.max_ejection_percent / 100, settings.healthy_panic_threshold / 100)


def retry_options(settings: Settings) -> RetryOptions:
    """Return the settings of further attempts."""
    return RetryOptions(
        initial_backoff_s=settings.retry_initial_backoff_ms / 1e3,
        max_backoff_s=settings.retry_max_backoff_ms / 1e3,
        backoff_multiplier=settings.retry_backoff_multiplier,
        jitter=settings.retry_jitter_factor,
        budget_share=settings.retry_budget_share,
        budget_per_s=settings.retry_budget_per_sec,
        budget_most=_RETRY_BURST_S * settings.retry_budget_per_sec,
    )


def time_limits(settings: Settings) -> TimeLimits:
    """Return the limits of a request's time."""
    return TimeLimits(
        request_s=settings.request_timeout_secs,
        prefill_s=settings.prefill_timeout_secs,
        first_token_s=settings.first_token_timeout_secs,
        idle_s=settings.stream_idle_timeout_secs,
        keepalive_s=settings.stream_keepalive_secs,
    )


def dispatch_options(settings: Settings) -> DispatchOptions:
    """Return the settings of the dispatcher."""
    return DispatchOptions(
        limits=time_limits(settings),
        max_reply_bytes=settings.upstream_max_reply_bytes,
        max_samples=settings.max_samples,
        decision_headers=settings.decision_headers,
        max_attempts=1 if settings.disable_retries else settings.retry_max_retries,
        suspects=SuspectOptions(settings.suspect_ttl_secs, settings.suspect_max),
        falls_back_to_decode=settings.pd_fallback == "decode",
        retry=retry_options(settings),
    )


def drain_options(settings: Settings) -> DrainOptions:
    """Return the times of a stop."""
    return DrainOptions(settings.drain_notice_secs, settings.shutdown_grace_period_secs)


def watch_options(settings: Settings) -> WatchOptions:
    """Return how endpoints are watched."""
    return WatchOptions(
        health=_health_options(settings),
        load=LoadOptions(settings.worker_load_check_interval, settings.load_check_timeout_secs),
        models=ModelOptions(settings.models_check_interval_secs, settings.max_models_per_endpoint),
    )


def _health_options(settings: Settings) -> HealthOptions:
    """Return the settings of the health checks."""
    return HealthOptions(
        path=settings.health_check_endpoint,
        interval_s=settings.health_check_interval_secs,
        timeout_s=settings.health_check_timeout_secs,
        startup_interval_s=settings.worker_startup_check_interval,
        failure_threshold=settings.health_failure_threshold,
        success_threshold=settings.health_success_threshold,
        is_disabled=settings.disable_health_check,
        may_be_refused=settings.forward_client_key,
    )
