"""Mooncake over real sockets: both legs at once, joined by a transfer id through the prefill's bootstrap server."""

from typing import Any

import pytest

from pdrouter.sim.emulator import EmulatorSettings, expected_text, start_emulator

from .legs import FAST, TEXT, TEXT_PATH, TEXTS, VllmPair, make_pair


@pytest.fixture
async def pair(new_vllm_pair: Any) -> Any:
    """Fast Mooncake pair of two ranks each."""
    async with new_vllm_pair(dp_size=2, kv_connector="mooncake") as pair:
        yield pair


async def test_the_bootstrap_server_tells_engines_by_rank(pair: VllmPair) -> None:
    """``/query`` is at the bootstrap port only, and nothing else is there."""
    bootstrap = f"http://127.0.0.1:{pair.prefill.bootstrap_port}"
    ranks = (await pair.client.send(bootstrap, "/query")).json()
    assert list(ranks) == ["0", "1"]
    assert len({rank["engine_id"] for rank in ranks.values()}) == 2
    assert (await pair.client.send(bootstrap, "/health")).status == 404
    assert (await pair.client.send(pair.prefill.url, "/query")).status == 404
    assert pair.decode.bootstrap_port is None


@pytest.mark.parametrize("rank", [0, 1])
async def test_both_legs_at_once(pair: VllmPair, until: Any, rank: int) -> None:
    """Decode answers in full, the prefill with one token and no params, and nothing is left."""
    legs = await pair.mooncake_legs(TEXTS, rank)
    call = await pair.client.start(pair.prefill.url, TEXT_PATH, legs[0], {"X-data-parallel-rank": str(rank)})
    second = await pair.client.send(pair.decode.url, TEXT_PATH, legs[1])
    first = await call.finish()
    assert first.json()["choices"][0]["text"] == expected_text(TEXT, 1)
    assert first.json()["kv_transfer_params"] is None
    assert second.json()["choices"][0]["text"] == expected_text(TEXT, 6)
    assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 129
    await until(lambda: pair.is_idle)
    assert pair.prefill.snapshot().errors == pair.decode.snapshot().errors == {}


async def test_the_order_of_the_legs_does_not_matter(pair: VllmPair, until: Any) -> None:
    """Decode first: it waits with its KV reserved. Prefill first: it is answered and holds its KV."""
    prefill, decode = await pair.mooncake_legs(TEXTS)
    call = await pair.client.start(pair.decode.url, TEXT_PATH, decode)
    await until(lambda: pair.decode.snapshot().ranks[0].transfer == 1)
    assert (await pair.client.send(pair.prefill.url, TEXT_PATH, prefill)).status == 200
    assert (await call.finish()).status == 200
    prefill, decode = await pair.mooncake_legs(TEXTS, 1)
    assert (await pair.client.send(pair.prefill.url, TEXT_PATH, prefill)).status == 200
    assert pair.prefill.snapshot().held_requests == 1
    assert (await pair.client.send(pair.decode.url, TEXT_PATH, decode)).status == 200
    await until(lambda: pair.is_idle)


async def test_a_transfer_id_used_twice_is_refused(pair: VllmPair, until: Any) -> None:
    """On either side, also long after its first use."""
    legs = await pair.mooncake_legs(TEXTS)
    assert [reply.status for reply in await pair.both(TEXT_PATH, *legs)] == [200, 200]
    for emulator, leg in ((pair.prefill, legs[0]), (pair.decode, legs[1])):
        assert (await pair.client.send(emulator.url, TEXT_PATH, leg)).status == 400
        assert emulator.snapshot().errors == {"transfer_id_reused": 1}
    await until(lambda: pair.is_idle)


async def test_samples_and_lists_would_share_a_transfer_id(pair: VllmPair) -> None:
    """Refused on both sides."""
    for fields in ({"n": 2}, {"prompt": [TEXT, "other"]}):
        for reply in await pair.both(TEXT_PATH, *[leg | fields for leg in await pair.mooncake_legs(TEXTS)]):
            assert reply.status == 400
    assert pair.prefill.snapshot().errors == pair.decode.snapshot().errors == {"transfer_id_reused": 2}


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"transfer_id": None}, "bad_kv_transfer_params"),
        ({"remote_engine_id": None}, "bad_kv_transfer_params"),
        ({"remote_bootstrap_addr": "127.0.0.1:8998"}, "bad_kv_transfer_params"),
        ({"remote_bootstrap_addr": "http://127.0.0.1:x"}, "bad_kv_transfer_params"),
        ({"remote_bootstrap_addr": "http://127.0.0.1:1"}, "bootstrap_unreachable"),
        ({"remote_engine_id": "another"}, "wrong_engine_id"),
    ],
)
async def test_a_wrong_decode_leg_is_refused(pair: VllmPair, fields: dict[str, object], code: str) -> None:
    """400 for what is malformed, 500 for what isn't there; counted, and nothing is held."""
    _, decode = await pair.mooncake_legs(TEXTS)
    decode["kv_transfer_params"] |= fields
    reply = await pair.client.send(pair.decode.url, TEXT_PATH, decode)
    assert reply.status == (400 if code.startswith("bad") else 500)
    assert pair.decode.snapshot().errors == {code: 1}
    assert pair.decode.snapshot().is_idle


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"max_tokens": 6}, "prefill_not_one_token"),
        ({"stream": True}, "prefill_streams"),
        ({"kv_transfer_params": None}, "no_kv_transfer_params"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "bad_kv_transfer_params"),
    ],
)
async def test_a_wrong_prefill_leg_is_refused(pair: VllmPair, fields: dict[str, object], code: str) -> None:
    """400, counted, and nothing is held."""
    prefill, _ = await pair.mooncake_legs(TEXTS)
    assert (await pair.client.send(pair.prefill.url, TEXT_PATH, prefill | fields)).status == 400
    assert pair.prefill.snapshot().errors == {code: 1}
    assert pair.is_idle


async def test_the_engine_of_another_rank_is_refused(pair: VllmPair) -> None:
    """The KV is on rank 1, decode was told rank 0: both sides say so, and the prefill keeps its KV."""
    prefill, decode = await pair.mooncake_legs(TEXTS, rank=0)
    await pair.client.send(pair.prefill.url, TEXT_PATH, prefill, {"X-data-parallel-rank": "1"})
    assert (await pair.client.send(pair.decode.url, TEXT_PATH, decode)).status == 500
    assert pair.prefill.snapshot().errors == pair.decode.snapshot().errors == {"wrong_engine_id": 1}
    assert pair.prefill.snapshot().held_requests == 1


async def test_different_prompts_are_refused(pair: VllmPair) -> None:
    """KV of another prompt would answer nonsense."""
    prefill, decode = await pair.mooncake_legs(TEXTS)
    _, second = await pair.both(TEXT_PATH, prefill | {"prompt": "another"}, decode)
    assert second.status == 500
    assert pair.decode.snapshot().errors == {"prompt_mismatch": 1}


async def test_engine_ids_change_when_a_prefill_is_started_again(client: Any, pair: VllmPair) -> None:
    """A decode that brings the old id to the new one is refused."""
    _, decode = await pair.mooncake_legs(TEXTS)
    settings = EmulatorSettings(engine="vllm", role="prefill", dp_size=2, kv_connector="mooncake", speed=FAST)
    async with start_emulator(settings) as other:
        decode["kv_transfer_params"] |= {"remote_bootstrap_addr": f"http://127.0.0.1:{other.bootstrap_port}"}
        assert (await client.send(pair.decode.url, TEXT_PATH, decode)).status == 500
        assert pair.decode.snapshot().errors == {"wrong_engine_id": 1}


async def test_a_leg_without_the_other(client: Any, until: Any) -> None:
    """Decode fails after its timeout; the prefill's KV is stranded after its own."""
    async with make_pair(client, kv_connector="mooncake", handshake_timeout_s=2.0, kv_hold_timeout_s=2.0) as pair:
        prefill, _ = await pair.mooncake_legs(TEXTS)
        _, decode = await pair.mooncake_legs(TEXTS)
        first, second = await pair.both(TEXT_PATH, prefill, decode)
        assert (first.status, second.status) == (200, 500)
        await until(lambda: pair.is_idle)
        assert pair.prefill.snapshot().stranded_requests == 1
        assert pair.decode.snapshot().errors == {"handshake_timeout": 1}


async def test_a_prefill_that_dies_leaves_its_decode_waiting(client: Any, until: Any) -> None:
    """As in life, until somebody ends it; then all is free."""
    async with make_pair(client, kv_connector="mooncake") as pair:
        _, decode = await pair.mooncake_legs(TEXTS)
        call = await client.start(pair.decode.url, TEXT_PATH, decode)
        await until(lambda: pair.decode.snapshot().ranks[0].transfer == 1)
        await pair.prefill.stop()
        assert pair.decode.snapshot().ranks[0].transfer == 1
        await call.abandon()
        await until(lambda: pair.decode.snapshot().is_idle)


@pytest.mark.parametrize("is_prefill", [True, False])
async def test_a_client_that_leaves_frees_its_leg(client: Any, until: Any, is_prefill: bool) -> None:
    """Before the prefill is over, or while decode waits for it."""
    async with make_pair(client, kv_connector="mooncake", speed=0.001) as pair:
        legs = await pair.mooncake_legs(TEXTS)
        emulator, leg = (pair.prefill, legs[0]) if is_prefill else (pair.decode, legs[1])
        call = await client.start(emulator.url, TEXT_PATH, leg)
        await until(lambda: emulator.snapshot().used_tokens > 0)
        await call.abandon()
        await until(lambda: emulator.snapshot().is_idle)


async def test_a_decode_without_params_reads_the_prompt_itself(pair: VllmPair) -> None:
    """Counted."""
    reply = await pair.client.send(pair.decode.url, TEXT_PATH, TEXTS)
    assert reply.json()["choices"][0]["text"] == expected_text(TEXT, 6)
    assert pair.decode.snapshot().recomputed_requests == 1
