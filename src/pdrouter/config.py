"""Every setting: default, unit, range and doc string, each written once.

Flags, environment variables, YAML keys and ``docs/config.md`` are derived from ``Settings``
(``python -m pdrouter.config`` prints the document). It must not know who uses a setting. Read
``Settings`` first, then ``loading.py``, which fills it.
"""

import sys
from collections.abc import Iterable
from importlib import resources
from typing import Annotated, Final, Literal, get_args

import msgspec
from msgspec import UNSET, Struct, UnsetType

from pdrouter.setting import Setting, check_header, check_host, check_path, check_url, setting, settings_of

AncestorPolicyName = Literal[
    "power_of_two", "load_aware", "cache_aware", "prefix_cache", "consistent_hashing", "manual", "bucket"
]
PolicyName = Literal["least_work", "minimum_tokens", "random", "round_robin", "least_request", AncestorPolicyName]
RankPolicyName = Literal["least_work", "minimum_tokens", "round_robin", "random", "engine"]
AssignmentMode = Literal["random", "min_load", "min_group"]
RankFields = Literal["auto", "routed", "legacy", "header", "none"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "console", "json"]


def check_profile(name: str) -> str:
    """Return the name of a shipped profile.

    Raises: ValueError with the names there are.
    """
    names = profile_entries()
    if name not in names:
        raise ValueError(f"write one of {', '.join(sorted(names))}")
    return name


def profile_entries() -> dict[str, dict[str, object]]:
    """Return the shipped timing profiles, as they stand in the package's data."""
    text = resources.files("pdrouter").joinpath("data/profiles.json").read_bytes()
    entries: dict[str, dict[str, object]] = msgspec.json.decode(text)["profiles"]
    return entries


# Two lines a setting, the default at the end of the second, read better than one argument a line.
# fmt: off
class EndpointSettings(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One engine server; in YAML a mapping, or the text ``URL [BOOTSTRAP_PORT|none]``."""

    url: Annotated[str, setting("Endpoint",
        "Where the engine serves HTTP: `http://HOST:PORT`.", check=check_url)]
    bootstrap_port: Annotated[int, setting("Endpoint",
        "Port where a prefill engine hands over KV; none sends null, unset asks the engine.",
        unit="port number", low=1, high=65_535)] | UnsetType | None = UNSET
    group: Annotated[str, setting("Endpoint",
        "Only endpoints of one group are paired.")] = ""
    model: Annotated[str | None, setting("Endpoint",
        "Name of the model that the engine serves; unset asks the engine.")] = None
    dp_size: Annotated[int, setting("Endpoint",
        "Data-parallel ranks in the engine; unset asks the engine.",
        unit="ranks", low=1, high=4096)] | None = None
    profile: Annotated[str | None, setting("Endpoint",
        "Timing that the engine is expected to have, by name; unset: the profile of all.", check=check_profile)] = None


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a router is started with; build it with ``load_settings``, which checks every value."""

    prefill: Annotated[tuple[EndpointSettings, ...], setting("Fleet",
        "Engines that read prompts.")] = ()
    decode: Annotated[tuple[EndpointSettings, ...], setting("Fleet",
        "Engines that write answers.")] = ()
    worker: Annotated[tuple[EndpointSettings, ...], setting("Fleet",
        "Regular engines, which do both; also --worker-urls URL URL ....")] = ()

    host: Annotated[str, setting("Server",
        "Address to listen on.", check=check_host)] = "127.0.0.1"
    port: Annotated[int, setting("Server",
        "Port to listen on; 0 lets the kernel choose.", unit="port number", low=0, high=65535)] = 30000
    max_payload_size: Annotated[int, setting("Server",
        "A longer request body gets 413.", unit="bytes", low=1, high=2**40)] = 536_870_912
    request_id_headers: Annotated[tuple[str, ...], setting("Server",
        "The first of these headers that a request carries is its id.",
        check=check_header)] = ("x-request-id", "x-correlation-id", "x-trace-id", "request-id")
    decision_headers: Annotated[bool, setting("Server",
        "Replies carry x-pdrouter-prefill and x-pdrouter-decode: address and rank chosen.")] = True
    shutdown_grace_period_secs: Annotated[float, setting("Server",
        "Time that running requests have to end after a stop signal.", unit="s", low=0, high=86_400)] = 180.0
    log_level: Annotated[LogLevel, setting("Server",
        "Least severe log lines that are written; debug has one for each decision.")] = "info"
    log_format: Annotated[LogFormat, setting("Server",
        "Log lines for people (console) or machines (json); auto is console on a terminal.")] = "auto"

    policy: Annotated[PolicyName | str, setting("Routing",
        "How an endpoint is chosen (sglang-router: cache_aware).")] = "least_work"
    prefill_policy: Annotated[PolicyName | str | None, setting("Routing",
        "How a prefill endpoint is chosen; unset: as policy says.")] = None
    decode_policy: Annotated[PolicyName | str | None, setting("Routing",
        "How a decode endpoint is chosen; unset: as policy says.")] = None
    rank_policy: Annotated[RankPolicyName | None, setting("Routing",
        "How a data-parallel rank is chosen; engine leaves it to the engine; unset: least_work with policy "
        "least_work, else minimum_tokens.")] = None
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
    shadow_policy: Annotated[PolicyName | str | None, setting("Routing",
        "Policy that looks on: it decides as well, without acting, and is counted and kept in the journal.")] = None
    profile: Annotated[str | None, setting("Routing",
        "Timing that engines are expected to have until theirs is learned: a name of the shipped profiles; "
        "unset: a neutral one.", check=check_profile)] = None
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

    bytes_per_token: Annotated[float, setting("Tokens",
        "Text per token until a model's usage is known.", unit="bytes", low=0.1, high=100)] = 4.0
    image_tokens: Annotated[int, setting("Tokens",
        "Prompt tokens that an image counts for.", unit="tokens", low=0, high=1_000_000)] = 1024

    prefix_block_bytes: Annotated[int, setting("Prefix",
        "Prompts are compared in blocks of this size; blocks of token ids hold whole ids.",
        unit="bytes", low=16, high=1_048_576)] = 1024
    prefix_index_bytes: Annotated[int, setting("Prefix",
        "Most memory that the prefix index takes, all ranks together; what was used longest ago goes first.",
        unit="bytes", low=1_048_576, high=2**40)] = 268_435_456

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
    disable_health_check: Annotated[bool, setting("Health",
        "No probes: an endpoint is ready once it was reached.")] = False

    upstream_max_connections: Annotated[int, setting("Upstream",
        "Most connections to one endpoint.", unit="connections", low=1, high=65_535)] = 4096
    connect_timeout_secs: Annotated[float, setting("Upstream",
        "Time to open a connection to an engine.", unit="s", low=0.01, high=3600)] = 5.0
    request_timeout_secs: Annotated[float, setting("Upstream",
        "Time for a whole request, its answer included (sglang-router: 1800).",
        unit="s", low=0.01, high=604_800)] = 600.0
    upstream_idle_timeout_secs: Annotated[float, setting("Upstream",
        "An idle connection is closed after this time; engines on uvicorn close theirs after 5 s.",
        unit="s", low=0, high=3600)] = 4.0
    upstream_max_idle: Annotated[int, setting("Upstream",
        "Most idle connections kept to one endpoint.", unit="connections", low=0, high=65_535)] = 256
    upstream_read_buffer_bytes: Annotated[int, setting("Upstream",
        "Bytes of an answer held for a slow client before its engine is slowed.",
        unit="bytes", low=1024, high=2**30)] = 262_144
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


_DOCUMENT = """\
# Settings

Each setting has one name. From weakest to strongest, its value comes from

1. its default;
2. a YAML file (`pdrouter serve --config FILE`, or `PDROUTER_CONFIG`): `worker_load_check_interval: 2`;
   dashes work, too;
3. the environment: `PDROUTER_WORKER_LOAD_CHECK_INTERVAL=2`; lists are separated by commas, and an empty
   variable counts as not set;
4. a flag: `--worker-load-check-interval 2`; for true and false `--decision-headers` and
   `--no-decision-headers`.

A list replaces the list of a weaker source; `none` unsets what may be unset. An unknown name, a value out of
range or a URL that isn't one stops the start. `pdrouter check-config` prints the effective settings and where
each came from.

`python -m pdrouter.config` writes this page.
"""

_ENDPOINT = """\
### An endpoint

Members of `prefill`, `decode` and `worker`: in YAML a mapping of these, or the text
`URL [BOOTSTRAP_PORT|none]`; as repeatable flags `--prefill URL [BOOTSTRAP_PORT|none]`, `--decode URL` and
`--worker URL`; in the environment `PDROUTER_PREFILL="URL [BOOTSTRAP_PORT|none], URL"`.
"""


def document() -> str:
    """Return ``docs/config.md``."""
    lines = [_DOCUMENT]
    for group in dict.fromkeys(item.group for item in SETTINGS.values()):
        lines += [f"## {group}\n", _table(item for item in SETTINGS.values() if item.group == group)]
        if group == "Fleet":
            lines += [_ENDPOINT, _table(ENDPOINT_SETTINGS.values())]
    return "\n".join(lines)


def _table(items: Iterable[Setting]) -> str:
    rows = ["| Name | Default | Unit | Range | What it does |", "|--|--|--|--|--|"]
    for item in items:
        cells = (f"`{item.name}`", item.default_text, item.unit, item.range_text, item.description)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(document())
