"""Results of scenes, made up: a value for each policy, the same for all seeds and loads."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.sim.virtual.results import make_figures

from pdrouter.options import router_options
from pdrouter.sim.study.found import Found
from pdrouter.sim.study.scenes import Scene
from pdrouter.sim.virtual.sweep import Case, Result


def make_found(scenes: Sequence[Scene], figures: Callable[[str], dict[str, Any]]) -> Found:
    """Return what all runs of scenes would have shown, had each policy these figures."""

    def runs() -> Iterator[tuple[Scene, Case, Result]]:
        for scene in scenes:
            for case in scene.cases(router_options):
                made = make_figures(**figures(case.policy))
                yield scene, case, Result(case.title, case.policy, case.settings.seed, 1.0, 1.0, made)

    return Found(runs())
