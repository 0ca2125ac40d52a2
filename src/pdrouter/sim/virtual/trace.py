"""Requests to simulate, in order of time: read from traces or a router's journal, begun anew when they end, scaled.

A trace's own moments are coarse (Mooncake: one in three seconds), so requests of one moment are scattered over the
time to the next by a seed. Generated traces: ``generators.py``.
"""

import contextlib
import csv
import gzip
import io
import random
import zlib
from collections.abc import Sequence
from datetime import datetime
from importlib import resources
from itertools import islice
from pathlib import Path
from statistics import fmean

import msgspec

from pdrouter.sim.workload import TRACE_BLOCK_TOKENS, TRACE_TICK_S, Row, load_excerpt
from pdrouter.telemetry.journal_file import Entry

EXCERPT = "excerpt"
CONVERSATION = "conversation"
"""The names of the shipped trace's first minutes, and of its whole hour."""

_LOOKED_AT_BYTES = 1 << 20


class Request(msgspec.Struct, frozen=True, gc=False):
    """One request. ``blocks`` names the prompt's full blocks: equal ids are equal prefixes."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    model: str | None = None


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Requests in order of time. ``span_s`` is the time that they stand for, ``block_tokens`` the size of a block."""

    requests: Sequence[Request]
    span_s: float
    block_tokens: int

    @property
    def rate_per_s(self) -> float:
        """Mean arrivals in a second."""
        return len(self.requests) / self.span_s

    def faster(self, factor: float) -> "Trace":
        """Return it with all moments divided by a factor."""
        requests = [msgspec.structs.replace(request, at_s=request.at_s / factor) for request in self.requests]
        return Trace(requests=requests, span_s=self.span_s / factor, block_tokens=self.block_tokens)

    def repeated(self, count: int) -> "Trace":
        """Return ``count`` requests: a trace that is over begins anew, with prompts that nobody has seen."""
        size = len(self.requests)
        lap_ids = 1 + max((block for request in self.requests for block in request.blocks), default=0)
        requests: list[Request] = []
        for lap in range(-(-count // size)):
            for request in islice(self.requests, count - lap * size):
                blocks = tuple([block + lap * lap_ids for block in request.blocks]) if lap else request.blocks
                at_s = request.at_s + lap * self.span_s
                requests.append(msgspec.structs.replace(request, at_s=at_s, blocks=blocks))
        return Trace(requests=requests, span_s=self.span_s * count / size, block_tokens=self.block_tokens)


def read_trace(name: str, seed: int) -> Trace:
    """Return a trace by its file: Mooncake's JSON lines, Azure's CSV, a journal, each perhaps as .gz; or shipped.

    Raises: ValueError that says what is wrong.
    """
    if name == EXCERPT:
        return from_rows(load_excerpt(), seed)
    if name == CONVERSATION:
        packed = resources.files("pdrouter").joinpath("data/mooncake_conversation_trace.jsonl.gz").read_bytes()
        return from_rows(_rows(gzip.decompress(packed)), seed)
    raw = _read(Path(name))
    try:
        if _is_journal(raw):
            return from_journal(_entries(raw))
        return from_azure(raw.decode(), seed) if ".csv" in Path(name).suffixes else from_rows(_rows(raw), seed)
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, ValueError) as error:
        raise ValueError(f"{name}: neither Mooncake's JSON lines nor Azure's CSV nor a journal: {error}") from None


def read_entries(name: str) -> Sequence[Entry]:
    """Return the requests of a router's journal, in the order of arrival; at least one.

    Raises: ValueError if it is another trace, or none.
    """
    raw = b"" if name in (EXCERPT, CONVERSATION) else _read(Path(name))
    if not _is_journal(raw):
        raise ValueError(f"{name}: it isn't the journal of a router")
    return _entries(raw)


def _read(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path}: {reason}; a trace is a file, {EXCERPT} or {CONVERSATION}") from None


def _rows(raw: bytes) -> list[Row]:
    return msgspec.json.Decoder(Row).decode_lines(raw)


def from_rows(rows: Sequence[Row], seed: int) -> Trace:
    """Return a trace of Mooncake's kind; the last block is left out where the prompt doesn't fill it."""
    moments = _scattered([row.timestamp / 1000 for row in rows], TRACE_TICK_S, seed)
    requests = [
        Request(
            at_s,
            max(1, row.input_length),
            max(1, row.output_length),
            tuple(row.hash_ids[: row.input_length // TRACE_BLOCK_TOKENS]),
        )
        for at_s, row in zip(moments, rows, strict=True)
    ]
    requests.sort(key=lambda request: request.at_s)
    span_s = (rows[-1].timestamp - rows[0].timestamp) / 1000 + TRACE_TICK_S
    return Trace(requests=requests, span_s=span_s, block_tokens=TRACE_BLOCK_TOKENS)


def from_azure(text: str, seed: int) -> Trace:
    """Return a trace of Azure's kind (TIMESTAMP, ContextTokens, GeneratedTokens); it says nothing of prefixes."""
    rows = list(csv.DictReader(io.StringIO(text)))
    stamps = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    order = sorted(range(len(rows)), key=stamps.__getitem__)
    moments = _scattered([stamps[i] - stamps[order[0]] for i in order], 0.0, seed)
    requests = [
        Request(at_s, max(1, int(rows[i]["ContextTokens"])), max(1, int(rows[i]["GeneratedTokens"])))
        for at_s, i in zip(moments, order, strict=True)
    ]
    return Trace(requests=requests, span_s=moments[-1] or 1.0, block_tokens=TRACE_BLOCK_TOKENS)


def _is_journal(raw: bytes) -> bool:
    """Whether a file is one that a router has written: it has moments that no other trace has."""
    return b'"at_s":' in raw[:_LOOKED_AT_BYTES]


def from_journal(entries: Sequence[Entry]) -> Trace:
    """Return the requests of a router's journal.

    A request that wasn't answered, or whose answer nobody counted, gets the mean answer, or its own limit if that is
    less. Blocks have one size here: the mean.
    """
    counted = [entry.output_tokens for entry in entries if entry.output_tokens]
    mean_tokens = round(fmean(counted)) if counted else 1
    blocks = sum(len(entry.blocks) for entry in entries)
    compared = sum(entry.block_tokens * len(entry.blocks) for entry in entries)
    block_tokens = max(1, round(compared / blocks)) if blocks else TRACE_BLOCK_TOKENS
    numbers: dict[int, int] = {}
    requests = []
    for entry in entries:
        full = entry.blocks[: entry.prompt_tokens // block_tokens]
        ids = tuple([numbers.setdefault(block, len(numbers)) for block in full])
        output_tokens = entry.output_tokens or min(mean_tokens, entry.max_output_tokens or mean_tokens)
        at_s = entry.at_s - entries[0].at_s
        requests.append(Request(at_s, entry.prompt_tokens, max(1, output_tokens), ids, entry.model))
    return Trace(requests=requests, span_s=requests[-1].at_s or 1.0, block_tokens=block_tokens)


def _entries(raw: bytes) -> list[Entry]:
    """Return what whole lines say; one that was torn, by a full disk or a killed process, is left out.

    Lines come in the order of the requests' ends, and of several files perhaps. Raises: ValueError.
    """
    decode = msgspec.json.Decoder(Entry).decode
    entries: list[Entry] = []
    for line in raw.splitlines():
        with contextlib.suppress(msgspec.DecodeError):
            entries.append(decode(line))
    if not entries:
        raise ValueError("no requests")
    return sorted(entries, key=lambda entry: entry.at_s)


def _scattered(stamps_s: Sequence[float], tick_s: float, seed: int) -> list[float]:
    if not stamps_s:
        raise ValueError("no requests")
    chance = random.Random(seed)  # noqa: S311 - no secret
    first_s = stamps_s[0]
    return [stamp_s - first_s + tick_s * chance.random() for stamp_s in stamps_s]
