"""Small builders for runs in virtual time: profiles in round numbers, fleets, traces by chance."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from tests.core.builders import make_options
from tests.sim.conftest import make_profile as make_plain_profile

from pdrouter.core.cost import profile_from
from pdrouter.core.router import Router
from pdrouter.sim.job import Role
from pdrouter.sim.profiles import DecodeCurve, PrefillCurve, Profile
from pdrouter.sim.simulator import Simulator, SimulatorSettings
from pdrouter.sim.virtual.fleet_spec import EngineSpec
from pdrouter.sim.virtual.run import Run
from pdrouter.sim.virtual.trace import Request, Trace

BLOCK = 100


def make_profile(**changes: Any) -> Profile:
    """Return a profile whose prefill takes 1 ms a token, read in chunks of 100, and whose answers take 1 us a step."""
    fields: dict[str, Any] = {
        "prefill": PrefillCurve(a0=0.0, a1=1.0, a2=0.0),
        "decode": DecodeCurve(b0=0.001, b1=0.0, b2=0.0),
        "kv_capacity_tokens": 10_000_000,
        "kv_transfer_us_per_token": 0.0,
        "max_batch": 10_000,
        "prefill_chunk_tokens": BLOCK,
    }
    return make_plain_profile(**(fields | changes))


PLAIN = {"plain": make_profile()}


def pairs(
    prefills: int, decodes: int = 1, *, ranks: int = 1, profile: str = "plain", **fields: Any
) -> list[EngineSpec]:
    """Return a fleet of engines that are all alike."""
    alike: dict[str, Any] = {"profile": profile, "ranks": ranks} | fields
    return [
        EngineSpec(role=Role.PREFILL, endpoints=prefills, **alike),
        EngineSpec(role=Role.DECODE, endpoints=decodes, **alike),
    ]


def make_trace(requests: Sequence[Request], block_tokens: int = BLOCK) -> Trace:
    """Return a trace that ends with its last arrival."""
    return Trace(requests=requests, span_s=requests[-1].at_s or 1.0, block_tokens=block_tokens)


def poisson(count: int, rate_per_s: float, tokens: Callable[[random.Random], int], seed: int, output: int = 1) -> Trace:
    """Return requests that come by chance, of lengths by chance."""
    chance = random.Random(seed)
    at_s, requests = 0.0, []
    for _ in range(count):
        at_s += chance.expovariate(rate_per_s)
        requests.append(Request(at_s, tokens(chance), output))
    return make_trace(requests)


def make_router(
    trace: Trace, profiles: Mapping[str, Profile] = PLAIN, router: type[Router] = Router, **options: Any
) -> Router:
    """Return a router that knows these profiles."""
    known = {name: profile_from(msgspec.to_builtins(profile)) for name, profile in profiles.items()}
    fields: dict[str, Any] = {"policy": "least_work", "profiles": known, "prefix_block_tokens": trace.block_tokens}
    return router(make_options(**(fields | options)))


def simulate(
    trace: Trace,
    fleet: Sequence[EngineSpec],
    profiles: Mapping[str, Profile] = PLAIN,
    world: SimulatorSettings | None = None,
    **options: Any,
) -> Run:
    """Return a run of a router with these options; by default nobody reports."""
    router = make_router(trace, profiles, **options)
    world = world or SimulatorSettings(report_interval_s=0)
    run = Simulator(router, fleet, profiles, trace, world).simulate()
    router.validate()
    assert not router.live
    return run
