"""Traces made by chance have what their settings say."""

from collections import Counter
from itertools import pairwise
from statistics import fmean, stdev

import pytest

from pdrouter.sim.virtual.generators import PRESETS, generate, read_generator
from pdrouter.sim.virtual.trace import Trace


def made(text: str, seed: int = 1) -> Trace:
    """Return a trace from a line."""
    generator = read_generator(text)
    assert generator is not None
    return generate(generator, seed)


def gaps(trace: Trace) -> list[float]:
    """Return times between arrivals."""
    return [later.at_s - earlier.at_s for earlier, later in pairwise(trace.requests)]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset(name: str) -> None:
    """So many requests, in order, at about the rate; the same for the same seed."""
    line = f"{name}:requests=2000,rate=20"
    trace = made(line)
    assert len(trace.requests) == 2000
    assert all(gap >= 0 for gap in gaps(trace))
    assert trace.rate_per_s == pytest.approx(20, rel=0.15)
    assert made(line).requests == trace.requests
    assert made(line, seed=2).requests != trace.requests
    assert all(len(r.blocks) == r.prompt_tokens // trace.block_tokens for r in trace.requests)


def test_lengths_and_burstiness() -> None:
    """Means are those asked for, tails as heavy, gaps as irregular."""
    trace = made("poisson:requests=20000,prompt_tokens=1000,output_tokens=200,sigma=0.5")
    assert fmean(r.prompt_tokens for r in trace.requests) == pytest.approx(1000, rel=0.03)
    assert fmean(r.output_tokens for r in trace.requests) == pytest.approx(200, rel=0.03)
    assert stdev(gaps(trace)) / fmean(gaps(trace)) == pytest.approx(1, rel=0.05)
    bursty = gaps(made("bursty:requests=20000"))
    assert stdev(bursty) / fmean(bursty) == pytest.approx(4, rel=0.15)
    assert {r.prompt_tokens for r in made("poisson:requests=9,sigma=0,prompt_tokens=70").requests} == {70}


def test_diurnal() -> None:
    """The middle of the period is busy, its ends are not."""
    trace = made("diurnal:requests=8000")
    quarters = Counter(int(4 * r.at_s / trace.span_s) for r in trace.requests)
    assert min(quarters[1], quarters[2]) > 2 * max(quarters[0], quarters[3])


def test_sessions_grow() -> None:
    """Each turn begins with the whole prompt of the one before, and goes on behind its answer."""
    trace = made("sessions:requests=2000,turns=5,think_s=3")
    sessions: dict[int, list[int]] = {}
    for number, request in enumerate(trace.requests):
        if request.blocks:
            sessions.setdefault(request.blocks[0], []).append(number)
    long = [numbers for numbers in sessions.values() if len(numbers) > 2]
    assert len(long) > 100
    for numbers in long:
        for earlier, later in pairwise([trace.requests[number] for number in numbers]):
            assert later.blocks[: len(earlier.blocks)] == earlier.blocks
            assert later.prompt_tokens > earlier.prompt_tokens + earlier.output_tokens


def test_system_prompts_are_shared() -> None:
    """By all requests of the same system, and nothing else is."""
    trace = made("shared:requests=1000,systems=4,system_tokens=640")
    assert len({r.blocks[:10] for r in trace.requests}) == 4
    own = [block for r in trace.requests for block in r.blocks[10:]]
    assert len(own) == len(set(own))


def test_models_take_turns() -> None:
    """As many requests for each."""
    trace = made("mixed:requests=100")
    assert Counter(r.model for r in trace.requests) == {"small": 50, "large": 50}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("poisson:speed=1", "'speed' isn't one of requests"),
        ("poisson:rate=fast", "rate"),
        ("poisson:rate=0", "must be positive"),
        ("diurnal:swing=2", "swing must be from 0 to 1"),
    ],
)
def test_what_cant_be_made_is_told(text: str, message: str) -> None:
    """By name."""
    with pytest.raises(ValueError, match=message):
        read_generator(text)


def test_other_names_are_no_generators() -> None:
    """They may be files."""
    assert read_generator("trace.jsonl") is None
