"""Every setting: default, unit, range and doc string, each written once.

Flags, environment variables, YAML keys and ``docs/config.md`` are derived from ``Settings``
(``python -m pdrouter.manual`` prints it). It must not know who uses a setting. Read
``Settings`` first, then ``loading.py``, which fills it.
"""

from typing import Annotated, Final, Literal, get_args

from msgspec import UNSET, Struct, UnsetType

from pdrouter.references import check_profile, check_profile_rule, check_tokenizer_file
from pdrouter.setting import (
    KeyFile,
    Secret,
    Setting,
    check_forwarded,
    check_header,
    check_host,
    check_key,
    check_kv_address,
    check_origin,
    check_path,
    check_url,
    check_weight,
    setting,
    settings_of,
)

AncestorPolicyName = Literal[
    "power_of_two",
    "load_aware",
    "cache_aware",
    "prefix_cache",
    "consistent_hashing",
    "manual",
    "bucket",
    "dynamo",
    "llm_d",
    "llm_d_pd",
]
PolicyName = Literal["least_work", "minimum_tokens", "random", "round_robin", "least_request", AncestorPolicyName]
RankPolicyName = Literal["least_work", "minimum_tokens", "dynamo", "round_robin", "random", "engine"]
AssignmentMode = Literal["random", "min_load", "min_group"]
RankFields = Literal["auto", "routed", "legacy", "header", "none"]
EngineName = Literal["sglang", "vllm", "trtllm", "openai"]
KvTransport = Literal["bootstrap", "nixl", "mooncake", "p2p_nccl", "shared_storage", "native", "none"]
Disaggregation = Literal["auto", "always", "never"]
PdFallback = Literal["none", "decode"]
ReadinessRule = Literal["any", "all"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "console", "json"]


# Two lines a setting, the default at the end of the second, read better than one argument a line.
# fmt: off
class EndpointSettings(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One engine server; in YAML a mapping, or the text ``URL [BOOTSTRAP_PORT|none]``."""

    url: Annotated[str, setting("Endpoint",
        "Where the engine serves HTTP: `http://HOST:PORT`.", check=check_url)]
    bootstrap_port: Annotated[int, setting("Endpoint",
        "Port where a prefill engine hands over KV; none sends null, unset asks the engine.",
        unit="port number", low=1, high=65_535)] | UnsetType | None = UNSET
    engine: Annotated[EngineName | None, setting("Endpoint",
        "Kind of engine; unset: the engine of all.")] = None
    kv_transport: Annotated[KvTransport | None, setting("Endpoint",
        "How KV comes from prefill to decode; unset: as for all.")] = None
    kv_address: Annotated[str | None, setting("Endpoint",
        "Where the KV transport p2p_nccl listens: `IP:PORT`, as the engine's kv_ip and kv_port say.",
        check=check_kv_address)] = None
    dp_start_rank: Annotated[int, setting("Endpoint",
        "First of its ranks among those of its deployment, where several endpoints share one (vLLM); unset asks the "
        "engine.", unit="rank", low=0, high=65_535)] | None = None
    group: Annotated[str, setting("Endpoint",
        "Only endpoints of one group are paired.")] = ""
    model: Annotated[str | None, setting("Endpoint",
        "Name of the model that the engine serves; unset asks the engine.")] = None
    dp_size: Annotated[int, setting("Endpoint",
        "Data-parallel ranks in the engine; unset asks the engine.",
        unit="ranks", low=1, high=4096)] | None = None
    profile: Annotated[str | None, setting("Endpoint",
        "Timing that the engine is expected to have, by name; unset: as profile_for says, else profile.",
        check=check_profile)] = None
    gpu: Annotated[str | None, setting("Endpoint",
        "What the engine runs on, in any words; profile_for looks at it.")] = None
    api_key: Annotated[Secret | None, setting("Endpoint",
        "Key that the engine wants (its --api-key); unset: engine_api_key.", check=check_key)] = None
    api_key_file: Annotated[KeyFile | None, setting("Endpoint",
        "File with that key; not in the workers API.")] = None


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a router is started with; build it with ``load_settings``, which checks every value."""

    prefill: Annotated[tuple[EndpointSettings, ...], setting("Fleet",
        "Engines that read prompts.")] = ()
    decode: Annotated[tuple[EndpointSettings, ...], setting("Fleet",
        "Engines that write answers.")] = ()
    worker: Annotated[tuple[EndpointSettings, ...], setting("Fleet",
        "Regular engines, which do both; also --worker-urls URL URL ....")] = ()

    engine: Annotated[EngineName, setting("Fleet",
        "Kind of engine, where an endpoint doesn't say its own.")] = "sglang"
    kv_transport: Annotated[KvTransport | None, setting("Fleet",
        "How KV comes from prefill to decode; unset: bootstrap for sglang, nixl for vllm, native for trtllm.")] = None

    engine_api_key: Annotated[Secret | None, setting("Fleet",
        "Key that engines want (their --api-key), sent as `authorization: Bearer KEY` with every request; to endpoints "
        "that were added by the API only if there is an api_key. Unset: api_key, to endpoints of the settings.",
        check=check_key)] = None
    engine_api_key_file: Annotated[KeyFile | None, setting("Fleet",
        "File with that key; read when the settings are.")] = None
    forward_client_key: Annotated[bool, setting("Fleet",
        "A client's own key goes to the engine instead, if it brought one; and an engine may refuse to tell of itself.",
        )] = False

    host: Annotated[str, setting("Server",
        "Address to listen on.", check=check_host)] = "127.0.0.1"
    port: Annotated[int, setting("Server",
        "Port to listen on; 0 lets the kernel choose.", unit="port number", low=0, high=65535)] = 30000
    max_payload_size: Annotated[int, setting("Server",
        "A longer request body gets 413.", unit="bytes", low=1, high=2**40)] = 536_870_912
    max_samples: Annotated[int, setting("Server",
        "Most answers to a prompt (`n`) where each has to be a request of its own, as with SGLang's pairs; above: 400. "
        "OpenAI's own limit is 128.", unit="requests", low=1, high=4096)] = 128
    request_id_headers: Annotated[tuple[str, ...], setting("Server",
        "The first of these headers that a request carries is its id.",
        check=check_header)] = ("x-request-id", "x-correlation-id", "x-trace-id", "request-id")
    forward_headers: Annotated[tuple[str, ...], setting("Server",
        "Headers of requests that engines get, beside those that they always get (docs/engines.md).",
        check=check_forwarded)] = ()
    decision_headers: Annotated[bool, setting("Server",
        "Replies carry x-pdrouter-prefill and x-pdrouter-decode: address and rank chosen.")] = True
    drain_notice_secs: Annotated[float, setting("Server",
        "Time after SIGTERM in which requests are still taken; /readiness says no.", unit="s", low=0, high=3600)] = 2.0
    shutdown_grace_period_secs: Annotated[float, setting("Server",
        "Time for requests to end after that, or on an engine that leaves.", unit="s", low=0, high=86_400)] = 180.0
    config_check_interval_secs: Annotated[float, setting("Server",
        "Time between two looks at the settings' file; SIGHUP looks at once.", unit="s", low=0.05, high=86_400)] = 5.0
    readiness: Annotated[ReadinessRule, setting("Server",
        "What /readiness needs: that any model can be served, or every model that some endpoint has.")] = "any"
    api_key: Annotated[Secret | None, setting("Server",
        "Key that a request must bring, `authorization: Bearer KEY` or `x-api-key: KEY`, unless it only reads a page; "
        "unset: none.")] = None
    open_workers_api: Annotated[bool, setting("Server",
        "Where there is no api_key, let other machines change the fleet, too.")] = False
    allowed_hosts: Annotated[tuple[str, ...], setting("Server",
        "Where there is no api_key, host names under which the fleet may be changed, beside localhost and IP "
        "addresses; a web page can give the router any other name.", check=check_host)] = ()
    log_level: Annotated[LogLevel, setting("Server",
        "Least severe log lines that are written; debug has one for each decision.")] = "info"
    log_format: Annotated[LogFormat, setting("Server",
        "Log lines for people (console) or machines (json); auto is console on a terminal.")] = "auto"

    client_max_connections: Annotated[int, setting("Clients",
        "Most connections of clients; one more gets 503.", unit="connections", low=1, high=1_000_000)] = 10_000
    client_max_connections_per_address: Annotated[int, setting("Clients",
        "Most connections of one client address, or of one /64 network of IPv6; unset: no limit of its own.",
        unit="connections", low=1, high=1_000_000)] | None = None
    client_max_head_bytes: Annotated[int, setting("Clients",
        "A longer request head gets 431.", unit="bytes", low=1024, high=2**24)] = 65_536
    client_max_headers: Annotated[int, setting("Clients",
        "A request with more headers gets 431.", unit="headers", low=4, high=65_536)] = 100
    client_max_target_bytes: Annotated[int, setting("Clients",
        "A longer request target (path and query) gets 414.", unit="bytes", low=64, high=2**24)] = 8192
    client_head_timeout_secs: Annotated[float, setting("Clients",
        "Time for a request's head from its first byte on; then 408.", unit="s", low=0.05, high=86_400)] = 10.0
    client_body_timeout_secs: Annotated[float, setting("Clients",
        "Time for a request's body beyond what client_body_bytes_per_s allows, and longest pause in it; then 408.",
        unit="s", low=0.05, high=86_400)] = 30.0
    client_body_bytes_per_s: Annotated[int, setting("Clients",
        "A body may take as long as it would at this rate, and client_body_timeout_secs more.",
        unit="bytes/s", low=1, high=2**40)] = 1024
    client_body_budget_bytes: Annotated[int, setting("Clients",
        "Most bytes of request bodies held until they are answered, all clients together; beyond it the largest that "
        "is coming in gets 503.", unit="bytes", low=65_536, high=2**44)] = 2_147_483_648
    body_inline_bytes: Annotated[int, setting("Clients",
        "A longer request body is read in a thread, and so is one of many small objects: reading is to stop the event "
        "loop for no more than some 5 ms.", unit="bytes", low=0, high=2**40)] = 262_144
    client_idle_timeout_secs: Annotated[float, setting("Clients",
        "An idle connection is closed after this time; longer than a load balancer's in front (often 60).",
        unit="s", low=0.05, high=86_400)] = 75.0
    client_write_timeout_secs: Annotated[float, setting("Clients",
        "A client that takes nothing of what waits for it is parted from after this time.",
        unit="s", low=0.05, high=86_400)] = 120.0
    client_write_buffer_bytes: Annotated[int, setting("Clients",
        "Bytes of an answer written ahead for a slow client before its engine is slowed.",
        unit="bytes", low=1024, high=2**30)] = 65_536
    client_write_budget_bytes: Annotated[int, setting("Clients",
        "Most bytes that wait to be sent, all clients together; the connections with most of them are cut first.",
        unit="bytes", low=65_536, high=2**44)] = 536_870_912
    cors_allowed_origins: Annotated[tuple[str, ...], setting("Clients",
        "Origins whose pages may call the router from a browser: `https://HOST[:PORT]`, or `*` for any; none: no page "
        "may (sglang-router: any).", check=check_origin)] = ()
    rate_limit_requests_per_min: Annotated[int, setting("Clients",
        "Requests per minute that a key may make, up to as many at once; more get 429; unset: any.",
        unit="requests/min", low=1, high=1_000_000_000)] | None = None
    rate_limit_tokens_per_min: Annotated[int, setting("Clients",
        "Tokens per minute that a key may ask for, its prompts and longest answers; more get 429; unset: any.",
        unit="tokens/min", low=1, high=1_000_000_000_000)] | None = None
    rate_limit_key_header: Annotated[str, setting("Clients",
        "The header that is the key; requests without it share one. `authorization` stands for `x-api-key`, too.",
        check=check_header)] = "authorization"

    policy: Annotated[PolicyName | str, setting("Routing",
        "How an endpoint is chosen (sglang-router: cache_aware).")] = "least_work"
    prefill_policy: Annotated[PolicyName | str | None, setting("Routing",
        "How a prefill endpoint is chosen; unset: as policy says.")] = None
    decode_policy: Annotated[PolicyName | str | None, setting("Routing",
        "How a decode endpoint is chosen; unset: as policy says.")] = None
    rank_policy: Annotated[RankPolicyName | None, setting("Routing",
        "How a data-parallel rank is chosen; engine leaves it to the engine; unset: as policy says "
        "where that is least_work or dynamo, else minimum_tokens.")] = None
    dp_minimum_tokens_scheduler: Annotated[bool, setting("Routing",
        "Short for rank_policy minimum_tokens.")] = False
    rank_fields: Annotated[RankFields, setting("Routing",
        "How a rank is told to the engine: routed (routed_dp_rank), legacy (data_parallel_rank), "
        "header (X-Data-Parallel-Rank), none, or auto by the engine's version.")] = "auto"
    load_aware_spread_requests: Annotated[int, setting("Routing",
        "Policy load_aware: endpoints are imbalanced when their requests differ by more than this.",
        unit="requests", low=0, high=1_000_000)] = 8
    load_aware_sigma: Annotated[float, setting("Routing",
        "Policy load_aware: endpoints above the mean plus this many deviations are passed over.",
        unit="standard deviations", low=0, high=100)] = 1.0
    load_aware_generation: Annotated[int, setting("Routing",
        "Policy load_aware: 1 as published, 2 as it grew: both sides by score.", unit="number", low=1, high=2)] = 1
    minimum_tokens_published: Annotated[bool, setting("Routing",
        "Policy minimum_tokens as published: no release, polls overwrite.")] = False
    cache_threshold: Annotated[float, setting("Routing",
        "Policy cache_aware: a greater matched share of the prompt decides.", unit="share", low=0, high=1)] = 0.3
    balance_abs_threshold: Annotated[int, setting("Routing",
        "Policy cache_aware: imbalance needs a difference above this.", unit="requests", low=0, high=1_000_000)] = 64
    balance_rel_threshold: Annotated[float, setting("Routing",
        "Policy cache_aware: imbalance needs a ratio above this, too.", unit="times", low=1, high=1_000_000)] = 1.5
    max_idle_secs: Annotated[float, setting("Routing",
        "Policy manual: a key unused for longer is forgotten.", unit="s", low=0.01, high=31_536_000)] = 14_400.0
    assignment_mode: Annotated[AssignmentMode, setting("Routing",
        "Policy manual: a new key's worker is any, the one with the fewest requests, or the fewest keys.")] = "random"
    bucket_adjust_interval_secs: Annotated[float, setting("Routing",
        "Policy bucket: time between two moves of the bounds.", unit="s", low=0.01, high=86_400)] = 5.0
    llm_d_prefill_tokens_per_s: Annotated[float, setting("Routing",
        "Policy llm_d_pd: prompt tokens that a prefill endpoint reads at best (llm-d: 15928, of Qwen 32B on two H100).",
        unit="tokens/s", low=1, high=1e9)] = 15_928.0
    shadow_policy: Annotated[PolicyName | str | None, setting("Routing",
        "Policy that looks on: it decides as well, without acting, and is counted and kept in the journal.")] = None
    profile: Annotated[str | None, setting("Routing",
        "Timing that engines are expected to have until theirs is learned: a name of the shipped profiles; "
        "unset: a neutral one.", check=check_profile)] = None
    profile_for: Annotated[tuple[str, ...], setting("Routing",
        "Timing by model and GPU: `MODEL[@GPU]=NAME`, both with `*`, `?`, `[...]`; the first that fits counts, "
        "before profile.", check=check_profile_rule)] = ()
    accept_any_model: Annotated[bool, setting("Routing",
        "A model that no endpoint lists is left to the engines to judge (SGLang answers, vLLM says 404) while all have "
        "one base model; off: it is 404, as it always is in a fleet of several base models.")] = True
    disaggregation: Annotated[Disaggregation, setting("Routing",
        "Whether a prompt may be read where its answer is written, if the engine can: when that is predicted to be "
        "faster (auto), not while there is a pair (always), or whenever it can (never).")] = "auto"
    pd_fallback: Annotated[PdFallback, setting("Routing",
        "What to do when no prefill endpoint could read a prompt: fail, or let a decode endpoint that can do both.",
        )] = "none"
    default_output_tokens: Annotated[int, setting("Routing",
        "Answer length expected until a model's is learned.",
        unit="tokens", low=1, high=10_000_000)] = 256
    seed: Annotated[int, setting("Routing",
        "Makes random choices repeatable; unset: they differ from run to run.",
        unit="integer", low=0, high=2**63 - 1)] | None = None

    worker_load_check_interval: Annotated[float, setting("Load",
        "Time between two polls of an endpoint's load (sglang-router: 10).",
        unit="s", low=0.01, high=3600)] = 2.0
    load_check_timeout_secs: Annotated[float, setting("Load",
        "A load poll that takes longer is no report.", unit="s", low=0.01, high=3600)] = 5.0
    report_max_age_secs: Annotated[float, setting("Load",
        "An older load report has no weight; the ledger alone counts.",
        unit="s", low=0.01, high=86_400)] = 30.0
    report_visible_delay_secs: Annotated[float, setting("Load",
        "Time from dispatch until a request can show in a load report.", unit="s", low=0, high=60)] = 0.0
    ledger_history_events: Annotated[int, setting("Load",
        "Changes of load kept for each rank to set against a late report.",
        unit="events", low=16, high=10_000_000)] = 8192

    journal_decisions: Annotated[int, setting("Journal",
        "Decisions kept with what became of them, for `pdrouter explain`: 1 to 10 KB each; 0: none.",
        unit="decisions", low=0, high=100_000)] = 10_000
    journal_file: Annotated[str | None, setting("Journal",
        "File that gets a line for each request that has ended, without its text, for `pdrouter simulate` and "
        "`pdrouter replay`; unset: none.")] = None
    journal_file_max_bytes: Annotated[int, setting("Journal",
        "Most that it takes: one half in FILE, the older half in FILE.1.",
        unit="bytes", low=65_536, high=2**44)] = 1_073_741_824

    bytes_per_token: Annotated[float, setting("Tokens",
        "Text per token until a model's usage is known.", unit="bytes", low=0.1, high=100)] = 4.0
    image_tokens: Annotated[int, setting("Tokens",
        "Prompt tokens that an image counts for, a clip of audio or video, and a file.",
        unit="tokens", low=0, high=1_000_000)] = 1024
    tokenizer_path: Annotated[tuple[str, ...], setting("Tokens",
        "Exact counts of prompts by a tokenizer.json, or a folder that has one: `[MODEL=]PATH`; "
        "needs `pdrouter[tokenizer]`; none: an estimate, learned from usage.", check=check_tokenizer_file)] = ()
    tokenizer_threads: Annotated[int, setting("Tokens",
        "Threads that count tokens.", unit="threads", low=1, high=256)] = 2
    tokenizer_max_waiting: Annotated[int, setting("Tokens",
        "Most prompts that are being counted or wait for it; others are estimated.",
        unit="prompts", low=1, high=1_000_000)] = 64
    tokenizer_max_bytes: Annotated[int, setting("Tokens",
        "A longer request body is estimated; 128 KB take some 50 ms to count.",
        unit="bytes", low=1, high=2**30)] = 262_144

    prefix_block_bytes: Annotated[int, setting("Prefix",
        "Prompts are compared in blocks of this size; blocks of token ids hold whole ids.",
        unit="bytes", low=16, high=1_048_576)] = 1024
    prefix_index_bytes: Annotated[int, setting("Prefix",
        "Most memory that the prefix index takes, all ranks together; what was used longest ago goes first.",
        unit="bytes", low=1_048_576, high=2**40)] = 268_435_456
    cache_salt: Annotated[Literal["client", "tenant"], setting("Prefix",
        "Who separates KV caches, here and in engines: `client`, by the field `cache_salt` if it likes, or `tenant`: "
        "the router writes that field, a hash of what `tenant_header` says; no tenant can time what others wrote.",
        )] = "client"

    health_check_interval_secs: Annotated[float, setting("Health",
        "Time between two probes of an endpoint (sglang-router: 60).",
        unit="s", low=0.01, high=86_400)] = 5.0
    health_check_timeout_secs: Annotated[float, setting("Health",
        "A probe that takes longer has failed.", unit="s", low=0.01, high=3600)] = 5.0
    health_check_endpoint: Annotated[str, setting("Health",
        "Path that a probe asks for.", check=check_path)] = "/health"
    health_failure_threshold: Annotated[int, setting("Health",
        "Failures in a row that make an endpoint unready.", unit="failures", low=1, high=1000)] = 3
    health_success_threshold: Annotated[int, setting("Health",
        "Successes in a row that make it ready again.", unit="successes", low=1, high=1000)] = 2
    worker_startup_check_interval: Annotated[float, setting("Health",
        "Time between two tries to reach an endpoint for the first time (sglang-router: 30).",
        unit="s", low=0.01, high=3600)] = 1.0
    worker_startup_timeout_secs: Annotated[float, setting("Health",
        "Longest time from the start until the port opens: it does when each endpoint has been asked once, whether it "
        "answered or failed (sglang-router: 1800, for all to be up). 0: at once.", unit="s", low=0, high=86_400)] = 10.0
    models_check_interval_secs: Annotated[float, setting("Health",
        "Time between two looks at which models and adapters an endpoint lists (/v1/models), 20 % more or less.",
        unit="s", low=0.05, high=86_400)] = 5.0
    max_models_per_endpoint: Annotated[int, setting("Health",
        "Ids of models and adapters that are kept of one endpoint's list; further ones aren't routable.",
        unit="ids", low=1, high=1_000_000)] = 1024
    disable_health_check: Annotated[bool, setting("Health",
        "No probes: an endpoint is ready once it was reached.")] = False

    admission: Annotated[bool, setting("Admission",
        "While every rank that may serve a request has enough to do, it waits in the router and not in an engine, so "
        "that a short or urgent one can overtake (policy least_work).")] = True
    admission_max_queue_secs: Annotated[float, setting("Admission",
        "A prefill rank has enough to do when reading what is queued on it takes longer.",
        unit="s", low=0, high=3600)] = 0.2
    admission_max_kv_share: Annotated[float, setting("Admission",
        "A decode rank has enough to do when more of its KV is in use.", unit="share", low=0.01, high=1)] = 0.95
    admission_aging_rate: Annotated[float, setting("Admission",
        "Seconds of work that a second of waiting outweighs: 0 is least work first, more is fairer to long prompts.",
        unit="s/s", low=0, high=1000)] = 0.05
    max_concurrent_requests: Annotated[int, setting("Admission",
        "Requests that run at once, in the whole router; further ones wait; -1: no limit.",
        unit="requests", low=-1, high=10_000_000)] = -1
    queue_size: Annotated[int, setting("Admission",
        "Requests that may wait; further ones get 429 (sglang-router: 100).",
        unit="requests", low=0, high=10_000_000)] = 10_000
    queue_max_bytes: Annotated[int, setting("Admission",
        "Bytes of bodies that may wait.", unit="bytes", low=0, high=2**40)] = 1_073_741_824
    queue_timeout_secs: Annotated[float, setting("Admission",
        "A request that has waited longer gets 408.", unit="s", low=0.01, high=86_400)] = 60.0
    priority_header: Annotated[str, setting("Admission",
        "Header with a request's priority, an integer: the higher goes first; else the body's priority counts, as the "
        "engine reads it.", check=check_header)] = "x-request-priority"
    max_client_priority: Annotated[int, setting("Admission",
        "Highest priority that a client may give itself in the router's queue, by header or body; the lowest is its "
        "negative. 0: none counts, as a client that asks for more starves others. Engines get the body's.",
        unit="priority", low=0, high=999_999_999)] = 0
    tenant_header: Annotated[str, setting("Admission",
        "Header that names whose share of the router a request takes; tenants wait for each other by fair share.",
        check=check_header)] = "authorization"
    tenants: Annotated[Literal["listed", "all"], setting("Admission",
        "Who has a share of its own: those that `tenant_weights` lists, all others having one share together, or `all` "
        "that the header names; not where a client may choose what it says, with a new name for each request.",
        )] = "listed"
    tenant_weights: Annotated[tuple[Secret, ...], setting("Admission",
        "Shares that differ: `TENANT=WEIGHT`, the header's value and a number above 0; others have 1.",
        check=check_weight)] = ()

    retry_max_retries: Annotated[int, setting("Retries",
        "Most attempts for one request, the first included; none is made once an answer has begun.",
        unit="attempts", low=1, high=100)] = 5
    retry_initial_backoff_ms: Annotated[float, setting("Retries",
        "Time before the second attempt.", unit="ms", low=0, high=600_000)] = 50.0
    retry_max_backoff_ms: Annotated[float, setting("Retries",
        "Longest time before any attempt.", unit="ms", low=0, high=600_000)] = 30_000.0
    retry_backoff_multiplier: Annotated[float, setting("Retries",
        "Factor from one such time to the next.", unit="times", low=1, high=100)] = 1.5
    retry_jitter_factor: Annotated[float, setting("Retries",
        "Share by which such a time differs either way.", unit="share", low=0, high=1)] = 0.2
    retry_budget_share: Annotated[float, setting("Retries",
        "Retries that all requests together may make, as a share of them.", unit="share", low=0, high=100)] = 0.2
    retry_budget_per_sec: Annotated[float, setting("Retries",
        "Retries that may be made beyond that share.", unit="1/s", low=0, high=1_000_000)] = 10.0
    disable_retries: Annotated[bool, setting("Retries",
        "One attempt for each request.")] = False
    suspect_ttl_secs: Annotated[float, setting("Retries",
        "A request that failed on two engines, as if it broke them, is refused with 422 for this time if it comes "
        "again; 0: never.", unit="s", low=0, high=86_400)] = 30.0
    suspect_max: Annotated[int, setting("Retries",
        "More different requests that are suspected at once are a failure of the engines: none is refused then, for "
        "`suspect_ttl_secs`.", unit="requests", low=1, high=10_000)] = 4

    cb_failure_threshold: Annotated[int, setting("Breaker",
        "Failures in a row by which an endpoint is taken out: its own, never a client's or its partner's.",
        unit="failures", low=1, high=10_000)] = 10
    cb_success_threshold: Annotated[int, setting("Breaker",
        "Successes in a row, one request at a time, by which it comes back.", unit="successes", low=1, high=1000)] = 3
    cb_timeout_duration_secs: Annotated[float, setting("Breaker",
        "Time that it stays out before one is tried.", unit="s", low=0.01, high=86_400)] = 60.0
    cb_window_duration_secs: Annotated[float, setting("Breaker",
        "Time within which the failures count.", unit="s", low=0.01, high=86_400)] = 120.0
    max_ejection_percent: Annotated[int, setting("Breaker",
        "Most endpoints of a role and model that breakers take out, one at least; further ones go on (Envoy: 10).",
        unit="%", low=0, high=100)] = 50
    healthy_panic_threshold: Annotated[int, setting("Breaker",
        "While fewer endpoints of a role and model are left, breakers take none out: all that answer health checks are "
        "tried (as Envoy); 0: never.", unit="%", low=0, high=100)] = 50
    disable_circuit_breaker: Annotated[bool, setting("Breaker",
        "Failures of requests take nobody out.")] = False

    upstream_max_connections: Annotated[int, setting("Upstream",
        "Most connections to one endpoint.", unit="connections", low=1, high=65_535)] = 4096
    connect_timeout_secs: Annotated[float, setting("Upstream",
        "Time to open a connection to an engine.", unit="s", low=0.01, high=3600)] = 5.0
    dns_refresh_secs: Annotated[float, setting("Upstream",
        "An engine's host name is looked up again after this time; old addresses are used while that lasts or fails.",
        unit="s", low=0.1, high=86_400)] = 30.0
    request_timeout_secs: Annotated[float, setting("Upstream",
        "Time for a whole request (sglang-router: 1800); a client's x-request-timeout-ms counts if it is less.",
        unit="s", low=0.01, high=604_800)] = 600.0
    prefill_timeout_secs: Annotated[float, setting("Upstream",
        "Time from dispatch until a prefill engine has read a prompt.", unit="s", low=0.01, high=604_800)] = 180.0
    first_token_timeout_secs: Annotated[float, setting("Upstream",
        "Time from dispatch until a stream has its first token.", unit="s", low=0.01, high=604_800)] = 240.0
    stream_idle_timeout_secs: Annotated[float, setting("Upstream",
        "Time between two tokens of a stream.", unit="s", low=0.01, high=604_800)] = 120.0
    stream_keepalive_secs: Annotated[float, setting("Upstream",
        "A stream that waits for its first token gets a comment (`: keep-alive`) after each such time, since load "
        "balancers cut silent ones; the first brings status 200, and later failures come as events. 0: none.",
        unit="s", low=0, high=3600)] = 15.0
    upstream_idle_timeout_secs: Annotated[float, setting("Upstream",
        "An idle connection is closed after this time; engines on uvicorn close theirs after 5 s.",
        unit="s", low=0, high=3600)] = 4.0
    upstream_max_idle: Annotated[int, setting("Upstream",
        "Most idle connections kept to one endpoint.", unit="connections", low=0, high=65_535)] = 256
    upstream_read_buffer_bytes: Annotated[int, setting("Upstream",
        "Bytes of an answer held for a slow client before its engine is slowed.",
        unit="bytes", low=1024, high=2**30)] = 65_536
    upstream_max_header_bytes: Annotated[int, setting("Upstream",
        "Longest head of an engine's answer.", unit="bytes", low=1024, high=2**24)] = 65_536
    upstream_max_reply_bytes: Annotated[int, setting("Upstream",
        "Longest answer held in memory: one that isn't streamed, or a probe's.",
        unit="bytes", low=1024, high=2**40)] = 268_435_456
    abort_retry_delay_secs: Annotated[float, setting("Upstream",
        "An abort is sent again after this time, as the first may come before the engine knows the request.",
        unit="s", low=0, high=60)] = 2.0


class DemoSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``pdrouter demo`` runs; flags only."""

    seconds: Annotated[float, setting("Demo",
        "Length of each run.", unit="s", low=1, high=3600)] = 25.0
    speed: Annotated[float, setting("Demo",
        "How many times faster than life engines and arrivals are.", unit="times", low=0.01, high=1000)] = 1.0
    policy: Annotated[PolicyName, setting("Demo",
        "How an endpoint is chosen in the first run.")] = "least_work"
    compare: Annotated[bool, setting("Demo",
        "A second run with round_robin and no rank choice, and both side by side.")] = True
    plain: Annotated[bool | None, setting("Demo",
        "No live table; unset: only on a terminal is there one.")] = None
# fmt: on


def is_endpoints(item: Setting) -> bool:
    """Tell the settings that list endpoints."""
    return item.is_list and get_args(item.base)[0] is EndpointSettings


SETTINGS: Final = settings_of(Settings)
ENDPOINT_SETTINGS: Final = settings_of(EndpointSettings)
