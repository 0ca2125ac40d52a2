"""The demo as a user starts it: a process, its output, its exit status, and what it leaves behind."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest

from pdrouter.sim import demo
from pdrouter.sim.demo import DemoOptions
from pdrouter.sim.demo_client import Seen, problem_of
from pdrouter.sim.text import expected_text, render_chat

LAST_OK = re.compile(r"demo: ok requests=(\d+) failed=0 ledger=0")
LAST_FAILED = re.compile(r"demo: FAILED requests=(\d+) failed=(\d+) ledger=(\w+)")


class Started:
    """A demo that runs."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "pdrouter", "demo", "--plain", *flags]
        self.mark = uuid.uuid4().hex
        env = os.environ | {"STARTED_BY_TEST": self.mark, "PDROUTER_RANK_POLICY": "of nobody"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        self.lines: list[str] = []

    def until(self, word: str) -> str:
        """Read up to the line that contains ``word``."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if word in line:
                return line
        raise AssertionError("\n".join(self.lines))

    def end(self) -> int:
        """Read the rest and return the exit status."""
        assert self.process.stdout is not None
        self.lines += self.process.stdout.read().splitlines()
        return self.process.wait(timeout=15)

    def family(self) -> list[psutil.Process]:
        """Processes that it started, wherever they are now."""
        return [
            process for process in psutil.process_iter() if process.pid != self.process.pid and self._is_of(process)
        ]

    def _is_of(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("STARTED_BY_TEST") == self.mark
        except psutil.Error:
            return False


@contextmanager
def started(*flags: str) -> Iterator[Started]:
    """Demo that is ended at the latest with the block."""
    run = Started(*flags)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.terminate()
            run.process.wait(timeout=15)
        assert run.process.stdout is not None
        run.process.stdout.close()


def decode_urls(line: str) -> list[str]:
    """Addresses of the decode engines behind the router that ``line`` names."""
    router = line.partition("curl -N ")[2].partition("/v1/")[0]
    with urllib.request.urlopen(f"{router}/workers") as reply:
        workers = json.load(reply)["workers"]
    return [worker["url"] for worker in workers if worker["worker_type"] == "decode"]


def test_both_runs() -> None:
    """Both runs end with all answers right, an empty ledger, status 0 and no process, whatever the environment says."""
    with started("--seconds", "1", "--speed", "4") as run:
        run.until("try: curl")
        assert len(run.family()) == 6
        assert run.end() == 0, "\n".join(run.lines)
        last = LAST_OK.fullmatch(run.lines[-1])
        assert last, "\n".join(run.lines)
        assert int(last[1]) >= 60
        assert any("least_work" in line and "round_robin" in line for line in run.lines)
        assert not run.family()


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "try: curl"), (signal.SIGTERM, "run 1 of")])
def test_signal(number: signal.Signals, word: str) -> None:
    """A signal ends it at any time with 128 + its number, and no process is left."""
    with started("--seconds", "20") as run:
        run.until(word)
        run.process.send_signal(number)
        assert run.end() == 128 + number
        assert not run.family()
        assert not run.lines[-1].startswith("demo:")


def test_engine_errors() -> None:
    """Engines that answer with errors make it fail, and it says what went wrong."""
    with started("--seconds", "2", "--speed", "2", "--no-compare") as run:
        for url in decode_urls(run.until("try: curl")):
            fault = json.dumps([{"kind": "status", "path": "/v1/chat/completions", "status": 500}]).encode()
            urllib.request.urlopen(f"{url}/_fault", data=fault).close()
        assert run.end() == 1
        last = LAST_FAILED.fullmatch(run.lines[-1])
        assert last, "\n".join(run.lines)
        assert int(last[2]) > 0
        assert any("fault on demand" in line for line in run.lines)
        assert not run.family()


def test_closed_output() -> None:
    """Nobody reads the output any more: it ends, and no process is left."""
    with started("--seconds", "20") as run:
        run.until("try: curl")
        assert run.process.stdout is not None
        run.process.stdout.close()
        assert run.process.wait(timeout=15) == 1
        assert not run.family()


def test_dead_engine() -> None:
    """An engine that dies ends the demo at once, and it is named."""
    with started("--seconds", "10", "--no-compare") as run:
        run.until("try: curl")
        victim = next(process for process in run.family() if "emulate" in process.cmdline())
        victim.kill()
        assert run.end() == 1
        assert LAST_FAILED.fullmatch(run.lines[-1]), "\n".join(run.lines)
        assert any("prefill 1 ended with status -9" in line for line in run.lines)
        assert not run.family()


def test_wrong_answers_are_seen() -> None:
    """Text, finish reason and usage of an answer are each compared with what the prompt demands."""
    text = expected_text(render_chat([{"role": "user", "content": "Hello"}]), 3)
    usage = SimpleNamespace(prompt_tokens=8, completion_tokens=3)

    def problem(*parts: str, finish: str = "length", usage: object = usage) -> str:
        seen = Seen()
        seen.parts, seen.finish, seen.usage = list(parts), finish, usage  # type: ignore[assignment]
        return problem_of("Hello", 3, seen)

    assert problem(text[:4], text[4:]) == ""
    assert problem(text[4:], text[:4]) == "wrong text"
    assert problem(text[:4]) == "wrong text"
    assert problem(text, finish="stop") == "wrong finish_reason: stop"
    assert problem(text, usage=None) == "wrong usage: None"
    assert problem(text, usage=SimpleNamespace(prompt_tokens=8, completion_tokens=4)) == "wrong usage: (8, 4)"


def test_without_openai(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the openai package it says what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    options = DemoOptions(seconds=1, speed=1, policy="random", compare=False, plain=True)
    assert demo.run(options) == 2
    assert "pip install 'pdrouter[demo]'" in capsys.readouterr().err
