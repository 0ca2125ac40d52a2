"""The timing and queue model, against numbers worked out by hand.

Profile of the fixtures: prefill 10 ms + 1 ms a token, chunk 1000; step 10 ms + 1 ms a request + 0.01 ms a KV
token; transfer 0.1 ms a token; 100,000 tokens of KV; 8 requests a batch.
"""

import random
from math import inf
from typing import Any

import pytest
from tests.sim.engine_bench import BLOCK, Bench

from pdrouter.sim.engine_rank import Rank
from pdrouter.sim.full_kv import WhenFull
from pdrouter.sim.job import EventKind, Job, Phase, Role
from pdrouter.sim.profiles import DecodeCurve, DpSplit, PrefillCurve

steps_until_due = Rank.steps_until_due


def test_prefill_takes_the_formula_s_time_and_holds_kv_until_released(new_profile: Any) -> None:
    """a0 + a1*n + a2*n*(p + n/2); afterwards the KV is in flight."""
    bench = Bench(new_profile(prefill=PrefillCurve(a0=10.0, a1=1.0, a2=0.001)), Role.PREFILL)
    job = bench.submit("a", 5, 400)
    load = bench.loads()[0]
    assert (load.running, load.used_tokens, load.waiting_uncached_tokens) == (1, 400, 0)
    bench.run()
    assert bench.times(EventKind.PREFILLED) == {"a": 5 + 10 + 400 + 0.001 * 400 * 200}
    load = bench.loads()[0]
    assert (load.running, load.inflight, load.used_tokens) == (0, 1, 400)
    bench.model.release(job, 1.0)
    assert bench.is_idle


def test_long_prompts_are_prefilled_in_chunks_and_short_ones_share_a_batch(new_profile: Any) -> None:
    """A batch pays a0 once; a chunk is filled up with what waits, first come, first served."""
    bench = Bench(new_profile(), Role.PREFILL)
    bench.submit("long", 0, 1500)
    bench.submit("short", 0, 300)
    bench.submit("last", 0, 300)
    load = bench.loads()[0]
    assert (load.running, load.waiting, load.waiting_uncached_tokens) == (1, 2, 1500 + 600)
    bench.run(1010)
    load = bench.loads()[0]
    assert (load.running, load.waiting, load.waiting_uncached_tokens) == (3, 0, 300)
    bench.run()
    # 1000 of long; 500 of long + 300 of short + 200 of last; 100 of last.
    assert bench.times(EventKind.PREFILLED) == {"long": 2020, "short": 2020, "last": 2130}
    load = bench.loads()[0]
    assert load.prefill_uncached_tokens == 2100
    assert load.prefill_busy_s == pytest.approx(2.13)


def test_decode_steps_take_the_formula_s_time(new_profile: Any) -> None:
    """Reserve, transfer, then one token with the KV and one a step of b0 + b1*1 + b2*(prompt + generated)."""
    bench = Bench(new_profile(), Role.DECODE)
    job = bench.submit("a", 0, 100, 4, interval=1)
    bench.run(0)
    assert bench.log == [("a", EventKind.RESERVED, 0, 0)]
    load = bench.loads()[0]
    assert (load.transfer, load.used_tokens, load.reserved_tokens) == (1, 100, 104)
    bench.model.start_transfer(job, 0.05)
    bench.run()
    steps = [10 + 1 + 0.01 * (100 + generated) for generated in (1, 2, 3)]
    at = 60.0
    assert bench.log[1:3] == [
        ("a", EventKind.TRANSFERRED, at, 0),
        ("a", EventKind.PROGRESS, at, 1),
    ]
    assert bench.log[3:] == [
        ("a", EventKind.PROGRESS, round(at + steps[0], 6), 2),
        ("a", EventKind.PROGRESS, round(at + sum(steps[:2]), 6), 3),
        ("a", EventKind.FINISHED, round(at + sum(steps), 6), 4),
    ]
    assert bench.is_idle


def test_stretches_of_steps_equal_single_steps(new_profile: Any) -> None:
    """Times don't depend on how often the model is looked at or how many steps are taken at once."""
    ends = []
    for interval, look_ms in ((0, None), (1, None), (7, 3.7), (0, 0.9)):
        bench = Bench(new_profile(), Role.REGULAR)
        bench.submit("a", 0, 100, 300, interval=interval)
        bench.submit("b", 1234.5, 250, 100, interval=interval)
        bench.submit("c", 1700, 30, 2, interval=interval)
        at = 1700.0
        while look_ms is not None and at < 3000:
            bench.run(at)
            at += look_ms
        bench.run()
        ends.append(bench.times(EventKind.FINISHED))
    for end in ends[1:]:
        assert end == pytest.approx(ends[0], abs=1e-5)


def test_a_newcomer_waits_for_the_step_under_way(new_profile: Any) -> None:
    """A prefill starts at the next step's edge and holds decode up meanwhile."""
    bench = Bench(new_profile(), Role.REGULAR)
    bench.submit("a", 0, 100, 3, interval=1)  # prefill ends at 110, then steps of 12.01, 12.02
    bench.submit("b", 115, 50, 1)
    bench.run()
    assert bench.times(EventKind.FINISHED) == {"b": 110 + 12.01 + 60, "a": 110 + 12.01 + 60 + 12.02}


def test_loads_between_events_are_those_of_the_moment(new_profile: Any) -> None:
    """Generated tokens count as they come, also in the middle of a stretch."""
    bench = Bench(new_profile(), Role.REGULAR)
    bench.submit("a", 0, 100, 1000)
    bench.run(110 + 12.01 + 12.02 + 1)
    load = bench.loads()[0]
    assert (load.running, load.used_tokens, load.reserved_tokens) == (1, 103, 1100)
    assert load.gen_tokens_per_s == pytest.approx(1 / 0.01202)


def test_a_full_rank_makes_newcomers_wait_until_kv_is_free(new_profile: Any) -> None:
    """Decode reserves prompt and answer; prefill the uncached prompt; in order, with no overtaking."""
    bench = Bench(new_profile(kv_capacity_tokens=1000), Role.DECODE)
    first = bench.submit("a", 0, 600, 100)
    bench.submit("b", 0, 400, 10)
    bench.submit("c", 0, 10, 10)
    bench.run(0)
    load = bench.loads()[0]
    assert (load.transfer, load.prealloc) == (1, 2)
    assert (load.used_tokens, load.total_tokens) == (600, 1010)
    bench.model.release(first, 1.0)
    bench.run(1000)
    assert bench.times(EventKind.RESERVED) == {"a": 0, "b": 1000, "c": 1000}


def test_prefill_waits_for_kv_in_flight(new_profile: Any) -> None:
    """KV that nobody fetches blocks the rank, as on a real engine."""
    bench = Bench(new_profile(kv_capacity_tokens=1000), Role.PREFILL)
    first = bench.submit("a", 0, 800)
    bench.submit("b", 0, 300)
    bench.run(5000)
    assert bench.times(EventKind.PREFILLED) == {"a": 810}
    assert bench.loads()[0].waiting == 1
    bench.model.release(first, 5.0)
    bench.run()
    assert bench.times(EventKind.PREFILLED)["b"] == 5310


def test_slots_are_limited_too(new_profile: Any) -> None:
    """Never more than max_batch requests are reserved or running."""
    bench = Bench(new_profile(max_batch=2), Role.DECODE)
    jobs = [bench.submit(name, 0, 10, 5) for name in "abc"]
    assert bench.loads()[0].prealloc == 1
    bench.model.start_transfer(jobs[0], 0)
    bench.run()
    assert bench.times(EventKind.RESERVED)["c"] == bench.times(EventKind.FINISHED)["a"]


def test_a_prompt_that_can_never_fit_is_told(new_profile: Any) -> None:
    """The caller refuses it."""
    bench = Bench(new_profile(kv_capacity_tokens=1000), Role.REGULAR)
    assert bench.model.fits(Job(0, 990, 10, [], 0))
    assert not bench.model.fits(Job(0, 990, 11, [], 0))


def test_a_cached_prefix_is_not_computed_again_and_is_held_once(new_profile: Any) -> None:
    """Time and KV are those of the rest; one token at least is computed."""
    bench = Bench(new_profile(), Role.PREFILL)
    blocks = list(range(1, 5))
    first = bench.submit("a", 0, 4 * BLOCK + 10, blocks=blocks)
    bench.run()
    again = bench.submit("b", 1000, 4 * BLOCK + 20, blocks=blocks)
    assert bench.loads()[0].used_tokens == 4 * BLOCK + 10 + 20
    exact = bench.submit("c", 2000, 4 * BLOCK, blocks=blocks)
    bench.run()
    assert bench.times(EventKind.PREFILLED) == {"a": 10 + 266, "b": 1030, "c": 2010 + BLOCK}
    assert (again.cached_tokens, exact.cached_tokens) == (4 * BLOCK, 3 * BLOCK)
    assert bench.loads()[0].used_tokens == 4 * BLOCK + 10 + 20
    for job in (first, again, exact):
        bench.model.release(job, 3.0)
    assert bench.is_idle
    assert bench.loads()[0].cached_idle_tokens == 4 * BLOCK
    bench.model.flush()
    assert bench.loads()[0].cached_idle_tokens == 0


def test_chunks_that_were_read_serve_who_joins_the_last_one(new_profile: Any) -> None:
    """A prompt that fills up another's last chunk finds what that has read in chunks before."""
    bench = Bench(new_profile(), Role.PREFILL)
    blocks = list(range(1, 1 + 1500 // BLOCK))
    first = bench.submit("a", 0, 1500, blocks=blocks)
    second = bench.submit("b", 0, 1500, blocks=blocks)
    bench.run()
    assert (first.cached_tokens, second.cached_tokens) == (0, 1000 // BLOCK * BLOCK)


def test_cached_blocks_give_way_oldest_first(new_profile: Any) -> None:
    """LRU: a new prompt evicts what was used longest ago, and only as much as it needs."""
    bench = Bench(new_profile(kv_capacity_tokens=10 * BLOCK), Role.PREFILL)
    for at_ms, name, blocks in ((0, "a", [1, 2, 3, 4]), (1000, "b", [11, 12, 13, 14])):
        job = bench.submit(name, at_ms, 4 * BLOCK + 1, blocks=blocks)
        bench.run(at_ms + 500)
        bench.model.release(job, (at_ms + 500) / 1000)
    bench.submit("c", 2000, 4 * BLOCK, blocks=[21, 22, 23, 24])
    bench.run(3000)
    probe_old = bench.submit("old", 3000, 4 * BLOCK + 1, blocks=[1, 2, 3, 4])
    bench.run()
    assert probe_old.cached_tokens == 2 * BLOCK


def test_ranks_without_dp_attention_are_independent(new_profile: Any) -> None:
    """A busy rank doesn't slow its neighbour."""
    bench = Bench(new_profile(), Role.REGULAR, dp_size=2)
    bench.submit("busy", 0, 1000, 50, rank=0)
    bench.submit("free", 0, 10, 3, rank=1)
    bench.run()
    assert bench.times(EventKind.FINISHED)["free"] == pytest.approx(20 + 10 + 1 + 0.11 + 10 + 1 + 0.12)


def test_ranks_with_dp_attention_step_together(new_profile: Any, dp_split: Any) -> None:
    """A step lasts as long as the slowest rank's local part, and the experts see all ranks."""
    bench = Bench(new_profile(dp=2, dp_split=dp_split), Role.DECODE, dp_size=2)
    jobs = [bench.submit("a", 0, 10, 2, rank=0), bench.submit("b", 0, 10, 3, rank=1)]
    jobs.append(bench.submit("c", 0, 10, 3, rank=1))
    for job in jobs:
        bench.model.start_transfer(job, 0)
    bench.run()
    # First KV arrives at 1 ms and starts a step alone at once; the other two join after it.
    arrived, first = 1, 10 + 1 + 3 + 0.5 * 1
    both = 10 + 2 + 3 + 0.5 * 2
    assert bench.times(EventKind.FINISHED) == {
        "a": arrived + first,
        "b": arrived + first + 2 * both,
        "c": arrived + first + 2 * both,
    }


def test_a_prefilling_rank_holds_up_all_others_of_dp_attention(new_profile: Any, dp_split: Any) -> None:
    """Mixed steps: the slowest local part, and the experts' prefill time for all tokens."""
    bench = Bench(new_profile(dp=2, dp_split=dp_split), Role.REGULAR, dp_size=2)
    bench.submit("a", 0, 10, 2, rank=0)
    bench.submit("b", 0, 100, 1, rank=1)
    bench.run()
    first = 5 + 10 + 2 + 0.1 * 10
    mixed = 5 + 100 + 2 + 0.1 * (100 + 1)
    assert bench.times(EventKind.FINISHED) == {"b": first + mixed, "a": first + mixed}


@pytest.mark.parametrize("stop_ms", [0, 5, 50, 111, 125, 140])
def test_a_release_frees_everything_at_any_moment(new_profile: Any, stop_ms: float) -> None:
    """Whatever phase a job is in, nothing of it stays, and its neighbour goes on."""
    for role in (Role.PREFILL, Role.DECODE, Role.REGULAR):
        bench = Bench(new_profile(), role)
        job = bench.submit("a", 0, 100, 50, interval=3, blocks=[1])
        other = bench.submit("b", 1, 200, 5, blocks=[1, 2, 3])
        bench.model.start_transfer(job, 0.002)
        bench.run(stop_ms)
        bench.model.release(job, stop_ms / 1000)
        bench.model.release(job, stop_ms / 1000)
        bench.model.start_transfer(other, stop_ms / 1000)
        bench.run()
        assert job.phase is Phase.DONE
        if role is Role.PREFILL:
            bench.model.release(other, 10)
        assert bench.is_idle
        assert "b" in bench.times(EventKind.PREFILLED if role is Role.PREFILL else EventKind.FINISHED)


def test_a_prefill_may_wait_for_its_decode_side(new_profile: Any) -> None:
    """With ``waits_for_decode`` it stays in the bootstrap queue, holding nothing, until they have met."""
    bench = Bench(new_profile(), Role.PREFILL, waits_for_decode=True)
    job = bench.submit("a", 0, 100)
    bench.run(1000)
    load = bench.loads()[0]
    assert (load.bootstrap, load.used_tokens, load.waiting_uncached_tokens) == (1, 0, 100)
    bench.model.meet(job, 1.0)
    bench.run()
    assert bench.times(EventKind.PREFILLED) == {"a": 1110}


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("dp_size", [1, 3])
@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("when_full", list(WhenFull))
def test_books_balance_after_random_traffic(
    new_profile: Any, dp_split: Any, role: Role, dp_size: int, is_split: bool, when_full: WhenFull
) -> None:
    """Arrivals, transfers and releases in any order never overfill a rank and leave nothing behind."""
    rng = random.Random(dp_size)
    profile = new_profile(kv_capacity_tokens=2000, max_batch=3, dp_split=dp_split if is_split else None)
    bench = Bench(profile, role, dp_size, when_full=when_full)
    live: list[Job] = []
    at_ms = 0.0
    for number in range(300):
        at_ms += rng.expovariate(1 / 40)
        chain = [rng.randrange(2) * 100 + 1, rng.randrange(3) * 1000 + 2, rng.randrange(4) * 10000 + 3]
        blocks = [hash(tuple(chain[: i + 1])) for i in range(rng.randrange(4))]
        prompt = len(blocks) * BLOCK + rng.randrange(1, BLOCK)
        live.append(
            bench.submit(
                str(number),
                at_ms,
                prompt,
                rng.randrange(1, 40),
                rank=rng.randrange(dp_size),
                interval=rng.randrange(3),
                blocks=blocks,
            )
        )
        for job in live:
            if job.phase is Phase.TRANSFER and rng.random() < 0.5:
                bench.model.start_transfer(job, at_ms / 1000)
        if rng.random() < 0.3:
            bench.model.release(live.pop(rng.randrange(len(live))), at_ms / 1000)
        for load in bench.loads():
            assert 0 <= load.used_tokens <= load.reserved_tokens
            assert load.reserved_tokens + load.cached_idle_tokens <= load.capacity_tokens
            assert load.waiting_uncached_tokens >= 0
    for job in live:
        bench.model.release(job, at_ms / 1000)
    assert bench.is_idle
    assert bench.model.next_event_s == -inf or bench.model.next_event_s > at_ms / 1000
    bench.run()
    assert bench.model.next_event_s == inf


@pytest.mark.parametrize("dp_size", [1, 4])
@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_jumps_over_steps_change_nothing(
    new_profile: Any, dp_split: Any, dp_size: int, is_split: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of all lengths on ranks of all loads, aborts too: every event is where single steps put it."""
    steep = DpSplit(dp_split.prefill_local, dp_split.prefill_moe, DecodeCurve(5.0, 1.0, 0.02), dp_split.decode_moe)
    profile = new_profile(dp_split=steep if is_split else None)

    def events() -> list[tuple[str, EventKind, float, int]]:
        chance = random.Random(seed)
        bench = Bench(profile, Role.DECODE, dp_size)
        at_ms = 0.0
        live: list[Job] = []
        moved: set[Job] = set()
        for number in range(200):
            at_ms += chance.expovariate(1 / 400)
            if number < 80:
                rank = min(chance.randrange(dp_size) for _ in range(2))
                prompt, output = chance.randrange(1, 3000), chance.randrange(1, 200)
                live.append(bench.submit(str(number), at_ms, prompt, output, rank=rank))
            bench.run(at_ms)
            for job in live:
                if job.phase is Phase.TRANSFER and job not in moved:
                    moved.add(job)
                    bench.model.start_transfer(job, at_ms / 1000)
            if chance.random() < 0.1:
                bench.model.release(live.pop(chance.randrange(len(live))), at_ms / 1000)
        bench.run()
        return sorted(bench.log)

    jumped = events()
    monkeypatch.setattr(Rank, "steps_until_due", lambda self: min(1, steps_until_due(self)))
    single = events()
    assert [event[:2] + event[3:] for event in jumped] == [event[:2] + event[3:] for event in single]
    assert [event[2] for event in jumped] == pytest.approx([event[2] for event in single], abs=1e-3)
    assert len(jumped) > 100


def test_the_slowest_rank_of_a_stretch_may_be_overtaken(new_profile: Any, dp_split: Any) -> None:
    """One long prompt is slower at first, six short ones grow faster: each step is the slower rank's of the moment."""
    local = DecodeCurve(5.0, 1.0, 0.02)
    split = DpSplit(dp_split.prefill_local, dp_split.prefill_moe, local, dp_split.decode_moe)
    bench = Bench(new_profile(dp_split=split, kv_transfer_us_per_token=0.0), Role.DECODE, 2)
    jobs = [bench.submit("long", 0, 3000, 400, rank=0)]
    jobs += [bench.submit(str(number), 0, 380, 400, rank=1) for number in range(6)]
    bench.run(0)
    for job in jobs:
        bench.model.start_transfer(job, 0.0)
    bench.run()
    step_alone = local.step_ms(1, 3001) + split.decode_moe.step_ms(1)  # the first to arrive begins alone
    slower = [max(local.step_ms(1, 3001 + i), local.step_ms(6, 6 * (380 + i))) for i in range(1, 399)]
    last_alone = local.step_ms(6, 6 * (380 + 399)) + split.decode_moe.step_ms(6)
    steps = step_alone + sum(slower) + 398 * split.decode_moe.step_ms(7)
    assert bench.times(EventKind.FINISHED)["long"] == pytest.approx(steps, abs=1e-3)
    assert bench.times(EventKind.FINISHED)["5"] == pytest.approx(steps + last_alone, abs=1e-3)
