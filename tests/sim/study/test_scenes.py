"""Scenes: who is compared, and what each is told."""

from collections import Counter

import pytest

from pdrouter.options import router_options
from pdrouter.sim.study.scenes import AGES, LARGE, POLICIES, QUICK, STUDY, Scene


@pytest.mark.parametrize("scene", [*QUICK, *STUDY], ids=lambda scene: scene.title)
def test_every_policy_runs_under_every_load_with_every_seed(scene: Scene) -> None:
    """No run is missing or there twice, and all can be made."""
    runs = Counter((case.policy, case.load.utilisation, case.settings.seed) for case in scene.cases(router_options))
    assert set(runs.values()) == {1}
    assert len(runs) == len(scene.typed()) * len(scene.utilisation) * scene.seeds


def test_peers_are_told_what_they_are_in_life() -> None:
    """llm-d polls every 50 ms, whoever polls like the SGLang router every 10 s; what is said is what is done."""
    told = {case.policy: case.settings.report_interval_s for case in LARGE.cases(router_options)}
    assert (told["llm_d"], told["power_of_two"], told["least_work"]) == (0.05, 10.0, 10.0)
    for name, policy in POLICIES.items():
        if "every 10 s" in policy.told:
            assert told[name] == 10.0


def test_ages_of_reports_differ() -> None:
    """The scene of old reports has each of its policies at each age."""
    ages = {(case.policy, case.settings.report_delay_s) for case in AGES.cases(router_options)}
    assert all(policy.endswith(f", {age_s:g} s") for policy, age_s in ages)
    assert Counter(age_s for _, age_s in ages) == {0.0: 4, 1.0: 4, 10.0: 4}
