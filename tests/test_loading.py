"""Settings from their sources, and refusals."""

from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from msgspec import UNSET

from pdrouter.config import DemoSettings, EndpointSettings, PolicyName, Settings
from pdrouter.errors import ConfigError
from pdrouter.loading import env_name, flag_name, from_flags, load_settings, resolve_settings
from pdrouter.setting import settings_of

DEMO_SETTINGS = settings_of(DemoSettings)


def write(folder: Path, text: str) -> Path:
    """Return a file with the text."""
    file = folder / "config.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def problems_of(
    file: Path | None = None, env: Mapping[str, str] | None = None, flags: Mapping[str, object] | None = None
) -> list[str]:
    """Return the problems of settings that can't be used."""
    with pytest.raises(ConfigError) as error:
        load_settings(file, env or {}, flags or {})
    return error.value.problems


def test_defaults() -> None:
    """Nothing set gives the defaults, which are within their own ranges; no endpoint is needed."""
    settings = load_settings(None, {}, {})
    assert settings == Settings()
    assert msgspec.convert(msgspec.to_builtins(settings), Settings) == settings
    assert (settings.prefill, settings.decode, settings.worker) == ((), (), ())


def test_order_of_sources(tmp_path: Path) -> None:
    """Defaults < file < environment < flags, and each value's source is told."""
    file = write(tmp_path, "port: 1\nhost: file\nlog_level: debug\nseed: 1\n")
    env = {"PDROUTER_HOST": "env", "PDROUTER_LOG_LEVEL": "error", "OTHER_PORT": "5"}
    resolved = resolve_settings(file, env, {"log_level": "warning", "seed": "none"})
    settings = resolved.settings
    assert (settings.port, settings.host, settings.log_level, settings.seed) == (1, "env", "warning", None)
    names = ("policy", "port", "host", "log_level", "seed")
    assert [resolved.sources[name] for name in names] == ["default", "file", "env", "flag", "flag"]


def test_list_replaces_list(tmp_path: Path) -> None:
    """A stronger source's list stands alone."""
    file = write(tmp_path, "worker: [http://a:1, http://b:1]\n")
    settings = load_settings(file, {"PDROUTER_WORKER": "http://c:1"}, {})
    assert [endpoint.url for endpoint in settings.worker] == ["http://c:1"]


def test_file_from_environment(tmp_path: Path) -> None:
    """PDROUTER_CONFIG names the file; --config goes before it."""
    env = {"PDROUTER_CONFIG": str(write(tmp_path, "port: 5\n"))}
    assert load_settings(None, env, {}).port == 5
    other = tmp_path / "other.yaml"
    other.write_text("port: 6\n", encoding="utf-8")
    assert load_settings(other, env, {}).port == 6


def test_environment_lists() -> None:
    """Lists in the environment are separated by commas, endpoints with their port behind a space."""
    env = {
        "PDROUTER_PREFILL": "http://a:1 8998, http://b:1 none,http://c:1",
        "PDROUTER_DECODE": "http://d:1",
        "PDROUTER_REQUEST_ID_HEADERS": "X-One, x-two",
        "PDROUTER_DECISION_HEADERS": "off",
        "PDROUTER_PORT": "",
    }
    settings = load_settings(None, env, {})
    assert [(e.url, e.bootstrap_port) for e in settings.prefill] == [
        ("http://a:1", 8998),
        ("http://b:1", None),
        ("http://c:1", UNSET),
    ]
    assert settings.decode == (EndpointSettings(url="http://d:1"),)
    assert settings.request_id_headers == ("x-one", "x-two")
    assert (settings.decision_headers, settings.port) == (False, Settings().port)


def test_kubernetes_variables_are_not_settings() -> None:
    """What Kubernetes sets for a service called pdrouter neither stops the start nor sets the port."""
    env = {
        "PDROUTER_PORT": "tcp://10.0.0.1:80",
        "PDROUTER_SERVICE_HOST": "10.0.0.1",
        "PDROUTER_SERVICE_PORT": "80",
        "PDROUTER_SERVICE_PORT_HTTP": "80",
        "PDROUTER_PORT_80_TCP": "tcp://10.0.0.1:80",
        "PDROUTER_PORT_80_TCP_ADDR": "10.0.0.1",
        "PDROUTER_METRICS_SERVICE_HOST": "10.0.0.2",
    }
    assert load_settings(None, env, {}) == Settings()


def test_yaml_endpoints(tmp_path: Path) -> None:
    """An endpoint is a mapping or a text; keys may have dashes or underscores."""
    text = """
prefill:
- http://a:1 8998
- {url: http://b:1, bootstrap-port: none, group: g, model: m, dp_size: 8}
- {url: http://c:1, bootstrap_port: null}
- url: http://d:1
worker-load-check-interval: 1
"""
    settings = load_settings(write(tmp_path, text), {}, {})
    assert settings.prefill == (
        EndpointSettings(url="http://a:1", bootstrap_port=8998),
        EndpointSettings(url="http://b:1", bootstrap_port=None, group="g", model="m", dp_size=8),
        EndpointSettings(url="http://c:1", bootstrap_port=None),
        EndpointSettings(url="http://d:1"),
    )
    assert settings.worker_load_check_interval == 1.0


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (
            'prefill: [http://a, "htp:/x"]',
            ['prefill[1].url: "htp:/x" is not a URL; write http://HOST:PORT'],
        ),
        ("prot: 1", ["prot: unknown setting; did you mean port?"]),
        ("zzzz: 1", ["zzzz: unknown setting"]),
        ("port: 65536", ["port: 65536 is out of range; write 0 to 65535 (port number)"]),
        ("host: a b", ['host: "a b" is not an address or host name']),
        (
            "health_check_endpoint: health",
            ['health_check_endpoint: "health" is not a path; it starts with / and has no spaces'],
        ),
        ("request_id_headers: [a b]", ['request_id_headers: "a b" is not a header name']),
        ("prefill: {url: http://a}", ['prefill: {"url": "http://a"} is not a list']),
        ("prefill:", ["prefill: null is not a list"]),
        ("prefill: [3]", ["prefill[0]: 3 is not an endpoint; write URL [BOOTSTRAP_PORT|none]"]),
        (
            "prefill: [http://a 1 2]",
            ['prefill[0]: "http://a 1 2" is not an endpoint; write URL [BOOTSTRAP_PORT|none]'],
        ),
        (
            "decode: &it [*it]",
            ["decode[0]: a value that contains itself is not an endpoint; write URL"],
        ),
        ("decode: [3]", ["decode[0]: 3 is not an endpoint; write URL"]),
        ("prefill: [{group: g}]", ["prefill[0].url: missing; write http://HOST:PORT"]),
        (
            "prefill: [{url: http://a, grop: g}]",
            ["prefill[0].grop: unknown setting; did you mean prefill[0].group?"],
        ),
        (
            "prefill: [http://a 0]",
            ['prefill[0].bootstrap_port: "0" is out of range; write 1 to 65535 (port number)'],
        ),
        (
            "decode: [http://a 8998]",
            ["decode[0].bootstrap_port: only prefill endpoints have one; leave it out"],
        ),
        (
            "prefill: [http://A:80]\ndecode: [http://b, http://a]",
            ["decode[1].url: http://a:80 is prefill[0] already; name each endpoint once"],
        ),
        (
            "worker: [http://a, http://a/]",
            ["worker[1].url: http://a:80 is worker[0] already; name each endpoint once"],
        ),
        ("log-level: info\nlog_level: info", ["log_level: set twice"]),
        (
            "dp_minimum_tokens_scheduler: true\nrank_policy: random",
            [
                (
                    "dp_minimum_tokens_scheduler is short for rank_policy minimum_tokens, "
                    "but rank_policy is random; set one of them"
                )
            ],
        ),
        (
            "port: x\nseed: -1\npolicy: best",
            [
                'port: "x" is not a whole number (port number)',
                "seed: -1 is out of range; write 0 to 9223372036854775807 (integer)",
                'policy: "best" is not one of ' + ", ".join(get_args(PolicyName)),
            ],
        ),
    ],
)
def test_refused(tmp_path: Path, text: str, problems: list[str]) -> None:
    """Each problem is one clear line, and all are told at once."""
    assert problems_of(write(tmp_path, text)) == problems


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [", ":1: expected the node content, but found '<stream end>'"),
        ("port: 1\nport: 2", ":2: port: set twice"),
        ("- port", ": not a mapping of settings; write lines like 'port: 30000'"),
        ("port: \x00", ": not YAML: "),
        ("port: 2024-13-45", ": not YAML: month must be in 1..12"),
        ("port: !!python/name:os.system", ":1: could not determine a constructor for the tag"),
    ],
)
def test_broken_file(tmp_path: Path, text: str, problem: str) -> None:
    """A file that isn't a YAML mapping is refused with its name and line."""
    file = write(tmp_path, text)
    (line,) = problems_of(file)
    assert line.startswith(f"{file}{problem}")
    assert "\n" not in line


def test_unreadable_file(tmp_path: Path) -> None:
    """A file that isn't there, or isn't text, is one line."""
    missing = tmp_path / "missing.yaml"
    assert problems_of(missing) == [f"{missing}: No such file or directory"]
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\xff")
    assert problems_of(binary) == [f"{binary}: not UTF-8 text"]


def test_empty_file(tmp_path: Path) -> None:
    """An empty file sets nothing."""
    assert load_settings(write(tmp_path, "# nothing\n"), {}, {}) == Settings()


def test_problems_name_their_source(tmp_path: Path) -> None:
    """Problems of the file, the environment and flags come together, each by the name used there."""
    file = write(tmp_path, "port: 70000\n")
    assert problems_of(file, {"PDROUTER_PROT": "1", "PDROUTER_PORT": "x"}, {"port": "y", "decode": ["z"]}) == [
        "port: 70000 is out of range; write 0 to 65535 (port number)",
        "PDROUTER_PROT: unknown setting; did you mean PDROUTER_PORT?",
        'PDROUTER_PORT: "x" is not a whole number (port number)',
        '--port: "y" is not a whole number (port number)',
        '--decode[0].url: "z" is not a URL; write http://HOST:PORT',
    ]


def test_dp_minimum_tokens_scheduler() -> None:
    """The short form goes with the policy that it names."""
    settings = load_settings(None, {}, {"dp_minimum_tokens_scheduler": True, "rank_policy": "minimum_tokens"})
    assert settings.rank_policy == "minimum_tokens"


def test_from_flags() -> None:
    """A struct of flags alone is checked like the settings."""
    assert from_flags(DemoSettings, DEMO_SETTINGS, {"seconds": "5", "compare": False}).compare is False
    with pytest.raises(ConfigError, match='--seconds: "0" is out of range; write 1 to 3600'):
        from_flags(DemoSettings, DEMO_SETTINGS, {"seconds": "0"})


def test_names_are_derived() -> None:
    """Flag and variable follow from the name."""
    assert flag_name("log_level") == "--log-level"
    assert env_name("log_level") == "PDROUTER_LOG_LEVEL"


def test_a_file_without_bounds(tmp_path: Path) -> None:
    """Is refused before it is read: nested too deep, or too long."""
    deep = problems_of(write(tmp_path, "worker: " + "[" * 100_000))
    assert deep == [f"{tmp_path}/config.yaml:1: nested deeper than 32 levels"]
    deep = problems_of(write(tmp_path, "\n".join("  " * level + "a:" for level in range(2000))))
    assert deep == [f"{tmp_path}/config.yaml:32: nested deeper than 32 levels"]
    (long,) = problems_of(write(tmp_path, "#" * (16 * 2**20 + 1)))
    assert long.endswith("config.yaml: longer than 16777216 bytes")


def test_aliases_that_grow(tmp_path: Path) -> None:
    """Each level of lists is twice the one before it; the message ends all the same."""
    lists = "\n".join(f"  - &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 25))
    (problem,) = problems_of(write(tmp_path, f"port:\n  - &a0 [x, x]\n{lists}\n"))
    assert problem.startswith("port: [[")
    assert len(problem) < 200
