"""The list of regular expressions in docs/regular-expressions.md is whole, and what it says of their time holds."""

import ast
import importlib
import re
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "pdrouter"
ROWS = re.findall(
    r"^\| `([\w/]+\.py)` `(\w+)` \|[^|]*\| (.*) \|$",
    (ROOT / "docs" / "regular-expressions.md").read_text("utf-8"),
    re.MULTILINE,
)
CALLS = {"compile", "search", "match", "fullmatch", "findall", "finditer", "sub", "subn", "split"}
UNITS = (
    " ",
    "\n",
    "\r\n",
    '"',
    "\\",
    "a",
    "0",
    "{",
    "[",
    ",",
    ":",
    '\na="',
    '\na{a="',
    '\na{a="b",',
    "\na 1",
    'a="b",',
    '"message" ',
    "\\u",
    "___",
    "\nGET ",
)
"""What an adversary would repeat."""


def is_regular_expression(node: ast.AST) -> bool:
    """Whether a node calls ``re``."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return isinstance(node.func.value, ast.Name) and node.func.value.id == "re" and node.func.attr in CALLS


def used() -> Iterator[tuple[str, str]]:
    """Yield file and name of each constant or function that holds one, but for the emulators' and the simulator's."""
    for path in SOURCE.rglob("*.py"):
        file = path.relative_to(SOURCE).as_posix()
        if file.startswith("sim/"):
            continue
        for node in ast.parse(path.read_text("utf-8")).body:
            for part in node.body if isinstance(node, ast.ClassDef) else [node]:
                if any(map(is_regular_expression, ast.walk(part))):
                    yield file, name_of(part)


def name_of(node: ast.stmt) -> str:
    """Return the name of a function, or of a constant."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name
    target = (
        node.target if isinstance(node, ast.AnnAssign) else node.targets[0] if isinstance(node, ast.Assign) else None
    )
    assert isinstance(target, ast.Name)
    return target.id


def constants() -> Iterator[tuple[re.Pattern[Any], bool]]:
    """Yield the patterns that are constants, and whether they are looked for at one place only."""
    for file, name, why in ROWS:
        module = importlib.import_module("pdrouter." + file.removesuffix(".py").replace("/", "."))
        value = getattr(module, name)
        if name == "_series":
            value = value(("a", "b"))
        for pattern in value.values() if isinstance(value, dict) else [value]:
            if isinstance(pattern, re.Pattern):
                yield pattern, "matched at one place" in why


def test_the_list_is_whole() -> None:
    """No expression is missing there, and none is left there that is gone."""
    assert sorted((file, name) for file, name, _ in ROWS) == sorted(set(used()))


@pytest.mark.invariant("I9")
@pytest.mark.parametrize(("pattern", "is_at_one_place"), list(constants()), ids=lambda value: repr(value)[:30])
def test_time_is_linear(pattern: re.Pattern[Any], *, is_at_one_place: bool) -> None:
    """CPU of a search through a text of one thing repeated, with and without another before it."""
    for unit, before in product(UNITS, ("", "{", '"', "a", "http://")):
        small_s, large_s = (
            cost_s(pattern, before + unit * (size // len(unit)), is_at_one_place=is_at_one_place)
            for size in (2_000, 32_000)
        )
        assert large_s < 16 * 5 * max(small_s, 0.0001), (pattern, unit, before)


def cost_s(pattern: re.Pattern[Any], text: str, *, is_at_one_place: bool) -> float:
    """Return the CPU seconds of reading a text, the least of three times."""
    subject = text.encode() if isinstance(pattern.pattern, bytes) else text
    costs_s = []
    for _ in range(3):
        began_s = time.process_time()
        pattern.match(subject)
        if not is_at_one_place:
            pattern.findall(subject)
        costs_s.append(time.process_time() - began_s)
    return min(costs_s)
