"""What a fleet is made of, in a line or in YAML, and what of it is told to the router.

``prefill=4x8:PROFILE,decode=2x8:PROFILE*0.5``: four endpoints of eight ranks each, and two at half the speed. The
router is told the profile's name, never the speed: it has to learn that. Knows no engine and no clock.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TypeVar

import msgspec

from pdrouter.core.fleet import Endpoint
from pdrouter.core.fleet import Role as EndpointRole
from pdrouter.sim.job import Role
from pdrouter.sim.profiles import DecodeCurve, DpSplit, PrefillCurve, PrefillExperts, Profile, load_profile

_PART = re.compile(r"(?P<role>\w+)=(?P<endpoints>\d+)(?:x(?P<ranks>\d+))?:(?P<profile>[\w.-]+)(?:\*(?P<speed>[\d.]+))?")
_ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE, "worker": Role.REGULAR, "regular": Role.REGULAR}
_PORT = 30_000

Curve = TypeVar("Curve", PrefillCurve, DecodeCurve)


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Some engines that are alike: ``endpoints`` of ``ranks`` each, ``speed`` times as fast as the profile says."""

    role: Role
    profile: str
    endpoints: int = 1
    ranks: int = 1
    speed: float = 1.0
    group: str = ""
    model: str | None = None
    kv_capacity_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.endpoints < 1 or self.ranks < 1 or not self.speed > 0:
            raise ValueError("endpoints, ranks and speed must be positive")
        if self.kv_capacity_tokens is not None and self.kv_capacity_tokens < 1:
            raise ValueError("kv_capacity_tokens must be positive")


FleetSpec = Sequence[EngineSpec]


def read_fleet(text: str) -> list[EngineSpec]:
    """Return the fleet that a line describes, or a YAML file that is a list of ``EngineSpec``.

    Raises: ValueError that says what is wrong.
    """
    specs = [_read_part(part.strip()) for part in text.split(",")] if "=" in text else _read_file(Path(text))
    roles = {spec.role for spec in specs}
    if roles != {Role.REGULAR} and not {Role.PREFILL, Role.DECODE} <= roles:
        raise ValueError("a fleet needs prefill and decode engines, or workers")
    for spec in specs:
        load_profile(spec.profile)
    return specs


def _read_file(path: Path) -> list[EngineSpec]:
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=list[EngineSpec])
    except OSError as error:
        raise ValueError(
            f"{path}: {error.strerror}; a fleet is a line such as prefill=4x8:PROFILE,decode=2x8:PROFILE"
        ) from None
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: {error}") from None


def _read_part(part: str) -> EngineSpec:
    found = _PART.fullmatch(part)
    if found is None or found["role"] not in _ROLES:
        raise ValueError(f"{part!r} isn't ROLE=ENDPOINTSxRANKS:PROFILE[*SPEED]; roles: {', '.join(_ROLES)}")
    return EngineSpec(
        role=_ROLES[found["role"]],
        profile=found["profile"],
        endpoints=int(found["endpoints"]),
        ranks=int(found["ranks"] or 1),
        speed=float(found["speed"] or 1.0),
    )


def endpoints_of(specs: FleetSpec) -> Iterator[tuple[EngineSpec, Endpoint]]:
    """Return every endpoint as the router knows it, with what it is made of."""
    count = dict.fromkeys(Role, 0)
    for spec in specs:
        for _ in range(spec.endpoints):
            host = f"{spec.role}{count[spec.role]}"
            count[spec.role] += 1
            yield (
                spec,
                Endpoint(
                    address=f"{host}:{_PORT}",
                    host=host,
                    port=_PORT,
                    role=EndpointRole(spec.role),
                    group=spec.group,
                    model=spec.model,
                    dp_size=spec.ranks,
                    profile=spec.profile,
                ),
            )


def at_speed(profile: Profile, speed: float) -> Profile:
    """Return a profile whose steps take ``1 / speed`` of the time; transfers are the network's and stay."""
    if speed == 1:
        return profile
    slowness = 1 / speed
    changes: dict[str, object] = {
        "prefill": _slowed(profile.prefill, slowness),
        "decode": _slowed(profile.decode, slowness),
    }
    if profile.dp_split is not None:
        split = profile.dp_split
        moe = split.decode_moe
        changes["dp_split"] = DpSplit(
            prefill_local=_slowed(split.prefill_local, slowness),
            prefill_moe=PrefillExperts(split.prefill_moe.g0 * slowness, split.prefill_moe.g1 * slowness),
            decode_local=_slowed(split.decode_local, slowness),
            decode_moe=msgspec.structs.replace(moe, g0=moe.g0 * slowness, g1=moe.g1 * slowness, g2=moe.g2 * slowness),
        )
    return msgspec.structs.replace(profile, **changes)


def _slowed(curve: Curve, slowness: float) -> Curve:
    return type(curve)(*[value * slowness for value in msgspec.structs.astuple(curve)])


def utilisation_rate_per_s(
    specs: FleetSpec, profiles: Mapping[str, Profile], prompts_tokens: Sequence[int], utilisation: float
) -> float:
    """Return the arrivals in a second at which reading such prompts keeps prefill ranks busy for this share of time.

    Counted without reuse of prefixes, all ranks of an engine busy; a prompt takes at least one step, and what a longer
    one leaves of its last chunk is another's. Regular ranks count as prefill ranks: their answers come on top.
    """
    prompts_per_s = 0.0
    for spec in specs:
        if spec.role is not Role.DECODE:
            curve, chunk_tokens = profiles[spec.profile].prefill, profiles[spec.profile].prefill_chunk_tokens
            mean_ms = fmean([curve.a0 * max(1, n / chunk_tokens) + curve.chunk_ms(n, 0) for n in prompts_tokens])
            prompts_per_s += spec.endpoints * spec.ranks * spec.speed * 1000 / mean_ms
    return utilisation * prompts_per_s
