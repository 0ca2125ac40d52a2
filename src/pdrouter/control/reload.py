"""Reads the settings' file again when it has changed or a signal asks for it; a bad file is refused whole.

It doesn't know what a setting means: ``load`` reads them all, ``apply`` puts them into effect.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import structlog

from pdrouter.config import Settings
from pdrouter.errors import ConfigError


class Stamp(NamedTuple):
    """What differs when a file is written or replaced."""

    modified_ns: int
    size: int
    inode: int


class Source(NamedTuple):
    """Where the settings came from, and how to read them all again; that may take its time, and raise ConfigError."""

    file: Path
    load: Callable[[], Settings]


class Reload:
    """Watches a source. ``apply`` may raise ConfigError; it returns the names of settings that have to wait."""

    def __init__(self, source: Source, apply: Callable[[Settings], Sequence[str]], interval_s: float) -> None:
        self.counts: Counter[str] = Counter(applied=0, refused=0)
        self._file, self._load = source
        self._apply = apply
        self._interval_s = interval_s
        self._seen = _stamp(source.file)
        self._asked = asyncio.Event()
        self._log = structlog.stdlib.get_logger("pdrouter.reload").bind(file=str(source.file))

    def counters(self) -> Mapping[str, int]:
        """Return how many were put into effect, and how many refused."""
        return self.counts

    def ask(self) -> None:
        """Read the file now, changed or not."""
        self._asked.set()

    async def run(self) -> None:
        """Watch for ever."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._asked.wait()
            is_asked = self._asked.is_set()
            self._asked.clear()
            stamp = _stamp(self._file)
            if is_asked or stamp not in (None, self._seen):
                self._seen = stamp
                await self._reload(stamp)

    async def _reload(self, stamp: Stamp | None) -> None:
        try:
            settings = await asyncio.to_thread(self._load)
            if _stamp(self._file) != stamp:
                self._log.info("is being written; it is read again")
                return
            if stamp is not None and not stamp.size:
                raise ConfigError(["the file is empty"])  # noqa: TRY301
            waiting = self._apply(settings)
        except ConfigError as error:
            self.counts["refused"] += 1
            self._log.error("refused; the settings stay as they were", problems=error.problems)
            return
        self.counts["applied"] += 1
        self._log.info("read again")
        if waiting:
            self._log.warning("changed, but only a new start puts them into effect", settings=list(waiting))


def _stamp(file: Path) -> Stamp | None:
    """Return the stamp of a file; ``None`` if it isn't there."""
    try:
        status = file.stat()
    except OSError:
        return None
    return Stamp(status.st_mtime_ns, status.st_size, status.st_ino)
