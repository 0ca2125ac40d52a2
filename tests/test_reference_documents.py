"""``docs/errors.md`` and ``docs/metrics.md``: every code and every metric stands there, and none that isn't."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from pdrouter.errors import RouterError
from pdrouter.manual import errors_document
from tests.lab import CHAT, chat, make_lab

ROOT = Path(__file__).parents[1]
ERRORS = (ROOT / "docs/errors.md").read_text("utf-8")
METRICS = (ROOT / "docs/metrics.md").read_text("utf-8")
MODULES = [path for path in (ROOT / "src/pdrouter").rglob("*.py") if "sim" not in path.relative_to(ROOT).parts]
TOLD = {
    name: row[1].strip()
    for row in (line.strip("|").split("|") for line in METRICS.splitlines() if line.startswith("| `"))
    for name in re.findall(r"`(\w+)`", row[0])
}
"""Type of each metric in the document."""


def test_errors_are_current() -> None:
    """docs/errors.md is what ``python -m pdrouter.manual errors`` prints."""
    assert errors_document() == ERRORS


def kinds(kind: type[RouterError]) -> Iterator[type[RouterError]]:
    """Yield a kind of error and all below it, wherever they are defined."""
    yield kind
    for below in kind.__subclasses__():
        yield from kinds(below)


def test_each_code_is_told() -> None:
    """Those of other modules too."""
    codes = {kind.code for kind in kinds(RouterError) if kind.__module__.startswith("pdrouter.")}
    assert len(codes) > 40
    assert {code for code in codes if f"`{code}`" not in ERRORS} == set()


def families() -> set[str]:
    """Return the metrics that the source makes, by the names that a page has for them."""
    found = set()
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            name, made = str(node.args[0].value), ast.unparse(node.func)
            if name.startswith("pdrouter_"):
                found.add(f"{name}_total" if "counter" in made.lower() else name)
    return found


def test_each_metric_is_told() -> None:
    """And none is told that isn't made."""
    assert families() == set(TOLD)


async def test_types_are_those_of_the_page() -> None:
    """What a router with an engine serves has the type that the document says."""
    async with make_lab() as lab:
        await lab.post(CHAT, chat("hello", 2))
        page = (await lab.get("/metrics")).body.decode()
    served = dict(re.findall(r"^# TYPE (pdrouter_\w+) (\w+)$", page, re.MULTILINE))
    served = {name: kind for name, kind in served.items() if not name.endswith("_created")}
    assert len(served) > 25
    assert {name: TOLD.get(name) for name in served} == served
