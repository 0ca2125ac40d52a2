"""What ``pdrouter simulate`` is asked for: its options, and the runs that they stand for.

How options of a router are made from its settings is the caller's to know. Next: ``command.py``.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from pdrouter.config import Settings
from pdrouter.core.router import RouterOptions
from pdrouter.loading import load_settings
from pdrouter.sim.simulator import SimulatorSettings
from pdrouter.sim.virtual.figures import Objective
from pdrouter.sim.virtual.fleet_spec import EngineSpec
from pdrouter.sim.virtual.generators import PRESETS
from pdrouter.sim.virtual.sweep import BOUNDS, Case, Load
from pdrouter.sim.virtual.trace import CONVERSATION, EXCERPT

S = TypeVar("S", bound=msgspec.Struct)
MakeOptions = Callable[[Settings], RouterOptions]


class SimulateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The options by name, as they are typed."""

    trace: str
    fleet: str
    policy: tuple[str, ...] = ("least_work",)
    requests: int | None = None
    rate: tuple[float, ...] = ()
    utilisation: tuple[float, ...] = ()
    report_interval: float = 2.0
    report_delay: float = 0.0
    seeds: int = 1
    slo_ttft: float = 2.0
    slo_ttft_per_token: float = 0.001
    slo_token: float = 0.05
    out: str | None = None
    plan: bool = False
    gpus: int = 64
    target: float = 0.95

    def __post_init__(self) -> None:
        for name in ("requests", "rate", "utilisation", "seeds", "slo_ttft", "slo_token", "gpus", "target"):
            value = getattr(self, name)
            values = value if isinstance(value, tuple) else () if value is None else (value,)
            if not all(number > 0 for number in values):
                raise ValueError(f"{_flag(name)}: must be positive")
        for name in ("report_interval", "report_delay", "slo_ttft_per_token"):
            _seconds(_flag(name), getattr(self, name))
        if self.rate and self.utilisation:
            raise ValueError("--rate and --utilisation say the same; leave one out")
        if "recorded" in self.policy and (self.rate or self.utilisation or self.requests):
            raise ValueError(
                "recorded: it went as fast and as long as it did; leave --rate, --utilisation, --requests out"
            )
        if self.plan and (self.utilisation or len(self.rate) > 1 or len(self.policy) > 1 or self.policy[0] in BOUNDS):
            raise ValueError("--plan is for one policy and one --rate; a utilisation would grow with the fleet")

    @property
    def objective(self) -> Objective:
        """What a good answer keeps."""
        return Objective(ttft_s=self.slo_ttft, ttft_s_per_prompt_token=self.slo_ttft_per_token, token_s=self.slo_token)

    def loads(self) -> list[Load]:
        """Return what comes, in one speed or in several."""
        load = Load(trace=self.trace, requests=self.requests)
        loads = [msgspec.structs.replace(load, rate_per_s=rate) for rate in self.rate]
        loads += [msgspec.structs.replace(load, utilisation=share) for share in self.utilisation]
        return loads or [load]


TRACE_KINDS = (
    f"Mooncake's JSON lines, Azure's CSV, a router's journal (journal_file), {EXCERPT} or {CONVERSATION} (shipped), "
    f"or made: {', '.join(PRESETS)}[:NAME=VALUE,...]"
)
OBJECTIVE_OPTIONS = (
    ("slo-ttft", "SECONDS", "Longest time to a good answer's first token (default 2) ..."),
    ("slo-ttft-per-token", "SECONDS", "... and so much more for each token of the prompt (default 0.001)."),
    ("slo-token", "SECONDS", "Longest mean time of its other tokens (default 0.05)."),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    a_policy = (
        "A policy, with other settings of the router, report_interval or report_delay if needed: "
        "NAME[,SETTING=VALUE,...]; or a bound: clairvoyant, alone; or how a journal's requests really went: recorded"
    )
    many = ("policy", "rate", "utilisation")
    options: Sequence[tuple[str, str, str]] = (
        ("trace", "FILE", f"Requests to simulate: {TRACE_KINDS}."),
        ("fleet", "SPEC", "Engines: ROLE=ENDPOINTSxRANKS:PROFILE[*SPEED],..., or a YAML file."),
        ("policy", "NAME", f"{a_policy}. May be repeated (default least_work)."),
        ("requests", "N", "How many requests; a trace that is over begins anew (default: the trace once)."),
        ("rate", "X", "Mean arrivals in a second; may be repeated (default: as recorded)."),
        ("utilisation", "U", "Share of time that prefill ranks are to be busy, without reuse; may be repeated."),
        ("report-interval", "SECONDS", "Time between two load reports of an endpoint; 0: none (default 2)."),
        ("report-delay", "SECONDS", "Age of a load report when it is told (default 0)."),
        ("seeds", "N", "Runs of each policy, which differ by chance (default 1)."),
        *OBJECTIVE_OPTIONS,
        ("out", "DIR", "Write runs.csv, results.json and report.html there."),
        ("gpus", "N", "With --plan: most GPUs (default 64)."),
        ("target", "SHARE", "With --plan: share of answers that must be good (default 0.95)."),
    )  # fmt: skip
    for name, metavar, text in options:
        action = "append" if name in many else "store"
        is_needed = name in ("trace", "fleet")
        parser.add_argument(
            f"--{name}", metavar=metavar, action=action, required=is_needed, default=argparse.SUPPRESS, help=text
        )
    text = "Find the fewest GPUs: as many endpoints of the fleet's two kinds as keep the target."
    parser.add_argument("--plan", action="store_true", default=argparse.SUPPRESS, help=text)


def read_settings(flags: dict[str, object]) -> SimulateSettings:
    """Return the options. Raises: ValueError that says what is wrong."""
    return read_flags(flags, SimulateSettings)


def read_flags(flags: dict[str, object], struct: type[S]) -> S:
    """Return typed options as a struct. Raises: ValueError that says what is wrong."""
    try:
        return msgspec.convert(flags, struct, strict=False)
    except msgspec.ValidationError as error:
        name = str(error).partition("`$.")[2].partition("[")[0].rstrip("`")
        if name not in flags:
            raise  # what options say of each other
        raise ValueError(f"{_flag(name)}: {flags[name]!r} is not a number") from None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def cases_of(
    settings: SimulateSettings, loads: Sequence[Load], fleet: Sequence[EngineSpec], make_options: MakeOptions
) -> Iterator[Case]:
    """Return every run: under each load each policy with each seed. Raises: ConfigError."""
    policies = list(dict.fromkeys(settings.policy))
    for load in loads:
        for policy in policies:
            for seed in range(settings.seeds):
                options, world = None, _world(settings, {}, seed)
                if policy not in BOUNDS:
                    name, changes = read_policy(policy)
                    world = _world(settings, changes, seed)
                    options = make_options(router_settings(name, changes, seed))
                yield Case(
                    title=load.label,
                    policy=policy,
                    options=options,
                    fleet=fleet,
                    load=load,
                    settings=world,
                    objective=settings.objective,
                    has_curves=seed == 0 and not settings.plan,
                )


def _world(settings: SimulateSettings, changes: dict[str, str], seed: int) -> SimulatorSettings:
    """Return how the world behaves; takes what a policy says of it out of its changes. Raises: ValueError."""
    told = {name: changes.pop(name, getattr(settings, name)) for name in ("report_interval", "report_delay")}
    interval_s, delay_s = (_seconds(name, value) for name, value in told.items())
    return SimulatorSettings(report_interval_s=interval_s, report_delay_s=delay_s, seed=seed)


def _seconds(name: str, value: float | str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        raise ValueError(f"{name}: {value!r} is not a number") from None
    if not seconds >= 0:
        raise ValueError(f"{name}: must not be negative")
    return seconds


def read_policy(text: str) -> tuple[str, dict[str, str]]:
    """Return name and settings of ``NAME[,SETTING=VALUE,...]``."""
    name, *changes = text.split(",")
    return name, {key: value for key, _, value in (change.partition("=") for change in changes)}


def router_settings(name: str, changes: Mapping[str, str], seed: int) -> Settings:
    """Return the settings of a router with a policy. Raises: ConfigError."""
    return load_settings(None, {}, {"policy": name, "journal_decisions": "0", "seed": str(seed), **changes})
