"""Fleets in a line or in YAML, and the rate that keeps them busy."""

from pathlib import Path

import pytest
from tests.sim.virtual.builders import PLAIN, make_trace, pairs, simulate

from pdrouter.core.fleet import Role as EndpointRole
from pdrouter.sim.job import Role
from pdrouter.sim.profiles import DEFAULT_PROFILE, DpSplit, load_profiles
from pdrouter.sim.virtual.fleet_spec import at_speed, endpoints_of, read_fleet, utilisation_rate_per_s
from pdrouter.sim.virtual.trace import Request

LINE = f"prefill=4x8:{DEFAULT_PROFILE},decode=2:{DEFAULT_PROFILE}*0.5, prefill=1x2:{DEFAULT_PROFILE}*2"


def test_a_line() -> None:
    """Roles, endpoints, ranks, profile and speed; one rank and full speed where nothing is said."""
    first, second, third = read_fleet(LINE)
    assert (first.role, first.endpoints, first.ranks, first.speed) == (Role.PREFILL, 4, 8, 1.0)
    assert (second.role, second.endpoints, second.ranks, second.speed) == (Role.DECODE, 2, 1, 0.5)
    assert (third.endpoints, third.ranks, third.speed) == (1, 2, 2.0)


def test_the_router_knows_each_endpoint_by_an_address_of_its_own() -> None:
    """With its role, ranks and profile, and not with its speed."""
    endpoints = [endpoint for _, endpoint in endpoints_of(read_fleet(LINE))]
    assert len({endpoint.address for endpoint in endpoints}) == 7
    assert [e.role for e in endpoints] == [EndpointRole.PREFILL] * 4 + [EndpointRole.DECODE] * 2 + [
        EndpointRole.PREFILL
    ]
    assert [e.dp_size for e in endpoints] == [8] * 4 + [1] * 2 + [2]
    assert {e.profile for e in endpoints} == {DEFAULT_PROFILE}


def test_yaml(tmp_path: Path) -> None:
    """A list of mappings, with groups, models and capacities as well."""
    path = tmp_path / "fleet.yaml"
    path.write_text(
        f"- {{role: prefill, profile: {DEFAULT_PROFILE}, endpoints: 2, group: a, model: m, kv_capacity_tokens: 5000}}\n"
        f"- {{role: decode, profile: {DEFAULT_PROFILE}, group: a, model: m}}\n"
    )
    specs = read_fleet(str(path))
    assert (specs[0].group, specs[0].model, specs[0].kv_capacity_tokens) == ("a", "m", 5000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prefill=2", "ROLE=ENDPOINTS"),
        (f"encode=2:{DEFAULT_PROFILE}", "roles: prefill"),
        (f"prefill=2:{DEFAULT_PROFILE}", "needs prefill and decode"),
        (f"prefill=0:{DEFAULT_PROFILE},decode=1:{DEFAULT_PROFILE}", "must be positive"),
        (f"prefill=1:{DEFAULT_PROFILE}*0,decode=1:{DEFAULT_PROFILE}", "must be positive"),
        ("worker=2:gpt", "unknown profile 'gpt'"),
        ("nowhere.yaml", "No such file"),
    ],
)
def test_what_is_no_fleet_is_told(text: str, message: str) -> None:
    """In words that say what to write."""
    with pytest.raises(ValueError, match=message):
        read_fleet(text)


def test_bad_yaml_is_told(tmp_path: Path) -> None:
    """With the file and the field."""
    path = tmp_path / "fleet.yaml"
    path.write_text("- {role: prefill, profile: x, ranks: many}\n")
    with pytest.raises(ValueError, match=r"fleet\.yaml.*ranks"):
        read_fleet(str(path))


@pytest.mark.parametrize("name", list(load_profiles()))
def test_speed_divides_every_time_but_the_networks(name: str) -> None:
    """At half the speed a step takes twice as long, in every part; a transfer takes as long as before."""
    profile = load_profiles()[name]
    slow = at_speed(profile, 0.5)
    assert slow.prefill_ms(1000, 500) == pytest.approx(2 * profile.prefill_ms(1000, 500))
    assert slow.decode.step_ms(7, 9000) == pytest.approx(2 * profile.decode.step_ms(7, 9000))
    assert slow.transfer_ms(1000) == profile.transfer_ms(1000)
    if profile.dp_split is not None:
        assert isinstance(slow.dp_split, DpSplit)
        for part, arguments in (("prefill_moe", (100,)), ("decode_moe", (100,)), ("decode_local", (7, 9000))):
            before = getattr(profile.dp_split, part).step_ms(*arguments)
            assert getattr(slow.dp_split, part).step_ms(*arguments) == pytest.approx(2 * before)
        assert slow.dp_split.prefill_local.chunk_ms(9, 9) == pytest.approx(
            2 * profile.dp_split.prefill_local.chunk_ms(9, 9)
        )
    assert at_speed(profile, 1.0) is profile


def test_utilisation_is_the_share_of_time_that_ranks_are_busy() -> None:
    """Just below 1 nobody waits long; above it the queue grows by what is too much."""
    mixed = [*pairs(2, ranks=2), *pairs(1, speed=2.0)]
    assert utilisation_rate_per_s(mixed, PLAIN, [500, 1500], 0.5) == pytest.approx(0.5 * (4 + 2))
    fleet = pairs(2, ranks=2)
    for utilisation, low_s, high_s in ((0.95, 0.0, 2.0), (1.1, 8.0, 12.0)):
        rate = utilisation_rate_per_s(fleet, PLAIN, [500, 1500], utilisation)
        requests = [Request((number + 1) / rate, 500 + 1000 * (number % 2), 1) for number in range(400)]
        answers = simulate(make_trace(requests), fleet).answers
        assert low_s < max(answer.ttft_s - answer.prompt_tokens / 1000 for answer in answers) < high_s
