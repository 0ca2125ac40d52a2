"""Where log lines go: a bounded queue, and a thread that writes them to a file descriptor.

Whoever logs never waits and never fails: a disk that is full, a pipe that is closed or that nobody reads costs lines,
and these are counted. It knows nothing of what the lines say. Read next: ``logs.py``.
"""

import os
import select
from collections.abc import Mapping
from queue import Empty, SimpleQueue
from threading import RLock, Thread

_MAX_HELD_BYTES = 4 * 1024 * 1024
"""Most that waits to be written (I9); some ten thousand lines; chosen."""

_MAX_WRITE_BYTES = 65_536
"""Most that is written at once; what a pipe takes."""

_CLOSING_S = 1.0
"""Time for the rest at the end; chosen."""


class Sink:
    """Takes text like a file; stands in for ``sys.stderr``, so that whatever Python itself says goes this way too."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, file: int) -> None:
        self._file = file
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._lock = RLock()  # a finalizer may write while its own thread is in here
        self._held_bytes = 0
        self._counts = dict.fromkeys(("written", "dropped", "failed"), 0)
        self._thread = Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def counters(self) -> Mapping[str, int]:
        """Return texts written, dropped as too many waited, and lost as the file took none."""
        return self._counts

    def write(self, text: str) -> int:
        """Put text, a line or more, into the queue."""
        data = text.encode(self.encoding, self.errors)
        with self._lock:
            if self._held_bytes + len(data) > _MAX_HELD_BYTES:  # I9
                self._counts["dropped"] += 1
                return len(text)
            self._held_bytes += len(data)
        self._queue.put(data)
        return len(text)

    def flush(self) -> None:
        """Do nothing: whoever logs doesn't wait."""

    def isatty(self) -> bool:
        """Whether people watch."""
        return os.isatty(self._file)

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._file

    def close(self) -> None:
        """Write the rest, unless that takes long."""
        self._queue.put(None)
        self._thread.join(_CLOSING_S)

    # In the thread.

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            texts, size_bytes, is_last = [first], len(first), False
            while size_bytes < _MAX_WRITE_BYTES and not is_last:
                try:
                    more = self._queue.get_nowait()
                except Empty:
                    break
                is_last = more is None
                if more is not None:
                    texts.append(more)
                    size_bytes += len(more)
            self._write(texts, size_bytes)
            if is_last:
                return

    def _write(self, texts: list[bytes], size_bytes: int) -> None:
        data = memoryview(b"".join(texts))
        try:
            while data:
                data = data[self._write_some(data) :]
        except OSError:
            event = "failed"
        else:
            event = "written"
        with self._lock:
            self._counts[event] += len(texts)
            self._held_bytes -= size_bytes

    def _write_some(self, data: memoryview) -> int:
        try:
            return os.write(self._file, data)
        except BlockingIOError:  # somebody else made the file non-blocking
            select.select([], [self._file], [])
            return 0
