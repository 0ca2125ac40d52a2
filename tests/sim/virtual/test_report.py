"""Tables, files and the page, from results made by hand."""

import builtins
import csv
import io
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from tests.sim.virtual.results import make_result

from pdrouter.sim.profiles import DEFAULT_PROFILE
from pdrouter.sim.virtual.fleet_spec import read_fleet
from pdrouter.sim.virtual.page import Report, write_page, write_report
from pdrouter.sim.virtual.plan import Plan, Sizes, grid_of
from pdrouter.sim.virtual.report import rows_of, table_of, write_files
from pdrouter.sim.virtual.sweep import Result

POLICIES = ("least_work", "alone", "<b>odd & bold</b>")


def make_results() -> list[Result]:
    """Return two loads, three policies, two seeds; TTFTs of 1 and 3 seconds."""
    return [
        make_result(title, policy, seed, rate, ttft_p90_s=1.0 + 2 * seed, attainment=0.5)
        for title, rate in (("60 %", 5.0), ("90 %", 7.5))
        for policy in POLICIES
        for seed in range(2)
    ]


def shown(renderable: object) -> str:
    """Return what a terminal shows."""
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(renderable)
    return console.export_text()


class Page(HTMLParser):
    """Tags, texts and whatever a page would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_row_is_a_policy_over_its_seeds() -> None:
    """In order, with means and intervals."""
    rows = rows_of(make_results())
    assert [(row.title, row.policy) for row in rows] == [(t, p) for t in ("60 %", "90 %") for p in POLICIES]
    assert rows[0].figures["ttft_p90_s"].mean == 2.0
    assert rows[0].figures["ttft_p90_s"].half_width == pytest.approx(12.706)


def test_the_table() -> None:
    """Each load is named once; a certain figure has no interval."""
    lines = shown(table_of(rows_of(make_results()))).splitlines()
    assert sum("60 %" in line for line in lines) == 1
    assert sum("least_work" in line for line in lines) == 2
    assert sum("±12.71" in line for line in lines) == 6
    assert any("50.0" in line for line in lines)


def test_files(tmp_path: Path) -> None:
    """A line for each run, and all of it as JSON."""
    results = make_results()
    write_files(tmp_path / "new" / "folder", "pdrouter simulate", rows_of(results), results)
    with (tmp_path / "new" / "folder" / "runs.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["title"], line["policy"], line["seed"], line["ttft_p90_s"]) for line in lines[:2]] == [
        ("60 %", "least_work", "0", "1.0"),
        ("60 %", "least_work", "1", "3.0"),
    ]
    written = json.loads((tmp_path / "new" / "folder" / "results.json").read_text())
    assert len(written["runs"]) == len(lines) == 12


def test_the_page_stands_alone(tmp_path: Path) -> None:
    """The command, a table, pictures; nothing is fetched from elsewhere, and names are text."""
    results = make_results()
    report = Report("pdrouter simulate", "pdrouter <simulate>", results, notes=["one <1 s>"])
    write_page(tmp_path / "page.html", report, rows_of(results))
    page = Page((tmp_path / "page.html").read_text())
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert {"pdrouter <simulate>", "one <1 s>"} <= set(page.texts)
    assert "<b>odd & bold</b>" in page.texts
    assert page.tags.count("figure") == page.tags.count("svg") == 5
    assert page.tags.count("tr") == 7
    assert "script" not in page.tags
    assert {"time to first token, s", "good answers/s", "rank"} <= {text.strip() for text in page.texts}


def test_what_a_live_fleet_does_not_tell(tmp_path: Path) -> None:
    """Where one of two has no slowdown and no ranks, there is a dash, and a picture less."""
    unknown: dict[str, Any] = {"slowdown_p50": None, "slowdown_p90": None, "slowdown_p99": None, "hit_rate": None}
    live = make_result("1/s", "live", **unknown, prefill_imbalance=None, decode_imbalance=None)
    assert live.curves is not None
    live = msgspec.structs.replace(live, curves=msgspec.structs.replace(live.curves, prefill_work=[]))
    results = [make_result("1/s", "simulated"), live]
    (simulated, line) = (line for line in shown(table_of(rows_of(results))).splitlines() if " 1.00 " in line)
    assert "-" not in simulated
    assert line.split().count("-") == 4
    write_page(tmp_path / "page.html", Report("x", "x", results), rows_of(results))
    assert Page((tmp_path / "page.html").read_text()).tags.count("figure") == 3
    write_page(tmp_path / "page.html", Report("x", "x", [live]), rows_of([live]))
    assert Page((tmp_path / "page.html").read_text()).tags.count("figure") == 1


def test_a_plan_s_page_and_grid(tmp_path: Path) -> None:
    """The answer in a sentence, and where it stands among all."""
    fleet = read_fleet(f"prefill=1:{DEFAULT_PROFILE},decode=1:{DEFAULT_PROFILE}")
    plan = Plan(Sizes(fleet, 16), 0.95)
    pairs = plan.to_try()
    results = [make_result(str(pair), "least_work", attainment=0.3 * sum(pair)) for pair in pairs]
    plan.tried(pairs, results)
    write_page(tmp_path / "page.html", Report("pdrouter", "pdrouter simulate --plan", results, plan), rows_of(results))
    page = Page((tmp_path / "page.html").read_text())
    assert any(text.startswith("fewest GPUs:") and "(16 GPUs)" in text for text in page.texts)
    assert page.tags.count("svg") == 1
    assert "60.0" in shown(grid_of(plan))


def test_without_matplotlib_there_is_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told what to install."""
    real_import = builtins.__import__

    def no_pictures(name: str, *arguments: Any) -> Any:
        if name == "pdrouter.sim.virtual.pictures":
            raise ImportError(name)
        return real_import(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", no_pictures)
    results = make_results()
    told = write_report(tmp_path, Report("x", "x", results))
    assert "pip install 'pdrouter[report]'" in told
    assert not (tmp_path / "report.html").exists()
    assert (tmp_path / "runs.csv").exists()
