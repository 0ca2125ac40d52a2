"""How many prefill and decode endpoints keep an objective with the fewest GPUs: what to try, and what was found.

More endpoints of either kind are taken to keep it no worse. Coarse sizes are tried first, then those between them that
could do with fewer GPUs. It runs nothing itself.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table

from pdrouter.sim.job import Role
from pdrouter.sim.profiles import load_profile
from pdrouter.sim.virtual.figures import estimate
from pdrouter.sim.virtual.fleet_spec import EngineSpec
from pdrouter.sim.virtual.sweep import Case, Result

_MOST_REFINED = 64
"""Sizes tried in a second round."""


class Pair(NamedTuple):
    """How many endpoints of each kind."""

    prefills: int
    decodes: int


class Sizes:
    """Fleets of two kinds of endpoints under a budget of GPUs; a rank takes as many as its profile's ``tp``.

    Raises: ValueError if the fleet isn't one kind of prefill and one of decode endpoints, or the budget too small.
    """

    def __init__(self, fleet: Sequence[EngineSpec], gpus: int) -> None:
        by_role = {spec.role: spec for spec in fleet}
        if len(fleet) != 2 or by_role.keys() != {Role.PREFILL, Role.DECODE}:
            raise ValueError("--plan needs a fleet of one kind of prefill and one kind of decode endpoints")
        self.budget = gpus
        self._specs = by_role[Role.PREFILL], by_role[Role.DECODE]
        self.each = Pair(*(spec.ranks * load_profile(spec.profile).tp for spec in self._specs))
        if sum(self.each) > gpus:
            raise ValueError(f"--gpus: one endpoint of each kind takes {sum(self.each)} already")

    def gpus(self, pair: Pair) -> int:
        """Return the GPUs that a fleet takes."""
        return pair.prefills * self.each.prefills + pair.decodes * self.each.decodes

    def fleet(self, pair: Pair) -> list[EngineSpec]:
        """Return a fleet of this size."""
        return [msgspec.structs.replace(spec, endpoints=n) for spec, n in zip(self._specs, pair, strict=True)]

    def cases(self, cases: Sequence[Case], pair: Pair) -> Iterator[Case]:
        """Return the same runs with a fleet of this size."""
        title, fleet = f"{pair.prefills} prefill, {pair.decodes} decode", self.fleet(pair)
        return (msgspec.structs.replace(case, title=title, fleet=fleet) for case in cases)


class Plan:
    """What has been tried: the share of good answers by size; ``best`` keeps the target with the fewest GPUs."""

    def __init__(self, sizes: Sizes, target: float) -> None:
        self.sizes = sizes
        self.target = target
        self.attainment: dict[Pair, float] = {}
        self._rounds = self._to_try()

    @property
    def best(self) -> Pair | None:
        """The fleet to take: of those with the fewest GPUs the one with the most good answers."""
        kept = [pair for pair, share in self.attainment.items() if share >= self.target]
        return min(kept, key=lambda pair: (self.sizes.gpus(pair), -self.attainment[pair]), default=None)

    def to_try(self) -> list[Pair]:
        """Return the sizes to try next; none when all is known."""
        return next(self._rounds, [])

    def tried(self, pairs: Sequence[Pair], results: Sequence[Result]) -> None:
        """Take in what runs have shown, a size for each."""
        shares: dict[Pair, list[float]] = {}
        for pair, result in zip(pairs, results, strict=True):
            shares.setdefault(pair, []).append(result.figures.attainment)
        self.attainment |= {pair: estimate(values).mean for pair, values in shares.items()}

    def _to_try(self) -> Iterator[list[Pair]]:
        sizes = self.sizes
        levels = _levels(sizes.budget)
        yield [pair for p in levels for d in levels if sizes.gpus(pair := Pair(p, d)) <= sizes.budget]
        best = self.best
        if best is None:
            return
        kept = [pair for pair, share in self.attainment.items() if share >= self.target]
        between = {
            Pair(p, d)
            for pair in kept
            for p in range(_below(levels, pair.prefills) + 1, pair.prefills + 1)
            for d in range(_below(levels, pair.decodes) + 1, pair.decodes + 1)
        }
        better = [pair for pair in between - self.attainment.keys() if sizes.gpus(pair) < sizes.gpus(best)]
        yield sorted(better, key=sizes.gpus, reverse=True)[:_MOST_REFINED]


def _levels(most: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, 16, ...: each at most a half more than the one before, from 2 on."""
    levels, power = [1], 2
    while power <= most:
        levels += [power, power * 3 // 2]
        power *= 2
    return levels


def _below(levels: Sequence[int], level: int) -> int:
    return max((other for other in levels if other < level), default=0)


def grid_of(plan: Plan) -> Table:
    """Return the share of good answers by numbers of endpoints."""
    prefills = sorted({pair.prefills for pair in plan.attainment})
    decodes = sorted({pair.decodes for pair in plan.attainment})
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title="good answers, %", title_justify="left")
    table.add_column("prefill\\decode", justify="right")
    for decode in decodes:
        table.add_column(str(decode), justify="right")
    for prefill in prefills:
        table.add_row(str(prefill), *[_cell(plan, Pair(prefill, decode)) for decode in decodes])
    return table


def _cell(plan: Plan, pair: Pair) -> str:
    share = plan.attainment.get(pair)
    if share is None:
        return ""
    style = "bold reverse" if pair == plan.best else "green" if share >= plan.target else "dim"
    return f"[{style}]{100 * share:.1f}[/]"


def line_of(plan: Plan) -> str:
    """Return the answer in a sentence."""
    best, sizes = plan.best, plan.sizes
    if best is None:
        most = max(plan.attainment, key=lambda pair: plan.attainment[pair])
        return (
            f"no fleet of up to {sizes.budget} GPUs keeps {100 * plan.target:g} %; the best, {_words(sizes, most)}, "
            f"{100 * plan.attainment[most]:.1f} %"
        )
    return f"fewest GPUs: {_words(sizes, best)}, {100 * plan.attainment[best]:.1f} % good answers"


def _words(sizes: Sizes, pair: Pair) -> str:
    return f"{pair.prefills} prefill and {pair.decodes} decode endpoints ({sizes.gpus(pair)} GPUs)"
