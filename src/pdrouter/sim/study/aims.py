"""What least_work is to reach against its peers, and how that is told: a line each. Knows no runs."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pdrouter.sim.study.found import Found, peers_of
from pdrouter.sim.study.scenes import BOUND, FULL, IN_STEP, LARGE, OURS, POLICIES, SMALL, Scene


class Line(NamedTuple):
    """One aim: two figures, what ratio they are to have, and whether they have it."""

    what: str
    ours: float
    theirs: float
    ratio: float
    aim: str
    is_met: bool

    def __str__(self) -> str:
        """Return it in words."""
        verdict = "ok" if self.is_met else "short"
        return f"{self.what}: {self.ours:.2f} / {self.theirs:.2f} = {self.ratio:.2f}, {self.aim}: {verdict}"


class Aim(NamedTuple):
    """Our TTFT p90 is to be at most this share of a peer's."""

    scene: Scene
    utilisation: float
    peer: str
    most: float


class BestAim(NamedTuple):
    """Our time to the first token that a share of requests keeps is to be at most so many times the best peer's."""

    scene: Scene
    utilisation: float
    percent: int
    most: float


AIMS: Sequence[Aim] = (
    Aim(LARGE, 0.9, "power_of_two", 0.15),
    Aim(LARGE, 0.9, "minimum_tokens as published", 0.5),
    Aim(LARGE, 0.9, "cache_aware", 0.5),
    Aim(LARGE, 0.9, "load_aware", 0.65),
    Aim(LARGE, 0.9, "llm_d", 0.75),
    Aim(LARGE, 0.9, "dynamo", 0.97),
    Aim(LARGE, 0.9, BOUND, 1.2),
    Aim(SMALL, 0.9, "dynamo", 0.8),
    Aim(SMALL, 1.1, "dynamo", 0.7),
)
BEST_AIMS: Sequence[BestAim] = (
    BestAim(LARGE, 0.9, 99, 1.0),
    BestAim(SMALL, 0.9, 99, 1.0),
    BestAim(SMALL, 1.1, 99, 1.0),
    *[
        BestAim(IN_STEP, load, percent, most)
        for load in IN_STEP.utilisation
        for percent, most in ((50, 1.0), (90, 1.0), (99, 1.1))
    ],
)

LEAST_GOODPUT = 1.15
"""Good answers in a second at the best load, over those of the best peer."""


def lines_of(found: Found) -> Iterator[Line]:
    """Return how each aim fares; ratios count as they are shown, to two digits."""
    for aim in AIMS:
        ours, theirs = (found.median(aim.scene, aim.utilisation, name, "ttft_p90_s") for name in (OURS, aim.peer))
        what = f"{_place(aim.scene, aim.utilisation)}, TTFT p90, {aim.peer} ({POLICIES[aim.peer].told})"
        yield _at_most(what, ours, theirs, aim.most)
    for scene, utilisation, percent, most in BEST_AIMS:
        figure = f"ttft_p{percent}_s"
        theirs, peer = min((found.median(scene, utilisation, name, figure), name) for name in peers_of(scene, OURS))
        ours = found.median(scene, utilisation, OURS, figure)
        yield _at_most(f"{_place(scene, utilisation)}, TTFT p{percent}, the best peer ({peer})", ours, theirs, most)
    goodput = {name: found.goodput_per_s(FULL, name) for name in FULL.typed()}
    peer = max(peers_of(FULL, OURS), key=goodput.__getitem__)
    ratio = round(goodput[OURS] / goodput[peer], 2)
    what = f"8 ranks, most good answers/s, the best peer ({peer})"
    yield Line(what, goodput[OURS], goodput[peer], ratio, f"at least {LEAST_GOODPUT:g}", ratio >= LEAST_GOODPUT)


def _place(scene: Scene, utilisation: float) -> str:
    return f"{scene.title}, {100 * utilisation:.0f} %"


def _at_most(what: str, ours: float, theirs: float, most: float) -> Line:
    ratio = round(ours / theirs, 2)
    return Line(what, ours, theirs, ratio, f"at most {most:g}", ratio <= most)
