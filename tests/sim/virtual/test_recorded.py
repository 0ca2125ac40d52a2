"""How a journal's requests went, beside policies that might have served them."""

import csv
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdrouter.cli import main
from pdrouter.sim.profiles import DEFAULT_PROFILE
from pdrouter.sim.virtual.recorded import recorded
from pdrouter.telemetry.journal_file import Entry

FLEET = ["--fleet", f"prefill=1x2:{DEFAULT_PROFILE},decode=1x2:{DEFAULT_PROFILE}"]


def write_journal(path: Path, *fields: dict[str, Any]) -> str:
    """Write a journal and return its name."""
    usual: dict[str, Any] = {"outcome": "answered", "prompt_tokens": 900, "output_tokens": 11, "took_s": 1.0}
    path.write_bytes(b"\n".join(msgspec.json.encode(Entry(**usual | changes)) for changes in fields))
    return str(path)


def test_times_are_the_recorded_ones(tmp_path: Path) -> None:
    """From arrival; without a first token seen, the whole time; failures by outcome."""
    name = write_journal(
        tmp_path / "journal",
        {"at_s": 14.0, "outcome": "queue_full"},
        {"at_s": 10.0, "ttft_s": 0.5},
        {"at_s": 12.0, "output_tokens": None},
    )
    run = recorded(name)
    assert [(a.number, a.at_s, a.ttft_s, a.end_to_end_s, a.token_s) for a in run.answers] == [
        (0, 0.0, 0.5, 1.0, 0.05),
        (1, 2.0, 1.0, 1.0, 0.0),
    ]
    assert (run.planned, run.span_s, dict(run.rejected)) == (3, 4.0, {"queue_full": 1})


def test_beside_policies(tmp_path: Path) -> None:
    """In one table; ranks and hits aren't known of it."""
    name = write_journal(tmp_path / "journal", *({"at_s": float(n), "ttft_s": 0.25 + n / 100} for n in range(30)))
    flags = ["--policy", "recorded", "--policy", "least_work", "--out", str(tmp_path)]
    assert main(["simulate", "--trace", name, *FLEET, *flags]) == 0
    with (tmp_path / "runs.csv").open() as file:
        was, would_be = csv.DictReader(file)
    assert (was["policy"], was["hit_rate"], was["prefill_imbalance"]) == ("recorded", "", "")
    assert float(was["ttft_p50_s"]) == pytest.approx(0.39)
    assert float(was["slowdown_p50"]) > 1
    assert (would_be["policy"], would_be["hit_rate"]) == ("least_work", "0.0")
    assert would_be["title"] == was["title"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trace", "excerpt"], "excerpt: it isn't the journal of a router"),
        (["--trace", "poisson"], "poisson: No such file"),
        (["--trace", "excerpt", "--rate", "3"], "recorded: it went as fast"),
    ],
)
def test_only_a_journal_has_been(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody knows how another trace went, nor how it would have gone faster."""
    assert main(["simulate", *FLEET, "--policy", "recorded", *flags]) == 2
    assert message in capsys.readouterr().err
