"""The journal as a file: a line of JSON for each request that has ended, to be simulated or replayed later.

No text is in it: moments, lengths, and the prompt's blocks as hashes under a key that nobody knows and that ends with
the process, so that equal beginnings are seen and no text can be tried out against them. Lines wait in memory, a
thread writes them. It knows no HTTP; ``sim/virtual/trace.py`` reads what it writes.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

import msgspec
import structlog

from pdrouter.core.request import PAIRED, RequestFacts
from pdrouter.errors import RouterError
from pdrouter.files import open_regular

_INTERVAL_S = 1.0
_MAX_HELD_BYTES = 16 * 1024 * 1024
_KEY_BYTES = 32
_OWNER_ONLY = 0o600
_BLOCK_ID_BYTES = 6
"""48 bits: of ten million blocks hardly two are alike by chance, and any reader of JSON has such numbers exactly."""

ANSWERED = "answered"


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line. ``at_s`` is when the request came, in Unix time; the other moments are seconds after it.

    Tokens are the engine's own count if it was seen, else an estimate; ``output_tokens`` is ``None`` where there is
    neither. ``blocks`` names the prompt's full blocks, each of about ``block_tokens``: equal ids are equal prefixes.
    ``outcome`` is ``answered`` or the code of the failure; ``took_s`` is until the end, whatever that was.
    """

    at_s: float
    outcome: str
    model: str | None = None
    prompt_tokens: int
    output_tokens: int | None = None
    max_output_tokens: int | None = None
    block_tokens: float = 0.0
    blocks: tuple[int, ...] = ()
    ttft_s: float | None = None
    took_s: float


class Answered(msgspec.Struct, frozen=True):
    """What was seen of an answer: when it began (``None``: never), and its tokens as far as they are known."""

    first_at_s: float | None
    prompt_tokens: int | None
    output_tokens: int | None


class JournalFile:
    """Writes at most ``max_bytes`` (I9): ``path``, and before it ``path.1``; what is older goes.

    Raises: OSError, when it is made, if the file can't be written.
    """

    def __init__(self, path: Path, max_bytes: int, clock: Callable[[], float]) -> None:
        self._path = path
        self._half_bytes = max_bytes // 2
        self._epoch_s = time.time() - clock()
        self._keyed = blake2b(key=secrets.token_bytes(_KEY_BYTES), digest_size=_BLOCK_ID_BYTES)
        self._encode = msgspec.json.Encoder().encode
        self._waiting: list[bytes] = []
        self._held_bytes = 0
        self._counters = dict.fromkeys(("written", "dropped", "failed", "turned"), 0)
        self._log = structlog.stdlib.get_logger("pdrouter.journal")
        self._file = _open(path)
        self._is_torn = False
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")

    def counters(self) -> Mapping[str, int]:
        """Return lines written, dropped for want of room, lost with the disk; and how often a new file was begun."""
        return self._counters

    def ended(
        self,
        facts: RequestFacts,
        began_s: float,
        answered: Answered | None,
        error: RouterError | None,
        now_s: float,
    ) -> None:
        """Take note of a request's end, if it was one that reads a prompt and writes an answer."""
        if facts.task not in PAIRED:
            return
        seen = answered or Answered(None, None, None)
        prompt_tokens = seen.prompt_tokens or facts.prompt_tokens
        blocks = () if facts.is_short else facts.prefix_blocks
        entry = Entry(
            at_s=round(self._epoch_s + began_s, 6),
            outcome=ANSWERED if error is None else error.code,
            model=facts.model,
            prompt_tokens=prompt_tokens,
            output_tokens=seen.output_tokens,
            max_output_tokens=facts.max_output_tokens,
            block_tokens=round(facts.block_tokens * prompt_tokens / facts.prompt_tokens, 3) if blocks else 0.0,
            blocks=tuple([self._block_id(block) for block in blocks]),
            ttft_s=None if seen.first_at_s is None else round(seen.first_at_s - began_s, 6),
            took_s=round(now_s - began_s, 6),
        )
        line = self._encode(entry) + b"\n"
        if self._held_bytes + len(line) > _MAX_HELD_BYTES:  # I9
            self._counters["dropped"] += 1
            return
        self._waiting.append(line)
        self._held_bytes += len(line)

    def _block_id(self, block: int) -> int:
        keyed = self._keyed.copy()
        keyed.update(block.to_bytes(8, "little", signed=True))
        return int.from_bytes(keyed.digest(), "little")

    async def run(self) -> None:
        """Write what waits, again and again; while the disk takes its time, more waits."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_INTERVAL_S)
            lines = self._take()
            if lines:
                await loop.run_in_executor(self._writer, self._write, lines)
                self._held_bytes -= sum(map(len, lines))

    def write_now(self) -> None:
        """Write what waits, behind what is being written."""
        self._writer.submit(self._write, self._take()).result()

    def close(self) -> None:
        """Write the rest, and no more."""
        self.write_now()
        self._writer.shutdown()
        os.close(self._file)

    def _take(self) -> Sequence[bytes]:
        lines, self._waiting = self._waiting, []
        return lines

    # In the thread.

    def _write(self, lines: Sequence[bytes]) -> None:
        """Write lines; a disk that won't take them costs these and no more."""
        if not lines:
            return
        data = memoryview((b"\n" if self._is_torn else b"") + b"".join(lines))
        self._is_torn = True
        try:
            if os.fstat(self._file).st_size >= self._half_bytes:
                self._turn()
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self._counters["failed"] += len(lines)
            self._log.warning("journal not written", file=str(self._path), reason=error.strerror, lines=len(lines))
        else:
            self._is_torn = False
            self._counters["written"] += len(lines)

    def _turn(self) -> None:
        """Begin a new file; the last one is kept, the one before it isn't."""
        self._path.replace(self._path.with_name(self._path.name + ".1"))
        full, self._file = self._file, _open(self._path)
        os.close(full)
        self._counters["turned"] += 1


def _open(path: Path) -> int:
    """Open the file for its owner alone; one that was there keeps its lines, a link isn't followed."""
    return open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, _OWNER_ONLY)
