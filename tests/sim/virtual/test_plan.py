"""The search for the fewest GPUs, over answers worked out by hand."""

import pytest
from tests.sim.virtual.results import make_result

from pdrouter.sim.job import Role
from pdrouter.sim.profiles import DEFAULT_PROFILE, load_profile
from pdrouter.sim.virtual.fleet_spec import EngineSpec, read_fleet
from pdrouter.sim.virtual.plan import Pair, Plan, Sizes, line_of

FLEET = read_fleet(f"prefill=1x2:{DEFAULT_PROFILE},decode=1x1:{DEFAULT_PROFILE}")
TP = load_profile(DEFAULT_PROFILE).tp


def search(needs: Pair, gpus: int, seeds: int = 1) -> Plan:
    """Return a plan for work that needs so many endpoints of each kind; each that lacks costs a tenth."""
    plan = Plan(Sizes(FLEET, gpus), 0.95)
    while pairs := plan.to_try():
        assert plan.attainment.keys().isdisjoint(pairs)
        sized = [pair for pair in pairs for _ in range(seeds)]
        shares = [
            1 - 0.1 * (max(0, needs.prefills - p.prefills) + max(0, needs.decodes - p.decodes)) - 0.01 * (i % seeds)
            for i, p in enumerate(sized)
        ]
        plan.tried(sized, [make_result("t", "p", attainment=share) for share in shares])
    return plan


@pytest.mark.parametrize("needs", [Pair(1, 1), Pair(3, 5), Pair(5, 3), Pair(7, 7), Pair(1, 10)])
@pytest.mark.parametrize("seeds", [1, 3])
def test_the_least_fleet_is_found(needs: Pair, seeds: int) -> None:
    """Whether or not its sizes are among those tried first; a prefill endpoint of two ranks costs twice as many."""
    plan = search(needs, 40 * TP, seeds)
    assert plan.best == needs
    assert plan.sizes.gpus(needs) == (2 * needs.prefills + needs.decodes) * TP
    assert f"{needs.prefills} prefill and {needs.decodes} decode endpoints" in line_of(plan)
    assert len(plan.attainment) < 150


def test_the_budget_is_kept() -> None:
    """Nothing beyond it is tried; if nothing within keeps the target, the best is named."""
    plan = search(Pair(9, 9), 20 * TP)
    assert plan.best is None
    assert max(plan.sizes.gpus(pair) for pair in plan.attainment) <= 20 * TP
    assert line_of(plan).startswith("no fleet of up to")


def test_a_fleet_of_another_shape_is_told() -> None:
    """Two kinds, and one endpoint of each within the budget."""
    with pytest.raises(ValueError, match="one kind of prefill"):
        Sizes([*FLEET, FLEET[0]], 100)
    with pytest.raises(ValueError, match="one kind of prefill"):
        Sizes([EngineSpec(role=Role.REGULAR, profile=DEFAULT_PROFILE)], 100)
    with pytest.raises(ValueError, match="takes 12 already"):
        Sizes(FLEET, 11)
