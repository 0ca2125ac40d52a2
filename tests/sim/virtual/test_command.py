"""``pdrouter simulate`` as it is typed."""

import csv
import json
from pathlib import Path

import pytest

from pdrouter.cli import main
from pdrouter.config import Settings
from pdrouter.core.router import RouterOptions
from pdrouter.options import router_options
from pdrouter.sim.profiles import DEFAULT_PROFILE
from pdrouter.sim.virtual.fleet_spec import read_fleet
from pdrouter.sim.virtual.options import SimulateSettings, cases_of

FLEET = f"prefill=2x2:{DEFAULT_PROFILE},decode=1x2:{DEFAULT_PROFILE}"
WORKER = f"worker=1:{DEFAULT_PROFILE}"
ARGUMENTS = ["simulate", "--fleet", FLEET, "--requests", "60", "--utilisation", "0.7"]


def test_policies_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table with a row for each policy and bound, the speed, and files that say how they were made."""
    policies = ["least_work", "load_aware,load_aware_generation=2", "clairvoyant", "alone"]
    flags = [word for policy in policies for word in ("--policy", policy)]
    assert main([*ARGUMENTS, "--trace", "excerpt", *flags, "--seeds", "2", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for word in (*policies, "TTFT", "8 runs, 480 requests", "requests a second of CPU time", "runs.csv"):
        assert word in shown
    assert "±" in shown
    with (tmp_path / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["policy"], row["seed"]) for row in rows] == [(p, s) for p in policies for s in "01"]
    assert all(float(row["ttft_p99_s"]) >= float(row["ttft_p50_s"]) > 0 for row in rows)
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["command"].startswith("pdrouter")
    assert [row["policy"] for row in written["policies"]] == policies
    assert written["policies"][0]["figures"]["requests"] == {"mean": 60.0, "half_width": 0.0}
    assert "<svg" in (tmp_path / "report.html").read_text()


def test_one_run_needs_no_other_process(capsys: pytest.CaptureFixture[str]) -> None:
    """One policy, one seed, a generated trace at a rate, no reports."""
    flags = ["--trace", "shared:rate=3", "--policy", "random", "--report-interval", "0"]
    assert main(["simulate", "--fleet", FLEET, "--requests", "50", "--rate", "20", *flags]) == 0
    shown = capsys.readouterr().out
    assert "1 runs, 50 requests, 20 arrivals/s" in shown
    assert "±" not in shown


def test_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """The fewest GPUs for a rate; status 1 if no fleet within the budget will do."""
    fleet = f"prefill=1:{DEFAULT_PROFILE},decode=1:{DEFAULT_PROFILE}"
    trace = "poisson:requests=300,prompt_tokens=4000"
    plan = ["simulate", "--plan", "--trace", trace, "--fleet", fleet, "--gpus", "16"]
    assert main([*plan, "--rate", "2"]) == 0
    shown = capsys.readouterr().out
    assert "good answers, %" in shown
    assert "fewest GPUs: 1 prefill and 1 decode endpoints (8 GPUs)" in shown
    assert main([*plan, "--rate", "500"]) == 1
    assert "no fleet of up to 16 GPUs keeps 95 %" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trace", "nowhere", "--policy", "least_work"], "nowhere: No such file"),
        (["--trace", "excerpt", "--policy", "leastwork"], '"leastwork" is not one of'),
        (["--trace", "excerpt", "--policy", "least_work,sed=1"], "unknown setting"),
        (["--trace", "excerpt", "--policy", "least_work", "--seeds", "0"], "--seeds: must be positive"),
        (["--trace", "excerpt", "--policy", "least_work", "--seeds", "x"], "--seeds: 'x' is not a number"),
        (["--trace", "excerpt", "--policy", "least_work", "--rate", "1"], "leave one out"),
        (["--trace", "excerpt", "--policy", "least_work", "--report-delay", "-1"], "must not be negative"),
        (["--trace", "poisson:x=1", "--policy", "least_work"], "'x' isn't one of"),
        (["--trace", "excerpt", "--policy", "least_work", "--fleet", "prefill=1"], "isn't ROLE="),
        (["--trace", "excerpt", "--policy", "least_work", "--polcy", "x"], "--polcy: unknown flag"),
        (["--trace", "excerpt", "--plan"], "a utilisation would grow with the fleet"),
        (["--trace", "excerpt", "--utilisation", "much"], "--utilisation"),
        (
            ["--trace", "excerpt", "--policy", "clairvoyant", "--fleet", f"worker=1:{DEFAULT_PROFILE}"],
            "clairvoyant needs",
        ),
        (["--policy", "least_work"], "--trace"),
    ],
)
def test_what_cant_be_simulated_is_told(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With status 2 and what to write instead."""
    assert main([*ARGUMENTS, *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_policy_brings_its_settings() -> None:
    """Other settings of a router stand behind its name, and how fresh its reports are; the seed is the run's."""
    policies = ("load_aware,load_aware_generation=2,report_interval=0.05,report_delay=3", "least_work", "alone")
    settings = SimulateSettings(trace="excerpt", fleet=FLEET, policy=policies, seeds=2, report_delay=1.0)
    made: list[Settings] = []

    def make_options(settings: Settings) -> RouterOptions:
        made.append(settings)
        return router_options(settings)

    cases = list(cases_of(settings, settings.loads(), read_fleet(FLEET), make_options))
    assert [(case.policy, case.settings.seed) for case in cases] == [(p, s) for p in policies for s in range(2)]
    assert [(s.policy, s.load_aware_generation, s.seed) for s in made[:3]] == [
        ("load_aware", 2, 0),
        ("load_aware", 2, 1),
        ("least_work", 1, 0),
    ]
    worlds = [(case.settings.report_interval_s, case.settings.report_delay_s) for case in cases[::2]]
    assert worlds == [(0.05, 3.0), (2.0, 1.0), (2.0, 1.0)]
    assert [case.options is None for case in cases[::2]] == [False, False, True]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("load_aware,load_aware_generation=3", "out of range"),
        ("least_work,report_delay=late", "report_delay: 'late' is not a number"),
        ("least_work,report_interval=-1", "report_interval: must not be negative"),
    ],
)
def test_settings_that_arent_are_told(policy: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As they are of a router."""
    assert main([*ARGUMENTS, "--trace", "excerpt", "--policy", policy]) == 2
    assert message in capsys.readouterr().err
