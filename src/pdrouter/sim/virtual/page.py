"""One page with all figures and pictures of a sweep, in one file that needs no other."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from pdrouter import __version__
from pdrouter.sim.virtual.plan import Plan, line_of
from pdrouter.sim.virtual.report import COLUMNS, Row, cell_of, rows_of, write_files
from pdrouter.sim.virtual.sweep import Result

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: .2rem .5rem; text-align: right; border-bottom: 1px solid #ddd; white-space: pre-line; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
small { color: #666; }
pre { background: #f4f4f4; padding: .6rem; white-space: pre-wrap; }
svg { max-width: 100%; height: auto; }
figure { margin: 1.5rem 0; break-inside: avoid; }
"""
_WORDS = """
Good: within the limits for the time to the first token and for the mean time of the others. Slowdown: the time of a
whole answer over that of the same request alone on the idle, warm fleet. Max/mean: the busiest rank's tokens over the
mean rank's. Under a mean: half the width of its 95 % confidence interval over seeds. Pictures of times and ranks show
the first seed.
"""


class CannotDraw(Exception):
    """What draws isn't installed."""


class Report(NamedTuple):
    """What is shown: the command that made it, its figures, and what else is to be said of them."""

    title: str
    command: str
    results: Sequence[Result]
    plan: Plan | None = None
    notes: Sequence[str] = ()


def write_report(directory: Path, report: Report) -> str:
    """Write ``runs.csv``, ``results.json`` and, if that can be drawn, ``report.html``; return what was written."""
    rows = rows_of(report.results)
    write_files(directory, report.command, rows, report.results)
    written = "runs.csv, results.json"
    try:
        write_page(directory / "report.html", report, rows)
    except CannotDraw as error:
        return f"written to {directory}: {written}; {error}"
    return f"written to {directory}: {written}, report.html"


def write_page(path: Path, report: Report, rows: Sequence[Row]) -> None:
    """Write the page. Raises: CannotDraw."""
    plan = report.plan
    try:
        from pdrouter.sim.virtual.pictures import draw  # noqa: PLC0415 - an optional extra
    except ImportError:
        raise CannotDraw("no report.html: pictures need pip install 'pdrouter[report]'") from None
    figures = "".join(
        f"<figure><figcaption><b>{escape(title)}</b></figcaption>{svg}</figure>\n"
        for title, svg in draw(rows, report.results, plan)
    )
    answer = f"<p><b>{escape(line_of(plan))}</b></p>" if plan is not None else _table(rows)
    notes = "".join(f"<p>{escape(note)}</p>\n" for note in report.notes)
    path.write_text(
        f"<!doctype html>\n<html lang=en><meta charset=utf-8><title>{report.title}</title><style>{_STYLE}</style>\n"
        f"<h1>{report.title}</h1>\n<pre>{escape(report.command)}</pre>\n{answer}\n{notes}{figures}"
        f"<p><small>{_WORDS.strip()} pdrouter {__version__}.</small></p>\n</html>\n",
        encoding="utf-8",
    )


def _table(rows: Sequence[Row]) -> str:
    heads = ["", "policy", *[f"{column.title}\n{column.unit}" for column in COLUMNS.values()]]
    lines = ["".join(f"<th>{escape(head)}</th>" for head in heads)]
    for row in rows:
        cells = [escape(row.title), escape(row.policy)]
        for name, column in COLUMNS.items():
            mean, half = cell_of(column, row.figures.get(name))
            cells.append(f"{mean}<br><small>{half}</small>" if half else mean)
        lines.append("".join(f"<td>{cell}</td>" for cell in cells))
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
