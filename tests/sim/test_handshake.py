"""The PD handshake over real sockets: the right order works, every broken rule is refused loudly."""

import asyncio
from typing import Any

import msgspec
import pytest

from pdrouter.sim.emulator import EmulatorSettings, expected_text, start_emulator

TEXT = "the prompt of this test"
GENERATE: dict[str, Any] = {"text": TEXT, "sampling_params": {"max_new_tokens": 6}}


async def test_both_legs_answer_and_everything_is_free_again(pair: Any) -> None:
    """Decode answers in full, prefill with one token, and neither holds anything afterwards."""
    prefill, decode = await pair.send("/generate", GENERATE)
    assert (prefill.status, decode.status) == (200, 200)
    assert decode.json()["text"] == expected_text(TEXT, 6)
    assert prefill.json()["text"] == expected_text(TEXT, 1)
    assert prefill.json()["meta_info"]["completion_tokens"] == 1
    assert pair.is_idle
    assert pair.prefill.snapshot().errors == pair.decode.snapshot().errors == {}


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_order_of_the_legs_does_not_matter(pair: Any, until: Any, is_stream: bool) -> None:
    """Decode first or prefill first: both wait for the other, and hold slot and KV meanwhile."""
    for first, second in ((pair.prefill, pair.decode), (pair.decode, pair.prefill)):
        body = GENERATE | pair.bootstrap() | {"stream": is_stream}
        call = await pair.client.start(first.url, "/generate", body)
        await until(lambda e=first: e.snapshot().used_tokens == 6)
        assert first.snapshot().rooms == [body["bootstrap_room"]]
        assert (await pair.client.send(second.url, "/generate", body)).status == 200
        assert (await call.finish()).status == 200
        await until(lambda: pair.is_idle)


async def test_where_a_waiting_leg_is_counted(pair: Any, until: Any) -> None:
    """Prefill: the inflight queue; decode: the transfer queue; neither as running."""
    queues = {
        pair.prefill: "prefill_inflight_queue_reqs",
        pair.decode: "decode_transfer_queue_reqs",
    }
    for emulator, queue in queues.items():
        body = GENERATE | pair.bootstrap(bootstrap_room=emulator.settings.dp_size * 100 + 2)
        call = await pair.client.start(emulator.url, "/generate", body | {"routed_dp_rank": 2})
        await until(lambda e=emulator: e.snapshot().used_tokens == 6)
        if emulator is pair.prefill:
            await until(lambda: pair.prefill.snapshot().ranks[2].inflight == 1)
        loads = (await pair.client.send(emulator.url, "/v1/loads")).json()["loads"]
        assert loads[2]["disaggregation"][queue] == 1
        assert loads[2]["num_running_reqs"] == 0
        assert loads[2]["num_used_tokens"] == 6
        assert sum(load["num_used_tokens"] for load in loads) == 6
        await call.abandon()
        await until(lambda e=emulator: e.snapshot().is_idle)


BAD_ROOMS = [None, "17", 1.5, -1, 2**63, True, [1]]


@pytest.mark.parametrize("room", BAD_ROOMS)
async def test_a_room_that_is_none_is_refused(pair: Any, room: object) -> None:
    """Null, no integer, out of [0, 2^63 - 1]: 400 on both roles, in SGLang's error shape."""
    for reply in await pair.send("/generate", GENERATE | {"bootstrap_room": room}):
        assert reply.status == 400
        error = reply.json()
        assert (error["object"], error["code"]) == ("error", 400)
        assert error["message"]
    assert sum(pair.decode.snapshot().errors.values()) == 1
    assert pair.is_idle


async def test_a_missing_room_or_host_is_refused(pair: Any) -> None:
    """A PD engine serves nothing without its handshake fields."""
    for body in (GENERATE, GENERATE | {"bootstrap_room": 5}):
        for emulator in (pair.prefill, pair.decode):
            assert (await pair.client.send(emulator.url, "/generate", body)).status == 400
    assert pair.decode.snapshot().errors == {"bad_room": 1, "bad_bootstrap_host": 1}


async def test_the_greatest_room_is_exact(pair: Any) -> None:
    """2^63 - 1 goes through without a float."""
    prefill, decode = await pair.send("/generate", GENERATE | {"bootstrap_room": 2**63 - 1})
    assert (prefill.status, decode.status) == (200, 200)
    assert pair.decode.received[0].room == pair.prefill.received[0].room == 2**63 - 1
    assert pair.prefill.received[0].rank == 3


async def test_a_bootstrap_server_that_is_not_there_fails_the_decode(pair: Any) -> None:
    """Connection refused: 500, and nothing is held."""
    body = GENERATE | pair.bootstrap(bootstrap_port=1)
    reply = await pair.client.send(pair.decode.url, "/generate", body)
    assert reply.status == 500
    assert "bootstrap" in reply.json()["message"]
    assert pair.decode.snapshot().errors == {"bootstrap_unreachable": 1}
    assert pair.is_idle


@pytest.mark.parametrize("is_decode_first", [False, True])
async def test_the_wrong_prefill_rank_fails_loudly(pair: Any, until: Any, is_decode_first: bool) -> None:
    """The KV is on another rank than decode was told: decode fails, prefill keeps its KV until aborted."""
    body = GENERATE | pair.bootstrap() | {"rid": "x"}
    legs = [
        (pair.prefill, body | {"routed_dp_rank": 1}),
        (pair.decode, body | {"disagg_prefill_dp_rank": 2}),
    ]
    calls = []
    for emulator, leg in reversed(legs) if is_decode_first else legs:
        calls.append(await pair.client.start(emulator.url, "/generate", leg))
        await until(lambda e=emulator: e.snapshot().total_requests > 0)
    if is_decode_first:
        calls.reverse()
    reply = await calls[1].finish()
    assert reply.status == 500
    assert "rank" in reply.json()["message"]
    assert pair.decode.snapshot().errors == {"wrong_prefill_rank": 1}
    assert pair.prefill.snapshot().errors == {"wrong_prefill_rank": 1}
    assert pair.prefill.snapshot().used_tokens == 6
    await pair.client.send(pair.prefill.url, "/abort_request", {"rid": "x"})
    assert (await calls[0].finish()).status == 500
    assert pair.is_idle


async def test_without_a_word_the_prefill_rank_is_room_mod_dp_size(pair: Any) -> None:
    """Decode doesn't find a prefill elsewhere, unless it is told."""
    room = {"bootstrap_room": 4 * 11 + 3}
    told = {"routed_dp_rank": 1, "disagg_prefill_dp_rank": 1}
    _, decode = await pair.send("/generate", GENERATE | room)
    assert decode.status == 200
    assert pair.prefill.received[-1].rank == 3
    room = {"bootstrap_room": 4 * 12 + 3}
    _, decode = await pair.send("/generate", GENERATE | room, told, {"disagg_prefill_dp_rank": 1})
    assert decode.status == 200
    assert pair.prefill.received[-1].rank == 1
    body = GENERATE | pair.bootstrap(bootstrap_room=4 * 13 + 3)
    call = await pair.client.start(pair.prefill.url, "/generate", body | told)
    assert (await pair.client.send(pair.decode.url, "/generate", body)).status == 500
    await call.abandon()


async def test_a_prefill_rank_that_is_not_there_fails(pair: Any) -> None:
    """Decode naming rank 9 of 4."""
    body = GENERATE | pair.bootstrap() | {"disagg_prefill_dp_rank": 9}
    reply = await pair.client.send(pair.decode.url, "/generate", body)
    assert reply.status == 500
    assert pair.decode.snapshot().errors == {"no_such_prefill_rank": 1}


async def test_a_room_used_twice_is_a_crash(pair: Any) -> None:
    """On either side, also long after its first use."""
    body = GENERATE | pair.bootstrap()
    await pair.send("/generate", body)
    for emulator in (pair.prefill, pair.decode):
        assert (await pair.client.send(emulator.url, "/generate", body)).status == 500
        assert emulator.snapshot().errors == {"room_reused": 1}
    assert pair.is_idle


async def test_two_decode_engines_cannot_want_one_room(pair: Any, until: Any) -> None:
    """The second one fails, the first goes on."""
    body = GENERATE | pair.bootstrap()
    async with start_emulator(EmulatorSettings(role="decode", speed=200.0)) as other:
        first = await pair.client.start(pair.decode.url, "/generate", body)
        await until(lambda: pair.prefill.snapshot().wanted_rooms == [body["bootstrap_room"]])
        assert (await pair.client.send(other.url, "/generate", body)).status == 500
        assert other.snapshot().errors == {"room_reused": 1}
        assert (await pair.client.send(pair.prefill.url, "/generate", body)).status == 200
        assert (await first.finish()).status == 200


async def test_legs_with_different_prompts_fail_both(pair: Any) -> None:
    """The KV would be another prompt's."""
    for reply in await pair.send("/generate", GENERATE, decode={"text": "another prompt of the same"}):
        assert reply.status == 500
        assert "different prompts" in reply.json()["message"]
    assert pair.prefill.snapshot().errors == pair.decode.snapshot().errors == {"prompt_mismatch": 1}
    assert pair.is_idle


async def test_a_prefill_that_goes_leaves_decode_hanging_until_aborted(new_pair: Any, until: Any) -> None:
    """As in life: no word to the decode side; abort or disconnect ends it."""
    async with new_pair() as pair:
        body = {"input_ids": [1] * 900_000, "rid": "r1"} | pair.bootstrap()
        decode = await pair.client.start(pair.decode.url, "/generate", body)
        await until(lambda: pair.decode.snapshot().used_tokens == 900_000)
        prefill = await pair.client.start(pair.prefill.url, "/generate", body)
        await until(lambda: pair.prefill.snapshot().requests == 1)
        await prefill.abandon()
        await until(lambda: pair.prefill.snapshot().is_idle)
        snapshot = pair.decode.snapshot()
        assert (snapshot.requests, snapshot.used_tokens) == (1, 900_000)
        await pair.client.send(pair.decode.url, "/abort_request", {"rid": "r1"})
        reply = await decode.finish()
        assert reply.status == 500
        assert "Decode transfer failed" in reply.json()["message"]
        assert pair.is_idle


async def test_a_decode_that_goes_leaves_the_prefill_s_kv_in_flight(pair: Any, until: Any) -> None:
    """Nobody fetches it: it stays until the prefill leg is ended too."""
    body = GENERATE | pair.bootstrap() | {"rid": "r1"}
    decode = await pair.client.start(pair.decode.url, "/generate", body)
    await until(lambda: pair.prefill.snapshot().wanted_rooms == [body["bootstrap_room"]])
    await decode.abandon()
    await until(lambda: not pair.prefill.snapshot().wanted_rooms and pair.decode.snapshot().is_idle)
    prefill = await pair.client.start(pair.prefill.url, "/generate", body)
    await until(lambda: sum(rank.inflight for rank in pair.prefill.snapshot().ranks) == 1)
    assert pair.prefill.snapshot().used_tokens == 6
    await prefill.abandon()
    await until(lambda: pair.is_idle)


async def test_many_pairs_at_once_keep_their_answers_apart(new_pair: Any) -> None:
    """200 requests with own prompts: every text is right, and all is free afterwards."""
    async with new_pair(stream_interval=8, speed=100.0) as pair:
        texts = [f"prompt number {i} " * (i + 1) for i in range(200)]
        bodies = [{"text": text, "stream": True, "sampling_params": {"max_new_tokens": 20}} for text in texts]
        replies = await asyncio.gather(*(pair.send("/generate", body) for body in bodies))
        answers = [decode.events()[-1]["text"] for _, decode in replies]
        assert answers == [expected_text(text, 20) for text in texts]
        assert pair.is_idle
        assert pair.prefill.snapshot().errors == pair.decode.snapshot().errors == {}


async def test_a_leg_left_alone_times_out(new_pair: Any) -> None:
    """After 300 s of engine time, on both sides."""
    async with new_pair(speed=100_000.0, handshake_timeout_s=300.0) as pair:
        for emulator in (pair.prefill, pair.decode):
            reply = await pair.client.send(emulator.url, "/generate", GENERATE | pair.bootstrap())
            assert reply.status == 500
            assert emulator.snapshot().errors == {"handshake_timeout": 1}
        assert pair.is_idle


async def test_a_prefill_engine_that_dies_is_reached_again_on_its_port(pair: Any) -> None:
    """Connections that broke are made anew for the next room."""
    settings = EmulatorSettings(role="prefill", speed=200.0, dp_size=4, dp_attention=True)
    async with start_emulator(settings) as first:
        port = first.bootstrap_port
        body = GENERATE | pair.bootstrap(bootstrap_port=port)
        call = await pair.client.start(first.url, "/generate", body)
        assert (await pair.client.send(pair.decode.url, "/generate", body)).status == 200
        assert (await call.finish()).status == 200
    settings = msgspec.structs.replace(settings, bootstrap_port=port or 0)
    async with start_emulator(settings) as second:
        body = GENERATE | pair.bootstrap(bootstrap_port=port)
        call = await pair.client.start(second.url, "/generate", body)
        assert (await pair.client.send(pair.decode.url, "/generate", body)).status == 200
        assert (await call.finish()).status == 200


async def test_prefill_starts_after_decode_where_the_engine_waits_for_it(new_pair: Any, until: Any) -> None:
    """``waits_for_decode``: the bootstrap queue holds the request, and no KV."""
    async with new_pair(waits_for_decode=True) as pair:
        body = GENERATE | pair.bootstrap()
        call = await pair.client.start(pair.prefill.url, "/generate", body)
        await until(lambda: pair.prefill.snapshot().requests == 1)
        assert pair.prefill.snapshot().used_tokens == 0
        assert sum(rank.bootstrap for rank in pair.prefill.snapshot().ranks) == 1
        assert (await pair.client.send(pair.decode.url, "/generate", body)).status == 200
        assert (await call.finish()).status == 200
        assert pair.is_idle


# Batches.


def batch(pair: Any, count: int, **fields: object) -> dict[str, Any]:
    """Body of a batch with a room for each prompt."""
    one = [pair.bootstrap() for _ in range(count)]
    return {key: [item[key] for item in one] for key in one[0]} | fields


async def test_batches_have_a_room_for_each_prompt(pair: Any) -> None:
    """Texts, token ids, several choices: every answer is right and in its place."""
    texts = ["one", "two", "three"]
    body = batch(pair, 3, text=texts, sampling_params={"max_new_tokens": 3})
    _, decode = await pair.send("/generate", body)
    assert [answer["text"] for answer in decode.json()] == [expected_text(text, 3) for text in texts]
    ids = [[1, 2, 3], [4, 5]]
    _, decode = await pair.send("/generate", batch(pair, 2, input_ids=ids, stream=True, rid="b"))
    last = {event["index"]: event for event in decode.events()}
    assert [last[i]["text"] for i in (0, 1)] == [expected_text(prompt, 128) for prompt in ids]
    assert [last[i]["meta_info"]["id"] for i in (0, 1)] == ["b_0", "b_1"]
    _, decode = await pair.send("/v1/completions", batch(pair, 2, prompt=["x", "y"], max_tokens=2))
    assert [choice["text"] for choice in decode.json()["choices"]] == [
        expected_text("x", 2),
        expected_text("y", 2),
    ]
    assert pair.is_idle


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/generate", {"text": TEXT, "sampling_params": {"n": 2, "max_new_tokens": 2}}),
        ("/generate", {"text": [TEXT, "x"], "sampling_params": {"n": 2, "max_new_tokens": 2}}),
        ("/v1/completions", {"prompt": TEXT, "n": 2, "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 2, "max_tokens": 2}),
    ],
)
@pytest.mark.parametrize("rooms", [3, [3, 4], [3]])
async def test_several_samples_hang_on_decode(
    pair: Any, until: Any, path: str, fields: dict[str, Any], is_stream: bool, rooms: object
) -> None:
    """The prefill answers with all of them, the decode engine never does, whatever shape the rooms have.

    Source: seen on SGLang 0.5.23.
    """
    body = fields | pair.bootstrap(bootstrap_room=rooms) | {"stream": is_stream}
    async with asyncio.timeout(10):
        call = await pair.client.start(pair.decode.url, path, body)
        assert (await pair.client.send(pair.prefill.url, path, body)).status == 200
        await until(lambda: pair.decode.snapshot().errors == {"hangs": 1})
        await call.abandon()
        await until(lambda: pair.is_idle)


@pytest.mark.parametrize("field", ["bootstrap_room", "bootstrap_host", "bootstrap_port"])
async def test_a_batch_with_scalars_or_short_lists_is_refused(pair: Any, field: str) -> None:
    """Lists of equal length, one entry a prompt, nothing else."""
    good = batch(pair, 2, text=["a", "b"])
    single = GENERATE | pair.bootstrap()
    bad = [good | {field: good[field][0]}, good | {field: good[field][:1]}, single | {field: [single[field]]}]
    for body in bad:
        for emulator in (pair.prefill, pair.decode):
            assert (await pair.client.send(emulator.url, "/generate", body)).status == 400
    assert pair.decode.snapshot().errors == {"bad_batch": 3}


async def test_one_room_twice_in_a_batch_is_a_crash(pair: Any) -> None:
    """The same room for two prompts."""
    body = batch(pair, 2, text=["a", "b"], bootstrap_room=[7, 7])
    assert (await pair.client.send(pair.decode.url, "/generate", body)).status == 500
    assert pair.is_idle
