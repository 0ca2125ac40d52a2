"""The command line: what reaches the commands, what is refused, what is printed."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import pytest
import yaml
from msgspec import UNSET, Struct

from pdrouter import __version__
from pdrouter.cli import COMMANDS, IMPLIED, UNSERVED, main
from pdrouter.config import SETTINGS, Settings
from pdrouter.loading import flag_name

T = TypeVar("T")
Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _no_settings_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("PDROUTER_"):
            monkeypatch.delenv(name)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Collect what ``serve`` is called with; it returns 7."""
    calls: list[Settings] = []
    _put(monkeypatch, "pdrouter.server", serve=_collect(calls, 7))
    return calls


def _collect(calls: list[T], status: int) -> Callable[[T], int]:
    """Return a function that keeps its argument and returns the status."""

    def run(argument: T) -> int:
        calls.append(argument)
        return status

    return run


def _put(monkeypatch: pytest.MonkeyPatch, module: str, **names: object) -> None:
    """Put a module in the place of one that a command imports."""
    stand_in = ModuleType(module)
    vars(stand_in).update(names)
    monkeypatch.setitem(sys.modules, module, stand_in)


def test_serve_gets_the_settings(served: list[Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    """``serve`` starts the server with the effective settings and returns its status."""
    monkeypatch.setenv("PDROUTER_LOG_LEVEL", "debug")
    assert main(["serve", "--port", "0", "--policy", "random", "--no-decision-headers"]) == 7
    (settings,) = served
    assert (settings.port, settings.policy, settings.log_level) == (0, "random", "debug")
    assert settings.decision_headers is False


def test_endpoints(served: list[Settings]) -> None:
    """--prefill takes a bootstrap port, none, or neither; all three roles repeat; --worker-urls adds."""
    words = (
        "serve --pd-disaggregation --dp-aware --prefill http://a:1 --prefill http://b:1 8998 "
        "--prefill http://c:1 none --decode http://d:1 --decode http://e:1 "
        "--worker http://f:1 --worker-urls http://g:1 http://h:1 --worker http://i:1"
    )
    assert main(words.split()) == 7
    (settings,) = served
    assert [(e.url, e.bootstrap_port) for e in settings.prefill] == [
        ("http://a:1", UNSET),
        ("http://b:1", 8998),
        ("http://c:1", None),
    ]
    assert [e.url for e in settings.decode] == ["http://d:1", "http://e:1"]
    assert [e.url for e in settings.worker] == ["http://f:1", "http://g:1", "http://h:1", "http://i:1"]


def test_lists(served: list[Settings]) -> None:
    """A list of words is several values behind one flag; none is an empty list."""
    assert main(["serve", "--request-id-headers", "X-A", "x-b"]) == 7
    assert main(["serve", "--request-id-headers"]) == 7
    assert [settings.request_id_headers for settings in served] == [("x-a", "x-b"), ()]


def test_problems_of_flags_come_together(served: list[Settings], capsys: Output) -> None:
    """Unknown, unserved and wrong flags are one line each on stderr, and nothing starts."""
    words = "serve --max-tree-size 9 --polcy x --port=70000 --decode http://d@2 --prefill a 1 2 --zzzz"
    assert main(words.split()) == 2
    output = capsys.readouterr()
    assert (output.out, served) == ("", [])
    assert output.err.splitlines() == [
        "--max-tree-size: not served yet; " + UNSERVED["--max-tree-size"],
        "--polcy: unknown flag; did you mean --policy?",
        "--zzzz: unknown flag",
        '--port: "70000" is out of range; write 0 to 65535 (port number)',
        '--decode[0].url: "http://d@2" names a rank; ranks are learned from the engine, write http://HOST:PORT',
        '--prefill[0]: "a 1 2" is not an endpoint; write URL [BOOTSTRAP_PORT|none]',
    ]


@pytest.mark.parametrize("flag", UNSERVED)
def test_unserved_flags_of_sglang_router(flag: str, served: list[Settings], capsys: Output) -> None:
    """A flag of sglang-router that isn't served says so and what to do, with or without a value."""
    for words in ([flag], [flag, "1"], [f"{flag}=1"]):
        assert main(["serve", *words]) == 2
        assert capsys.readouterr().err == f"{flag}: not served yet; {UNSERVED[flag]}\n"
    assert served == []


def test_a_flag_is_served_or_not() -> None:
    """No flag is both a setting and refused or without effect."""
    flags = {flag_name(name) for name in SETTINGS}
    assert not flags & (UNSERVED.keys() | IMPLIED.keys())


@pytest.mark.parametrize("words", [["--decode", "http://a", "http://b"], ["stray"]])
def test_stray_word(words: list[str], capsys: Output) -> None:
    """A word that belongs to no flag is refused."""
    assert main(["check-config", *words]) == 2
    assert capsys.readouterr().err == f"{words[-1]}: not a flag\n"


def test_flag_without_its_value(capsys: Output) -> None:
    """A flag that lacks its value is refused by name."""
    assert main(["serve", "--port"]) == 2
    assert "--port: expected one argument" in capsys.readouterr().err


def test_check_config_tells_sources(tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting is printed with its effective value and where it came from."""
    file = tmp_path / "config.yaml"
    file.write_text("seed: 3\nprefill: [http://a:1 none]\n", encoding="utf-8")
    monkeypatch.setenv("PDROUTER_LOG_FORMAT", "json")
    assert main(["check-config", "--config", str(file), "--port", "0"]) == 0
    output = capsys.readouterr().out
    lines = output.splitlines()
    assert {
        "prefill:  # file",
        "seed: 3  # file",
        "log_format: json  # env",
        "port: 0  # flag",
        "decode: []  # default",
        "prefill_policy: null  # default",
    } <= set(lines)
    printed = yaml.safe_load(output)
    assert list(printed) == list(SETTINGS)
    assert printed["prefill"] == [{"url": "http://a:1", "bootstrap_port": None}]


def test_check_config_can_be_read_back(tmp_path: Path, capsys: Output) -> None:
    """What check-config prints is a config file that gives the same settings."""
    file = tmp_path / "config.yaml"
    file.write_text(
        "prefill:\n- {url: 'http://a:1', bootstrap_port: 8998, group: 'g: #1', model: 'null', dp_size: 2}\n"
        "- http://b:1 none\n- http://c:1\ndecode: ['http://[::1]:2']\nhealth_check_endpoint: '/h#x:%20'\n"
        "host: '::'\nload_aware_sigma: 0.1\nseed: 9223372036854775807\ndecode_policy: random\n",
        encoding="utf-8",
    )
    assert main(["check-config", "--config", str(file)]) == 0
    first = capsys.readouterr().out
    again = tmp_path / "again.yaml"
    again.write_text(first, encoding="utf-8")
    assert main(["check-config", "--config", str(again)]) == 0
    second = capsys.readouterr().out
    assert yaml.safe_load(first) == yaml.safe_load(second)
    assert "# default" not in second


def test_check_config_shows_no_secret(tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it comes from, and what is wrong with one neither; where each came from is shown."""
    file = tmp_path / "router.yaml"
    file.write_text("tenant_weights: [Bearer sk-file=2]\n")
    monkeypatch.setenv("PDROUTER_API_KEY", "sk-env")
    assert main(["check-config", "--config", str(file)]) == 0
    out = capsys.readouterr().out
    assert "api_key: (secret)  # env" in out
    assert "tenant_weights:  # file\n- (secret)" in out
    assert "sk-" not in out
    file.write_text("tenant_weights: [sk-file]\napi_key: [sk-file]\n")
    assert main(["check-config", "--config", str(file), "--tenant-weights", "sk-flag"]) == 2
    out, err = capsys.readouterr()
    assert "sk-" not in out + err
    assert "api_key: it is not text" in err


def test_check_config_refuses(capsys: Output) -> None:
    """Settings that can't be used print their problems and nothing else."""
    assert main(["check-config", "--prefill", "htp:/x"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == '--prefill[0].url: "htp:/x" is not a URL; write http://HOST:PORT\n'


@pytest.mark.parametrize("command", ["serve", "check-config"])
def test_help_is_complete(command: str, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """Help names every setting by flag and variable, with its unit, range and default."""
    monkeypatch.setenv("COLUMNS", "1000")
    assert main([command, "--help"]) == 0
    output = capsys.readouterr().out
    for item in SETTINGS.values():
        assert f"{flag_name(item.name)} " in output.replace(",", " ")
        facts = (item.unit, item.range_text, f"default {item.default_text}", f"env PDROUTER_{item.name.upper()}")
        assert f"{item.description} ({'; '.join(fact for fact in facts if fact)})" in output
        assert f"\n{item.group}:\n" in output
    assert "--worker-urls" in output
    assert "--config" in output


def test_top_level(capsys: Output) -> None:
    """Without a command there is help and status 2; --help and --version are 0; an unknown command is 2."""
    assert main([]) == 2
    assert "check-config" in capsys.readouterr().err
    assert main(["--help"]) == 0
    output = capsys.readouterr().out
    assert all(f"\n    {name} " in output or f"\n    {name}\n" in output for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pdrouter {__version__}\n"
    assert main(["bogus"]) == 2
    assert "bogus" in capsys.readouterr().err


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    """Ctrl-C ends a command with 130 and without a traceback."""

    def serve(settings: Settings) -> int:
        raise KeyboardInterrupt

    _put(monkeypatch, "pdrouter.server", serve=serve)
    assert main(["serve"]) == 130
    assert capsys.readouterr() == ("", "")


def test_emulate(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    """``emulate`` runs the engine that its flags describe."""
    calls: list[object] = []
    _put(monkeypatch, "pdrouter.sim.emulator", run=_collect(calls, 7))
    words = "emulate --role prefill --dp-size 4 --speed 10 --port 0 --bootstrap-port 0 --load-api legacy"
    assert main([*words.split(), "--kv-capacity-tokens", "1000"]) == 7
    (settings,) = calls
    assert [getattr(settings, name) for name in ("role", "dp_size", "speed", "load_api")] == [
        "prefill",
        4,
        10.0,
        "legacy",
    ]
    assert main(["emulate", "--dp-size", "0", "--profile", "none-such", "--roll", "x"]) == 2
    unknown, size, profile = capsys.readouterr().err.splitlines()
    assert unknown == "--roll: unknown flag; did you mean --role?"
    assert size.startswith('--dp-size: "0" is out of range')
    assert profile.startswith("--profile: unknown profile 'none-such'; there are: ")
    assert main(["emulate", "--engine", "sglang", "--kv-connector", "nixl"]) == 2
    assert "kv_connector is vLLM's" in capsys.readouterr().err


def test_emulate_help_describes_each_flag(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each flag of ``emulate`` has a sentence."""
    monkeypatch.setenv("COLUMNS", "1000")
    assert main(["emulate", "--help"]) == 0
    flags = [text for text in capsys.readouterr().out.split("\n  --")[1:] if ". (" in text and "default" in text]
    assert len(flags) == 27


class Options(Struct, kw_only=True):
    """Stands in for the demo's options."""

    seconds: float
    speed: float
    policy: str
    compare: bool
    plain: bool


def test_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """``demo`` runs with its flags; no live table where stdout is no terminal, unless asked for."""
    calls: list[Options] = []
    _put(monkeypatch, "pdrouter.sim.demo", run=_collect(calls, 0), DemoOptions=Options)
    assert main(["demo", "--seconds", "3", "--policy", "random", "--no-compare"]) == 0
    assert main(["demo", "--no-plain", "--speed", "2"]) == 0
    first, second = calls
    assert (first.seconds, first.policy, first.compare, first.plain) == (3.0, "random", False, True)
    assert (second.speed, second.compare, second.plain) == (2.0, True, False)
    assert main(["demo", "--seconds", "0"]) == 2


def test_help_imports_nothing_heavy() -> None:
    """``pdrouter --help`` is quick: servers, event loops and tables stay unimported."""
    code = (
        "import sys; from pdrouter.cli import main; main(['serve', '--help']); main(['--help']); "
        "sys.exit(','.join({'asyncio', 'uvicorn', 'starlette', 'rich', 'httptools', 'structlog', "
        "'prometheus_client'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_module_runs() -> None:
    """``python -m pdrouter`` is the command line, and its status is the process's."""
    words = [sys.executable, "-m", "pdrouter", "check-config", "--port", "x"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == '--port: "x" is not a whole number (port number)\n'


def test_commands() -> None:
    """The commands are those of the documents."""
    assert list(COMMANDS) == ["serve", "check-config", "emulate", "demo", "simulate", "replay", "explain"]
