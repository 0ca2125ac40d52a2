"""The table in ``docs/engines.md``: each cell names a test, and the test is there."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdrouter.engines.openai import OpenAi
from pdrouter.engines.sglang import Sglang
from pdrouter.engines.sglang_ranks import RankFields
from pdrouter.engines.trtllm import Trtllm
from pdrouter.engines.vllm import Vllm

DOCS = Path(__file__).parents[1] / "docs"
TEXT = (DOCS / "engines.md").read_text("utf-8")
SECTION = TEXT.partition("## What works")[2].partition("\n## ")[0]
_, _, *ROWS = [line.strip(" |").split(" | ") for line in SECTION.splitlines() if line.startswith("|")]
PROOFS = {
    name: (file, test) for name, file, test in re.findall(r'^\[([\w-]+)\]: (\S+) "::(.+)"$', SECTION, re.MULTILINE)
}


def labels(cell: str) -> list[str]:
    """Return the proofs that a cell is linked to."""
    return re.findall(r"\]\[([\w-]+)\]", cell)


def names_of(path: Path) -> Iterator[str]:
    """Yield the names of a file's tests."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node.name


def test_every_cell_has_a_proof() -> None:
    """No word stands there without a test, and no test without a word."""
    unproven = [(row[0], cell) for row in ROWS for cell in row[1:] if not labels(cell)]
    assert unproven == []
    assert {label for row in ROWS for cell in row for label in labels(cell)} == set(PROOFS)


def test_every_engine_has_a_row() -> None:
    """One for each way in which an engine hands over KV."""
    engines = (Sglang(RankFields.AUTO), Vllm(), Trtllm(), OpenAi())
    assert len(ROWS) == sum(len(engine.kv_transports) for engine in engines)
    for engine in engines[:3]:
        for transport in engine.kv_transports:
            assert any(f"`{transport}`" in row[0] for row in ROWS)


@pytest.mark.parametrize("label", PROOFS)
def test_the_proof_is_there(label: str) -> None:
    """The file has such a test; of the bytes on the wire there is such a fixture."""
    file, test = PROOFS[label]
    name, _, case = test.rstrip("]").partition("[")
    path = DOCS / file
    assert name in set(names_of(path))
    if case:
        engine, _, stem = case.partition("-")
        assert (path.parent / engine / f"{stem}.http").exists()
