"""The study's document: tables and pictures go in between marks, the words around them are people's.

A mark is ``<!-- NAME -->``; what stands from there to ``<!-- end -->`` is made.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pdrouter.sim.study.found import Found
from pdrouter.sim.study.scenes import LOADS, OVERLOAD, POLICIES, Scene

_END = "<!-- end -->"
_SHARES = (50, 90, 99)


def write_document(path: Path, made: Mapping[str, str]) -> None:
    """Put what was made between its marks. Raises: ValueError for a mark that isn't there."""
    text = path.read_text("utf-8")
    for name, content in made.items():
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(_END)
        if not end:
            raise ValueError(f"{path}: no mark {name}")
        text = f"{before}{mark}{content}\n{end}{after}"
    path.write_text(text, "utf-8")


def tables_of(found: Found, scenes: Mapping[str, Scene]) -> Iterator[tuple[str, str]]:
    """Return each mark's table."""
    rows = [(f"`{name}`", policy.told, f"`{policy.typed}`") for name, policy in POLICIES.items()]
    yield "policies", _table(("policy", "is told", "as typed"), rows)
    yield "loads", "\n\n".join(_times(found, scene) for scene in LOADS)
    for mark, scene in scenes.items():
        yield mark, _times(found, scene)
    yield "overload", _goodput(found, OVERLOAD)


def _times(found: Found, scene: Scene) -> str:
    """Return times to the first token, p50 / p90 / p99, by load."""
    head = ("TTFT p50 / p90 / p99, s", *[f"{100 * load:.0f} %" for load in scene.utilisation])
    rows = []
    for name in scene.typed():
        cells = [
            " / ".join([f"{found.median(scene, load, name, f'ttft_p{share}_s'):.2f}" for share in _SHARES])
            for load in scene.utilisation
        ]
        rows.append((f"`{name}`", *cells))
    return f"**{scene.title}**\n\n{_table(head, rows)}"


def _goodput(found: Found, scene: Scene) -> str:
    """Return the share of good answers by load, and the most of them in a second."""
    head = (
        "good answers, %",
        *[f"{100 * load:.0f} %" for load in scene.utilisation],
        "most, 1/s",
        "p99 at most load, s",
    )
    rows = []
    for name in scene.typed():
        cells = [f"{100 * found.median(scene, load, name, 'attainment'):.1f}" for load in scene.utilisation]
        last_s = found.median(scene, scene.utilisation[-1], name, "ttft_p99_s")
        rows.append((f"`{name}`", *cells, f"{found.goodput_per_s(scene, name):.2f}", f"{last_s:.1f}"))
    return f"**{scene.title}**\n\n{_table(head, rows)}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["--"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
