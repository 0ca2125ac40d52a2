"""What goes wrong around the router: logs, nameservers, files, tenants."""

import asyncio
import contextlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.abuse.case import case, must
from tests.abuse.stage import Router, Stage, ready
from tests.lab import get, post

COMPLETIONS = "/v1/completions"


async def _serves(router: Router, count: int = 20) -> None:
    for number in range(count):
        async with asyncio.timeout(5):
            reply = await post(router.url, COMPLETIONS, {"prompt": f"p {number}", "max_tokens": 2})
        must(reply.status == 200, f"status {reply.status}")


async def _logs_to(stage: Stage, file: int) -> str:
    words = ("--worker", stage.regular)
    async with stage.route(*words, stderr=file, log_level="debug", drain_notice_secs=0) as router:
        await ready(router.url)
        await _serves(router, 150)
        missing = await post(router.url, COMPLETIONS, b"{")
        must(missing.status == 400, f"status {missing.status}")
        await router.ledger_is_zero()
        must(await router.end() == 0, "another status than 0")
    return "150 answered, ledger zero, ends"


@case(4, "stderr is a full disk (/dev/full), log level debug", "lines dropped, counted", is_shared=False)
async def full_disk(stage: Stage) -> str:
    file = os.open("/dev/full", os.O_WRONLY)
    try:
        return await _logs_to(stage, file)
    finally:
        os.close(file)


@case(4, "stderr is a pipe without a reader, log level debug", "lines dropped, counted", is_shared=False)
async def closed_pipe(stage: Stage) -> str:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return await _logs_to(stage, writer)
    finally:
        os.close(writer)


@case(4, "stderr is a pipe that nobody reads, log level debug", "4 MB wait, then dropped", is_shared=False)
async def unread_pipe(stage: Stage) -> str:
    reader, writer = os.pipe()
    try:
        return await _logs_to(stage, writer)
    finally:
        os.close(reader)
        os.close(writer)


_HANGS = """
import socket, time
real = socket.getaddrinfo
def lookup(host, *a, **k):
    if str(host).endswith(".hangs"):
        time.sleep(3600)
    return real(host, *a, **k)
socket.getaddrinfo = lookup
"""


@case(7, "6 workers whose nameserver is silent, one healthy by name", "healthy one serves", is_shared=False)
async def silent_nameserver(stage: Stage) -> str:
    folder = stage.folder / "hangs"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(_HANGS, "utf-8")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    named = stage.regular.replace("127.0.0.1", "localhost")
    words = [word for i in range(6) for word in ("--worker", f"http://w{i}.hangs:1")]
    flags: dict[str, Any] = {"drain_notice_secs": 0, "shutdown_grace_period_secs": 1}
    async with stage.route("--worker", named, *words, env={"PYTHONPATH": path}, **flags) as router:
        await ready(router.url)
        await _serves(router)
        must(await router.end(6.0) == 0, "another status than 0")
    return "20 answered, ends"


@case(11, "the fleet's file cut off, a FIFO, unreadable, 50,000 levels", "told, fleet as before", is_shared=False)
async def bad_files(stage: Stage) -> str:
    file = stage.folder / "cut.yaml"
    good = json.dumps({"worker": [{"url": stage.regular}]})
    file.write_text(good, "utf-8")
    async with stage.route("--config", str(file), config_check_interval_secs=0.1) as router:
        await ready(router.url)
        for text in ("", good[: len(good) // 2], "worker: []", "[" * 50_000, "a: &a [*a, *a]", "\0\xff"):
            file.write_text(text, "latin-1")
            await asyncio.sleep(0.4)
            must(len((await get(router.url, "/workers")).json()["workers"]) == 1, f"drained by {text[:20]!r}")
        file.unlink()
        os.mkfifo(file)
        await asyncio.sleep(0.4)
        await _serves(router, 5)
    file.unlink()
    return "fleet as before"


@case(11, "check-config with keys set", "keys are hidden", is_shared=False)
async def hidden_keys(stage: Stage) -> str:
    file = stage.folder / "keys.yaml"
    text = json.dumps({"api_key": "sk-secret1", "engine_api_key": "sk-secret2", "worker": ["http://u:sk-secret3@a:1"]})
    file.write_text(text, "utf-8")
    command = [sys.executable, "-m", "pdrouter", "check-config", "--config", str(file)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=False, timeout=20)
    must(b"sk-secret" not in done.stdout + done.stderr, (done.stdout + done.stderr)[-200:].decode())
    return "hidden"


@case(11, "journal file: one of mode 0644 was there; a symlink", "0600; not followed", is_shared=False)
async def journal_files(stage: Stage) -> str:
    file, target = stage.folder / "journal", stage.folder / "target"
    file.write_text("", "utf-8")
    file.chmod(0o644)
    async with stage.route("--worker", stage.regular, journal_file=file) as router:
        await ready(router.url)
        await _serves(router, 2)
        mode = stat.S_IMODE(file.stat().st_mode)
        must(mode == 0o600, f"mode {mode:o}")
    file.unlink()
    Path(target).write_text("kept", "utf-8")  # noqa: ASYNC240
    file.symlink_to(target)
    with contextlib.suppress(Exception):
        async with stage.route("--worker", stage.regular, journal_file=file) as router:
            await ready(router.url)
            await _serves(router, 2)
    must(target.read_text("utf-8") == "kept", "the link's target was written")
    return "mode 600, target untouched"
