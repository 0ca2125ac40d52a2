"""Traces: read, scattered by seed, scaled, begun anew."""

import gzip
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.sim.virtual.builders import make_trace

from pdrouter.sim.virtual.trace import CONVERSATION, EXCERPT, Request, read_trace
from pdrouter.sim.workload import load_excerpt
from pdrouter.telemetry.journal_file import Entry

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:46.6805900,374,44
"""


def test_the_excerpt_keeps_lengths_and_prefixes() -> None:
    """Each row is a request within its three seconds; only full blocks can be shared."""
    trace = read_trace(EXCERPT, 1)
    rows = load_excerpt()
    assert len(trace.requests) == len(rows)
    assert all(earlier.at_s <= later.at_s for earlier, later in pairwise(trace.requests))
    assert all(len(request.blocks) == request.prompt_tokens // 512 for request in trace.requests)
    assert sum(r.prompt_tokens for r in trace.requests) == sum(row.input_length for row in rows)
    first = [r for r in trace.requests if r.at_s < 3]
    assert sorted(r.prompt_tokens for r in first) == sorted(row.input_length for row in rows if row.timestamp < 3000)


def test_a_seed_scatters_what_came_at_one_moment() -> None:
    """The same seed gives the same moments, another gives others."""
    assert read_trace(EXCERPT, 1).requests == read_trace(EXCERPT, 1).requests
    assert read_trace(EXCERPT, 1).requests != read_trace(EXCERPT, 2).requests


def test_azure(tmp_path: Path) -> None:
    """CSV in any order becomes requests in order of time, without prefixes."""
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    trace = read_trace(str(path), 0)
    assert [(r.prompt_tokens, r.output_tokens, r.blocks) for r in trace.requests] == [(374, 44, ()), (396, 109, ())]
    assert trace.requests[1].at_s - trace.requests[0].at_s == pytest.approx(4.314579, abs=1e-6)


def test_mooncake_from_a_file(tmp_path: Path) -> None:
    """JSON lines are read as the excerpt is."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}\n')
    (request,) = read_trace(str(path), 0).requests
    assert (request.prompt_tokens, request.output_tokens, request.blocks) == (1100, 5, (7, 8))
    assert 0 <= request.at_s < 3


def journal(*entries: Entry) -> bytes:
    """Return a journal's file."""
    return b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries)


def entry(at_s: float, prompt_tokens: int, **changes: Any) -> Entry:
    """Return a line of an answered request."""
    fields: dict[str, Any] = {"outcome": "answered", "took_s": 1.0, "output_tokens": 10} | changes
    return Entry(at_s=at_s, prompt_tokens=prompt_tokens, **fields)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_router_s_journal(tmp_path: Path, suffix: str) -> None:
    """In the order of arrival, with its prefixes in blocks of one size, and a guess where nobody counted."""
    raw = journal(
        entry(1e9 + 7, 700, blocks=(1 << 47, 5, 6), block_tokens=210.0, model="m", output_tokens=30),
        entry(1e9 + 2, 500, blocks=(1 << 47, 5), block_tokens=205.0),
        entry(1e9 + 3, 100, output_tokens=None, outcome="queue_full"),
        entry(1e9 + 3.5, 300, blocks=(1 << 47, 5), block_tokens=150.0),
        entry(1e9 + 4, 100, output_tokens=0, max_output_tokens=4, outcome="upstream_timeout"),
    )
    path = tmp_path / f"journal{suffix}"
    path.write_bytes(gzip.compress(raw) if suffix.endswith("gz") else raw)
    trace = read_trace(str(path), 0)
    assert trace.block_tokens == 191
    assert trace.requests == [
        Request(0.0, 500, 10, (0, 1)),
        Request(1.0, 100, 17),
        Request(1.5, 300, 10, (0,)),
        Request(2.0, 100, 4),
        Request(5.0, 700, 30, (0, 1, 2), "m"),
    ]
    assert trace.rate_per_s == pytest.approx(5 / 5)
    assert max(b for r in trace.repeated(9).requests for b in r.blocks) < 10


def test_a_torn_journal(tmp_path: Path) -> None:
    """Whole lines count, whatever stands between them."""
    path = tmp_path / "journal"
    path.write_bytes(b'{"at_s":3,"ou\n\n' + journal(entry(5.0, 10)) + b'{"at_s":9')
    assert read_trace(str(path), 0).requests == [Request(0.0, 10, 10)]
    path.write_bytes(b'{"at_s":3,"ou')
    with pytest.raises(ValueError, match="no requests"):
        read_trace(str(path), 0)


@pytest.mark.parametrize("text", ["", "nonsense\n", '{"timestamp": 1}\n', "a,b\n1,2\n"])
@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_what_is_no_trace_is_told(tmp_path: Path, text: str, suffix: str) -> None:
    """With the file's name."""
    path = tmp_path / f"bad{suffix}"
    path.write_text(text)
    with pytest.raises(ValueError, match="bad"):
        read_trace(str(path), 0)


def test_a_missing_file_is_told() -> None:
    """With what would do instead."""
    with pytest.raises(ValueError, match=r"nowhere\.jsonl: No such file.*excerpt"):
        read_trace("nowhere.jsonl", 0)


def test_faster_and_repeated() -> None:
    """A factor divides moments; a trace begun anew has the same lengths and rate, and prompts of its own."""
    trace = make_trace([Request(1.0, 100, 1, (1,)), Request(4.0, 300, 2, (1, 2, 3))])
    assert [r.at_s for r in trace.faster(2).requests] == [0.5, 2.0]
    assert trace.faster(2).rate_per_s == pytest.approx(2 * trace.rate_per_s)
    longer = trace.repeated(5)
    assert [r.at_s for r in longer.requests] == [1.0, 4.0, 5.0, 8.0, 9.0]
    assert [r.prompt_tokens for r in longer.requests] == [100, 300, 100, 300, 100]
    assert longer.rate_per_s == pytest.approx(trace.rate_per_s)
    laps = [{b for r in longer.requests[i : i + 2] for b in r.blocks} for i in (0, 2, 4)]
    assert laps[0].isdisjoint(laps[1])
    assert (laps[0] | laps[1]).isdisjoint(laps[2])
    assert len(laps[1]) == 3
    assert len(trace.repeated(1).requests) == 1


def test_the_whole_trace_begins_as_its_excerpt_does() -> None:
    """The shipped hour has the excerpt's requests in front."""
    whole, excerpt = read_trace(CONVERSATION, 1), read_trace(EXCERPT, 1)
    assert len(whole.requests) == 12_031
    assert sum(r.prompt_tokens for r in whole.requests if r.at_s < 60) == sum(
        r.prompt_tokens for r in excerpt.requests if r.at_s < 60
    )
