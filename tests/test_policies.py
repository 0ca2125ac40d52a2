"""Every policy by its flag, over emulated engines: from a client's headers and an engine's report to the choice."""

from typing import Any, get_args

import pytest

from pdrouter.config import PolicyName

from .lab import CHAT, Lab, chat, make_lab, until


def taken(lab: Lab) -> tuple[list[int], list[int]]:
    """Return how many requests each prefill and each decode engine had."""
    return [len(e.received) for e in lab.prefills], [len(e.received) for e in lab.decodes]


@pytest.mark.parametrize(
    "flags",
    [
        *({"policy": name} for name in get_args(PolicyName)),
        {"policy": "load_aware", "load_aware_generation": 2},
        {"policy": "cache_aware", "rank_policy": "minimum_tokens", "minimum_tokens_published": True},
        {"policy": "manual", "assignment_mode": "min_group"},
    ],
    ids=str,
)
async def test_requests_are_placed(flags: dict[str, Any]) -> None:
    """Each gets its answer, and the ledger is zero afterwards."""
    async with make_lab(prefill=2, decode=2, **flags) as lab:
        for number in range(3):
            assert (await lab.post(CHAT, chat(f"prompt {number}"))).status == 200
        await lab.settled()
        assert [sum(side) for side in taken(lab)] == [3, 3]


@pytest.mark.parametrize(
    ("policy", "header"),
    [("manual", "x-smg-routing-key"), ("consistent_hashing", "x-smg-routing-key"), ("consistent_hashing", "cookie")],
)
async def test_a_key_sticks_to_its_engines(policy: str, header: str) -> None:
    """One key goes to one pair; many keys go to all engines."""
    async with make_lab(prefill=2, decode=2, policy=policy) as lab:
        for _ in range(6):
            await lab.post(CHAT, chat("hello"), {header: "one client"})
        assert [sorted(side) for side in taken(lab)] == [[0, 6], [0, 6]]
        for number in range(24):
            await lab.post(CHAT, chat("hello"), {header: f"client {number}"})
        assert min(map(min, taken(lab))) > 0
        await lab.settled()


async def test_the_engines_throughput_and_kv_use_arrive() -> None:
    """What generation 2 scores is in the reports that the load poll brings."""
    async with make_lab(policy="load_aware", load_aware_generation=2, worker_load_check_interval=0.05) as lab:

        def reports() -> list[object]:
            return [rank.report for load in lab.core.load.endpoints.values() for rank in load.ranks]

        await until(lambda: None not in reports())
        for load in lab.core.load.endpoints.values():
            for rank in load.ranks:
                assert rank.report is not None
                assert rank.report.throughput_tokens_per_s is not None
                assert rank.report.kv_use is not None
        await lab.post(CHAT, chat("hello"))
        await lab.settled()
