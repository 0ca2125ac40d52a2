"""The legs of SGLang's plans find each other on the emulated engines of every version, whatever ranks they go to."""

import asyncio
import itertools
import random
from typing import Any
from urllib.parse import urlsplit

import pytest

from pdrouter.core.fleet import Endpoint, Role
from pdrouter.engines.base import Attempt, Leg
from pdrouter.engines.sglang import Sglang
from pdrouter.engines.sglang_ranks import RankFields
from pdrouter.proxy.ids import Ids
from pdrouter.sim.emulator import Emulator, EmulatorSettings, start_emulator

from .builders import decode_leg, make_decision, make_inbound, place, prefill_leg

VERSIONS = (
    *("0.5.6", "0.5.7", "0.5.8", "0.5.9", "0.5.10", "0.5.11", "0.5.12", "0.5.14", "0.5.15.post1"),
    *("0.5.16", "0.5.18", "0.5.20", "0.5.21", "0.5.22", "0.5.23"),
)
RANKS = 2
BODIES = {
    "/generate": (None, b'"text":"hello","sampling_params":{"max_new_tokens":2}}'),
    "/v1/completions": (2, b'"prompt":["a","b"],"max_tokens":2}'),
    "/v1/chat/completions": (None, b'"messages":[{"role":"user","content":"hello"}],"max_tokens":2}'),
}


def endpoint(engine: Emulator, role: Role) -> Endpoint:
    """Return an emulated engine as it describes itself."""
    parts, settings = urlsplit(engine.url), engine.settings
    return Endpoint(
        address=parts.netloc,
        host=parts.hostname or "",
        port=parts.port or 0,
        role=role,
        dp_size=settings.dp_size,
        dp_attention=settings.dp_attention,
        bootstrap_port=engine.bootstrap_port,
        version=settings.version,
    )


async def status(leg: Leg) -> int:
    """Send a leg and return what its engine answers."""
    place = leg.placement.endpoint
    reader, writer = await asyncio.open_connection(place.host, place.port)
    try:
        writer.write(leg.head + b"".join(leg.body))
        return int((await reader.readline()).split()[1])
    finally:
        writer.close()
        await writer.wait_closed()


def serves(version: str, kind: str, spelling: RankFields) -> bool:
    """Whether an engine serves that way at all: ranks that take turns must be named so that it knows the name."""
    if not kind.endswith("turns") or version in ("0.5.6", "0.5.7"):
        return True
    if version in ("0.5.8", "0.5.9"):
        return spelling not in (RankFields.NONE, RankFields.ROUTED)
    return spelling is not RankFields.NONE or kind.startswith("attention")


@pytest.mark.parametrize("kind", ["replicas", "replicas in turns", "attention", "attention in turns"])
@pytest.mark.parametrize("version", VERSIONS)
async def test_every_plan_meets(version: str, kind: str) -> None:
    """Each spelling, path and pair of ranks; the prefill runs where it was sent, and since 0.5.10 decode as well."""
    settings: dict[str, Any] = {
        "dp_size": RANKS,
        "server_version": version,
        "dp_attention": kind.startswith("attention"),
        "speed": 1000.0,
        "handshake_timeout_s": 1e6,
    }
    method: Any = "round_robin" if kind.endswith("turns") else "auto"
    ids = Ids(random.Random(1))
    async with (
        start_emulator(EmulatorSettings(role="prefill", load_balance_method=method, **settings)) as prefill,
        start_emulator(EmulatorSettings(role="decode", **settings)) as decode,
    ):
        ways = itertools.product(RankFields, BODIES, range(RANKS), range(RANKS))
        for spelling, path, reader, writer in ways:
            if not serves(version, kind, spelling):
                continue
            is_named = spelling is not RankFields.NONE
            decision = make_decision(
                place(endpoint(prefill, Role.PREFILL), reader if is_named else None),
                place(endpoint(decode, Role.DECODE), writer if is_named else None),
            )
            batch, rest = BODIES[path]
            attempt: Attempt = ids.attempt(batch or 1)
            plan = Sglang(spelling).plan(decision, make_inbound(rest, path=path, batch=batch), attempt)
            legs = (prefill_leg(plan), decode_leg(plan))
            assert await asyncio.gather(*map(status, legs)) == [200, 200], (spelling, path, reader, writer)
            if is_named:
                assert prefill.received[-1].rank == reader
            if is_named and spelling is not RankFields.LEGACY and version not in VERSIONS[:4]:
                assert decode.received[-1].rank == writer
        assert prefill.snapshot().errors == decode.snapshot().errors == {}
