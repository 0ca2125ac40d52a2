"""Which rank serves a request: every spelling, by version."""

from typing import Any

import pytest

from pdrouter.sim.emulator import EmulatorSettings, start_emulator

GENERATE = {"text": "hello", "sampling_params": {"max_new_tokens": 2}}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}

NEW = "0.5.23"
OLD = "0.5.6"


@pytest.mark.parametrize(
    ("version", "fields", "headers", "expected"),
    [
        (NEW, {"routed_dp_rank": 2, "disagg_prefill_dp_rank": 1}, {}, (2, 1)),
        (NEW, {"decode_dp_rank": 2, "data_parallel_rank": 1}, {}, (2, 1)),
        (NEW, {"data_parallel_rank": 3}, {}, (3, None)),
        (
            NEW,
            {"routed_dp_rank": 2, "disagg_prefill_dp_rank": 1, "decode_dp_rank": 0, "data_parallel_rank": 0},
            {},
            (2, 1),
        ),
        (NEW, {"routed_dp_rank": 2}, {"X-Data-Parallel-Rank": "3"}, (3, None)),
        (
            NEW,
            {"routed_dp_rank": 0},
            {"x-override-routed-dp-rank": "1", "x-override-disagg-prefill-dp-rank": "2"},
            (1, 2),
        ),
        (NEW, {}, {}, (0, None)),
        (OLD, {"decode_dp_rank": 2, "data_parallel_rank": 1}, {}, (2, 1)),
        (OLD, {"routed_dp_rank": 2, "disagg_prefill_dp_rank": 1}, {}, (0, None)),
        (OLD, {}, {"x-override-routed-dp-rank": "3"}, (0, None)),
        (OLD, {}, {"X-Data-Parallel-Rank": "3"}, (3, None)),
    ],
)
async def test_decode_ranks(
    client: Any,
    until: Any,
    version: str,
    fields: dict[str, int],
    headers: dict[str, str],
    expected: tuple[int, int | None],
) -> None:
    """Newer names beat those of #13208, headers beat the body; older versions ignore what they don't know."""
    settings = EmulatorSettings(role="decode", dp_size=4, server_version=version, speed=200.0)
    body = CHAT | fields | {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 1}
    async with start_emulator(settings) as emulator:
        await client.send(emulator.url, "/v1/chat/completions", body, headers)
        received = emulator.received[0]
        assert (received.rank, received.prefill_rank) == expected
        info = (await client.send(emulator.url, "/server_info")).json()
        assert (info["version"], info["dp_size"]) == (version, 4)


@pytest.mark.parametrize(
    ("version", "fields", "rank"),
    [
        (NEW, {"routed_dp_rank": 2}, 2),
        (NEW, {"data_parallel_rank": 1}, 1),
        (OLD, {"data_parallel_rank": 1}, 1),
        (NEW, {}, 3),
        (OLD, {"routed_dp_rank": 2}, 3),
    ],
)
async def test_prefill_ranks(client: Any, until: Any, version: str, fields: dict[str, int], rank: int) -> None:
    """What is said, else room mod dp_size."""
    settings = EmulatorSettings(role="prefill", dp_size=4, server_version=version, speed=200.0)
    body = GENERATE | fields | {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 7}
    async with start_emulator(settings) as emulator:
        call = await client.start(emulator.url, "/generate", body)
        await until(lambda: emulator.snapshot().requests == 1)
        assert emulator.received[0].rank == rank
        await call.abandon()
        await until(lambda: emulator.snapshot().is_idle)


async def test_all_handshake_fields_as_headers(pair: Any) -> None:
    """The body is left alone."""
    headers = {
        "x-override-rid": "mine",
        "x-override-bootstrap-host": "127.0.0.1",
        "x-override-bootstrap-port": str(pair.prefill.bootstrap_port),
        "x-override-bootstrap-room": str(2**63 - 1),
        "x-override-routed-dp-rank": "2",
        "x-override-disagg-prefill-dp-rank": "2",
    }
    call = await pair.client.start(pair.prefill.url, "/generate", GENERATE, headers)
    reply = await pair.client.send(pair.decode.url, "/generate", GENERATE, headers)
    assert reply.status == (await call.finish()).status == 200
    assert reply.json()["meta_info"]["id"] == "mine"
    assert (pair.prefill.received[0].rank, pair.decode.received[0].rank) == (2, 2)


@pytest.mark.parametrize("rank", [4, -1, "1", 1.5, True])
async def test_a_rank_that_is_not_there_is_refused(client: Any, rank: object) -> None:
    """400, and counted."""
    async with start_emulator(EmulatorSettings(dp_size=4)) as emulator:
        reply = await client.send(emulator.url, "/generate", GENERATE | {"routed_dp_rank": rank})
        assert reply.status == 400
        assert reply.json()["object"] == "error"
        assert sum(emulator.snapshot().errors.values()) == 1


async def test_requests_that_name_no_rank_go_round(client: Any) -> None:
    """Regular engines take turns."""
    async with start_emulator(EmulatorSettings(dp_size=3, speed=200.0)) as emulator:
        for _ in range(6):
            await client.send(emulator.url, "/generate", GENERATE)
        assert emulator.snapshot().requests_by_rank == [2, 2, 2]
