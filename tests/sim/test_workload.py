"""The replayed traffic: the shipped excerpt, and prompts with its prefixes and lengths."""

from itertools import pairwise
from statistics import median

import pytest

from pdrouter.sim.text import BYTES_PER_TOKEN, Prompt
from pdrouter.sim.workload import TRACE_BLOCK_TOKENS, Planned, Row, Scale, load_excerpt, plan

HALVED = Scale(lengths=2, arrivals=7.0)


def planned(seconds: float = 25.0, scale: Scale = HALVED) -> list[Planned]:
    """Requests made from the excerpt."""
    return list(plan(load_excerpt(), seconds, scale))


def test_excerpt() -> None:
    """The excerpt is the first rows of the trace, in order of time, each with an id for every block."""
    rows = load_excerpt()
    assert len(rows) == 1000
    assert rows[0] == Row(0, 6758, 500, list(range(14)))
    assert all(earlier.timestamp <= later.timestamp for earlier, later in pairwise(rows))
    assert all(len(row.hash_ids) == -(-row.input_length // TRACE_BLOCK_TOKENS) for row in rows)


def test_prefixes_are_those_of_the_trace() -> None:
    """Two prompts share the text of their equal leading blocks, and not the block behind."""
    requests = planned(5.0)
    texts = [request.prompt() for request in requests]
    compared = 0
    for one, text in zip(requests, texts, strict=True):
        for other, other_text in zip(requests, texts, strict=True):
            shared = 0
            while shared < min(len(one.blocks), len(other.blocks)) and one.blocks[shared] == other.blocks[shared]:
                shared += 1
            size = min(shared * one.block_tokens * BYTES_PER_TOKEN, len(text), len(other_text))
            assert text[:size] == other_text[:size]
            if shared < min(len(one.blocks), len(other.blocks)):
                compared += 1
                end = (shared + 1) * one.block_tokens * BYTES_PER_TOKEN
                assert text[size:end] != other_text[size:end]
    assert compared > len(requests)


@pytest.mark.parametrize("divisor", [1, 2, 4])
def test_text_sizes(divisor: int) -> None:
    """A prompt has the recorded tokens, divided, and the tail stays heavy."""
    requests = planned(10.0, Scale(lengths=divisor, arrivals=6.0))
    for request, row in zip(requests, load_excerpt(), strict=False):
        assert request.prompt_tokens == row.input_length // divisor
        assert request.output_tokens == max(1, row.output_length // divisor)
        assert Prompt(request.prompt(), BYTES_PER_TOKEN).tokens == request.prompt_tokens
    sizes = [request.prompt_tokens for request in requests]
    assert max(sizes) > 10 * median(sizes)


def test_arrivals() -> None:
    """Arrivals keep the recorded rate times the factor, and those of one tick are spread over it."""
    requests = planned()
    times = [request.at_s for request in requests]
    assert times == sorted(times)
    assert times[-1] < 25.0
    assert len(set(times)) == len(times)
    recorded = sum(row.timestamp < 25_000 * HALVED.arrivals for row in load_excerpt())
    assert len(requests) == pytest.approx(recorded, rel=0.05)


def test_more_than_the_excerpt() -> None:
    """A replay longer than the excerpt begins anew with prompts that nobody has in a cache."""
    rows = load_excerpt()[:20]
    requests = list(plan(rows, 12.0, Scale(lengths=1, arrivals=1.0)))
    assert len(requests) > len(rows)
    first = {block for request in requests[: len(rows)] for block in request.blocks}
    assert first.isdisjoint(block for request in requests[len(rows) :] for block in request.blocks)
