"""Which rank serves a request, and which rooms it takes: by version and kind of data parallelism."""

from typing import Any

import pytest

from pdrouter.engines.sglang import Sglang
from pdrouter.engines.sglang_ranks import RankFields
from pdrouter.sim.emulator import EmulatorSettings, start_emulator

GENERATE = {"text": "hello", "sampling_params": {"max_new_tokens": 2}}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}

KINDS = ("replicas", "attention")
NEW = "0.5.23"
OLD = "0.5.6"


@pytest.mark.parametrize(
    ("version", "path", "fields", "headers", "expected"),
    [
        (NEW, "chat", {"routed_dp_rank": 2, "disagg_prefill_dp_rank": 1}, {}, (2, 1)),
        (NEW, "chat", {"data_parallel_rank": 3}, {}, (3, None)),
        (NEW, "chat", {"routed_dp_rank": 2, "data_parallel_rank": 1}, {}, (2, None)),
        (NEW, "chat", {"routed_dp_rank": 2}, {"X-Data-Parallel-Rank": "3"}, (3, None)),
        (NEW, "generate", {"routed_dp_rank": 2}, {"X-Data-Parallel-Rank": "3"}, (2, None)),
        (NEW, "chat", {"routed_dp_rank": 2}, {"x-override-routed-dp-rank": "3"}, (2, None)),
        (NEW, "chat", {}, {}, (0, None)),
        # Of a pull request that no release has.
        (NEW, "chat", {"decode_dp_rank": 2, "data_parallel_rank": 1}, {}, (1, None)),
        # Before 0.5.10 a decode side takes its own rank for the prefill's.
        ("0.5.9", "chat", {"data_parallel_rank": 3}, {}, (3, 3)),
        ("0.5.9", "chat", {"routed_dp_rank": 2, "disagg_prefill_dp_rank": 1}, {}, (0, None)),
        ("0.5.9", "chat", {}, {"X-Data-Parallel-Rank": "3"}, (0, None)),
        # Before 0.5.7 OpenAI's endpoints take no rank.
        (OLD, "generate", {"data_parallel_rank": 3}, {}, (3, 3)),
        (OLD, "chat", {"data_parallel_rank": 3}, {}, (1, None)),
    ],
)
async def test_decode_ranks(
    client: Any,
    version: str,
    path: str,
    fields: dict[str, int],
    headers: dict[str, str],
    expected: tuple[int, int | None],
) -> None:
    """Its own and the prefill's, as each version reads them."""
    settings = EmulatorSettings(role="decode", dp_size=4, server_version=version, speed=200.0)
    full = "/generate" if path == "generate" else "/v1/chat/completions"
    body = (GENERATE if path == "generate" else CHAT) | fields
    body |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 1}
    async with start_emulator(settings) as emulator:
        await client.send(emulator.url, full, body, headers)
        received = emulator.received[0]
        assert (received.rank, received.prefill_rank) == expected


@pytest.mark.parametrize(
    ("version", "method", "fields", "rank"),
    [
        (NEW, "auto", {"routed_dp_rank": 2, "disagg_prefill_dp_rank": 2}, 2),
        (NEW, "round_robin", {"data_parallel_rank": 1}, 1),
        ("0.5.10", "auto", {"data_parallel_rank": 1}, 1),
        (OLD, "auto", {"data_parallel_rank": 1}, 1),
        (OLD, "auto", {"routed_dp_rank": 2}, 3),
        ("0.5.10", "auto", {}, 3),
        (NEW, "round_robin", {}, 0),
    ],
)
async def test_prefill_ranks(
    client: Any, until: Any, version: str, method: Any, fields: dict[str, int], rank: int
) -> None:
    """What is said, else room mod dp_size, or in turn."""
    settings = EmulatorSettings(
        role="prefill", dp_size=4, server_version=version, speed=200.0, load_balance_method=method
    )
    body = GENERATE | fields | {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 7}
    async with start_emulator(settings) as emulator:
        call = await client.start(emulator.url, "/generate", body)
        await until(lambda: emulator.snapshot().requests == 1)
        assert emulator.received[0].rank == rank
        await call.abandon()
        await until(lambda: emulator.snapshot().is_idle)


NAMED = {"disagg_prefill_dp_rank": 1}
RANK_1 = {"routed_dp_rank": 1}


@pytest.mark.parametrize(
    ("version", "kind", "room", "fields", "is_refused"),
    [
        # Without a rank: replicas serve rooms that leave 0 only.
        (NEW, "replicas", 0, {}, False),
        (NEW, "replicas", 1, {}, True),
        (NEW, "attention", 1, {}, False),
        # A rank alone.
        (NEW, "replicas", 0, RANK_1, False),
        (NEW, "replicas", 1, RANK_1, True),
        (NEW, "attention", 0, RANK_1, True),
        (NEW, "attention", 1, RANK_1, False),
        # The prefill's rank named as such: since 0.5.16 nothing is compared.
        *(
            (version, kind, room, RANK_1 | NAMED, False)
            for version in (NEW, "0.5.16")
            for kind in KINDS
            for room in (0, 1)
        ),
        ("0.5.15.post1", "replicas", 0, RANK_1 | NAMED, False),
        ("0.5.15.post1", "replicas", 1, RANK_1 | NAMED, True),
        ("0.5.11", "attention", 0, RANK_1 | NAMED, True),
        ("0.5.11", "attention", 1, RANK_1 | NAMED, False),
        # Before 0.5.11 nothing is.
        ("0.5.10", "replicas", 1, RANK_1, False),
        ("0.5.9", "attention", 0, {"data_parallel_rank": 1}, False),
        # Nor where ranks take turns.
        (NEW, "turns", 1, RANK_1, False),
    ],
)
async def test_rooms_that_conflict_with_the_rank(
    client: Any, until: Any, version: str, kind: str, room: int, fields: dict[str, int], is_refused: bool
) -> None:
    """The prefill fails such a request as soon as it sees it."""
    method: Any = "round_robin" if kind == "turns" else "auto"
    settings = EmulatorSettings(
        role="prefill", dp_size=2, server_version=version, dp_attention=kind == "attention", load_balance_method=method
    )
    body = GENERATE | fields | {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": room}
    async with start_emulator(settings) as emulator:
        call = await client.start(emulator.url, "/generate", body)
        if is_refused:
            reply = await call.finish()
            assert reply.status == 500
            assert "follow_bootstrap_room conflict: dispatched to dp_rank" in reply.json()["message"]
            assert emulator.snapshot().errors == {"room_conflict": 1}
        else:
            await until(lambda: emulator.snapshot().requests == 1)
            await call.abandon()
        await until(lambda: emulator.snapshot().is_idle)


@pytest.mark.parametrize("is_decode_first", [False, True])
async def test_a_decode_side_is_not_told_of_a_conflict(new_pair: Any, until: Any, is_decode_first: bool) -> None:
    """It waits for KV that never comes."""
    async with new_pair(dp_size=2, dp_attention=False) as pair:
        body = GENERATE | pair.bootstrap(bootstrap_room=3)
        legs = [pair.decode, pair.prefill] if is_decode_first else [pair.prefill, pair.decode]
        calls = {}
        for engine in legs:
            calls[engine] = await pair.client.start(engine.url, "/generate", body)
            await until(lambda engine=engine: engine.snapshot().total_requests == 1)
        assert (await calls[pair.prefill].finish()).status == 500
        await until(lambda: pair.prefill.snapshot().wanted_rooms == [3])
        assert pair.decode.snapshot().requests == 1
        await calls[pair.decode].abandon()
        await until(lambda: pair.is_idle)


@pytest.mark.parametrize(
    ("version", "kind", "told", "is_found"),
    [
        (NEW, "attention", {}, True),
        (NEW, "attention", NAMED, False),
        (NEW, "replicas", {}, False),
        ("0.5.9", "attention", {}, False),
    ],
)
async def test_ranks_that_take_turns_are_found_by_what_the_prefill_registers(
    new_pair: Any, until: Any, version: str, kind: str, told: dict[str, int], is_found: bool
) -> None:
    """Its rank inside the group, so 0 of every replica; nothing if the request names it; nothing before 0.5.10."""
    settings = {"load_balance_method": "round_robin", "server_version": version, "dp_attention": kind == "attention"}
    async with new_pair(dp_size=2, **settings) as pair:
        own = {"routed_dp_rank": 1} if version == NEW else {"data_parallel_rank": 1}
        body = GENERATE | pair.bootstrap(bootstrap_room=2)
        prefill = await pair.client.start(pair.prefill.url, "/generate", body | own | told)
        await until(lambda: pair.prefill.snapshot().requests == 1)
        decode = await pair.client.start(pair.decode.url, "/generate", body)
        if is_found:
            assert (await decode.finish()).status == (await prefill.finish()).status == 200
        else:
            await until(lambda: pair.decode.snapshot().total_requests == 1)
            await decode.abandon()
            await prefill.abandon()
        await until(lambda: pair.is_idle)


@pytest.mark.parametrize(
    ("version", "dp_attention", "told"),
    [
        (NEW, False, {"dp_size": 2, "attn_dp_size": 1, "enable_dp_attention": False}),
        (NEW, True, {"dp_size": 1, "attn_dp_size": 2, "enable_dp_attention": True}),
        ("0.5.21", False, {"dp_size": 2, "enable_dp_attention": False}),
        ("0.5.21", True, {"dp_size": 2, "enable_dp_attention": True}),
        (OLD, True, {"dp_size": 2, "enable_dp_attention": True}),
    ],
)
async def test_what_it_tells_of_its_ranks(
    client: Any, version: str, dp_attention: bool, told: dict[str, object]
) -> None:
    """Each version in its own words, and the router's reading counts them all."""
    settings = EmulatorSettings(dp_size=2, server_version=version, dp_attention=dp_attention)
    async with start_emulator(settings) as emulator:
        reply = await client.send(emulator.url, "/server_info")
        info = reply.json()
        assert {
            name: info.get(name) for name in ("dp_size", "attn_dp_size", "enable_dp_attention") if name in info
        } == told
        assert (info["disaggregation_mode"], len(info["internal_states"])) == ("null", 2)
        described = Sglang(RankFields.AUTO).describe("/server_info", reply.body)
        assert described is not None
        assert (described.dp_size, described.dp_attention, described.contradiction) == (2, dp_attention, None)
        found = [(await client.send(emulator.url, path)).status for path in ("/v1/loads", "/get_load")]
        assert found == [404 if version == OLD else 200, 404 if version in (NEW, "0.5.21") else 200]


async def test_all_handshake_fields_as_headers(new_pair: Any) -> None:
    """The body is left alone, where the engine is set to read them."""
    async with new_pair(takes_overrides=True) as pair:
        await send_all_as_headers(pair)


async def send_all_as_headers(pair: Any) -> None:
    """Send a pair of legs whose bodies say nothing."""
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
        told = reply.json()
        assert "routed_dp_rank" in told.get("error", told)["message"]
        assert sum(emulator.snapshot().errors.values()) == 1


async def test_requests_that_name_no_rank_go_round(client: Any) -> None:
    """Regular engines take turns."""
    async with start_emulator(EmulatorSettings(dp_size=3, speed=200.0)) as emulator:
        for _ in range(6):
            await client.send(emulator.url, "/generate", GENERATE)
        assert emulator.snapshot().requests_by_rank == [2, 2, 2]
