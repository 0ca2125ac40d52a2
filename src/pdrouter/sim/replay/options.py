"""What ``pdrouter replay`` is asked for. Next: ``command.py``."""

import argparse
import os
import re
from collections.abc import Sequence

import msgspec

from pdrouter.sim.virtual.figures import Objective
from pdrouter.sim.virtual.options import OBJECTIVE_OPTIONS, TRACE_KINDS, read_flags
from pdrouter.sim.virtual.sweep import Load


class ReplaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """The options by name, as they are typed."""

    trace: str
    url: str
    requests: int | None = None
    rate: float | None = None
    speed: float = 1.0
    model: str | None = None
    api_key: str | None = None
    token_ids: bool = False
    ignore_eos: bool = False
    max_in_flight: int = 1000
    timeout: float = 600.0
    seed: int | None = None
    name: str = "live"
    slo_ttft: float = 2.0
    slo_ttft_per_token: float = 0.001
    slo_token: float = 0.05
    out: str | None = None
    beside: tuple[str, ...] = ()
    allow_failures: bool = False

    def __post_init__(self) -> None:
        for name in ("requests", "rate", "speed", "max_in_flight", "timeout", "slo_ttft", "slo_token"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"--{name.replace('_', '-')}: must be positive")
        if not re.match(r"https?://[^/]", self.url):
            raise ValueError(f"--url: {self.url} is not a URL; write http://HOST:PORT")

    @property
    def objective(self) -> Objective:
        """What a good answer keeps."""
        return Objective(ttft_s=self.slo_ttft, ttft_s_per_prompt_token=self.slo_ttft_per_token, token_s=self.slo_token)

    @property
    def load(self) -> Load:
        """What comes, and how fast."""
        return Load(trace=self.trace, requests=self.requests, rate_per_s=self.rate)

    @property
    def root(self) -> str:
        """The URL without the API's own part."""
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def key(self) -> str:
        """The key to bring along; where none is needed any will do."""
        return self.api_key or os.environ.get("OPENAI_API_KEY") or "none"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    faster = "send S times as fast, and tell times S times as long"
    cached = "an endpoint may have prompts of an earlier run with the same seed cached"
    where = "simulated or live, in the same tables and pictures"
    options: Sequence[tuple[str, str | None, str]] = (
        ("url", "URL", "Where the endpoint is, a router or an engine: http://HOST:PORT."),
        ("requests", "N", "How many requests; a trace that is over begins anew (default: the trace once)."),
        ("rate", "X", "Mean arrivals in a second of the trace's time (default: as recorded)."),
        ("speed", "S", f"For emulated engines S times faster than life: {faster} (default 1)."),
        ("model", "NAME", "Model to ask for (default: the request's own if it is served, else the first one served)."),
        ("api-key", "KEY", "Key to bring along (default: what OPENAI_API_KEY says)."),
        ("token-ids", None, "Send prompts as token ids to /v1/completions: exact lengths, no chat template."),
        ("ignore-eos", None, "Ask engines that know it (SGLang, vLLM, TensorRT-LLM) for answers of full length."),
        ("max-in-flight", "N", "Most requests under way; a later one is held back, and that is told (default 1000)."),
        ("timeout", "SECONDS", "Longest wait for a whole answer (default 600)."),
        ("seed", "N", f"Chance of moments and prompts; {cached} (default: moments of 0, new prompts)."),
        ("name", "NAME", "What this run is called in tables and pictures (default live)."),
        *OBJECTIVE_OPTIONS,
        ("out", "DIR", "Write runs.csv, requests.csv, results.json and report.html there."),
        ("beside", "DIR", f"Show the runs of an earlier --out, {where}; may be repeated."),
        ("allow-failures", None, "End with status 0 even if requests failed."),
    )  # fmt: skip
    parser.add_argument("trace", metavar="TRACE", help=f"Requests to send: {TRACE_KINDS}.")
    for name, metavar, text in options:
        default = argparse.SUPPRESS
        if metavar is None:
            parser.add_argument(f"--{name}", action="store_true", default=default, help=text)
            continue
        action = "append" if name == "beside" else "store"
        parser.add_argument(
            f"--{name}", metavar=metavar, action=action, required=name == "url", default=default, help=text
        )


def read_settings(flags: dict[str, object]) -> ReplaySettings:
    """Return the options. Raises: ValueError that says what is wrong."""
    return read_flags(flags, ReplaySettings)
