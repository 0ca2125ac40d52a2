"""The command line: serve, check-config, emulate, demo, simulate, replay, explain.

Options are derived from settings structs; nothing here knows a default. What a command needs is imported
when it runs, so that ``--help`` is quick.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar, cast, get_args

import msgspec
import yaml
from msgspec import Struct

from pdrouter import __version__
from pdrouter.config import SETTINGS, DemoSettings, PolicyName, Settings, is_endpoints
from pdrouter.errors import ConfigError
from pdrouter.loading import ENV_CONFIG, Resolved, env_name, flag_name, from_flags, resolve_settings
from pdrouter.plugins import load_policies, policy_names
from pdrouter.setting import Setting, check_host, did_you_mean, setting, settings_of, with_choices

T = TypeVar("T")
S = TypeVar("S", bound=Struct)

# Flags of sglang-router that ask for what is always so.
IMPLIED: Final = {
    "--pd-disaggregation": "Accepted; implied by --prefill and --decode.",
    "--dp-aware": "Accepted; implied, as ranks are learned from each engine.",
}

# Flags of sglang-router 0.3.2 that aren't served: what to do, and the flags.
_UNSERVED: Final = (
    (
        "leave it out; --prefix-index-bytes bounds what is known of caches, and what is idle goes by itself",
        "eviction-interval-secs max-tree-size",
    ),
    ("leave it out; this is the router", "mini-lb enable-igw backend"),
    (
        "name the engines with --prefill, --decode and --worker",
        (
            "service-discovery selector prefill-selector decode-selector service-discovery-port "
            "service-discovery-namespace"
        ),
    ),
    ("redirect standard error", "log-dir"),
    ("scrape /metrics on the main port", "prometheus-port prometheus-host prometheus-duration-buckets"),
    (
        "put a proxy that does it in front",
        (
            "tls-cert-path tls-key-path control-plane-api-keys "
            "control-plane-audit-enabled jwt-issuer jwt-audience jwt-jwks-uri jwt-role-mapping"
        ),
    ),
    (
        "use --rate-limit-requests-per-min, for each client, or --max-concurrent-requests",
        "rate-limit-tokens-per-second",
    ),
    ("reach the engines over http", "client-cert-path client-key-path ca-cert-paths"),
    ("leave it out; x-request-id ties replies to log lines", "enable-trace otlp-traces-endpoint"),
    (
        "leave it out; engines do this",
        (
            "model-path chat-template tokenizer-cache-enable-l0 tokenizer-cache-l0-max-entries "
            "tokenizer-cache-enable-l1 tokenizer-cache-l1-max-memory reasoning-parser tool-call-parser "
            "mcp-config-path"
        ),
    ),
    (
        "leave it out; requests aren't stored",
        (
            "history-backend oracle-wallet-path oracle-tns-alias oracle-connect-descriptor oracle-username "
            "oracle-password oracle-pool-min oracle-pool-max oracle-pool-timeout-secs postgres-db-url "
            "postgres-pool-max redis-url redis-pool-max redis-retention-days"
        ),
    ),
)
UNSERVED: Final = {f"--{name}": hint for hint, names in _UNSERVED for name in names.split()}


class Command(NamedTuple):
    """One word of the command line: what it does, its options, and what runs it."""

    summary: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[dict[str, object], list[str]], int]
    words: str = "[OPTIONS]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 2 for what can't be used, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except ConfigError as error:
        print(*error.problems, sep="\n", file=sys.stderr)  # noqa: T201
        return 2
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:  # argparse: help, version, or a flag without its value
        return stop.code if isinstance(stop.code, int) else bool(stop.code)


def _run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="pdrouter", description=_SUMMARY, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"pdrouter {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, command in COMMANDS.items():
        usage = f"pdrouter {name} {command.words}"
        options = commands.add_parser(
            name, help=command.summary, description=command.summary, usage=usage, allow_abbrev=False
        )
        if name in arguments[:1]:
            command.add_options(options)
    parsed, unknown = parser.parse_known_args(arguments)
    flags = vars(parsed)
    chosen = flags.pop("command")
    if chosen is None:
        parser.print_help(sys.stderr)
        return 2
    return COMMANDS[chosen].run(flags, unknown)


def _add_setting(group: argparse._ArgumentGroup, item: Setting, *, env: str) -> None:
    """Add the flag of one setting; its value stays text, which ``Setting.read`` understands."""
    facts = (item.unit, item.range_text, f"default {item.default_text}", env)
    text = f"{item.description} ({'; '.join(fact for fact in facts if fact)})".replace("%", "%%")
    flag, default = flag_name(item.name), argparse.SUPPRESS
    if item.base is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=text)
    elif item.name == "prefill":
        group.add_argument(
            flag,
            action="append",
            nargs="+",
            metavar=("URL", "BOOTSTRAP_PORT|none"),
            default=default,
            help=text,
        )
    elif is_endpoints(item):
        group.add_argument(flag, action="append", metavar="URL", default=default, help=text)
    else:
        metavar = {"s": "SECONDS", "bytes": "BYTES"}.get(item.unit, "N" if item.unit else "TEXT")
        metavar = "NAME" if item.choices else metavar
        action, nargs = ("extend", "*") if item.is_list else ("store", None)
        group.add_argument(flag, action=action, nargs=nargs, metavar=metavar, default=default, help=text)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``serve``: every setting, the file, and what sglang-router's users type."""
    parser.add_argument("--config", metavar="FILE", help=f"YAML file with settings by name (env {ENV_CONFIG})")
    items = _settings_with(policy_names()).values()
    groups = {item.group: parser.add_argument_group(item.group) for item in items}
    for item in items:
        _add_setting(groups[item.group], item, env=f"env {env_name(item.name)}")
    fleet = groups["Fleet"]
    fleet.add_argument(
        "--worker-urls",
        action="extend",
        nargs="*",
        dest="worker",
        metavar="URL",
        default=argparse.SUPPRESS,
        help="More regular engines (sglang-router's name for --worker).",
    )
    for flag, text in IMPLIED.items():
        fleet.add_argument(flag, action="store_true", dest=_IGNORED, default=argparse.SUPPRESS, help=text)


def _resolve(flags: dict[str, object], unknown: list[str]) -> Resolved:
    """Return the effective settings; raises ConfigError with the problems of all sources."""
    file = flags.pop("config")
    flags.pop(_IGNORED, None)
    if "prefill" in flags:
        flags["prefill"] = [" ".join(words) for words in cast("list[list[str]]", flags["prefill"])]
    path = Path(str(file)) if file else None
    problems = _unknown_flags(unknown, SETTINGS, UNSERVED)
    known = _settings_with(load_policies(get_args(PolicyName)))
    return _after(problems, lambda: resolve_settings(path, os.environ, flags, known))


def _settings_with(policies: Iterable[str]) -> dict[str, Setting]:
    return with_choices(SETTINGS, get_args(PolicyName), policies)


def _after(problems: list[str], build: Callable[[], T]) -> T:
    """Return what ``build`` builds unless there are problems, its own included."""
    try:
        built = build()
    except ConfigError as error:
        raise ConfigError(problems + error.problems) from None
    if problems:
        raise ConfigError(problems)
    return built


def _unknown_flags(unknown: list[str], known: Mapping[str, object], hints: Mapping[str, str]) -> list[str]:
    """Return a line for each flag that isn't one; words behind it are its values."""
    problems = []
    for index, word in enumerate(unknown):
        flag = word.partition("=")[0]
        if flag in hints:
            problems.append(f"{flag}: not served yet; {hints[flag]}")
        elif flag.startswith("--"):
            name = flag[2:].replace("-", "_")
            problems.append(f"{flag}: unknown flag{did_you_mean(name, known, flag_name)}")
        elif not index:
            problems.append(f"{word}: not a flag")
    return problems


def _serve(flags: dict[str, object], unknown: list[str]) -> int:
    def read() -> Settings:
        return _resolve(dict(flags), unknown).settings

    file = flags["config"] or os.environ.get(ENV_CONFIG)
    settings = read()
    from pdrouter.server import serve  # noqa: PLC0415 - heavy

    if not file:
        return serve(settings)
    from pdrouter.control.reload import Source  # noqa: PLC0415 - heavy

    return serve(settings, Source(Path(str(file)), read))


def _check_config(flags: dict[str, object], unknown: list[str]) -> int:
    resolved = _resolve(flags, unknown)
    values = msgspec.to_builtins(resolved.settings, enc_hook=str)  # what isn't plain is a secret
    for name, value in values.items():
        text = yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True, width=sys.maxsize)
        first, rest = text.split("\n", 1)
        sys.stdout.write(f"{first}  # {resolved.sources[name]}\n{rest}")
    return 0


def _emulated() -> dict[str, Setting]:
    from pdrouter.sim.emulator_settings import EmulatorSettings  # noqa: PLC0415 - heavy

    return settings_of(EmulatorSettings, _EMULATED)


def _add_emulate(parser: argparse.ArgumentParser) -> None:
    _add_items(parser, _emulated())


def _emulate(flags: dict[str, object], unknown: list[str]) -> int:
    from pdrouter.sim.emulator_settings import EmulatorSettings  # noqa: PLC0415 - heavy

    try:
        settings = _build(EmulatorSettings, _emulated(), flags, unknown)
    except ValueError as error:  # settings that don't go together
        raise ConfigError([str(error)]) from None
    from pdrouter.sim.emulator import run  # noqa: PLC0415 - heavy

    return run(settings)


def _add_demo(parser: argparse.ArgumentParser) -> None:
    _add_items(parser, settings_of(DemoSettings))


def _demo(flags: dict[str, object], unknown: list[str]) -> int:
    chosen = _build(DemoSettings, settings_of(DemoSettings), flags, unknown)
    from pdrouter.sim.demo import DemoOptions, run  # noqa: PLC0415 - heavy

    options = msgspec.structs.asdict(chosen)
    options["plain"] = not sys.stdout.isatty() if chosen.plain is None else chosen.plain
    return run(DemoOptions(**options))


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    from pdrouter.sim.virtual.options import add_options  # noqa: PLC0415 - heavy

    add_options(parser)


def _simulate(flags: dict[str, object], unknown: list[str]) -> int:
    problems = _unknown_flags(unknown, {}, {})
    if problems:
        raise ConfigError(problems)
    from pdrouter.options import router_options  # noqa: PLC0415 - heavy
    from pdrouter.sim.virtual.command import run  # noqa: PLC0415 - heavy

    return run(flags, router_options)


def _add_replay(parser: argparse.ArgumentParser) -> None:
    from pdrouter.sim.replay.options import add_options  # noqa: PLC0415 - heavy

    add_options(parser)


def _replay(flags: dict[str, object], unknown: list[str]) -> int:
    problems = _unknown_flags(unknown, {}, {})
    if problems:
        raise ConfigError(problems)
    from pdrouter.sim.replay.command import run  # noqa: PLC0415 - heavy

    return run(flags)


def _add_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="Where a router serves: http://HOST:PORT.")
    parser.add_argument("request_id", metavar="REQUEST_ID", help="The x-request-id of a reply.")


def _explain(flags: dict[str, object], unknown: list[str]) -> int:
    problems = _unknown_flags(unknown, {}, {})
    if problems:
        raise ConfigError(problems)
    from pdrouter.telemetry.stories import NoStory, fetch_stories, print_stories  # noqa: PLC0415 - heavy

    try:
        page = fetch_stories(str(flags["url"]), str(flags["request_id"]))
    except NoStory as reason:
        print(f"pdrouter explain: {reason}", file=sys.stderr)  # noqa: T201
        return 1
    print_stories(page)
    return 0


def _add_items(parser: argparse.ArgumentParser, items: Mapping[str, Setting]) -> None:
    """Add a flag for each setting, without what ``serve`` adds."""
    groups = {item.group: parser.add_argument_group(item.group) for item in items.values()}
    for item in items.values():
        _add_setting(groups[item.group], item, env="")


def _build(struct: type[S], known: Mapping[str, Setting], flags: dict[str, object], unknown: list[str]) -> S:
    return _after(_unknown_flags(unknown, known, {}), lambda: from_flags(struct, known, flags))


def _check_profile(text: str) -> str:
    from pdrouter.sim.profiles import load_profile  # noqa: PLC0415 - heavy

    load_profile(text)
    return text


# fmt: off
_EMULATED: Final = {
    "engine": setting("Engine", "Engine to emulate."),
    "role": setting("Engine", "What it does: read prompts, write answers, or both."),
    "dp_size": setting("Engine", "Data-parallel ranks.", unit="ranks", low=1, high=4096),
    "profile": setting("Engine", "Model, GPU and engine whose timing it has.", check=_check_profile),
    "speed": setting("Engine", "How many times faster than life it is.", unit="times", low=0.01, high=100_000),
    "model": setting("Engine", "Name of the model it says it serves."),
    "kv_capacity_tokens": setting("Engine", "KV cache of a rank; unset: as the profile says.",
                                  unit="tokens", low=1, high=2**40),
    "stream_interval": setting("Engine", "Tokens in a streamed chunk.", unit="tokens", low=1, high=1_000_000),
    "server_version": setting("Engine", "Version that it says it is."),
    "api_key": setting("Engine", "Key that it wants, as SGLang and vLLM do; unset: none."),
    "host": setting("Address", "Address to listen on.", check=check_host),
    "port": setting("Address", "Port to listen on; 0 lets the kernel choose.",
                    unit="port number", low=0, high=65_535),
    "bootstrap_port": setting("Address", "Port where KV is handed over; 0 lets the kernel choose.",
                              unit="port number", low=0, high=65_535),
    "load_api": setting("Load", "How it tells its load: /v1/loads (v1), /get_load (legacy), both, none, or as its "
                        "version does (auto)."),
    "load_delay": setting("Load", "Age of the load that it tells.", unit="s", low=0, high=3600),
    "dp_attention": setting("SGLang", "Its ranks share one tensor-parallel group, else they are replicas."),
    "load_balance_method": setting("SGLang", "Which rank runs a request that names none; auto: as SGLang's default."),
    "takes_overrides": setting("SGLang", "Read the x-override-* headers."),
    "prefill_patience_s": setting("SGLang", "How long a decode engine waits for a prefill engine that is gone.",
                                  unit="s of the engine", low=0, high=86_400),
    "start_s": setting("SGLang", "How long /health says that it isn't ready yet.",
                       unit="s of the engine", low=0, high=86_400),
    "kv_connector": setting("vLLM", "How KV gets from prefill to decode; unset: nixl, and none for regular engines."),
    "dp_start_rank": setting("vLLM", "First of its ranks, numbered over all servers of a deployment.",
                             unit="rank", low=0, high=65_535),
    "kv_hold_timeout_s": setting("vLLM", "How long an answered prefill keeps KV that nobody fetches.",
                                 unit="s of the engine", low=0, high=86_400),
    "storage_dir": setting("vLLM", "Folder of the store that shared_storage engines share."),
    "tells_cached_tokens": setting("vLLM", "Tell cached tokens in usage."),
    "tracks_server_load": setting("vLLM", "Tell the load at /load; else it is 0 there, as on the real one."),
    "takes_aborts": setting("vLLM", "Have /abort_requests."),
}
# fmt: on
_IGNORED: Final = "implied"
_SUMMARY: Final = "A load-aware router for prefill/decode-disaggregated LLM serving."
COMMANDS: Final = {
    "serve": Command("Route requests to a fleet of engines.", _add_settings, _serve),
    "check-config": Command("Print the effective settings and where each came from.", _add_settings, _check_config),
    "emulate": Command("Serve as an engine would, without a GPU.", _add_emulate, _emulate),
    "demo": Command("Route real traffic over an emulated fleet and show the difference.", _add_demo, _demo),
    "simulate": Command("Try policies on a trace in virtual time.", _add_simulate, _simulate),
    "replay": Command(
        "Send a trace to a live endpoint and measure it as its clients see it.",
        _add_replay,
        _replay,
        "TRACE --url URL [OPTIONS]",
    ),
    "explain": Command(
        "Print what a running router decided for a request, why, and what became of it.",
        _add_explain,
        _explain,
        "URL REQUEST_ID",
    ),
}
