"""Policies from other packages: the example is installed and used, and a broken one stops the start with a line."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from pdrouter.cli import main
from pdrouter.config import SETTINGS, PolicyName, Settings
from pdrouter.core import events
from pdrouter.core.policies import POLICIES
from pdrouter.core.router import Router
from pdrouter.errors import ConfigError
from pdrouter.loading import resolve_settings
from pdrouter.options import router_options
from pdrouter.plugins import load_policies, policy_names
from pdrouter.setting import with_choices
from tests.core.builders import decide, decode, facts, prefill, prefill_of

EXAMPLE = Path(__file__).parents[1] / "examples" / "pdrouter_fewest_requests"
NAME = "fewest_requests"
Output = pytest.CaptureFixture[str]

GOOD = """
class Mine:
    name = "mine"
    def __init__(self, options): pass
    def choose(self, question, candidates): raise NotImplementedError
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the example where nothing else is, without a network."""
    root = tmp_path_factory.mktemp("plugins")
    source = shutil.copytree(EXAMPLE, root / "source")
    target = root / "site"
    offline = ["--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check", "--quiet"]
    words = [sys.executable, "-m", "pip", "install", *offline, "--target", str(target), str(source)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def example(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process see the example."""
    monkeypatch.syspath_prepend(installed)


def announce(path: Path, monkeypatch: pytest.MonkeyPatch, *names: str, code: str = GOOD, target: str = "Mine") -> None:
    """Put a package with policies of these names on the path."""
    path.mkdir(exist_ok=True)
    module = f"plugin_{path.name}".replace("-", "_")
    (path / f"{module}.py").write_text(code)
    info = path / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    lines = [f"{name} = {module}:{target}" for name in names]
    (info / "entry_points.txt").write_text("[pdrouter.policies]\n" + "\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(path)


def run(path: Path, *words: str) -> tuple[int, str, str]:
    """Run the command line with a directory on its path; return status, output and errors."""
    env = os.environ | {"PYTHONPATH": str(path), "COLUMNS": "1000"}
    command = [sys.executable, "-m", "pdrouter", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=15)
    return done.returncode, done.stdout, done.stderr


def read_settings(flags: dict[str, object]) -> Settings:
    """Return settings that may name any policy that is found."""
    known = with_choices(SETTINGS, get_args(PolicyName), load_policies(POLICIES))
    return resolve_settings(None, {}, flags, known).settings


def test_shipped_names_are_those_of_the_table() -> None:
    """The settings and the core name the same policies."""
    assert set(get_args(PolicyName)) == set(POLICIES)


def test_the_example_is_a_choice(installed: Path) -> None:
    """Once installed, its name is right for each setting of a policy, and in the help."""
    flags = [f"--{which}policy={NAME}" for which in ("", "prefill-", "decode-", "shadow-")]
    status, checked, errors = run(installed, "check-config", *flags)
    assert (status, errors) == (0, "")
    for which in ("", "prefill_", "decode_", "shadow_"):
        assert f"{which}policy: {NAME}  # flag" in checked.splitlines()
    assert f"llm_d_pd, {NAME}; default least_work" in run(installed, "serve", "--help")[1]


def test_without_the_example_its_name_is_wrong(capsys: Output) -> None:
    """A name that isn't there is refused."""
    assert main(["check-config", "--policy", NAME]) == 2
    assert capsys.readouterr().err.startswith(f'--policy: "{NAME}" is not one of least_work, ')


@pytest.mark.usefixtures("example")
def test_the_example_decides() -> None:
    """A router built from settings asks it: fewest requests, then by name; and so does a shadow."""
    settings = read_settings({"policy": NAME, "rank_policy": "round_robin", "shadow_policy": NAME})
    router = Router(router_options(settings))
    for address in ("p:2", "p:1", "p:3"):
        router.observe(events.EndpointJoined(prefill(address)), 0.0)
    router.observe(events.EndpointJoined(decode("d:1")), 0.0)
    decisions = [decide(router, facts(), 1.0) for _ in range(3)]
    assert [prefill_of(d).endpoint.address for d in decisions] == ["p:1", "p:2", "p:3"]
    router.settle(decisions[1], 2.0)
    last = prefill_of(decide(router, facts(), 3.0))
    assert last.endpoint.address == "p:2"
    assert last.endpoint_why.sentence() == f"{NAME}: fewest requests, then by name (p:2=0, p:1=1, p:3=1)"
    assert router.shadow is not None
    assert router.shadow.counts["same"] == 4  # type: ignore[index]


@pytest.mark.usefixtures("example")
def test_nothing_is_loaded_before_it_is_needed() -> None:
    """Shipped policies need no other package."""
    assert policy_names() == [NAME]
    assert router_options(Settings()).plugins == {}


@pytest.mark.parametrize(
    ("code", "target", "words"),
    [
        ("import no_such_module", "Mine", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def broken(:", "Mine", "SyntaxError: "),
        ("1 / 0", "Mine", "ZeroDivisionError: division by zero"),
        ("", "Mine", "AttributeError: module"),
        ("Mine = 3", "Mine", "TypeError: it is neither a class nor a function that makes a policy"),
    ],
)
def test_a_broken_one_stops_the_start(
    code: str, target: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """With one line that names policy and package, used or not."""
    announce(tmp_path / "one", monkeypatch, "mine", code=code, target=target)
    monkeypatch.delitem(sys.modules, "plugin_one", raising=False)
    for command in ("check-config", "serve"):
        assert main([command, "--port", "0"]) == 2
        line = capsys.readouterr().err
        assert line.startswith(f"policy mine of plugin_one (plugin_one:Mine): {words}")
        assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("class Mine: pass", "TypeError: Mine() takes no arguments"),
        ("def Mine(options): return 3", "TypeError: what it makes has no method choose(question, candidates)"),
        ("def Mine(options): return options.nothing", "AttributeError: "),
    ],
)
def test_one_that_makes_no_policy_stops_the_start(
    code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is used, with one line."""
    announce(tmp_path / "one", monkeypatch, "mine", code=code)
    status, _, line = run(tmp_path / "one", "serve", "--port=0", "--policy=mine", "--log-level=error")
    assert status == 2
    assert line.startswith(f"policy mine of plugin_one (plugin_one:Mine): {words}")
    assert line.count("\n") == 1


def test_names_are_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of a shipped policy, or of another package's, is refused."""
    announce(tmp_path / "one", monkeypatch, "random", "mine")
    announce(tmp_path / "two", monkeypatch, "mine")
    for module in ("plugin_one", "plugin_two"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ConfigError) as refused:
        load_policies(POLICIES)
    twice, taken = refused.value.problems
    assert twice == "policy mine of plugin_two (plugin_two:Mine): ValueError: another package has a policy of that name"
    assert taken.startswith("policy random of plugin_one (plugin_one:Mine): ValueError: pdrouter has a policy random ")
