"""The simulator against queueing theory: M/D/1, M/G/1 and M/M/k.

One prefill rank is a server: a prompt takes 1 ms a token, and nothing else takes time. Prompts are whole chunks, so
that no two share a step. Ranks under ``least_work`` with exact knowledge are one queue: whoever joins the rank that is
free first begins when a central queue would have served it. Every wait is that of the recursion for the same arrivals;
the recursion's mean over many more is the formula's, within 2 %.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from math import ceil, factorial
from statistics import fmean

import pytest
from tests.sim.virtual.builders import BLOCK, PLAIN, make_trace, pairs, simulate

from pdrouter.sim.virtual.bounds import clairvoyant
from pdrouter.sim.virtual.run import Run
from pdrouter.sim.virtual.trace import Request

WITHIN = 0.02
SIMULATED, COMPUTED = 2000, 400_000

Service = Callable[[random.Random], float]


def fixed(chance: random.Random) -> float:
    """One second."""
    return 1.0


def two_kinds(chance: random.Random) -> float:
    """Half a second, or in one of five cases three."""
    return 3.0 if chance.random() < 0.2 else 0.5


def exponential(chance: random.Random) -> float:
    """A second on average."""
    return chance.expovariate(1.0)


def mean_wait_s(rate_per_s: float, services_s: Sequence[tuple[float, float]]) -> float:
    """Return the mean wait of M/G/1, from (service, probability) pairs (Pollaczek and Khinchine)."""
    first = sum(service * share for service, share in services_s)
    second = sum(service**2 * share for service, share in services_s)
    return rate_per_s * second / (2 * (1 - rate_per_s * first))


def mean_wait_of_many_s(rate_per_s: float, servers: int) -> float:
    """Return the mean wait of M/M/k with services of one second on average (Erlang C)."""
    others = sum(rate_per_s**n / factorial(n) for n in range(servers))
    all_busy = rate_per_s**servers / factorial(servers) * servers / (servers - rate_per_s)
    return all_busy / (others + all_busy) / (servers - rate_per_s)


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
        (fixed, 1, 0.7, mean_wait_s(0.7, [(1.0, 1.0)])),
        (two_kinds, 1, 0.6, mean_wait_s(0.6, [(0.5, 0.8), (3.0, 0.2)])),
        (exponential, 1, 0.6, mean_wait_s(0.6, [(1.0, 1.0)]) * 2),
        (exponential, 4, 2.8, mean_wait_of_many_s(2.8, 4)),
    ],
    ids=["M/D/1", "M/G/1", "M/M/1", "M/M/4"],
)
def test_ranks_are_servers(service: Service, servers: int, rate_per_s: float, expected_s: float) -> None:
    """Router and engines, and the bound's one queue, let each request wait as long as theory says."""
    computed = list(central_waits_s(arrivals(COMPUTED, rate_per_s, service), servers))
    assert fmean(computed) == pytest.approx(expected_s, rel=WITHIN)

    chunks = [
        (at_s, ceil(service_s * 1000 / BLOCK) * BLOCK) for at_s, service_s in arrivals(SIMULATED, rate_per_s, service)
    ]
    waits = list(central_waits_s([(at_s, tokens / 1000) for at_s, tokens in chunks], servers))
    assert max(waits) > 5 * expected_s
    trace = make_trace([Request(at_s, tokens, 1) for at_s, tokens in chunks])
    assert waits_s(simulate(trace, pairs(servers))) == pytest.approx(waits, abs=1e-6)
    assert waits_s(clairvoyant(pairs(servers), PLAIN, trace)) == pytest.approx(waits, abs=1e-6)


def test_a_bad_policy_is_no_queue() -> None:
    """The comparison can fail: by chance, requests wait behind others while ranks are idle."""
    requests = [Request(at_s, 1000, 1) for at_s, _ in arrivals(SIMULATED, 2.8, fixed)]
    waits = list(central_waits_s([(request.at_s, 1.0) for request in requests], 4))
    run = simulate(make_trace(requests), pairs(4), policy="random", prefill_policy="random", decode_policy="random")
    assert fmean(waits_s(run)) > 2 * fmean(waits)
