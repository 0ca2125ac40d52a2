"""The journal's file: what a live router writes of its requests, and that it stays within its bounds."""

import asyncio
import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdrouter.errors import ConfigError
from pdrouter.server import Service
from pdrouter.telemetry import journal_file
from pdrouter.telemetry.journal_file import Answered, Entry, JournalFile
from tests.core.builders import facts
from tests.lab import CHAT, Lab, chat, fault, make_lab, make_settings, until

MARK = "Tell nobody of the blue heron"


def entries(*paths: Path) -> list[Entry]:
    """Return what stands in files."""
    return [msgspec.json.decode(line, type=Entry) for path in paths for line in path.read_bytes().splitlines()]


def make_file(path: Path, max_bytes: int = 1 << 20) -> JournalFile:
    """Return a file whose clock stands at 100."""
    return JournalFile(path, max_bytes, lambda: 100.0)


def note(file: JournalFile, **changes: Any) -> None:
    """Let a request have ended that came at 100."""
    file.ended(facts(1000, **changes), 100.0, Answered(101.0, 1100, 7), None, 102.0)


async def ask_all(lab: Lab) -> None:
    """Send a conversation that grows, one that isn't streamed, one without usage, one that fails, one for a rank."""
    text = f"{MARK}. " * 400
    for length, stream in ((5000, True), (10_000, True), (10_000, False)):
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        assert (await lab.post(CHAT, chat(text[:length], tokens=20, stream=stream, **usage))).status == 200
    assert (await lab.post(CHAT, chat("other " * 500, tokens=300, stream=True))).status == 200
    await fault(lab.decodes[0], "status", status=500, times=1)
    assert (await lab.post(CHAT, chat("short", tokens=9))).status == 500
    assert (await lab.post(CHAT, chat("x"), {"x-data-parallel-rank": "99"})).status == 400
    assert (await lab.post("/v1/embeddings", {"input": "x"})).status in (200, 404)


async def test_a_live_router_s_requests(tmp_path: Path) -> None:
    """A line for each, with the engine's own counts, equal ids for equal beginnings, and nothing of the text."""
    path = tmp_path / "journal.jsonl"
    began_s = time.time()
    async with make_lab(1, 1, journal_file=str(path)) as lab:
        await ask_all(lab)
        await lab.settled()
        file = lab.router.service.journal_file
        assert b'pdrouter_journal_file_total{event="dropped"} 0' in (await lab.get("/metrics")).body
    assert file is not None
    assert file.counters() == {"written": 6, "dropped": 0, "failed": 0, "turned": 0}
    assert MARK.encode() not in path.read_bytes()
    assert path.stat().st_mode & 0o077 == 0
    first, longer, whole, uncounted, failed, refused = entries(path)
    assert began_s <= first.at_s <= longer.at_s <= refused.at_s <= time.time()
    assert [e.prompt_tokens for e in (first, longer, whole)] == [1256, 2506, 2506]
    assert [e.output_tokens for e in (first, longer, whole)] == [20, 20, 20]
    assert uncounted.output_tokens == pytest.approx(300, rel=0.05)
    assert longer.blocks == whole.blocks
    assert longer.blocks[: len(first.blocks)] == first.blocks
    assert not set(uncounted.blocks) & set(longer.blocks)
    assert len(first.blocks) == 4
    assert longer.block_tokens == pytest.approx(256, rel=0.02)
    assert first.ttft_s is not None
    assert 0 < first.ttft_s <= first.took_s
    assert [e.outcome for e in (first, uncounted, failed, refused)] == [
        "answered", "answered", "engine_reply", "invalid_rank"
    ]  # fmt: skip
    assert (failed.output_tokens, failed.max_output_tokens, failed.model, failed.ttft_s) == (None, 9, "emulated", None)


async def test_one_line_for_all_attempts_and_for_a_client_that_leaves(tmp_path: Path) -> None:
    """The journal tells of requests, not of attempts."""
    path = tmp_path / "journal.jsonl"
    retries: dict[str, Any] = {"disable_retries": False, "retry_initial_backoff_ms": 1, "journal_file": str(path)}
    async with make_lab(1, 1, engine={"speed": 0.5}, **retries) as lab:
        await fault(lab.decodes[0], "status", status=500, times=1)
        assert (await lab.post(CHAT, chat("x", tokens=1))).status == 200
        async with await lab.start(CHAT, chat("x", tokens=5000, stream=True)) as call:
            await call.head()
        await lab.settled(5.0)
    again, left = entries(path)
    assert (again.outcome, left.outcome) == ("answered", "client_gone")
    assert left.output_tokens is not None
    assert left.output_tokens < 5000


def test_keys_are_another_process_s_secret(tmp_path: Path) -> None:
    """The same prompt has other ids in another file, so that no text can be tried out."""
    one, other = make_file(tmp_path / "one"), make_file(tmp_path / "other")
    for file in (one, one, other):
        note(file, prefix_blocks=(5, -6), block_tokens=300.0)
    one.close()
    other.close()
    first, second = entries(tmp_path / "one")
    (third,) = entries(tmp_path / "other")
    assert first.blocks == second.blocks
    assert not set(first.blocks) & (set(third.blocks) | {5, -6})
    assert first.block_tokens == 330.0
    assert b"[]" not in (tmp_path / "one").read_bytes()


def test_a_prompt_shorter_than_a_block_has_no_blocks(tmp_path: Path) -> None:
    """A line names full blocks, all about as large."""
    file = make_file(tmp_path / "one")
    note(file, prefix_blocks=(5,), block_tokens=8.0, is_short=True)
    file.close()
    (entry,) = entries(tmp_path / "one")
    assert (entry.blocks, entry.block_tokens) == ((), 0.0)


@pytest.mark.invariant("I9")
async def test_two_halves_are_kept(tmp_path: Path) -> None:
    """However many requests, the file and the one before it take no more than they may, but for the last batch."""
    path = tmp_path / "journal"
    file = make_file(path, max_bytes=4096)
    batches = 40
    for batch in range(batches):
        note(file, request_id=str(batch), model=f"m{batch}")
        file.write_now()
    file.close()
    old, new = tmp_path / "journal.1", path
    kept = entries(old, new)
    assert [e.model for e in kept] == [f"m{n}" for n in range(batches - len(kept), batches)]
    assert old.stat().st_size + new.stat().st_size < 4096 + 512
    assert file.counters()["turned"] >= 1
    assert file.counters()["written"] == batches


@pytest.mark.invariant("I9")
def test_what_waits_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing can be written, lines beyond a number of bytes are counted, not kept."""
    monkeypatch.setattr(journal_file, "_MAX_HELD_BYTES", 400)
    file = make_file(tmp_path / "journal")
    for _ in range(10):
        note(file)
    file.close()
    counters = file.counters()
    assert counters["written"] == len(entries(tmp_path / "journal")) == 10 - counters["dropped"]
    assert 1 <= counters["written"] < 10


async def test_a_full_disk_costs_lines_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was torn ends where the next line begins."""
    file = make_file(tmp_path / "journal")
    real, is_full = os.write, True

    def write(number: int, data: Any) -> int:
        if is_full and len(data) < 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(number, data[:40] if is_full else data)

    monkeypatch.setattr(os, "write", write)
    note(file)
    file.write_now()
    is_full = False
    note(file, model="later")
    file.close()
    assert file.counters() == {"written": 1, "dropped": 0, "failed": 1, "turned": 0}
    torn, later = (tmp_path / "journal").read_bytes().splitlines()
    with pytest.raises(json.JSONDecodeError):
        json.loads(torn)
    assert json.loads(later)["model"] == "later"


async def test_lines_are_written_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to stop a router to read its journal."""
    monkeypatch.setattr(journal_file, "_INTERVAL_S", 0.001)
    monkeypatch.setattr(journal_file, "_MAX_HELD_BYTES", 200)  # room for one line
    file = make_file(tmp_path / "journal")
    running = asyncio.create_task(file.run())
    for count in (1, 2):
        note(file)
        await until(lambda: file.counters()["written"] == count)  # noqa: B023
    assert len(entries(tmp_path / "journal")) == 2
    running.cancel()
    file.close()


def test_a_file_that_cannot_be_stops_the_start(tmp_path: Path) -> None:
    """It is told before the router listens."""
    with pytest.raises(ConfigError) as told:
        Service(make_settings({"journal_file": str(tmp_path / "nowhere" / "journal")}))
    assert "journal_file" in told.value.problems[0]
    assert "No such file" in told.value.problems[0]


def test_only_its_owner_reads_it_whatever_was_there(tmp_path: Path) -> None:
    """A file that all could read is kept and closed to them; so is the one that it turns into."""
    path = tmp_path / "journal.jsonl"
    path.write_text("old\n")
    path.chmod(0o666)
    file = make_file(path)
    note(file)
    file.close()
    assert path.read_text().startswith("old\n{")
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "read pipe", "folder"])
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    """A link isn't followed, a pipe isn't waited for."""
    path, target = tmp_path / "journal.jsonl", tmp_path / "target"
    if kind == "link":
        target.write_text("keep")
    if "link" in kind:
        path.symlink_to(target)
    if "pipe" in kind:
        os.mkfifo(path)
    if kind == "folder":
        path.mkdir()
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if kind == "read pipe" else None
    with pytest.raises(ConfigError) as error:
        Service(make_settings({"journal_file": str(path)}))
    assert str(path) in error.value.problems[0]
    assert "None" not in error.value.problems[0]
    assert not target.exists() or target.read_text() == "keep"
    if reader is not None:
        os.close(reader)
