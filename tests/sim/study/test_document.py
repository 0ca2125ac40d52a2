"""The document: what is made goes between its marks, and nothing else changes."""

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from tests.sim.study.builders import make_found

from pdrouter.sim.study.document import tables_of, write_document
from pdrouter.sim.study.drawings import pictures_of
from pdrouter.sim.study.found import Found
from pdrouter.sim.study.scenes import AGES, STUDY, UNEQUAL

DOCUMENT = Path(__file__).parents[3] / "docs" / "study.md"


@pytest.fixture(scope="module")
def found() -> Found:
    """Return a study of which all figures are 1, but dynamo's p90."""
    return make_found(STUDY, lambda policy: {"ttft_p90_s": 7.0} if policy == "dynamo" else {})


def test_words_stay_and_tables_are_made_anew(tmp_path: Path) -> None:
    """Only what stands between a mark and its end is replaced, however often."""
    path = tmp_path / "study.md"
    path.write_text("# A\n<!-- one -->\nold | table\n<!-- end -->\nwords\n<!-- two -->\n<!-- end -->\n")
    for content in ("| x |", "| y |\n| z |"):
        write_document(path, {"one": content, "two": "2"})
        expected = f"# A\n<!-- one -->\n{content}\n<!-- end -->\nwords\n<!-- two -->\n2\n<!-- end -->\n"
        assert path.read_text() == expected
    with pytest.raises(ValueError, match="no mark three"):
        write_document(path, {"three": ""})


def test_the_document_has_all_marks(tmp_path: Path, found: Found) -> None:
    """Each table has its place in the document as it is; each shows what was found."""
    path = tmp_path / "study.md"
    path.write_text(DOCUMENT.read_text("utf-8"))
    tables = dict(tables_of(found, {"unequal": UNEQUAL, "ages": AGES}))
    write_document(path, {"origin": "here", **tables})
    assert "| `dynamo` | 1.00 / 7.00 / 1.00 |" in path.read_text("utf-8")


def test_pictures_are_small_svg(found: Found) -> None:
    """Each picture is one SVG element of less than 100 kB, and the document shows it."""
    shown = DOCUMENT.read_text("utf-8")
    for name, svg in pictures_of(found):
        assert ET.fromstring(svg).tag.endswith("svg")
        assert len(svg) < 100_000
        assert f"(study/{name})" in shown
