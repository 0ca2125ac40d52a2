"""Answers that outgrow a rank's KV: who is preempted, what becomes of it, and that nothing is lost.

Profile of the fixtures: prefill 10 ms + 1 ms a token, chunk 1000; step 10 ms + 1 ms a request + 0.01 ms a KV
token; transfer 0.1 ms a token.
"""

import random
from collections import Counter
from math import inf
from typing import Any

import pytest
from tests.sim.engine_bench import Bench

from pdrouter.sim.engine_rank import Rank
from pdrouter.sim.full_kv import AnswerShare, WhenFull, rule_of
from pdrouter.sim.job import EventKind, Job, Phase, Role

steps_until_due = Rank.steps_until_due
PREEMPTING = [WhenFull.RECOMPUTE, WhenFull.RETRACT]


class Traffic:
    """Jobs on ranks that are too small for all of them; KV moves when it may, and some callers leave."""

    def __init__(self, bench: Bench, role: Role, seed: int, *, leaving: float = 0.0) -> None:
        self.bench = bench
        self.chance = random.Random(seed)
        self.live: dict[Job, None] = {}
        self.jobs: dict[str, Job] = {}
        self.role = role
        self.leaving = leaving
        self._moved: set[Job] = set()

    def run(self, count: int) -> None:
        """Let so many jobs come, and time pass until nothing happens any more."""
        at_ms = 0.0
        for number in range(count):
            at_ms += self.chance.expovariate(1 / 150)
            prompt = self.chance.randrange(1, 600)
            output = self.chance.randrange(1, self.chance.choice([50, 2000]))
            blocks = [self.chance.randrange(2) * 1000 + i for i in range(prompt // 64)]
            rank = self.chance.randrange(len(self.bench.loads()))
            interval = self.chance.choice([0, 1, 7])
            job = self.bench.submit(str(number), at_ms, prompt, output, rank=rank, interval=interval, blocks=blocks)
            self.jobs[str(number)] = job
            self.go_on(at_ms)
            if self.chance.random() < self.leaving:
                left = self.chance.choice(list(self.jobs.values()))
                self.bench.model.release(left, at_ms / 1000)
        while (next_s := self.bench.model.next_event_s) < inf:
            self.go_on(max(next_s * 1000, at_ms))
            self.check()

    def go_on(self, at_ms: float) -> None:
        """Let time pass; start the transfers that may start."""
        self.bench.run(at_ms)
        for job in self.jobs.values():
            if job.phase is Phase.TRANSFER and job not in self._moved:
                self._moved.add(job)
                self.bench.model.start_transfer(job, at_ms / 1000)

    def check(self) -> None:
        """No rank holds more than it has."""
        for load in self.bench.loads():
            assert 0 <= load.used_tokens <= load.reserved_tokens
            assert load.reserved_tokens + load.cached_idle_tokens <= load.capacity_tokens


def run_until_preempted(bench: Bench) -> None:
    """Let time pass, 10 ms at once, until an answer has been preempted."""
    for _ in range(10_000):
        if bench.model.preemptions:
            return
        bench.run(bench.now_s * 1000 + 10)
    raise AssertionError("nobody was preempted")


@pytest.mark.parametrize("when_full", PREEMPTING)
@pytest.mark.parametrize("role", [Role.DECODE, Role.REGULAR])
@pytest.mark.parametrize("dp_size", [1, 3])
@pytest.mark.parametrize("is_split", [False, True])
def test_all_is_answered_however_little_kv_there_is(
    new_profile: Any, dp_split: Any, when_full: WhenFull, role: Role, dp_size: int, is_split: bool
) -> None:
    """Every answer comes whole and once, its tokens in order; no rank is ever overfull; nothing stays."""
    profile = new_profile(kv_capacity_tokens=4000, dp_split=dp_split if is_split else None)
    bench = Bench(profile, role, dp_size, when_full=when_full)
    traffic = Traffic(bench, role, dp_size)
    traffic.run(40 * dp_size)
    told: dict[str, list[int]] = {name: [] for name in traffic.jobs}
    for name, kind, _, tokens in bench.log:
        if kind in {EventKind.PROGRESS, EventKind.FINISHED}:
            told[name].append(tokens)
    for name, job in traffic.jobs.items():
        assert told[name][-1] == job.output_tokens
        assert told[name] == sorted(set(told[name]))
        if job.interval == 1:
            assert told[name] == list(range(1, job.output_tokens + 1))
    ends = Counter(name for name, kind, _, _ in bench.log if kind is EventKind.FINISHED)
    assert ends == Counter(list(traffic.jobs))
    assert bench.model.preemptions == sum(job.preemptions for job in traffic.jobs.values()) > 2
    assert sum(load.preemptions for load in bench.loads()) == bench.model.preemptions
    assert sum(load.generated_tokens for load in bench.loads()) == sum(j.output_tokens for j in traffic.jobs.values())
    assert bench.is_idle


@pytest.mark.parametrize("when_full", PREEMPTING)
@pytest.mark.parametrize("role", [Role.DECODE, Role.REGULAR])
@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_jumps_over_steps_change_nothing(
    new_profile: Any,
    dp_split: Any,
    when_full: WhenFull,
    role: Role,
    is_split: bool,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where answers are preempted, resumed and left, every event is where single steps put it."""

    def events() -> tuple[list[tuple[str, EventKind, float, int]], int]:
        profile = new_profile(kv_capacity_tokens=4000, dp_split=dp_split if is_split else None)
        bench = Bench(profile, role, 2, when_full=when_full)
        Traffic(bench, role, seed, leaving=0.1).run(80)
        assert bench.is_idle
        return sorted(bench.log), bench.model.preemptions

    jumped, preemptions = events()
    monkeypatch.setattr(Rank, "steps_until_due", lambda self: min(1, steps_until_due(self)))
    single, same = events()
    assert preemptions == same > 2
    assert [event[:2] + event[3:] for event in jumped] == [event[:2] + event[3:] for event in single]
    assert [event[2] for event in jumped] == pytest.approx([event[2] for event in single], abs=1e-3)


def test_the_last_comer_is_read_anew(new_profile: Any) -> None:
    """vLLM: who was admitted last goes, whatever it has; prompt and answer are read again when there is room."""
    bench = Bench(new_profile(kv_capacity_tokens=1000), Role.REGULAR, when_full=WhenFull.RECOMPUTE)
    bench.submit("old", 0, 400, 80, interval=1)
    bench.submit("new", 0, 500, 60, interval=1)
    # Both are read by 920 ms, one by one, and have a token each; 98 are left for 49 steps.
    steps_ms = sum(12 + 0.01 * (902 + 2 * step) for step in range(49))
    bench.run(920 + steps_ms + 1)
    load = bench.loads()[0]
    assert (load.running, load.waiting, load.preemptions) == (1, 1, 1)
    assert load.waiting_uncached_tokens == 550
    alone_ms = sum(11 + 0.01 * (450 + step) for step in range(30))
    bench.run()
    ends = bench.times(EventKind.FINISHED)
    assert ends["old"] == pytest.approx(920 + steps_ms + alone_ms)
    # Its 550 tokens are read, which tells one token, and 9 more come.
    again_ms = 10 + 550 + sum(11 + 0.01 * (551 + step) for step in range(9))
    assert ends["new"] == pytest.approx(ends["old"] + again_ms)


def test_who_has_answered_least_waits_in_the_host_s_memory(new_profile: Any) -> None:
    """SGLang's decode side: the shortest answer goes; its KV comes back at the pace of a transfer, no token twice."""
    bench = Bench(new_profile(kv_capacity_tokens=4000), Role.DECODE, when_full=WhenFull.RETRACT)
    profile = bench.model.settings.profile
    first = bench.submit("first", 0, 100, 3500)
    bench.run(0)
    bench.model.start_transfer(first, 0.0)
    second = bench.submit("second", 3000, 300, 2000)
    bench.run(3000)
    bench.model.start_transfer(second, 3.0)
    run_until_preempted(bench)
    load = bench.loads()[0]
    assert (load.running, load.retracted, load.preemptions, second.preemptions) == (1, 1, 1, 1)
    held = second.read_tokens
    bench.run()
    ends = bench.times(EventKind.FINISHED)
    left = 300 + 2000 - held - 1
    back_ms = profile.transfer_ms(held) + sum(11 + 0.01 * (held + 1 + step) for step in range(left))
    assert ends["second"] == pytest.approx(ends["first"] + back_ms)
    assert [name for name, kind, _, _ in bench.log if kind is EventKind.TRANSFERRED] == ["first", "second"]
    assert [name for name, kind, _, _ in bench.log if kind is EventKind.RESERVED] == ["first", "second"]


def test_of_equal_answers_the_longest_prompt_goes(new_profile: Any) -> None:
    """SGLang's order among answers that are equally long."""
    profile = new_profile(kv_capacity_tokens=2800, kv_transfer_us_per_token=0.0)
    bench = Bench(profile, Role.DECODE, when_full=WhenFull.RETRACT)
    jobs = [bench.submit(str(prompt), 0, prompt, 1000) for prompt in (200, 350, 210)]
    bench.run(0)
    for job in jobs:
        bench.model.start_transfer(job, 0.0)
    bench.run()
    assert [job.preemptions for job in jobs] == [0, 1, 0]


def test_room_is_left_for_answers_under_way(new_profile: Any) -> None:
    """SGLang's decode side: 512 tokens for each, or the rest of a newcomer's answer; vLLM: one token."""
    admitted = {}
    for when_full in WhenFull:
        bench = Bench(new_profile(kv_capacity_tokens=5000), Role.DECODE, when_full=when_full)
        for number in range(8):
            bench.submit(str(number), 0, 500, 1500)
        bench.run(0)
        admitted[when_full] = bench.loads()[0].transfer
    assert admitted == {WhenFull.KEEP: 2, WhenFull.RECOMPUTE: 8, WhenFull.RETRACT: 3}


def test_what_was_given_meanwhile_isnt_grown_into(new_profile: Any) -> None:
    """An answer under way, in many steps at once, ends where the KV does that a newcomer has got since it began."""
    bench = Bench(new_profile(kv_capacity_tokens=1000), Role.DECODE, when_full=WhenFull.RECOMPUTE)
    old = bench.submit("old", 0, 100, 800)
    bench.run(0)
    bench.model.start_transfer(old, 0.0)
    new = bench.submit("new", 2000, 650, 10)
    bench.run(2000)
    assert new.phase is Phase.TRANSFER
    free = 1000 - bench.loads()[0].reserved_tokens
    tokens = bench.model.generated(old, 2.0)
    assert 0 < free < 100
    bench.run(10_000)
    load = bench.loads()[0]
    assert (old.preemptions, load.running, load.waiting, load.reserved_tokens) == (1, 0, 1, 651)
    assert old.read_tokens == 100 + tokens + free
    bench.model.release(new, 10.0)
    bench.run()
    assert bench.times(EventKind.FINISHED).keys() == {"old"}
    assert bench.is_idle


def test_a_preempted_job_can_be_released_while_it_waits(new_profile: Any) -> None:
    """Nothing of it stays, wherever it waits, and its neighbour goes on."""
    for when_full in PREEMPTING:
        for role in (Role.DECODE, Role.REGULAR):
            bench = Bench(new_profile(kv_capacity_tokens=4000), role, when_full=when_full)
            for at_ms, output in ((0, 3000), (15_000, 2000)):
                waiting = bench.submit(str(at_ms), at_ms, 300, output)
                bench.run(at_ms)
                bench.model.start_transfer(waiting, at_ms / 1000)
            run_until_preempted(bench)
            assert waiting.phase in {Phase.PREALLOC, Phase.WAITING}
            bench.model.release(waiting, bench.now_s)
            bench.run()
            assert len(bench.times(EventKind.FINISHED)) == 1
            assert bench.is_idle


def test_the_share_of_answers_falls_and_is_set_anew() -> None:
    """0.7 at first, a seventh of it after 600 steps; after a retraction what answers have shown, 20 steps ahead."""
    share = AnswerShare()
    assert share.at(300) == pytest.approx((0.7 + 0.098) / 2)
    assert share.at(5000) == 0.098
    share.learn(5000, 4, 420, 999)
    assert share.at(5000) == 0.5
    assert share.at(5100) < 0.5
    share.learn(6000, 100, 900, 1000)
    assert share.at(6000) == 1.0
    share.begin(7000)
    assert share.at(7000) == 0.7


def test_engines_have_their_rule() -> None:
    """By the first word of a profile's engine, which the emulators' names are too."""
    rules = {"vllm 0.24.0": "recompute", "sglang": "retract", "trtllm": "keep", "openai": "keep"}
    assert {engine: str(rule_of(engine)) for engine in rules} == rules
