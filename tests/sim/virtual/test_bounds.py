"""The bounds: what a request takes alone, and one queue with perfect knowledge."""

import random
from typing import Any

import pytest
from tests.sim.virtual.builders import PLAIN, make_profile, make_trace, pairs, poisson, simulate

from pdrouter.sim.job import Role
from pdrouter.sim.profiles import DecodeCurve
from pdrouter.sim.virtual.bounds import alone, clairvoyant
from pdrouter.sim.virtual.fleet_spec import EngineSpec
from pdrouter.sim.virtual.trace import Request


def test_alone_nobody_waits_and_everything_is_warm() -> None:
    """Each prompt takes its uncached tokens' time on the fastest rank, whoever read its beginning."""
    trace = make_trace([Request(1.0, 1000, 1, tuple(range(10))), Request(1.0, 1500, 1, (*range(10), *range(20, 25)))])
    run = alone([*pairs(1), *pairs(1, speed=2.0)], PLAIN, trace)
    assert [answer.cached_tokens for answer in run.answers] == [0, 1000]
    assert [answer.ttft_s for answer in run.answers] == pytest.approx([0.5, 0.25])


def test_alone_on_regular_engines() -> None:
    """There is no transfer."""
    profiles = {"far": make_profile(kv_transfer_us_per_token=1000.0)}
    trace = make_trace([Request(1.0, 1000, 1)])
    regular = alone([EngineSpec(role=Role.REGULAR, profile="far")], profiles, trace)
    apart = alone(pairs(1, profile="far"), profiles, trace)
    assert (regular.answers[0].ttft_s, apart.answers[0].ttft_s) == pytest.approx((1.0, 2.0))


def test_the_clairvoyant_s_ranks_share_a_cache_of_all_their_memory() -> None:
    """What any rank has read needn't be read again, until newer blocks take its place."""
    first = tuple(range(10))
    filler = [Request(2.0 + i, 1000, 1, tuple(range(100 * i + 100, 100 * i + 110))) for i in range(3)]
    trace = make_trace(
        [Request(0.0, 1000, 1, first), Request(1.5, 1001, 1, first), *filler, Request(9.0, 1001, 1, first)]
    )
    for capacity, cached in ((2000, 1000), (1500, 0)):
        run = clairvoyant(pairs(2, kv_capacity_tokens=capacity), PLAIN, trace)
        by_number = {answer.number: answer.cached_tokens for answer in run.answers}
        assert by_number[1] == 1000
        assert by_number[5] == cached


def test_the_clairvoyant_balances_answers() -> None:
    """Each goes to the rank whose step it leaves the shortest; nobody waits for KV while another rank has some."""
    profiles = {"slow": make_profile(decode=DecodeCurve(b0=100.0, b1=10.0, b2=0.0))}
    trace = make_trace([Request(0.001 * i, 100, 400) for i in range(40)])
    run = clairvoyant(pairs(8, 4, profile="slow", kv_capacity_tokens=6000), profiles, trace)
    places = [answer.decode_place for answer in run.answers]
    assert [places.count(place) for place in sorted(set(places))] == [10] * 4


def test_what_fits_nowhere_is_rejected() -> None:
    """As by an engine."""
    trace = make_trace([Request(0.0, 9000, 400), Request(0.0, 100, 10)])
    run = clairvoyant(pairs(1, kv_capacity_tokens=9100), PLAIN, trace)
    assert (run.rejected.total(), len(run.answers)) == (1, 1)


def test_regular_engines_have_no_clairvoyant() -> None:
    """The bound is for pairs."""
    with pytest.raises(ValueError, match="prefill and decode"):
        clairvoyant([EngineSpec(role=Role.REGULAR, profile="plain")], PLAIN, make_trace([Request(0.0, 1, 1)]))


@pytest.mark.parametrize("policy", ["least_work", "round_robin"])
def test_no_router_beats_the_bounds(policy: str) -> None:
    """Alone is fastest for every single request; the mean of one queue is at most a router's."""
    trace = poisson(500, 3.0, lambda chance: 100 * chance.randrange(1, 20), seed=1, output=30)
    names: dict[str, Any] = {"policy": policy, "prefill_policy": policy, "decode_policy": policy}
    run = simulate(trace, pairs(4), chance=random.Random(1), **names)
    least = {a.number: a.end_to_end_s for a in alone(pairs(4), PLAIN, trace).answers}
    assert all(answer.end_to_end_s >= least[answer.number] - 1e-9 for answer in run.answers)
    queue = clairvoyant(pairs(4), PLAIN, trace)
    assert sum(a.ttft_s for a in queue.answers) <= sum(a.ttft_s for a in run.answers) + 1e-6
