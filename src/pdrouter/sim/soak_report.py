"""What a soak found, and how it is told: a table, what was wrong, and the last line."""

from collections import Counter
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from pdrouter.sim.soak_client import End

MOST_GROWTH = 1.1
"""Router memory at the end over that at the start, at most."""

_SHOWN_PROBLEMS = 20
_MIB = 1 << 20


class SoakResult:
    """Counts of one soak. ``free_s``: from a client's leaving until its engines were free, of every probe."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.causes: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self.problems: list[str] = []
        self.faults: Counter[str] = Counter()
        self.restarts = 0
        self.leaked = 0
        self.retried = 0
        self.aborts = 0
        self.free_s: list[float] = []
        self.rss_bytes: tuple[int, int] | None = None
        self.took_s = 0.0

    def add(self, end: End) -> None:
        """Take in what became of a request."""
        self.kinds[end.kind] += 1
        if end.kind == "failed":
            self.causes[end.cause] += 1
        elif end.kind == "wrong":
            self.wrong[end.cause] += 1

    def leak(self, count: int, what: str) -> None:
        """Take note of what is left behind."""
        if count > 0:
            self.leaked += count
            self.problems.append(f"{count} left: {what}")

    @property
    def requests(self) -> int:
        """All that were sent."""
        return self.kinds.total()

    @property
    def growth(self) -> float | None:
        """Memory at the end over that at the start."""
        return None if self.rss_bytes is None else self.rss_bytes[1] / self.rss_bytes[0]

    @property
    def is_ok(self) -> bool:
        """Whether nothing was wrong, nothing is left and the router's memory came back."""
        has_grown = self.growth is not None and self.growth > MOST_GROWTH
        return bool(self.kinds["right"]) and not (self.kinds["wrong"] or self.leaked or self.problems or has_grown)


def table(result: SoakResult) -> Table:
    """Return the figures."""
    shown = Table(box=SIMPLE_HEAD, show_header=False)
    shown.add_column()
    shown.add_column(justify="right")
    for name, value in _rows(result):
        shown.add_row(name, value)
    return shown


def _rows(result: SoakResult) -> Sequence[tuple[str, str]]:
    kinds = result.kinds
    rate = result.requests / result.took_s if result.took_s else 0.0
    rows = [
        ("requests", f"{result.requests} ({rate:.0f}/s)"),
        ("right", str(kinds["right"])),
        ("failed, and told so", str(kinds["failed"])),
        *((f"  {cause}", str(count)) for cause, count in result.causes.most_common()),
        ("client left", str(kinds["left"])),
        ("wrong", str(kinds["wrong"])),
        ("retries", str(result.retried)),
        ("aborts sent", str(result.aborts)),
        ("faults put in", str(result.faults.total())),
        *((f"  {kind}", str(count)) for kind, count in result.faults.most_common()),
        ("engines killed and restarted", str(result.restarts)),
        ("leaked", str(result.leaked)),
    ]
    if result.rss_bytes is not None and result.growth is not None:
        first, last = (size / _MIB for size in result.rss_bytes)
        rows.append(("router memory", f"{first:.1f} -> {last:.1f} MiB ({result.growth - 1:+.1%})"))
    if result.free_s:
        worst_ms, ranked = max(result.free_s) * 1e3, sorted(result.free_s)
        median_ms = ranked[len(ranked) // 2] * 1e3
        rows.append(("free after a cancel", f"median {median_ms:.0f} ms, worst {worst_ms:.0f} ms of {len(ranked)}"))
    return rows


def problem_lines(result: SoakResult) -> Sequence[str]:
    """Say what was wrong."""
    wrong = [f"wrong, {count} times: {cause}" for cause, count in result.wrong.most_common(_SHOWN_PROBLEMS)]
    return wrong + result.problems[:_SHOWN_PROBLEMS]


def last_line(result: SoakResult) -> str:
    """Return the line that scripts look for."""
    verdict = "ok" if result.is_ok else "failed"
    return f"soak: {verdict} requests={result.requests} wrong={result.kinds['wrong']} leaked={result.leaked}"
