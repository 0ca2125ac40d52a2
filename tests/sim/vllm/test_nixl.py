"""NIXL over real sockets: the right order works, every broken rule is refused or counted."""

import asyncio
from typing import Any

import pytest

from pdrouter.sim.emulator import EmulatorSettings, expected_text, render_chat, start_emulator

from .legs import CHAT, CHAT_PATH, FAST, PREFILL_PARAMS, TEXT, TEXT_PATH, TEXTS, VllmPair

CHAT_TEXT = render_chat(CHAT["messages"])
OBJECT_KEYS = {
    "do_remote_prefill",
    "do_remote_decode",
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "tp_size",
    "dcp_size",
    "pp_size",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
    "transfer_mode",
    "remote_prefill_cached_tokens",
}


@pytest.fixture
async def pair(new_vllm_pair: Any) -> Any:
    """Fast NIXL pair of two ranks each."""
    async with new_vllm_pair(dp_size=2) as pair:
        yield pair


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_good_pair(pair: VllmPair, until: Any, is_stream: bool) -> None:
    """The prefill answers one token and the whole object, decode the same text as one engine alone; nothing is left."""
    first, second = await pair.nixl(CHAT_PATH, CHAT | {"stream": is_stream})
    params = first.json()["kv_transfer_params"]
    assert set(params) == OBJECT_KEYS
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert first.json()["choices"][0]["message"]["content"] == expected_text(CHAT_TEXT, 1)
    if is_stream:
        text = "".join(c["delta"].get("content", "") for e in second.events() for c in e["choices"])
    else:
        text = second.json()["choices"][0]["message"]["content"]
        tokens = second.json()["usage"]["prompt_tokens"]
        assert params["remote_num_tokens"] == tokens
        assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert second.json()["kv_transfer_params"] is None
    assert text == expected_text(CHAT_TEXT, 6)
    await until(lambda: pair.is_idle)
    for snapshot in (pair.prefill.snapshot(), pair.decode.snapshot()):
        assert snapshot.errors == {}
        assert (snapshot.held_requests, snapshot.stranded_requests, snapshot.recomputed_requests) == (0, 0, 0)


async def test_the_prefill_s_cache_is_told(pair: VllmPair) -> None:
    """In its usage, in the object, and, since that goes on to decode, in the usage of the answer."""
    for cached in (0, 0, 128, 128):  # two ranks in turn
        first, second = await pair.nixl(TEXT_PATH, TEXTS)
        for reply in (first, second):
            assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        assert first.json()["kv_transfer_params"]["remote_prefill_cached_tokens"] == cached


async def test_older_versions_do_not_tell_the_prefill_s_cache(new_vllm_pair: Any) -> None:
    """There all that came from the prefill counts as cached in decode's usage."""
    async with new_vllm_pair(server_version="0.11.0") as pair:
        first, second = await pair.nixl(TEXT_PATH, TEXTS)
        assert "remote_prefill_cached_tokens" not in first.json()["kv_transfer_params"]
        assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 129


async def test_blocks_are_held_until_they_are_pulled(pair: VllmPair, until: Any) -> None:
    """The prefill's KV stays in use after its answer, and is free once decode has it."""
    first = await pair.prefill_leg(TEXT_PATH, TEXTS, kv_transfer_params=PREFILL_PARAMS)
    held = pair.prefill.snapshot()
    assert (held.requests, held.held_requests, held.is_idle) == (0, 1, False)
    assert held.used_tokens == first.json()["usage"]["prompt_tokens"]
    reply = await pair.client.send(
        pair.decode.url, TEXT_PATH, TEXTS | {"kv_transfer_params": first.json()["kv_transfer_params"]}
    )
    assert reply.json()["choices"][0]["text"] == expected_text(TEXT, 6)
    await until(lambda: pair.is_idle)


async def test_blocks_that_nobody_pulls_are_stranded(new_vllm_pair: Any, until: Any) -> None:
    """After the timeout they are freed and counted; a decode that comes later fails."""
    async with new_vllm_pair(kv_hold_timeout_s=1.0) as pair:
        first = await pair.prefill_leg(TEXT_PATH, TEXTS, kv_transfer_params=PREFILL_PARAMS)
        await until(lambda: pair.prefill.snapshot().is_idle)
        assert pair.prefill.snapshot().stranded_requests == 1
        metrics = (await pair.client.send(pair.prefill.url, "/metrics")).body.decode()
        assert 'vllm:nixl_num_kv_expired_reqs_total{engine="0",model_name="emulated"} 1.0' in metrics
        late = TEXTS | {"kv_transfer_params": first.json()["kv_transfer_params"]}
        assert (await pair.client.send(pair.decode.url, TEXT_PATH, late)).status == 500
        assert pair.decode.snapshot().errors == {"kv_not_held": 1}


async def test_a_decode_whose_client_leaves_gives_the_blocks_up(new_vllm_pair: Any, until: Any) -> None:
    """Before it had room, while it pulled, or while it wrote: the prefill holds nothing for it."""
    async with new_vllm_pair(kv_capacity_tokens=1000, speed=1.0) as pair:
        body = TEXTS | {"max_tokens": 300, "prompt": "word " * 480}
        calls = []
        for _ in range(2):  # the second has no room
            first = await pair.prefill_leg(TEXT_PATH, body, kv_transfer_params=PREFILL_PARAMS)
            leg = body | {"kv_transfer_params": first.json()["kv_transfer_params"]}
            calls.append(await pair.client.start(pair.decode.url, TEXT_PATH, leg))
            await until(lambda: pair.decode.snapshot().requests == len(calls))
        assert pair.decode.snapshot().ranks[0].prealloc == 1
        for call in reversed(calls):
            await call.abandon()
        await until(lambda: pair.is_idle)
        assert pair.prefill.snapshot().stranded_requests == 0
        assert pair.prefill.snapshot().errors == pair.decode.snapshot().errors == {}


REFUSED = [
    {"max_tokens": 0},
    {"max_tokens": 20_000_000},
    {"min_tokens": 9, "max_tokens": 2},
    {"model": "other"},
    {"n": 0},
]


@pytest.mark.parametrize("fields", REFUSED)
async def test_a_decode_that_refuses_lets_the_prefill_go(pair: VllmPair, until: Any, fields: dict[str, Any]) -> None:
    """A router can so free what nobody will want; the prompt needn't be that of the prefill."""
    first = await pair.prefill_leg(TEXT_PATH, TEXTS, kv_transfer_params=PREFILL_PARAMS)
    release = {"prompt": "x", "kv_transfer_params": first.json()["kv_transfer_params"]} | fields
    assert (await pair.client.send(pair.decode.url, TEXT_PATH, release)).status in {400, 404}
    await until(lambda: pair.is_idle)
    assert pair.prefill.snapshot().errors == {}
    assert pair.prefill.snapshot().stranded_requests == 0


async def test_an_empty_prompt_lets_nothing_go(pair: VllmPair) -> None:
    """It is refused before anybody looks at the rest."""
    first = await pair.prefill_leg(TEXT_PATH, TEXTS, kv_transfer_params=PREFILL_PARAMS)
    release = {"prompt": "", "max_tokens": 0, "kv_transfer_params": first.json()["kv_transfer_params"]}
    assert (await pair.client.send(pair.decode.url, TEXT_PATH, release)).status == 400
    assert pair.prefill.snapshot().held_requests == 1


BAD_PREFILLS = [
    ({"kv_transfer_params": None}, "no_kv_transfer_params"),
    ({"max_tokens": 2}, "prefill_not_one_token"),
    ({"max_tokens": None}, "prefill_not_one_token"),
    ({"max_completion_tokens": 5}, "prefill_not_one_token"),
    ({"stream": True}, "prefill_streams"),
    ({"stream_options": {"include_usage": True}}, "prefill_streams"),
    ({"min_tokens": 2}, "bad_request"),
    ({"kv_transfer_params": PREFILL_PARAMS | {"do_remote_prefill": True}}, "bad_kv_transfer_params"),
    ({"kv_transfer_params": {"do_remote_prefill": True}}, "wrong_role"),
]


@pytest.mark.parametrize(("fields", "code"), BAD_PREFILLS)
async def test_a_wrong_prefill_leg_is_refused(pair: VllmPair, fields: dict[str, object], code: str) -> None:
    """400 in vLLM's error shape, counted, and nothing is held."""
    reply = await pair.prefill_leg(CHAT_PATH, CHAT, **({"kv_transfer_params": PREFILL_PARAMS} | fields))
    assert reply.status == 400
    assert reply.json()["error"]["code"] == 400
    assert pair.prefill.snapshot().errors == {code: 1}
    assert pair.is_idle


async def test_the_least_that_a_prefill_leg_must_say(pair: VllmPair) -> None:
    """``do_remote_decode`` alone is enough, as on the real one."""
    reply = await pair.prefill_leg(TEXT_PATH, TEXTS, kv_transfer_params={"do_remote_decode": True})
    assert reply.json()["kv_transfer_params"]["do_remote_prefill"] is True


BAD_DECODES = [
    ({"remote_engine_id": "another"}, "wrong_engine_id"),
    ({"remote_request_id": "another"}, "kv_not_held"),
    ({"remote_block_ids": [[1, 2]]}, "wrong_blocks"),
    ({"remote_num_tokens": 3}, "params_changed"),
    ({"remote_num_tokens": 130.0}, "params_changed"),
    ({"transfer_mode": None}, "params_changed"),
    ({"added": 1}, "params_changed"),
    ({"remote_port": 1}, "prefill_unreachable"),
]


@pytest.mark.parametrize(("fields", "code"), BAD_DECODES)
async def test_params_that_are_not_the_prefill_s_fail_the_decode(
    pair: VllmPair, fields: dict[str, object], code: str
) -> None:
    """500, counted on the decode side, told by the metrics, and the blocks stay held."""
    _, second = await pair.nixl(TEXT_PATH, TEXTS, **fields)
    assert second.status == 500
    assert pair.decode.snapshot().errors == {code: 1}
    assert pair.decode.snapshot().is_idle
    assert pair.prefill.snapshot().held_requests == 1
    metrics = (await pair.client.send(pair.decode.url, "/metrics")).body.decode()
    assert 'vllm:nixl_num_failed_transfers_total{engine="0",model_name="emulated"} 1.0' in metrics


MALFORMED = [
    {"remote_block_ids": None},
    {"remote_block_ids": [1, 2]},
    {"remote_block_ids": [[1.0]]},
    {"remote_engine_id": None},
    {"remote_request_id": None},
    {"remote_host": None},
    {"remote_port": "5600"},
    {"remote_port": 0},
    {"do_remote_decode": True},
]


@pytest.mark.parametrize("fields", MALFORMED)
async def test_malformed_params_are_refused(pair: VllmPair, fields: dict[str, object]) -> None:
    """400 at once, where the real one would read the prompt again without a word."""
    _, second = await pair.nixl(TEXT_PATH, TEXTS, **fields)
    assert second.status == 400
    assert pair.decode.snapshot().errors == {"bad_kv_transfer_params": 1}


async def test_missing_params_are_refused_key_by_key(pair: VllmPair) -> None:
    """The object goes on as it is: a key that a router dropped is missed, whichever it is."""
    for key in OBJECT_KEYS:
        first = await pair.prefill_leg(TEXT_PATH, TEXTS, kv_transfer_params=PREFILL_PARAMS)
        params = {k: v for k, v in first.json()["kv_transfer_params"].items() if k != key}
        reply = await pair.client.send(pair.decode.url, TEXT_PATH, TEXTS | {"kv_transfer_params": params})
        assert reply.status in {400, 500}, key


async def test_another_prompt_fails_the_decode(pair: VllmPair) -> None:
    """KV of another prompt would answer nonsense; it is refused."""
    first = await pair.prefill_leg(TEXT_PATH, TEXTS, kv_transfer_params=PREFILL_PARAMS)
    body = TEXTS | {"prompt": TEXT + "!", "kv_transfer_params": first.json()["kv_transfer_params"]}
    assert (await pair.client.send(pair.decode.url, TEXT_PATH, body)).status == 500
    assert pair.decode.snapshot().errors == {"prompt_mismatch": 1}


async def test_blocks_are_pulled_once(pair: VllmPair) -> None:
    """A second decode with the same object finds them gone."""
    first, _ = await pair.nixl(TEXT_PATH, TEXTS)
    body = TEXTS | {"kv_transfer_params": first.json()["kv_transfer_params"]}
    assert (await pair.client.send(pair.decode.url, TEXT_PATH, body)).status == 500
    assert pair.decode.snapshot().errors == {"kv_not_held": 1}


async def test_a_prefill_started_again_has_another_id(pair: VllmPair) -> None:
    """What an engine gave before it was started again is refused by the new one at the same address."""
    first = await pair.prefill_leg(TEXT_PATH, TEXTS, kv_transfer_params=PREFILL_PARAMS)
    async with start_emulator(EmulatorSettings(engine="vllm", role="prefill", dp_size=2, speed=FAST)) as other:
        params = first.json()["kv_transfer_params"] | {"remote_port": other.bootstrap_port}
        reply = await pair.client.send(pair.decode.url, TEXT_PATH, TEXTS | {"kv_transfer_params": params})
        assert reply.status == 500
        assert pair.decode.snapshot().errors == {"wrong_engine_id": 1}


async def test_a_decode_without_params_reads_the_prompt_itself(pair: VllmPair) -> None:
    """In silence, as the real one: only the snapshot and the metrics tell."""
    reply = await pair.client.send(pair.decode.url, TEXT_PATH, TEXTS, {"X-data-parallel-rank": "1"})
    assert reply.json()["choices"][0]["text"] == expected_text(TEXT, 6)
    assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert pair.decode.snapshot().recomputed_requests == 1
    assert pair.decode.snapshot().errors == {}
    metrics = (await pair.client.send(pair.decode.url, "/metrics")).body.decode()
    source = 'vllm:prompt_tokens_by_source_total{engine="1",model_name="emulated",source='
    assert f'{source}"external_kv_transfer"}} 0.0' in metrics
    assert f'{source}"local_compute"}} {reply.json()["usage"]["prompt_tokens"]}.0' in metrics


async def test_several_samples_share_a_pull(pair: VllmPair, until: Any) -> None:
    """Decode with n of 2 pulls once for each; both texts are right, and the prefill is free afterwards."""
    first = await pair.prefill_leg(TEXT_PATH, TEXTS, kv_transfer_params=PREFILL_PARAMS)
    body = TEXTS | {"n": 2, "kv_transfer_params": first.json()["kv_transfer_params"]}
    reply = await pair.client.send(pair.decode.url, TEXT_PATH, body)
    assert [c["text"] for c in reply.json()["choices"]] == [expected_text(TEXT, 6, choice) for choice in (0, 1)]
    await until(lambda: pair.is_idle)


async def test_blocks_stay_until_the_last_sample_has_pulled(new_vllm_pair: Any, until: Any) -> None:
    """Decode has room for one sample at a time: the second pulls when the first has long been done."""
    async with new_vllm_pair(kv_capacity_tokens=200) as pair:
        first = await pair.prefill_leg(TEXT_PATH, TEXTS, kv_transfer_params=PREFILL_PARAMS)
        body = TEXTS | {"n": 2, "kv_transfer_params": first.json()["kv_transfer_params"]}
        reply = await pair.client.send(pair.decode.url, TEXT_PATH, body)
        assert reply.status == 200
        assert [c["text"] for c in reply.json()["choices"]] == [expected_text(TEXT, 6, choice) for choice in (0, 1)]
        await until(lambda: pair.is_idle)


async def test_samples_and_lists_on_a_prefill_strand_blocks(pair: VllmPair) -> None:
    """One object for all: of two samples the last one's blocks, of two prompts the first's; the others stay."""
    sampled = await pair.prefill_leg(TEXT_PATH, TEXTS, n=2, kv_transfer_params=PREFILL_PARAMS)
    assert sampled.json()["kv_transfer_params"]["remote_request_id"].startswith("1_cmpl-")
    prompts = [TEXT, TEXT + "!"]
    listed = await pair.prefill_leg(TEXT_PATH, TEXTS, prompt=prompts, kv_transfer_params=PREFILL_PARAMS)
    params = listed.json()["kv_transfer_params"]
    assert params["remote_request_id"].startswith(f"{listed.json()['id']}-0-")
    assert pair.prefill.snapshot().held_requests == 4
    body = TEXTS | {"prompt": prompts, "kv_transfer_params": params}
    assert (await pair.client.send(pair.decode.url, TEXT_PATH, body)).status == 500
    assert pair.decode.snapshot().errors == {"prompt_mismatch": 1}


async def test_thirty_two_at_once(pair: VllmPair, until: Any) -> None:
    """Every answer is that of its own prompt, and all is free at the end."""
    bodies = [TEXTS | {"prompt": f"{i} {TEXT}"} for i in range(32)]
    replies = await asyncio.gather(*(pair.nixl(TEXT_PATH, body) for body in bodies))
    texts = [second.json()["choices"][0]["text"] for _, second in replies]
    assert texts == [expected_text(body["prompt"], 6) for body in bodies]
    await until(lambda: pair.is_idle)
    assert pair.prefill.snapshot().requests_by_rank == [16, 16]


async def test_a_regular_engine_with_nixl_does_both(client: Any, until: Any) -> None:
    """Prefill for itself, decode for itself, or serve alone."""
    settings = EmulatorSettings(engine="vllm", kv_connector="nixl", speed=FAST)
    async with start_emulator(settings) as emulator:
        pair = VllmPair(client, emulator, emulator)
        _, second = await pair.nixl(TEXT_PATH, TEXTS)
        alone = await client.send(emulator.url, TEXT_PATH, TEXTS)
        for reply in (second, alone):
            assert reply.json()["choices"][0]["text"] == expected_text(TEXT, 6)
        await until(lambda: pair.is_idle)
        assert emulator.snapshot().recomputed_requests == 0
