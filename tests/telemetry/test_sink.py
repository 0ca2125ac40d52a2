"""The way of log lines to a file: whoever logs never waits and never fails, and what is lost is counted."""

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from pdrouter.telemetry import sink as module
from pdrouter.telemetry.logs import set_up_logs
from pdrouter.telemetry.sink import Sink


@pytest.fixture(autouse=True)
def _own_logs() -> Iterator[None]:
    """Leave structlog as it was."""
    yield
    structlog.reset_defaults()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe of 64 KB: the end to read, the end to write."""
    reading, writing = os.pipe()
    yield reading, writing
    for file in (reading, writing):
        if _is_open(file):
            os.close(file)


def _is_open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


def read_all(file: int) -> str:
    """Return all that was written to a pipe whose other end is closed."""
    with os.fdopen(file, "rb", closefd=False) as reader:
        return reader.read().decode()


def test_lines_come_out_in_order(pipe: tuple[int, int]) -> None:
    """Whole, and all of them, though they come faster than they are written."""
    reading, writing = pipe
    sink = Sink(writing)
    for number in range(300):
        assert sink.write(f"{number}\n") == len(f"{number}\n")
    sink.close()
    os.close(writing)
    assert read_all(reading).split() == [str(number) for number in range(300)]
    assert sink.counters() == {"written": 300, "dropped": 0, "failed": 0}


def test_a_pipe_that_nobody_reads(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """So much waits, the rest is dropped and counted, and the end doesn't wait; who reads later gets what waited."""
    monkeypatch.setattr(module, "_CLOSING_S", 0.05)
    reading, writing = pipe
    sink, line = Sink(writing), "x" * 9999 + "\n"
    for _ in range(1000):
        sink.write(line)
    dropped = sink.counters()["dropped"]
    assert dropped >= 1000 - (module._MAX_HELD_BYTES + 65_536) // len(line) - 1
    assert sink._held_bytes <= module._MAX_HELD_BYTES
    sink.close()
    assert sink._thread.is_alive()
    got = 0
    while got < (1000 - dropped) * len(line):
        got += len(os.read(reading, 65_536))
    sink._thread.join(5)
    assert (sink.counters(), sink._held_bytes) == ({"written": 1000 - dropped, "dropped": dropped, "failed": 0}, 0)


@pytest.mark.parametrize("kind", ["full disk", "closed pipe", "closed file"])
def test_a_file_that_takes_nothing(kind: str, pipe: tuple[int, int]) -> None:
    """Lines are lost, and whoever logs isn't told."""
    reading, writing = pipe
    file = os.open("/dev/full", os.O_WRONLY) if kind == "full disk" else writing
    if kind == "closed pipe":
        os.close(reading)
    if kind == "closed file":
        os.close(writing)
    sink = Sink(file)
    for _ in range(3):
        sink.write("x\n")
    sink.close()
    assert (sink.counters()["failed"], sink._held_bytes) == (3, 0)


def test_a_file_that_was_made_non_blocking(pipe: tuple[int, int]) -> None:
    """Whoever shares the terminal may do so; the thread waits, and nothing is lost."""
    reading, writing = pipe
    fcntl.fcntl(writing, fcntl.F_SETFL, fcntl.fcntl(writing, fcntl.F_GETFL) | os.O_NONBLOCK)
    sink = Sink(writing)
    sink.write("x" * 200_000)
    got = 0
    while got < 200_000:
        got += len(os.read(reading, 65_536))
    sink.close()
    assert sink.counters()["written"] == 1


def test_what_python_itself_says(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback that nobody catches goes the same way; what can't be encoded is escaped."""
    reading, writing = pipe
    sink = Sink(writing)
    monkeypatch.setattr(sys, "stderr", sink)
    sys.stderr.write("\ud800")
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    _Finalized()
    sink.close()
    os.close(writing)
    said = read_all(reading)
    assert "\\ud800" in said
    assert "ValueError: lost" in said
    assert not sink.isatty()


class _Finalized:
    def __del__(self) -> None:
        raise ValueError("lost")


class Unspeakable:
    """A value without words."""

    def __repr__(self) -> str:
        raise ValueError("no words")


class Lines:
    """Takes lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, text: str) -> int:
        """Keep a line."""
        self.lines.append(text)
        return len(text)

    def flush(self) -> None:
        """Do nothing."""

    def isatty(self) -> bool:
        """Say no."""
        return False


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_line_that_cant_be_put_into_words(log_format: str) -> None:
    """It is lost, and whoever logs goes on."""
    lines = Lines()
    set_up_logs("info", log_format, lines)
    log = structlog.stdlib.get_logger("x")
    log.info("one", value=Unspeakable())
    log.error("two", exc_info=ValueError(Unspeakable()))
    log.info("three")
    assert "three" in lines.lines[-1]


def test_controls_are_escaped() -> None:
    """On a console nothing that was sent moves the cursor, forges a line or turns the text around."""
    lines = Lines()
    set_up_logs("info", "console", lines)
    structlog.stdlib.get_logger("x").info("told", value="a\x9b2Jb\x1b[2Jc\nd\re\u202ef\x7fg\u2028h", other="\xe9 ok")
    (line,) = lines.lines
    assert line.count("\n") == 1
    for control in "\x9b\r\u202e\x7f\u2028":
        assert control not in line
    assert "\x1b[2J" not in line
    assert "\xe9 ok" in line


def test_no_line_takes_time(pipe: tuple[int, int]) -> None:
    """Ten thousand lines that nobody reads are put away, or dropped, without a write."""
    sink = Sink(pipe[1])
    set_up_logs("debug", "json", sink)
    log: Any = structlog.stdlib.get_logger("x")
    began_s = time.thread_time()
    for number in range(10_000):
        log.debug("line", number=number, filler="x" * 1000)
    assert sink.counters()["dropped"] > 0
    assert time.thread_time() - began_s < 10
    assert json.loads(os.read(pipe[0], 4096).split(b"\n")[0])["number"] == 0
