"""What is done now, and what was found: a line of progress for each, and a table at the end."""

import time

from rich.console import Console
from rich.table import Table

SEEN_LETTERS = 48
"""Of what was seen, what the table shows; the line of progress has all."""


PART_LETTERS = 9
"""Fewest letters of a part's name to show, however narrow the console is."""


class Record:
    """Tells on a console; ``is_good`` while every check held."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began_s = time.monotonic()
        self._part = ""
        self._rows: list[tuple[str, str, bool, str]] = []

    @property
    def is_good(self) -> bool:
        """Whether there were checks and all held."""
        return bool(self._rows) and all(held for _, _, held, _ in self._rows)

    def verdict(self, target: str) -> str:
        """Return the last line of a target: its name, whether all held, and how many didn't."""
        failed = sum(not row[2] for row in self._rows)
        return f"{target}: {'ok' if self.is_good else 'failed'} checks={len(self._rows)} failed={failed}"

    @property
    def age_s(self) -> float:
        """Time since the start."""
        return time.monotonic() - self._began_s

    def begin(self, part: str) -> None:
        """Begin a part: the checks that follow belong to it."""
        self._part = part
        self.tell(part)

    def tell(self, text: str) -> None:
        """Say what is done now."""
        self._console.print(f"{self.age_s:7.1f} s  {text}", highlight=False, markup=False, soft_wrap=True)

    def check(self, promise: str, held: bool, seen: str) -> None:
        """Take down whether a promise held, and what was seen."""
        self._rows.append((self._part, promise, held, seen))
        self.tell(f"{'ok  ' if held else 'FAIL'}  {promise}: {seen}")

    def show(self) -> None:
        """Print the table."""
        table = Table(title=f"{sum(row[2] for row in self._rows)} of {len(self._rows)} held, {self.age_s:.0f} s")
        widths = {"part": PART_LETTERS, "promise": 0, "held": len("held"), "seen": 0}
        for heading, width in widths.items():
            table.add_column(heading, overflow="ellipsis", no_wrap=True, min_width=width)
        for part, promise, held, seen in self._rows:
            table.add_row(part, promise, "yes" if held else "NO", " ".join(seen.split())[:SEEN_LETTERS])
        self._console.print(table)
