"""``pdrouter replay`` as it is typed, against a live router over emulated engines, and what the router wrote of it."""

import asyncio
import contextlib
import csv
import importlib.util
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest
from tests.lab import CHAT, COMPLETIONS, ScriptedEngine, always, fault, hang, make_lab, until

from pdrouter.cli import main
from pdrouter.sim.profiles import DEFAULT_PROFILE
from pdrouter.sim.virtual.trace import Request, read_trace
from pdrouter.sim.workload import load_excerpt

SPEED = 20.0
FLEET = f"prefill=2x2:{DEFAULT_PROFILE},decode=2x2:{DEFAULT_PROFILE}"
COUNT = 30
TIME_LIMIT_S = 40.0

pytestmark = pytest.mark.timeout(60)  # processes of their own, on a machine that may be busy


def write_mooncake(path: Path) -> None:
    """Write the excerpt's first rows of no more than 16,000 tokens, with an eighth of each answer."""
    rows = [row for row in load_excerpt() if row.input_length <= 16_000][:COUNT]
    rows = [msgspec.structs.replace(row, output_length=row.output_length // 8) for row in rows]
    path.write_bytes(b"\n".join(map(msgspec.json.encode, rows)))


@contextlib.asynccontextmanager
async def replaying(*words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start the command in a process of its own; it is gone when the block is left."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pdrouter", "replay", *words,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"COLUMNS": "200", "OPENAI_API_KEY": ""},
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def replay(*words: str) -> tuple[int | None, str, str]:
    """Run the command; return status, output and errors."""
    async with replaying(*words) as process, asyncio.timeout(TIME_LIMIT_S):
        out, err = await process.communicate()
        return process.returncode, out.decode(), err.decode()


async def test_a_trace_live_simulated_and_from_the_journal(tmp_path: Path) -> None:
    """One table of both; the router's journal of the run is the same trace again."""
    trace, journal, simulated, out = (tmp_path / name for name in ("trace.jsonl", "journal.jsonl", "sim", "out"))
    write_mooncake(trace)
    load = ["--rate", "3"]
    policies = ["--policy", "least_work", "--out", str(simulated)]
    assert main(["simulate", "--trace", str(trace), *load, "--fleet", FLEET, *policies]) == 0
    async with make_lab(2, 2, engine={"speed": SPEED}, journal_file=str(journal)) as lab:
        flags = ["--url", f"{lab.url}/v1", "--speed", str(SPEED), "--beside", str(simulated), "--out", str(out)]
        status, shown, errors = await replay(str(trace), *load, *flags, "--api-key", "hidden")
        await lab.settled()
    assert (status, errors) == (0, "")
    assert f"{COUNT} of {COUNT} requests ended" in shown
    assert "prompts 1.000, answers 1.000" in shown
    written = json.loads((out / "results.json").read_text())
    assert "hidden" not in written["command"]
    virtual, live = (run["figures"] for run in written["runs"])
    for name in ("ttft_p50_s", "end_to_end_p50_s"):  # a busy machine may take a second longer
        assert 0.8 * virtual[name] < live[name] < virtual[name] + SPEED
    assert live["hit_rate"] == pytest.approx(virtual["hit_rate"], abs=0.05)
    assert (live["rejected"], live["requests"], live["slowdown_p50"]) == (0, COUNT, None)
    assert live["prefill_imbalance"] >= 1
    with (out / "requests.csv").open() as file:
        lines = list(csv.DictReader(file))
    recorded = read_trace(str(trace), 0)
    assert [int(line["prompt_tokens"]) for line in lines] == [r.prompt_tokens for r in recorded.requests]
    assert (out / "report.html").read_text().count("<svg") == 3
    check_journal(journal, tmp_path)


def check_journal(journal: Path, tmp_path: Path) -> None:
    """The journal has the same lengths and prefixes, two short probes before them, and can be simulated."""
    mine, recorded = read_trace(str(journal), 0), read_trace(str(tmp_path / "trace.jsonl"), 0)
    _, _, *requests = mine.requests
    assert lengths(requests) == lengths(recorded.requests)
    assert shared_tokens(requests, mine.block_tokens) == pytest.approx(
        shared_tokens(recorded.requests, recorded.block_tokens), rel=0.1
    )
    assert main(["simulate", "--trace", str(journal), "--fleet", FLEET, "--policy", "recorded"]) == 0


def lengths(requests: Sequence[Request]) -> list[tuple[int, int]]:
    """Return the lengths of prompts and answers; what came within a millisecond may have changed places."""
    return sorted((request.prompt_tokens, request.output_tokens) for request in requests)


def shared_tokens(requests: Sequence[Request], block_tokens: int) -> int:
    """Return how many tokens of prompts had been there before."""
    seen: set[int] = set()
    shared = 0
    for request in requests:
        shared += sum(block in seen for block in request.blocks)
        seen.update(request.blocks)
    return shared * block_tokens


async def test_failures() -> None:
    """Counted by cause, and status 1, unless they are allowed."""
    trace = "poisson:requests=20,prompt_tokens=200,output_tokens=9"
    async with make_lab(0, 0, 1, engine={"speed": SPEED}) as lab:
        for flags, expected in (([], 1), (["--allow-failures"], 0)):
            busy = {"error": {"code": "busy", "message": "x"}}
            await fault(lab.workers[0], "status", COMPLETIONS, status=503, times=7, body=busy)
            flags += ["--url", lab.url, "--rate", "100", "--token-ids", "--ignore-eos"]
            status, shown, _ = await replay(trace, *flags)
            assert status == expected
            assert "failed: 7 x 503 busy" in shown
            assert "20 of 20 requests ended" in shown


async def test_a_signal_ends_it_with_what_there_is(tmp_path: Path) -> None:
    """Ctrl-C: a table of what was answered, status 130."""
    trace = "poisson:requests=10000,rate=40,prompt_tokens=200,output_tokens=4"
    async with make_lab(1, 1) as lab:
        async with replaying(trace, "--url", lab.url, "--out", str(tmp_path)) as process, asyncio.timeout(TIME_LIMIT_S):
            await until(lambda: lab.core.decided > 30, TIME_LIMIT_S)
            process.send_signal(signal.SIGINT)
            out, errors = await process.communicate()
        await lab.settled()
    assert (process.returncode, errors) == (130, b"")
    assert b"of 10,000 requests ended" in out
    assert (tmp_path / "report.html").exists()


async def test_a_signal_before_anything_has_ended() -> None:
    """It says so."""
    async with (
        ScriptedEngine(None, {COMPLETIONS: hang}).listen() as engine,
        replaying("poisson", "--url", engine.url, "--model", "m", "--token-ids") as process,
        asyncio.timeout(TIME_LIMIT_S),
    ):
        await until(lambda: bool(engine.asked_for(COMPLETIONS)), TIME_LIMIT_S)
        process.send_signal(signal.SIGINT)
        out, _ = await process.communicate()
    assert process.returncode == 130
    assert b"before any request had ended" in out


async def test_seeds_make_an_interval(tmp_path: Path) -> None:
    """The same name with another seed is another run of the same; with the same seed it is refused."""
    trace = ["poisson:prompt_tokens=100,output_tokens=3", "--requests", "10", "--rate", "100"]
    async with make_lab(1, 1) as lab:
        flags = ["--url", lab.url, "--seed"]
        status, shown, _ = await replay(*trace, *flags, "1", "--out", str(tmp_path))
        assert (status, "±" in shown) == (0, False)
        status, shown, _ = await replay(*trace, *flags, "2", "--beside", str(tmp_path))
        assert (status, "±" in shown) == (0, True)
        status, _, errors = await replay(*trace, *flags, "1", "--beside", str(tmp_path))
    assert status == 2
    assert "give another --name or --seed" in errors


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nowhere", "--url", "http://127.0.0.1:1"], "nowhere: No such file"),
        (["poisson", "--url", "127.0.0.1:1"], "127.0.0.1:1 is not a URL"),
        (["poisson", "--url", "http://127.0.0.1:1"], "http://127.0.0.1:1: it doesn't say what it serves: ConnectError"),
        (["poisson", "--url", "http://127.0.0.1:1", "--model", "m"], "http://127.0.0.1:1: ConnectError"),
        (["poisson", "--url", "http://127.0.0.1:1", "--speed", "0"], "--speed: must be positive"),
        (["poisson", "--url", "http://127.0.0.1:1", "--rate", "x"], "--rate: 'x' is not a number"),
        (["poisson", "--url", "http://127.0.0.1:1", "--beside", "nowhere"], "--beside: nowhere/results.json: No such"),
        (["poisson", "--url", "http://127.0.0.1:1", "--utilisation", "1"], "--utilisation: unknown flag"),
        (["poisson"], "--url"),
    ],
)
def test_what_cant_be_replayed_is_told(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With status 2 and what to write instead."""
    assert main(["replay", *flags]) == 2
    assert message in capsys.readouterr().err


async def test_an_endpoint_that_does_not_count() -> None:
    """Text can't be made as long as a trace wants it; token ids can."""
    body = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\ndata: [DONE]\n\n'
    async with ScriptedEngine(None, {CHAT: always(200, body)}).listen() as engine:
        status, _, errors = await replay("poisson", "--url", engine.url, "--model", "m")
    assert status == 2
    assert "it doesn't count the tokens of a prompt; try --token-ids" in errors


def test_without_the_client_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The openai package is an extra."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["replay", "poisson", "--url", "http://x"]) == 2
    assert "pip install 'pdrouter[demo]'" in capsys.readouterr().err
