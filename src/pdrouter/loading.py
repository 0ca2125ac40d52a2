"""Fills ``Settings`` from its defaults, a file, the environment and flags, and gathers all that is wrong with them.

It must not know what a setting means, but where settings contradict each other.
"""

import re
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Final, Literal, TypeVar, cast

import yaml
from msgspec import Struct

from pdrouter.config import ENDPOINT_SETTINGS, SETTINGS, EndpointSettings, Settings, is_endpoints
from pdrouter.errors import ConfigError
from pdrouter.files import read_file
from pdrouter.setting import Setting, did_you_mean, shown, split

S = TypeVar("S", bound=Struct)
Source = Literal["default", "file", "env", "flag"]

ENV_PREFIX: Final = "PDROUTER_"
ENV_CONFIG: Final = "PDROUTER_CONFIG"


_MAX_FILE_BYTES = 16 * 2**20
_MAX_DEPTH = 32
"""Bounds of a settings' file (I9); chosen, far beyond any fleet's."""


class Resolved(Struct, frozen=True):
    """The effective settings and where each value came from."""

    settings: Settings
    sources: dict[str, Source]


def load_settings(file: Path | None, env: Mapping[str, str], flags: Mapping[str, object]) -> Settings:
    """Return the defaults, overridden by the file, then the environment, then the flags.

    ``flags`` maps names of settings to text, lists of text or values. Raises ConfigError with every
    problem found.
    """
    return resolve_settings(file, env, flags).settings


def resolve_settings(
    file: Path | None, env: Mapping[str, str], flags: Mapping[str, object], known: Mapping[str, Setting] = SETTINGS
) -> Resolved:
    """Do what ``load_settings`` does and tell the source of each value."""
    reader = _Reader()
    if file is None and env.get(ENV_CONFIG):
        file = Path(env[ENV_CONFIG])
    layers: list[tuple[Source, dict[str, object]]] = [
        ("file", reader.read(known, reader.load_file(file) if file else {}, str)),
        ("env", reader.read(known, _env_values(env), env_name)),
        ("flag", reader.read(known, flags, flag_name)),
    ]
    values: dict[str, object] = {}
    sources: dict[str, Source] = dict.fromkeys(SETTINGS, "default")
    for source, layer in layers:
        values |= layer
        sources |= dict.fromkeys(layer, source)
    reader.problems += _conflicts(values)
    if reader.problems:
        raise ConfigError(reader.problems)
    return Resolved(Settings(**values), sources)  # type: ignore[arg-type]


def from_flags(struct: type[S], known: Mapping[str, Setting], flags: Mapping[str, object]) -> S:
    """Build a struct from flags alone; raises ConfigError with every problem found."""
    reader = _Reader()
    values = reader.read(known, flags, flag_name)
    if reader.problems:
        raise ConfigError(reader.problems)
    return struct(**values)


def read_endpoint(role: str, fields: Mapping[str, object]) -> EndpointSettings:
    """Build what is said of one endpoint of a role; raises ConfigError with every problem found."""
    reader = _Reader()
    endpoint = reader.endpoint(role, fields, role)
    if endpoint is None:
        raise ConfigError(reader.problems)
    return endpoint


def flag_name(name: str) -> str:
    """Return the flag that sets a setting."""
    return "--" + name.replace("_", "-")


def env_name(name: str) -> str:
    """Return the environment variable that sets a setting."""
    return ENV_PREFIX + name.upper()


# Kubernetes puts these into every container beside a service called pdrouter or pdrouter-something.
_KUBERNETES = re.compile(r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")


def _env_values(env: Mapping[str, str]) -> dict[str, object]:
    """Return what the environment sets; an empty variable counts as not set."""
    values: dict[str, object] = {}
    for key, text in env.items():
        name = key.removeprefix(ENV_PREFIX)
        is_foreign = _KUBERNETES.fullmatch(name) or text.startswith(("tcp://", "udp://", "sctp://"))
        if key.startswith(ENV_PREFIX) and key != ENV_CONFIG and text.strip() and not is_foreign:
            values[name.lower()] = text
    return values


def _conflicts(values: Mapping[str, object]) -> list[str]:
    """Return what is wrong between settings that are each right."""
    problems = []
    rank_policy = values.get("rank_policy")
    if values.get("dp_minimum_tokens_scheduler") and rank_policy not in (None, "minimum_tokens"):
        problems.append(
            "dp_minimum_tokens_scheduler is short for rank_policy minimum_tokens, "
            f"but rank_policy is {rank_policy}; set one of them"
        )
    if values.get("engine_api_key") and values.get("engine_api_key_file"):
        problems.append("engine_api_key and engine_api_key_file: set one of them")
    seen: dict[str, str] = {}
    for role in ("prefill", "decode", "worker"):
        endpoints = cast("tuple[EndpointSettings, ...]", values.get(role, ()))
        for index, endpoint in enumerate(endpoints):
            label = f"{role}[{index}]"
            first = seen.setdefault(endpoint.url, label)
            if first != label:
                problems.append(f"{label}.url: {endpoint.url} is {first} already; name each endpoint once")
    return problems


class _Reader:
    """Turns raw values into checked ones and gathers the problems, one line each."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def load_file(self, file: Path) -> dict[str, object]:
        """Return the top-level mapping of a YAML file."""
        try:
            text = read_file(file, _MAX_FILE_BYTES).decode("utf-8")
            loaded = yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
        except OSError as error:
            self.problems.append(f"{file}: {error.strerror or error}")
        except UnicodeDecodeError:
            self.problems.append(f"{file}: not UTF-8 text")
        except yaml.MarkedYAMLError as error:
            line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
            self.problems.append(f"{file}{line}: {error.problem or error.context}")
        except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or number that isn't one
            self.problems.append(f"{file}: not YAML: {' '.join(str(error).split())}")
        else:
            if loaded is None or isinstance(loaded, dict):
                return loaded or {}
            self.problems.append(f"{file}: not a mapping of settings; write lines like 'port: 30000'")
        return {}

    def read(
        self, known: Mapping[str, Setting], raw: Mapping[str, object], label: Callable[[str], str]
    ) -> dict[str, object]:
        """Return the values of ``raw`` that are right, by name; keys may have dashes or underscores."""
        values: dict[str, object] = {}
        for key, value in raw.items():
            name = str(key).replace("-", "_")
            if name not in known:
                self.problems.append(f"{label(str(key))}: unknown setting{did_you_mean(name, known, label)}")
            elif name in values:
                self.problems.append(f"{label(name)}: set twice")
            elif is_endpoints(known[name]):
                values[name] = self._endpoints(name, value, label(name))
            else:
                try:
                    values[name] = known[name].read(value)
                except ValueError as error:
                    self.problems.append(f"{label(name)}: {error}")
        return values

    def _endpoints(self, role: str, raw: object, label: str) -> tuple[EndpointSettings, ...]:
        try:
            items = split(raw)
        except ValueError as error:
            self.problems.append(f"{label}: {error}")
            return ()
        read = (self.endpoint(role, item, f"{label}[{index}]") for index, item in enumerate(items))
        return tuple(endpoint for endpoint in read if endpoint)

    def endpoint(self, role: str, raw: object, label: str) -> EndpointSettings | None:
        """Return what is said of an endpoint, unless something is wrong with it."""
        fields: object = _endpoint_fields(raw) if isinstance(raw, str) else raw
        if not isinstance(fields, Mapping):
            usage = "URL [BOOTSTRAP_PORT|none]" if role == "prefill" else "URL"
            self.problems.append(f"{label}: {shown(raw)} is not an endpoint; write {usage}")
            return None
        count = len(self.problems)
        values = self.read(ENDPOINT_SETTINGS, fields, lambda name: f"{label}.{name}")
        if role != "prefill" and "bootstrap_port" in values:
            self.problems.append(f"{label}.bootstrap_port: only prefill endpoints have one; leave it out")
        if values.get("api_key") and values.get("api_key_file"):
            self.problems.append(f"{label}: api_key and api_key_file: set one of them")
        if "url" not in values and len(self.problems) == count:
            self.problems.append(f"{label}.url: missing; write http://HOST:PORT")
        return EndpointSettings(**values) if len(self.problems) == count else None  # type: ignore[arg-type]


def _endpoint_fields(text: str) -> dict[str, object] | None:
    """Return the fields of ``URL [BOOTSTRAP_PORT|none]``; None if it is neither."""
    words = text.split()
    return dict(zip(("url", "bootstrap_port"), words, strict=False)) if len(words) in (1, 2) else None


class _Loader(yaml.SafeLoader):
    """YAML without its traps: a key given twice has its last value in silence, nesting ends in the stack's end."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem=f"nested deeper than {_MAX_DEPTH} levels", problem_mark=mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"{key.value}: set twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)
