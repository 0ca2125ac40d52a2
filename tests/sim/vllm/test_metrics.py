"""What a load monitor reads: one series for each rank, by its global number, exact or late."""

import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdrouter.sim.emulator import Emulator, EmulatorSettings, start_emulator

from .legs import PREFILL_PARAMS, TEXT_PATH, TEXTS

SLOW = TEXTS | {"prompt": "hi", "max_tokens": 100_000}


async def read(client: Any, emulator: Emulator) -> dict[tuple[str, str], float]:
    """Values by name and rank."""
    text = (await client.send(emulator.url, "/metrics")).body.decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(s.name + s.labels.get("source", ""), s.labels["engine"]): s.value for s in samples if "engine" in s.labels}


async def test_preemptions_are_counted(client: Any, until: Any) -> None:
    """Two answers that outgrow the KV: one is preempted, and both come whole."""
    settings = EmulatorSettings(engine="vllm", speed=500.0, kv_capacity_tokens=1000)
    body = TEXTS | {"prompt": "hi", "max_tokens": 700, "ignore_eos": True}
    async with start_emulator(settings) as emulator:
        calls = [await client.start(emulator.url, TEXT_PATH, body) for _ in range(2)]
        await until(lambda: emulator.snapshot().requests == 2)
        replies = [(await call.finish()).json() for call in calls]
        assert [reply["usage"]["completion_tokens"] for reply in replies] == [700, 700]
        values = await read(client, emulator)
        assert values["vllm:num_preemptions_total", "0"] == emulator.snapshot().ranks[0].preemptions > 0
        await until(lambda: emulator.snapshot().is_idle)


async def test_one_series_for_each_rank(client: Any, until: Any) -> None:
    """Labelled with ranks as the header has them; requests and KV as the engine has them, once a rank has worked."""
    settings = EmulatorSettings(engine="vllm", dp_size=2, dp_start_rank=4, speed=0.001, kv_capacity_tokens=128_000)
    async with start_emulator(settings) as emulator:
        calls = [await client.start(emulator.url, TEXT_PATH, SLOW, {"X-data-parallel-rank": "5"}) for _ in range(3)]
        await until(lambda: emulator.snapshot().requests == 3)
        values = await read(client, emulator)
        assert {rank for _, rank in values} == {"4", "5"}
        assert [values.get(("vllm:num_requests_running", rank)) for rank in ("4", "5")] == [None, 1]
        assert [values.get(("vllm:num_requests_waiting", rank)) for rank in ("4", "5")] == [None, 2]
        used = emulator.snapshot().ranks[1].used_tokens
        assert values["vllm:kv_cache_usage_perc", "5"] == used / 128_000
        text = (await client.send(emulator.url, "/metrics")).body.decode()
        assert 'block_size="64",enable_prefix_caching="True",engine="5",kv_cache_size_tokens="128000"' in text
        assert 'num_gpu_blocks="2000"' in text
        assert re.search(r"^process_start_time_seconds 1\.\d+e\+09$", text, re.MULTILINE)
        for call in calls:
            await call.abandon()
        await until(lambda: emulator.snapshot().is_idle)


async def test_counters_by_source(new_vllm_pair: Any) -> None:
    """Computed, found in the cache, or come from another engine; the sum is the prompts'."""
    async with new_vllm_pair() as pair:
        for _ in range(2):
            await pair.nixl(TEXT_PATH, TEXTS)
        prefill, decode = await read(pair.client, pair.prefill), await read(pair.client, pair.decode)
        source = "vllm:prompt_tokens_by_source_total"
        assert prefill[f"{source}local_cache_hit", "0"] == prefill["vllm:prefix_cache_hits_total", "0"] == 128
        assert prefill[f"{source}local_compute", "0"] == 2 * 130 - 128
        assert decode[f"{source}external_kv_transfer", "0"] == 2 * 130
        assert decode[f"{source}local_compute", "0"] == 0
        assert decode["vllm:prompt_tokens_total", "0"] == prefill["vllm:prompt_tokens_total", "0"] == 260
        assert decode["vllm:generation_tokens_total", "0"] == 12
        assert decode["vllm:nixl_num_failed_transfers_total", "0"] == 0


async def test_a_rank_has_no_gauges_before_its_first_request(client: Any) -> None:
    """Where there are several; its counters and its cache are told from the start."""
    async with start_emulator(EmulatorSettings(engine="vllm", dp_size=2)) as emulator:
        gauge, counter = "vllm:num_requests_running", "vllm:prompt_tokens_total"
        values = await read(client, emulator)
        assert [(name, rank) in values for name in (gauge, counter) for rank in "01"] == [False, False, True, True]
        assert (await client.send(emulator.url, TEXT_PATH, TEXTS, {"X-data-parallel-rank": "1"})).status == 200
        values = await read(client, emulator)
        assert [(gauge, rank) in values for rank in "01"] == [False, True]
    async with start_emulator(EmulatorSettings(engine="vllm")) as emulator:
        assert (await read(client, emulator))[gauge, "0"] == 0


async def test_held_blocks_are_in_use_though_nothing_runs(new_vllm_pair: Any) -> None:
    """So a stranded prefill shows in its gauges, as on the real one."""
    async with new_vllm_pair() as pair:
        await pair.prefill_leg(TEXT_PATH, TEXTS, kv_transfer_params=PREFILL_PARAMS)
        values = await read(pair.client, pair.prefill)
        assert values["vllm:num_requests_running", "0"] == values["vllm:num_requests_waiting", "0"] == 0
        assert values["vllm:kv_cache_usage_perc", "0"] > 0


async def test_gauges_lag(client: Any, until: Any) -> None:
    """Requests are there long before the gauges say so."""
    async with start_emulator(EmulatorSettings(engine="vllm", load_delay=30.0, speed=0.001)) as emulator:
        call = await client.start(emulator.url, TEXT_PATH, SLOW)
        await until(lambda: emulator.snapshot().requests == 1)
        assert (await read(client, emulator))["vllm:num_requests_running", "0"] == 0
        await call.abandon()


@pytest.mark.parametrize(("mode", "told"), [("negative", -1.0), ("nan", None), ("missing", None)])
async def test_bad_loads_on_demand(client: Any, mode: str, told: float | None) -> None:
    """-1, not a number, or the last rank missing; and no answer."""
    async with start_emulator(EmulatorSettings(engine="vllm", dp_size=2)) as emulator:
        for rank in "01":
            assert (await client.send(emulator.url, TEXT_PATH, TEXTS, {"X-data-parallel-rank": rank})).status == 200
        await client.send(emulator.url, "/_fault", [{"kind": "bad_load", "mode": mode, "times": 1}])
        values = await read(client, emulator)
        name = "vllm:num_requests_running"
        if mode == "missing":
            assert ((name, "0") in values, (name, "1") in values) == (True, False)
        elif told is None:
            assert values[name, "0"] != values[name, "0"]
        else:
            assert values[name, "0"] == told
        await client.send(emulator.url, "/_fault", [{"kind": "no_load", "times": 1}])
        assert (await client.send(emulator.url, "/metrics")).status == 500
        assert (await client.send(emulator.url, "/health")).status == 200
