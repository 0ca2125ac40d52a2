"""Runs the study: the aims alone, or all tables and pictures of its document."""

from collections.abc import Sequence
from pathlib import Path

from pdrouter.sim.study.aims import lines_of
from pdrouter.sim.study.document import tables_of, write_document
from pdrouter.sim.study.found import Found
from pdrouter.sim.study.scenes import AGES, QUICK, STUDY, UNEQUAL, Scene
from pdrouter.sim.virtual.command import run_all
from pdrouter.sim.virtual.options import MakeOptions


def run_quick(make_options: MakeOptions) -> list[str]:
    """Return a line for each aim, and the sum of them."""
    found = run_scenes(QUICK, make_options)
    lines = list(lines_of(found))
    short = sum(not line.is_met for line in lines)
    return [*map(str, lines), f"study-quick: {f'{short} short' if short else 'ok'}"]


def write_study(make_options: MakeOptions, document: Path, pictures: Path, origin: str) -> None:
    """Write the document's tables and pictures; ``origin`` says how, and on what machine.

    Raises: ValueError for a document without its marks; ImportError without matplotlib.
    """
    from pdrouter.sim.study.drawings import pictures_of  # noqa: PLC0415 - an optional extra

    found = run_scenes(STUDY, make_options)
    made = {"origin": origin, **dict(tables_of(found, {"unequal": UNEQUAL, "ages": AGES}))}
    write_document(document, made)
    pictures.mkdir(exist_ok=True)
    for name, svg in pictures_of(found):
        (pictures / name).write_text(svg, "utf-8")


def run_scenes(scenes: Sequence[Scene], make_options: MakeOptions) -> Found:
    """Return what all runs of scenes have shown."""
    planned = [(scene, case) for scene in scenes for case in scene.cases(make_options)]
    results = run_all([case for _, case in planned])
    return Found((scene, case, result) for (scene, case), result in zip(planned, results, strict=True))
