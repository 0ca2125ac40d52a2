"""The quick study, from runs to words, with a scene small enough for a test."""

import pytest

from pdrouter.options import router_options
from pdrouter.sim.study import command
from pdrouter.sim.study.scenes import OURS, Scene, dense


def test_runs_are_told_by_scene_load_and_policy() -> None:
    """What comes back from the processes is found under the run that it belongs to."""
    scene = Scene(
        title="tiny", fleet=dense(4), policies=(OURS, "power_of_two"), utilisation=(0.3, 1.5), requests=150, seeds=2
    )
    found = command.run_scenes([scene], router_options)
    for policy in scene.policies:
        light, heavy = (found.median(scene, load, policy, "ttft_p90_s") for load in scene.utilisation)
        assert light < heavy
    assert found.median(scene, 1.5, OURS, "ttft_p90_s") < found.median(scene, 1.5, "power_of_two", "ttft_p90_s")


def test_the_last_line_counts_what_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says ok, or how many aims are short."""

    class Line:
        def __init__(self, is_met: bool) -> None:
            self.is_met = is_met

    monkeypatch.setattr(command, "run_scenes", lambda *_: None)
    for met, last in (([True, True], "ok"), ([True, False, False], "2 short")):
        monkeypatch.setattr(command, "lines_of", lambda _, met=met: map(Line, met))
        assert command.run_quick(router_options)[-1] == f"study-quick: {last}"
