"""The simulator against queueing theory: M/D/1, M/G/1 and M/M/k.

One prefill rank is a server: a prompt takes 1 ms a token, and nothing else takes time. Prompts are whole chunks, so
that no two share a step. Ranks under ``least_work`` with exact knowledge are one queue: whoever joins the rank that is
free first begins when a central queue would have served it. The simulator lets the first of very many requests wait as
the recursion does, each as long; over all of them the recursion's mean wait is the formula's, within 2 %. (The mean
of 20,000 waits scatters by 2 to 4 %: to simulate enough of them would take minutes.)
"""

import random
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from math import ceil, exp, factorial
from statistics import fmean

import pytest
from tests.sim.virtual.builders import make_profile, make_trace, pairs, simulate

from pdrouter.sim.virtual.bounds import clairvoyant
from pdrouter.sim.virtual.run import Run
from pdrouter.sim.virtual.trace import Request

WITHIN = 0.02
SIMULATED, COMPUTED = 2000, 500_000

CHUNK = 10
"""Tokens of a chunk, and so milliseconds: services are whole ones."""

TICK_S = CHUNK / 1000
MEAN_S = TICK_S / (1 - exp(-TICK_S))
SQUARE_S2 = MEAN_S**2 * (1 + exp(-TICK_S))
"""First two moments of exponential services of a second, rounded up to whole chunks: a geometric distribution."""

PROFILES = {"plain": make_profile(prefill_chunk_tokens=CHUNK)}

Service = Callable[[random.Random], float]


def fixed(chance: random.Random) -> float:
    """One second."""
    return 1.0


def two_kinds(chance: random.Random) -> float:
    """Half a second, or in one of five cases three."""
    return 3.0 if chance.random() < 0.2 else 0.5


def exponential(chance: random.Random) -> float:
    """A second on average, before it is rounded up."""
    return ceil(chance.expovariate(1.0) / TICK_S) * TICK_S


def mean_wait_s(rate_per_s: float, mean_s: float, square_s2: float) -> float:
    """Return the mean wait of M/G/1, from the first two moments of services (Pollaczek and Khinchine)."""
    return rate_per_s * square_s2 / (2 * (1 - rate_per_s * mean_s))


def mean_wait_of_many_s(rate_per_s: float, servers: int, mean_s: float) -> float:
    """Return the mean wait of M/M/k (Erlang C)."""
    load = rate_per_s * mean_s
    others = sum(load**n / factorial(n) for n in range(servers))
    all_busy = load**servers / factorial(servers) * servers / (servers - load)
    return all_busy / (others + all_busy) * mean_s / (servers - load)


def arrivals(count: int, rate_per_s: float, service: Service) -> list[tuple[float, float]]:
    """Return moments of arrival and services."""
    chance = random.Random(1)
    moments = accumulate(chance.expovariate(rate_per_s) for _ in range(count))
    return [(at_s, service(chance)) for at_s in moments]


def central_waits_s(requests: Sequence[tuple[float, float]], servers: int) -> Iterator[float]:
    """Return the waits in one queue before so many servers (Kiefer and Wolfowitz 1955; for one: Lindley 1952)."""
    free = [0.0] * servers
    for at_s, service_s in requests:
        start_s = max(at_s, heappop(free))
        heappush(free, start_s + service_s)
        yield start_s - at_s


def waits_s(run: Run) -> list[float]:
    """Return how long each simulated request waited, in the order of arrival."""
    answers = sorted(run.answers, key=lambda answer: answer.number)
    return [answer.ttft_s - answer.prompt_tokens / 1000 for answer in answers]


@pytest.mark.parametrize(
    ("service", "servers", "rate_per_s", "expected_s"),
    [
        (fixed, 1, 0.7, mean_wait_s(0.7, 1.0, 1.0)),
        (two_kinds, 1, 0.6, mean_wait_s(0.6, 1.0, 0.8 * 0.25 + 0.2 * 9)),
        (exponential, 1, 0.6, mean_wait_s(0.6, MEAN_S, SQUARE_S2)),
        (exponential, 4, 2.8, mean_wait_of_many_s(2.8, 4, MEAN_S)),
    ],
    ids=["M/D/1", "M/G/1", "M/M/1", "M/M/4"],
)
def test_ranks_are_servers(service: Service, servers: int, rate_per_s: float, expected_s: float) -> None:
    """Router and engines, and the bound's one queue, let each request wait as long as theory says."""
    requests = arrivals(COMPUTED, rate_per_s, service)
    waits = list(central_waits_s(requests, servers))
    assert fmean(waits) == pytest.approx(expected_s, rel=WITHIN)
    first = waits[:SIMULATED]
    assert max(first) > 5 * expected_s
    trace = make_trace([Request(at_s, round(service_s * 1000), 1) for at_s, service_s in requests[:SIMULATED]])
    assert waits_s(simulate(trace, pairs(servers), PROFILES)) == pytest.approx(first, abs=1e-6)
    assert waits_s(clairvoyant(pairs(servers), PROFILES, trace)) == pytest.approx(first, abs=1e-6)


def test_a_bad_policy_is_no_queue() -> None:
    """The comparison can fail: by chance, requests wait behind others while ranks are idle."""
    requests = [Request(at_s, 1000, 1) for at_s, _ in arrivals(SIMULATED, 2.8, fixed)]
    waits = list(central_waits_s([(request.at_s, 1.0) for request in requests], 4))
    run = simulate(
        make_trace(requests), pairs(4), PROFILES, policy="random", prefill_policy="random", decode_policy="random"
    )
    assert fmean(waits_s(run)) > 2 * fmean(waits)
