"""Runs in virtual time: what happens when, and what the router is told of it."""

import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from tests.sim.virtual.builders import BLOCK, make_profile, make_router, make_trace, pairs, poisson, simulate

from pdrouter.core import events
from pdrouter.core.admission import AdmissionOptions
from pdrouter.core.entrance import EntranceOptions
from pdrouter.core.gate import GateOptions
from pdrouter.core.router import RouterOptions
from pdrouter.sim.job import Role
from pdrouter.sim.profiles import DecodeCurve, DecodeExperts, DpSplit, PrefillCurve, PrefillExperts
from pdrouter.sim.simulator import Simulator, SimulatorSettings
from pdrouter.sim.virtual.bounds import alone, answer_s, prompt_s
from pdrouter.sim.virtual.fleet_spec import EngineSpec
from pdrouter.sim.virtual.recording import Observed, RecordedRouter, Settled
from pdrouter.sim.virtual.run import Run
from pdrouter.sim.virtual.trace import Request, Trace

REAL = make_profile(
    prefill=PrefillCurve(a0=8.0, a1=0.04, a2=1e-6),
    decode=DecodeCurve(b0=9.0, b1=0.03, b2=2e-5),
    kv_capacity_tokens=200_000,
    kv_transfer_us_per_token=1.3,
    max_batch=64,
    prefill_chunk_tokens=8192,
)
SPLIT = DpSplit(
    prefill_local=PrefillCurve(a0=5.0, a1=0.03, a2=1e-6),
    prefill_moe=PrefillExperts(g0=2.0, g1=0.01),
    decode_local=DecodeCurve(b0=5.0, b1=0.01, b2=3e-5),
    decode_moe=DecodeExperts(g0=4.0, g1=0.1, g2=0.01, knee=16),
)
PROFILES = {"real": REAL, "split": make_profile(**{f: getattr(REAL, f) for f in ("kv_capacity_tokens", "max_batch")} | {
    "kv_transfer_us_per_token": 1.3, "prefill_chunk_tokens": 1024, "dp_split": SPLIT,
    "prefill": REAL.prefill, "decode": REAL.decode})}  # fmt: skip


def chats(count: int, rate_per_s: float, seed: int = 1) -> Trace:
    """Return requests of which many share long prefixes."""
    chance = random.Random(seed)
    at_s, requests = 0.0, []
    for number in range(count):
        at_s += chance.expovariate(rate_per_s)
        tokens = round(chance.lognormvariate(7.5, 1.0)) + 1
        family = chance.randrange(20)
        shared = chance.randrange(tokens // BLOCK + 1)
        blocks = [family * 1000 + i if i < shared else 10**6 * (number + 1) + i for i in range(tokens // BLOCK)]
        requests.append(Request(at_s, tokens, 1 + round(chance.expovariate(1 / 150)), tuple(blocks)))
    return make_trace(requests)


def recorded(
    trace: Trace, fleet: list[EngineSpec], world: SimulatorSettings | None = None
) -> tuple[RecordedRouter, Run]:
    """Return a run and the calls that its router got."""

    class Recorder(RecordedRouter):
        def __init__(self, options: RouterOptions) -> None:
            super().__init__(options, 10**6)

    router = make_router(trace, PROFILES, Recorder)
    assert isinstance(router, RecordedRouter)
    return router, Simulator(router, fleet, PROFILES, trace, world or SimulatorSettings()).simulate()


@pytest.mark.invariant("I4")
@pytest.mark.parametrize("policy", ["least_work", "power_of_two", "cache_aware"])
@pytest.mark.parametrize("profile", ["real", "split"])
def test_the_same_seed_gives_the_same_run(policy: str, profile: str) -> None:
    """All figures of all requests are the same; another seed of the router's chance or of reports differs."""
    trace, fleet = chats(300, 20.0), pairs(2, 2, ranks=2, profile=profile)

    def run(seed: int) -> Run:
        names: dict[str, Any] = {"policy": policy, "prefill_policy": policy, "decode_policy": policy}
        return simulate(trace, fleet, PROFILES, SimulatorSettings(seed=seed), chance=random.Random(seed), **names)

    first = run(1)
    assert len(first.answers) == 300
    assert run(1).answers == first.answers
    if policy == "power_of_two":
        assert run(2).answers != first.answers


@pytest.mark.parametrize("profile", ["real", "split"])
def test_a_request_alone_takes_the_formulas_time(profile: str) -> None:
    """Chunks of the prompt, the transfer, a step for each token behind the first; a cached prefix isn't read again."""
    blocks = tuple(range(90))
    trace = make_trace([Request(1.0, 9050, 40, blocks), Request(100.0, 9070, 1, blocks)])
    run = simulate(trace, pairs(1, ranks=2, profile=profile), PROFILES)
    first, second = run.answers
    made = PROFILES[profile]
    assert first.ttft_s == pytest.approx(prompt_s(made, 2, 9050, 0) + made.transfer_ms(9050) / 1000)
    assert first.end_to_end_s == pytest.approx(first.ttft_s + answer_s(made, 2, 9050, 40))
    assert (first.cached_tokens, second.cached_tokens) == (0, 9000)
    assert second.ttft_s == pytest.approx(prompt_s(made, 2, 70, 9000) + made.transfer_ms(9070) / 1000)
    bound = alone(pairs(1, ranks=2, profile=profile), PROFILES, trace)
    assert [a[2:6] for a in run.answers] == [pytest.approx(a[2:6]) for a in bound.answers]


def test_the_router_is_told_what_live_traffic_would_tell() -> None:
    """In order of time; for each request its prefill's count, its first token, all its tokens, and its one end."""
    trace = chats(200, 10.0)
    router, run = recorded(trace, pairs(2, 2, ranks=2, profile="real"), SimulatorSettings(growth_steps=16))
    moments = [call.at_s for call in router.calls]
    assert moments == sorted(moments)
    ends = Counter(call.number for call in router.calls if isinstance(call, Settled))
    assert len(ends) == 200
    assert set(ends.values()) == {1}
    told: Counter[int] = Counter()
    firsts: dict[int, float] = {}
    cached: dict[int, int] = {}
    growths = 0
    for call in router.calls:
        if isinstance(call, Observed):
            if isinstance(call.event, events.TokensGenerated):
                told[call.number] += call.event.tokens
                growths += 1
            elif isinstance(call.event, events.FirstTokenSeen):
                firsts[call.number] = call.at_s
            elif isinstance(call.event, events.PrefillUsageSeen):
                cached[call.number] = call.event.cached_tokens
    for answer in run.answers:
        number = answer.number + 1
        assert told[number] == answer.output_tokens
        assert answer.at_s < firsts[number] <= answer.at_s + answer.ttft_s
        assert cached[number] == answer.cached_tokens
    assert growths > sum(answer.output_tokens for answer in run.answers) / 32


@pytest.mark.parametrize("delay_s", [0.0, 3.0])
def test_reports_come_in_their_interval_and_with_their_age(delay_s: float) -> None:
    """Each endpoint tells what it held when the report was taken, every so often, and late if asked to."""
    trace = chats(200, 10.0)
    world = SimulatorSettings(report_interval_s=1.5, report_delay_s=delay_s)
    router, _ = recorded(trace, pairs(2, 1, ranks=2, profile="real"), world)
    by_endpoint: dict[str, list[float]] = {}
    held = []
    for call in router.calls:
        if isinstance(call, Observed) and isinstance(call.event, events.LoadReported):
            report = call.event
            by_endpoint.setdefault(report.address, []).append(call.at_s)
            assert call.at_s - report.t_report_s == pytest.approx(delay_s)
            assert [rank.rank for rank in report.ranks] == [0, 1]
            held += [rank.tokens for rank in report.ranks if rank.tokens]
    assert len(by_endpoint) == 3
    assert held
    for moments in by_endpoint.values():
        gaps = [later - earlier for earlier, later in pairwise(moments)]
        assert gaps == pytest.approx([1.5] * len(gaps))
    assert not router.load.rejected_reports


def test_what_doesnt_fit_is_rejected() -> None:
    """A prompt that no engine can hold is refused, leaves nothing in the ledger, and the others are served."""
    trace = make_trace([Request(1.0, 300_000, 10), Request(2.0, 1000, 10)])
    run = simulate(trace, pairs(1, profile="real"), PROFILES)
    assert (run.rejected.total(), [answer.number for answer in run.answers]) == (1, [1])


def test_a_model_that_nobody_serves_is_rejected() -> None:
    """The router's own rejection counts."""
    fleet = [*pairs(1, profile="real", model="a"), *pairs(1, profile="real", model="b")]
    trace = make_trace([Request(1.0, 100, 10, (), "a"), Request(2.0, 100, 10, (), "c")])
    run = simulate(trace, fleet, PROFILES)
    assert (run.rejected.total(), [answer.number for answer in run.answers]) == (1, [0])


def test_regular_engines_do_both() -> None:
    """A fleet of workers reads and writes on one rank, without a transfer."""
    trace = chats(100, 5.0)
    run = simulate(trace, [EngineSpec(role=Role.REGULAR, profile="real", endpoints=2, ranks=2)], PROFILES)
    assert len(run.answers) == 100
    assert all(answer.prefill_place == answer.decode_place for answer in run.answers)
    assert {answer.decode_place for answer in run.answers} == {0, 1, 2, 3}


def test_slow_engines_get_less_once_they_are_known() -> None:
    """The router isn't told of a straggler's speed; least_work learns it from how long prompts take there."""
    fleet = [
        EngineSpec(role=Role.PREFILL, profile="real", endpoints=2),
        EngineSpec(role=Role.PREFILL, profile="real", speed=0.25),
        EngineSpec(role=Role.DECODE, profile="real"),
    ]
    trace = poisson(600, 4.0, lambda chance: 5000 + chance.randrange(1000), seed=1)
    late = [answer.prefill_place for answer in simulate(trace, fleet, PROFILES).answers if answer.number > 300]
    share = late.count(2) / len(late)
    assert share < 0.2


def test_ranks_that_step_together_wait_for_the_slowest() -> None:
    """With DP attention, a short prompt beside a long one takes as long as the long one's chunk."""
    trace = make_trace([Request(1.0, 1024, 1), Request(1.001, 10, 1)])
    together = simulate(trace, pairs(1, ranks=2, profile="split"), PROFILES)
    apart = simulate(trace, pairs(1, ranks=2, profile="real"), PROFILES)
    long_s = together.answers[0].ttft_s
    assert together.answers[1].ttft_s > long_s
    assert max(answer.ttft_s for answer in apart.answers) > 2 * min(answer.ttft_s for answer in apart.answers)


def test_answers_that_outgrow_the_kv_are_counted_and_come() -> None:
    """Decode ranks too small for all that they are given preempt; every request is answered, none of it twice."""
    tight = {
        "real": make_profile(**{f: getattr(REAL, f) for f in REAL.__struct_fields__} | {"kv_capacity_tokens": 9000})
    }
    trace = make_trace([Request(1.0 + number, 500, 4000) for number in range(12)])
    run = simulate(trace, pairs(2, 2, profile="real"), tight)
    assert len(run.answers) == 12
    assert run.preemptions
    assert simulate(trace, pairs(2, 2, profile="real"), PROFILES).preemptions == 0


def entrance(**changes: float) -> EntranceOptions:
    """Return a queue before ranks that have enough to do with one prompt; it lets nobody wait for long."""
    admission: dict[str, Any] = {"max_waiting": 100, "max_waiting_bytes": 10**9, "max_wait_s": 1000.0}
    admission |= {"aging_rate": 0.0, "rate_per_s": None, "rate_burst": 1.0} | changes
    return EntranceOptions(
        AdmissionOptions(**admission), GateOptions(max_running=None, max_queue_s=0.0, max_kv_share=None)
    )


def test_requests_wait_in_the_router_as_they_do_live() -> None:
    """While the rank is busy they wait, and the shortest goes on first; without a queue they go in turn."""
    lengths = [2000, 3000, 500, 1000]
    trace = make_trace([Request(1.0 + 0.01 * number, tokens, 1) for number, tokens in enumerate(lengths)])
    with_queue = simulate(trace, pairs(1), entrance=entrance())
    assert [answer.number for answer in with_queue.answers] == [0, 2, 3, 1]
    assert [answer.number for answer in simulate(trace, pairs(1)).answers] == [0, 1, 2, 3]
    last = with_queue.answers[-1]
    assert last.at_s + last.ttft_s == pytest.approx(1.0 + sum(lengths) / 1000, abs=0.2)


@pytest.mark.parametrize(
    ("changes", "code"), [({"max_waiting": 2}, "queue_full"), ({"max_wait_s": 1.5}, "queue_timeout")]
)
def test_who_cant_wait_is_rejected(changes: dict[str, float], code: str) -> None:
    """Because the queue is full, or because it took too long; everybody has one end."""
    trace = make_trace([Request(1.0 + 0.01 * number, 2000, 1) for number in range(6)])
    run = simulate(trace, pairs(1), entrance=entrance(**changes))
    assert set(run.rejected) == {code}
    assert len(run.answers) + run.rejected.total() == 6
    assert len(run.answers) >= 1
