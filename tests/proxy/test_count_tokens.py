"""``/v1/messages/count_tokens``: to one engine that has it, as it came, and not as a generation."""

from collections.abc import Mapping
from typing import Any

import pytest

from pdrouter.sim.emulator import EmulatorSettings, start_emulator
from tests.lab import make_lab, route_to

PATH = "/v1/messages/count_tokens"
BODY = {"model": "emulated", "messages": [{"role": "user", "content": "how many tokens are these?"}]}
OLD: Mapping[str, Any] = {"server_version": "0.5.8"}


@pytest.mark.parametrize("sides", [(1, 1, 0), (0, 0, 1)], ids=["pair", "regular"])
async def test_it_goes_to_one_engine(sides: tuple[int, int, int]) -> None:
    """The engine's own answer; the journal knows one leg, and no answer's length is learned."""
    async with make_lab(*sides) as lab:
        reply = await lab.post(PATH, BODY)
        assert reply.status == 200, reply.body
        assert reply.json()["input_tokens"] > 1
        assert "x-pdrouter-prefill" not in reply.headers
        assert not any(emulator.snapshot().requests_by_rank[0] for emulator in lab.emulators)
        await lab.settled()


async def test_vllm_has_it() -> None:
    """On both sides of a pair; ours is asked on the first that is ready."""
    engine = {"engine": "vllm", "kv_connector": "nixl"}
    async with make_lab(1, 1, engine=engine) as lab:
        reply = await lab.post(PATH, BODY)
        assert reply.status == 200, reply.body
        assert set(reply.json()) == {"input_tokens"}


@pytest.mark.parametrize("policy", ["least_work", "round_robin", "cache_aware"])
async def test_an_engine_without_it_is_not_asked(policy: str) -> None:
    """Before SGLang 0.5.9; the others of the model get all."""
    common: dict[str, Any] = {"role": "regular", "dp_size": 2, "speed": 100.0}
    async with (
        start_emulator(EmulatorSettings(**common, **OLD)) as old,
        start_emulator(EmulatorSettings(**common)) as new,
        route_to(workers=[old, new], policy=policy) as lab,
    ):
        replies = [await lab.post(PATH, BODY) for _ in range(6)]
        assert [reply.status for reply in replies] == [200] * 6
        assert {reply.headers["x-pdrouter-decode"].partition(";")[0] for reply in replies} == {new.url[7:]}


@pytest.mark.parametrize("sides", [(1, 1, 0), (0, 0, 1)], ids=["pair", "regular"])
async def test_a_fleet_without_it(sides: tuple[int, int, int]) -> None:
    """501 in Anthropic's shape, with the reason; no other time is better."""
    async with make_lab(*sides, engine=OLD) as lab:
        reply = await lab.post(PATH, BODY)
        assert (reply.status, "retry-after" in reply.headers) == (501, False)
        error = reply.json()["error"]
        assert (reply.json()["type"], error["code"]) == ("error", "not_supported")
        assert "no engine has it" in error["message"]
        assert "is sglang 0.5.8" in error["message"]


async def test_an_engines_failure() -> None:
    """It is the client's to see, and blames no more than any other."""
    async with make_lab(0, 0, 1) as lab:
        assert (await lab.post(PATH, {"model": "emulated", "messages": 7})).status == 400
        assert (await lab.post(PATH, b"{")).status == 400
        assert (await lab.get(PATH)).status == 405
        await lab.settled()
