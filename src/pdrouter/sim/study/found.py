"""What the runs of scenes have shown, to be asked by scene, load and policy. Values in, values out."""

from collections.abc import Iterable, Sequence
from statistics import median

from pdrouter.sim.study.scenes import BOUND, Scene
from pdrouter.sim.virtual.figures import Figures
from pdrouter.sim.virtual.sweep import Case, Result

Key = tuple[str, float, str]


class Found:
    """Figures of all seeds by a scene's title, utilisation and policy."""

    def __init__(self, runs: Iterable[tuple[Scene, Case, Result]]) -> None:
        self._figures: dict[Key, list[Figures]] = {}
        for scene, case, result in runs:
            key = (scene.title, case.load.utilisation or 0.0, case.policy)
            self._figures.setdefault(key, []).append(result.figures)

    def median(self, scene: Scene, utilisation: float, policy: str, name: str) -> float:
        """Return the median of a figure over seeds."""
        return median([float(getattr(figures, name)) for figures in self._figures[scene.title, utilisation, policy]])

    def goodput_per_s(self, scene: Scene, policy: str) -> float:
        """Return the most good answers in a second under any load of a scene."""
        return max(self.median(scene, load, policy, "goodput_per_s") for load in scene.utilisation)


def peers_of(scene: Scene, ours: str) -> Sequence[str]:
    """Return who is compared with us: all but us and the bound."""
    return [name for name in scene.typed() if name not in (ours, BOUND)]
