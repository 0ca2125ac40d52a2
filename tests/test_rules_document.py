"""The tables of handshake rules in ``docs/engines.md``: each rule of an emulator has a row, and each row a test."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pdrouter.sim.sglang_version import SglangVersion

ROOT = Path(__file__).parents[1]
SIM = ROOT / "src/pdrouter/sim"
TESTS = ROOT / "tests/sim"
REAL = ROOT / "tests/real"
SECTION = (ROOT / "docs/engines.md").read_text("utf-8").partition("## Handshake rules")[2].partition("\n## ")[0]

NO_RULES = frozenset({"bad_request", "unknown_model", "fault", "bad_fault", "aborted"})
"""Errors that no rule of a handshake is broken by, or that aren't counted."""

ENGINES = {"SGLang": ".", "vLLM": "vllm", "TensorRT-LLM": "trtllm"}
"""Folder of each engine's modules, below ``SIM``."""


def rows_of(engine: str) -> list[list[str]]:
    """Return the cells of each row of an engine's table: rule, source, test, seen."""
    part = SECTION.partition(f"### {engine}\n")[2].partition("\n### ")[0]
    _, _, *rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("|")]
    return rows


ROWS = [(engine, row) for engine in ENGINES for row in rows_of(engine)]


def codes_in(path: Path) -> Iterator[str]:
    """Yield the causes that a module may count: the second argument of an ``EngineError``, wherever it is from."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name, args = node.func.id, node.args
            if name == "EngineError":
                yield from _words(args[1])
            elif name == "_refused":
                yield from _words(args[0])
            elif name == "UsedIds":
                yield from (f"{word}_reused" for word in _words(args[0]))
        elif isinstance(node, ast.Assign) and any(
            isinstance(name, ast.Name) and name.id == "code" for target in node.targets for name in ast.walk(target)
        ):
            value = node.value
            # ``code, text = answer if answer else ("prefill_lost", "...")``: the code is the first of a pair.
            yield from (
                word for part in ast.walk(value) if isinstance(part, ast.Tuple) for word in _words(part.elts[0])
            )
            yield from _words(value)


def _words(node: ast.AST) -> Iterator[str]:
    """Yield what an expression may be: a constant, or either of two."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from _words(node.body)
        yield from _words(node.orelse)


def enforced(engine: str) -> set[str]:
    """Return the rules of an engine's emulator, by the cause that it counts or the name of what a version does."""
    found = {code for path in sorted((SIM / ENGINES[engine]).glob("*.py")) for code in codes_in(path)}
    if engine == "SGLang":
        found |= {field.name for field in msgspec.structs.fields(SglangVersion)}
    return {code for code in found if code.strip(":, ")} - NO_RULES


def told(engine: str) -> set[str]:
    """Return the rules that an engine's table names."""
    named = {word for row in rows_of(engine) for word in re.findall(r"`(\w+)`", row[0])}
    return {word for word in named if re.fullmatch("[a-z]+_[a-z_]+", word) or word in enforced(engine)} - FIELDS


FIELDS = frozenset(
    {
        "disagg_prefill_dp_rank",
        "routed_dp_rank",
        "data_parallel_rank",
        "dp_size",
        "attn_dp_size",
        "dp_rank_count",
        "kv_transfer_params",
        "transfer_id",
        "disaggregated_params",
    }
)
"""Fields of requests and pages that rules speak of."""


@pytest.mark.parametrize("engine", ENGINES)
def test_each_rule_has_a_row(engine: str) -> None:
    """And no row speaks of a rule that isn't there."""
    assert told(engine) == enforced(engine)


def proofs(cell: str) -> list[tuple[str, str]]:
    """Return file and name of each test of a cell."""
    found, file = [], ""
    for word in re.findall(r"`([^`]+)`", cell):
        if word.endswith(".py"):
            file = word
        else:
            found.append((file, word))
    return found


@pytest.mark.parametrize(("engine", "row"), ROWS, ids=lambda value: value if isinstance(value, str) else value[0][:40])
def test_each_row_has_a_test_and_a_source(engine: str, row: list[str]) -> None:
    """The tests exist, and between them they name each cause that the row does."""
    assert len(row) == 4
    rule, source, tests, seen = row
    assert source
    assert proofs(tests)
    text = ""
    for file, name in proofs(tests):
        module = ast.parse((TESTS / file).read_text("utf-8"))
        names = [node.name for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        assert name in names
        text += (TESTS / file).read_text("utf-8")
    flags = {field.name for field in msgspec.structs.fields(SglangVersion)}
    causes = {word for word in re.findall(r"`(\w+)`", rule) if word in enforced(engine)} - flags
    assert [cause for cause in sorted(causes) if f'"{cause}"' not in text] == []
    _check_seen(seen)


def _check_seen(cell: str) -> None:
    """What is quoted is the name of a check of a real engine, or its beginning."""
    sources = "".join(path.read_text("utf-8") for path in REAL.rglob("*.py"))
    assert re.search(r'by hand|"|^no$', cell)
    for check in re.findall(r'"([^"]+)"', cell):
        assert re.search(rf'f?"{re.escape(check)}', sources), f"no check of a real engine begins with {check!r}"
