"""The table of limits in docs/threat-model.md: each setting that bounds something, its default, its counter."""

import re
from itertools import chain
from pathlib import Path

import pytest

from pdrouter.config import SETTINGS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "threat-model.md").read_text("utf-8")
ROWS = {
    name: (default, unit, counter)
    for name, default, unit, counter in re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*) \|$", PAGE, re.MULTILINE)
}
SOURCE = "\n".join(path.read_text("utf-8") for path in (ROOT / "src" / "pdrouter").rglob("*.py"))

WORDS = {"max", "budget", "limit", "timeout", "most", "size"}
"""A setting with a number and one of these words in its name bounds something, and so does one in bytes."""

NO_LIMITS = {
    "bytes_per_token",
    "cb_timeout_duration_secs",
    "dp_size",
    "max_idle_secs",
    "prefix_block_bytes",
    "report_max_age_secs",
    "retry_max_backoff_ms",
    "worker_startup_timeout_secs",
}
"""Of these names, those that bound nothing a client, an engine or a disk could make grow."""


def bounds() -> set[str]:
    """Return the names of the settings that must have a row."""
    found = {
        item.name
        for item in SETTINGS.values()
        if item.unit and (WORDS & {*item.name.split("_")} or item.unit == "bytes")
    }
    return found - NO_LIMITS


def test_each_limit_has_a_row() -> None:
    """And each row is a setting."""
    assert bounds() <= ROWS.keys() <= SETTINGS.keys()
    assert len(bounds()) > 40


@pytest.mark.parametrize("name", ROWS)
def test_a_row_says_what_is(name: str) -> None:
    """Its default and unit; and a counter that exists, with a label that something counts by, or why there is none."""
    default, unit, counter = ROWS[name]
    assert (default, unit) == (SETTINGS[name].default_text, SETTINGS[name].unit)
    metric = re.fullmatch(r'`(pdrouter_\w+?)(?:_total)?(?:\{(?:event|code)="(\w+)"\})?`', counter)
    if metric is None:
        assert re.fullmatch(r"none: [a-z ]+", counter)
        return
    assert f'"{metric[1]}"' in SOURCE
    assert metric[2] is None or f'"{metric[2]}"' in SOURCE


def test_links() -> None:
    """Readers of README and SECURITY find it; what it links to is there."""
    for page in ("README.md", "SECURITY.md"):
        assert "docs/threat-model.md" in (ROOT / page).read_text("utf-8")
    titles = re.findall(r"^## (.*)$", (ROOT / "docs" / "operating.md").read_text("utf-8"), re.MULTILINE)
    anchors = {title.lower().replace(" ", "-") for title in titles}
    assert set(re.findall(r"operating\.md#([\w-]+)", PAGE)) <= anchors


def test_what_an_operator_must_set_is_a_setting() -> None:
    """Every setting that the page names exists."""
    part = PAGE.partition("## What an operator must set")[2].partition("\n## ")[0]
    named = chain.from_iterable(re.findall(r"[a-z]+(?:_[a-z]+)+", code) for code in re.findall(r"`([^`]+)`", part))
    assert set(named) <= SETTINGS.keys()
