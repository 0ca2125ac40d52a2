"""Learned speeds: they follow a change, wild observations don't move them, classes don't flap."""

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from math import inf, log, nan

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrouter.core.cost import NEUTRAL, prefill_s, step_s
from pdrouter.core.speed import CLASS_STEP, MAX_FACTOR, PRIOR, WINDOW, Peers, Speed, class_factor

WILD = (100.0, 0.01, nan, -1.0, 0.0, inf)
factors = st.floats(1 / 20, 20)
seeds = st.integers(0, 2**32)


class Side:
    """One of the two factors of a speed, fed with ratios of observed to predicted time."""

    def __init__(self, name: str) -> None:
        self.speed = Speed(NEUTRAL)
        self.is_prefill = name == "prefill"

    def see(self, ratio: float) -> None:
        """Let an observation come that is ``ratio`` times the predicted one."""
        if self.is_prefill:
            self.speed.saw_prefill(3000, 1000, ratio * prefill_s(NEUTRAL, 3000, 1000))
        else:
            self.speed.saw_step(20, 40_000, ratio * step_s(NEUTRAL, 20, 40_000))

    @property
    def factor(self) -> float:
        """What was learned."""
        return self.speed.prefill_factor if self.is_prefill else self.speed.decode_factor

    @property
    def number(self) -> int:
        """Its class."""
        return self.speed.prefill_class if self.is_prefill else self.speed.decode_class

    @property
    def other(self) -> tuple[float, int]:
        """The factor that nobody fed."""
        speed = self.speed
        if self.is_prefill:
            return speed.decode_factor, speed.decode_class
        return speed.prefill_factor, speed.prefill_class


both = pytest.mark.parametrize("name", ["prefill", "decode"])


def is_near(factor: float, true: float) -> bool:
    """Whether a factor is within 10 % of the true one, either way."""
    return abs(log(factor / true)) < log(1.1)


def noisy(true: float, chance: random.Random, wild: Callable[[int], float | None]) -> Iterator[float]:
    """Yield ratios that scatter by 5 % around the true one; ``wild`` may replace one."""
    count = 0
    while True:
        odd = wild(count)
        yield true * chance.lognormvariate(0, 0.05) if odd is None else true * odd
        count += 1


def no_wild(_count: int) -> None:
    """Nothing wild."""


# Following.


def test_at_the_start_the_profile_is_right() -> None:
    """Both factors are 1, in class 0."""
    speed = Speed(NEUTRAL)
    assert (speed.prefill_factor, speed.decode_factor) == (1.0, 1.0)
    assert (speed.prefill_class, speed.decode_class) == (0, 0)


@both
@given(true=factors, seed=seeds)
def test_a_speed_is_learned(name: str, true: float, seed: int) -> None:
    """Some 30 observations are enough, and the other side is left alone."""
    side = Side(name)
    ratios = noisy(true, random.Random(seed), no_wild)
    for _ in range(30):
        side.see(next(ratios))
    assert is_near(side.factor, true)
    assert side.other == (1.0, 0)


@both
@given(before=st.floats(0.2, 5), change=st.sampled_from([2.0, 0.5]), seed=seeds)
def test_a_true_change_is_followed(name: str, before: float, change: float, seed: int) -> None:
    """Twice or half as fast shows after 30 observations, though one in ten is wild, against a full window."""
    side = Side(name)
    chance = random.Random(seed)
    for ratio, _ in zip(noisy(before, chance, no_wild), range(3 * WINDOW), strict=False):
        side.see(ratio)
    against = 0.01 if change > 1 else 100.0
    ratios = noisy(before * change, chance, lambda count: against if count % 10 == 9 else None)
    for _ in range(30):
        side.see(next(ratios))
    assert is_near(side.factor, before * change)


@both
def test_a_few_first_observations_overthrow_nothing(name: str) -> None:
    """As many as the prior has are not believed against it, more are."""
    side = Side(name)
    for _ in range(PRIOR - 1):
        side.see(3.0)
    assert side.factor == 1.0
    side.see(3.0)
    side.see(3.0)
    assert side.factor == pytest.approx(3.0)


# Robustness.


@both
@given(
    true=st.floats(0.2, 5),
    seed=seeds,
    kinds=st.lists(st.sampled_from(WILD), min_size=1, max_size=6),
    phase=st.integers(0, 9),
)
def test_wild_observations_move_little(name: str, true: float, seed: int, kinds: list[float], phase: int) -> None:
    """One in ten, all too long, all too short or no number at all: at no time more than 10 %."""
    side = Side(name)
    chance = random.Random(seed)
    for ratio, _ in zip(noisy(true, chance, no_wild), range(WINDOW), strict=False):
        side.see(ratio)
    ratios = noisy(true, chance, lambda count: kinds[count // 10 % len(kinds)] if count % 10 == phase else None)
    for _ in range(200):
        side.see(next(ratios))
        assert is_near(side.factor, true)


@both
@pytest.mark.parametrize("wild", [100.0, 0.01])
@pytest.mark.parametrize(("noise", "share"), [(0.05, 1.0), (0.1, 0.99), (0.2, 0.9)])
def test_wild_observations_by_chance_move_little(name: str, wild: float, noise: float, share: float) -> None:
    """They may come in runs, all to one side, and the others may scatter: within 10 % nearly always."""
    side = Side(name)
    chance = random.Random(5)
    near = []
    for _ in range(3000):
        side.see(wild if chance.random() < 0.1 else chance.lognormvariate(0, noise))
        near.append(is_near(side.factor, 1.0))
    assert sum(near) >= share * len(near)


@both
@pytest.mark.parametrize("seconds", [nan, inf, -inf, 0.0, -3.0])
def test_what_is_no_time_teaches_nothing(name: str, seconds: float) -> None:
    """Even if nothing else ever comes."""
    side = Side(name)
    for _ in range(2 * WINDOW):
        side.see(seconds)
    assert (side.factor, side.number) == (1.0, 0)


def test_a_profile_without_times_teaches_nothing() -> None:
    """Where nothing is predicted there is nothing to compare with."""
    none = {name: 0.0 for name in NEUTRAL.__struct_fields__ if name.endswith("_s")}
    speed = Speed(msgspec.structs.replace(NEUTRAL, **none))
    for number in range(2 * WINDOW):
        speed.saw_prefill(1000, 0, 1.0)
        speed.saw_prefill_totals(number * 10_000, number)
        speed.saw_step(1, 1, 1.0)
    assert (speed.prefill_factor, speed.decode_factor) == (1.0, 1.0)


@pytest.mark.parametrize(("uncached", "past"), [(0, 0), (-1, 0), (nan, 0), (inf, 0), (100, nan), (100, inf)])
def test_a_prefill_of_nothing_teaches_nothing(uncached: float, past: float) -> None:
    """An engine computes one token at least, so the numbers are wrong."""
    speed = Speed(NEUTRAL)
    for _ in range(2 * WINDOW):
        speed.saw_prefill(uncached, past, 1.0)
    assert speed.prefill_factor == 1.0


@both
@pytest.mark.parametrize(("ratio", "bound"), [(1e9, MAX_FACTOR), (1e-9, 1 / MAX_FACTOR)])
def test_a_factor_has_bounds(name: str, ratio: float, bound: float) -> None:
    """Whatever is observed."""
    side = Side(name)
    for _ in range(WINDOW):
        side.see(ratio)
    assert side.factor == pytest.approx(bound)
    assert class_factor(side.number) == pytest.approx(bound, rel=0.1)


@both
def test_old_observations_are_forgotten(name: str) -> None:
    """Memory is bounded: after a window of others, nothing of the past is left, whatever the past was."""
    fresh, old = Side(name), Side(name)
    for _ in range(10 * WINDOW):
        old.see(7.0)
    chance = random.Random(3)
    for _ in range(WINDOW):
        ratio = chance.uniform(0.5, 2.0)
        fresh.see(ratio)
        old.see(ratio)
    assert fresh.factor == old.factor


# Classes.


@both
@given(ratios=st.lists(st.floats(0.01, 100), max_size=200))
def test_a_class_is_within_a_tenth_of_its_factor(name: str, ratios: list[float]) -> None:
    """At every moment, so that what is exact over classes is right within 10 %."""
    side = Side(name)
    for ratio in ratios:
        side.see(ratio)
        assert class_factor(side.number) == pytest.approx(side.factor, rel=0.1)
        assert 1 / 1.1 <= class_factor(side.number) / side.factor <= 1.1


def test_classes_are_geometric() -> None:
    """Steps of 10 %, 73 of them within the bounds."""
    assert class_factor(0) == 1.0
    assert all(class_factor(n + 1) == pytest.approx(1.1 * class_factor(n)) for n in range(-36, 36))
    assert CLASS_STEP**36 < MAX_FACTOR < CLASS_STEP**37


@both
@pytest.mark.parametrize(("noise", "most_changes"), [(0.05, 0), (0.1, 10)])
@pytest.mark.parametrize("border", [0.5, 1.5, -2.5])
def test_a_class_does_not_flap(name: str, border: float, noise: float, most_changes: int) -> None:
    """A factor at the border of two classes stays in one of them; rounded each time it would change a hundred times."""
    side = Side(name)
    chance = random.Random(11)
    seen = []
    for _ in range(2000):
        side.see(CLASS_STEP**border * chance.lognormvariate(0, noise))
        seen.append(side.number)
    changes = sum(before != after for before, after in pairwise(seen[WINDOW:]))
    assert changes <= most_changes
    assert abs(seen[-1] - border) == 0.5


# Running totals of an engine.


class Totals:
    """An engine that counts what it prefilled, in steps of its own, at its own speed."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.tokens = 0.0
        self.busy_s = 0.0

    def step(self, prompts: int, uncached: int, past: int) -> None:
        """Prefill some equal prompts in one step."""
        work_s = prefill_s(NEUTRAL, uncached, past) - NEUTRAL.prefill_base_s
        self.tokens += prompts * uncached
        self.busy_s += self.factor * (NEUTRAL.prefill_base_s + prompts * work_s)

    def tell(self, speed: Speed) -> None:
        """Report."""
        speed.saw_prefill_totals(self.tokens, self.busy_s)


@given(true=st.floats(0.25, 4))
def test_totals_alone_teach_a_speed(true: float) -> None:
    """Where prompts are like those that are assumed, 30 reports are enough."""
    speed, engine = Speed(NEUTRAL), Totals(true)
    for _ in range(31):
        engine.tell(speed)
        for _ in range(20):
            engine.step(1, 1024, 0)
    assert abs(log(speed.prefill_factor / true)) < log(1.2)  # 20 % lie between one step a prompt and full steps


@pytest.mark.parametrize("prompts", [1, 10, 40])
@pytest.mark.parametrize(("uncached", "past"), [(100, 0), (200, 30_000), (2000, 8000)])
def test_totals_confirm_what_prefills_taught(prompts: int, uncached: int, past: int) -> None:
    """Short prompts, one by one or many in a step, and long pasts don't look like another speed."""
    speed, engine = Speed(NEUTRAL), Totals(1.5)
    for _ in range(120):
        speed.saw_prompt(uncached, past)
        speed.saw_prefill(uncached, past, 1.5 * prefill_s(NEUTRAL, uncached, past))
    for _ in range(100):
        engine.tell(speed)
        for _ in range(max(1, 10_000 // (prompts * uncached))):
            engine.step(min(prompts, 8192 // uncached), uncached, past)
    assert is_near(speed.prefill_factor, 1.5)


def test_totals_follow_a_change() -> None:
    """An engine that slows down to half is found out by its totals, though no single prefill is seen any more."""
    speed, engine = Speed(NEUTRAL), Totals(1.0)
    for _ in range(WINDOW):
        speed.saw_prompt(4000, 0)
        speed.saw_prefill(4000, 0, prefill_s(NEUTRAL, 4000, 0))
    engine.factor = 2.0
    for _ in range(31):
        engine.tell(speed)
        for _ in range(5):
            engine.step(2, 4000, 0)
    assert is_near(speed.prefill_factor, 2.0)


def test_totals_of_less_than_a_chunk_wait() -> None:
    """A step under way makes small differences meaningless: they are added up, and nothing of them is lost."""
    often, seldom = Speed(NEUTRAL), Speed(NEUTRAL)
    for number in range(82 * WINDOW + 1):
        totals = (number * 100.0, number * 0.01)
        often.saw_prefill_totals(*totals)
        if number % 82 == 0:  # 8,200 tokens: the first report of a chunk's worth
            seldom.saw_prefill_totals(*totals)
    assert often.prefill_factor == seldom.prefill_factor != 1.0


def test_totals_that_start_anew() -> None:
    """An engine that was restarted counts from zero: the fall is no observation, what follows is compared with it."""
    speed, engine = Speed(NEUTRAL), Totals(2.0)
    for _ in range(40):
        engine.tell(speed)
        for _ in range(20):
            engine.step(1, 1024, 0)
    learned = speed.prefill_factor
    for _ in range(3 * WINDOW):
        engine = Totals(2.0)
        engine.tell(speed)
        for _ in range(20):
            engine.step(1, 1024, 0)
        engine.tell(speed)
    assert speed.prefill_factor == pytest.approx(learned, rel=0.05)


@pytest.mark.parametrize("totals", [(nan, 1.0), (1.0, nan), (inf, 1.0), (1.0, inf), (-1.0, 1.0), (1.0, -1.0)])
def test_totals_that_are_no_numbers_are_passed_over(totals: tuple[float, float]) -> None:
    """They are neither an observation nor a start to compare with."""
    speed, engine = Speed(NEUTRAL), Totals(3.0)
    for _ in range(31):
        engine.tell(speed)
        speed.saw_prefill_totals(*totals)
        for _ in range(20):
            engine.step(1, 1024, 0)
    assert abs(log(speed.prefill_factor / 3.0)) < log(1.2)


@given(true=st.floats(0.3, 3), seed=seeds)
def test_wild_totals_move_little(true: float, seed: int) -> None:
    """One report in ten that is a hundred times too busy, or not busy at all."""
    speed, engine = Speed(NEUTRAL), Totals(true)
    chance = random.Random(seed)
    for number in range(200):
        engine.tell(speed)
        for _ in range(3):
            engine.step(1, 8000, 0)
        if number % 10 == 9:
            engine.busy_s += chance.choice([10.0, 0.0, 1000.0])
        if number > WINDOW:
            assert is_near(speed.prefill_factor, true)


def test_one_that_nobody_tried_is_like_its_peers() -> None:
    """Until it shows otherwise; then its own observations count."""
    peers = Peers()
    tried, untried = Speed(NEUTRAL, peers), Speed(NEUTRAL, peers)
    for _ in range(30):
        tried.saw_prefill(4000, 0, 0.1 * prefill_s(NEUTRAL, 4000, 0))
    assert untried.prefill_factor == 1.0
    untried.refresh()
    assert untried.prefill_factor == pytest.approx(0.1, rel=0.05)
    assert Speed(NEUTRAL, peers).prefill_factor == pytest.approx(0.1, rel=0.05)
    for _ in range(30):
        untried.saw_prefill(4000, 0, 0.5 * prefill_s(NEUTRAL, 4000, 0))
    assert untried.prefill_factor == pytest.approx(0.5, rel=0.05)
    assert Speed(NEUTRAL).prefill_factor == 1.0
