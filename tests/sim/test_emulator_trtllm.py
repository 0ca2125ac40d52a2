"""TensorRT-LLM's legs over real sockets: the right order works, every broken rule is refused or counted."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pdrouter.sim.emulator import EmulatorSettings, expected_text, render_chat, start_emulator
from pdrouter.sim.text import Prompt, text_seed, token_id
from pdrouter.sim.trtllm.tokens import ids_of, prompt_of

from .trtllm_legs import CHAT, CHAT_PATH, FAST, FIRST_ID, TEXT, TEXT_PATH, TEXTS, TrtllmPair, make_trtllm_pair

CHAT_TEXT = render_chat(CHAT["messages"])


@pytest.fixture
async def pair(client: Any) -> AsyncIterator[TrtllmPair]:
    """Fast pair of two ranks each."""
    async with make_trtllm_pair(client, dp_size=2) as pair:
        yield pair


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_good_pair(pair: TrtllmPair, until: Any, is_stream: bool) -> None:
    """The context leg answers one token and the whole object, the other the engine's own text; nothing is left."""
    first = await pair.context_answer(CHAT_PATH, CHAT)
    choice = first["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", expected_text(CHAT_TEXT, 1))
    params = choice["disaggregated_params"]
    assert params["first_gen_tokens"] == [token_id(text_seed(Prompt(CHAT_TEXT, 4).digest, 0), 0)]
    assert params["ctx_request_id"] == params["disagg_request_id"] == FIRST_ID
    assert (params["request_type"], params["ctx_dp_rank"]) == ("context_only", 0)
    assert len(first["prompt_token_ids"]) == first["usage"]["prompt_tokens"]
    second = await pair.generation_leg(CHAT_PATH, CHAT | {"stream": is_stream}, first)
    if is_stream:
        text = "".join(c["delta"].get("content", "") for e in second.events() for c in e["choices"])
    else:
        text = second.json()["choices"][0]["message"]["content"]
        assert second.json()["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"]
        assert second.json()["prompt_token_ids"] is None
        assert second.json()["choices"][0]["disaggregated_params"] is None
    assert text == expected_text(CHAT_TEXT, 6)
    await until(lambda: pair.is_idle)
    for snapshot in (pair.context.snapshot(), pair.generation.snapshot()):
        assert snapshot.errors == {}
        assert (snapshot.held_requests, snapshot.stranded_requests, snapshot.recomputed_requests) == (0, 0, 0)


@pytest.mark.parametrize("prompt", [TEXT, [5, 6, 7], [[5, 6, 7]], [TEXT], "Größe \U0001f600"])
async def test_completions(pair: TrtllmPair, prompt: Any) -> None:
    """A text, or ids; they come back in a list of lists, and the answer is that of the prompt."""
    body = TEXTS | {"prompt": prompt}
    first = await pair.context_answer(TEXT_PATH, body)
    plain = prompt[0] if isinstance(prompt[0], list | str) and isinstance(prompt, list) else prompt
    assert first["prompt_token_ids"] == [ids_of(plain, 4)]
    second = await pair.generation_leg(TEXT_PATH, body, first)
    assert second.json()["choices"][0]["text"] == expected_text(plain, 6)


def test_ids_are_those_of_their_prompt() -> None:
    """A text comes back from its ids, ids of something else stay what they are."""
    for text in ("", "a", "abcd", "abcde", "\x00\x00", "é" * 9, "\ud800"):
        ids = ids_of(text, 4)
        assert len(ids) == Prompt(text, 4).tokens
        assert prompt_of(ids) == (text or [])
    assert prompt_of([1, 2**31]) == [1, 2**31]
    assert ids_of([3, 4], 4) == [3, 4]


async def test_a_regular_engine_does_both(client: Any, until: Any) -> None:
    """Either leg, or all of it."""
    async with start_emulator(EmulatorSettings(engine="trtllm", speed=FAST)) as emulator:
        pair = TrtllmPair(client, emulator, emulator)
        second = await pair.both(TEXT_PATH, TEXTS)
        alone = await client.send(emulator.url, TEXT_PATH, TEXTS)
        for reply in (second, alone):
            assert reply.json()["choices"][0]["text"] == expected_text(TEXT, 6)
        await until(lambda: pair.is_idle)
        assert emulator.snapshot().recomputed_requests == 0


async def test_a_generation_engine_that_reads_a_prompt_itself(pair: TrtllmPair) -> None:
    """It says nothing; that is counted, whoever wanted it."""
    reply = await pair.client.send(pair.generation.url, TEXT_PATH, TEXTS | {"n": 2})
    assert [c["text"] for c in reply.json()["choices"]] == [expected_text(TEXT, 6), expected_text(TEXT, 6, 1)]
    assert pair.generation.snapshot().recomputed_requests == 2


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
async def test_an_answer_may_end_with_its_first_token(pair: TrtllmPair, until: Any, path: str) -> None:
    """Then it says so, and nothing is held for another leg."""
    body, prompt = (CHAT, CHAT_TEXT) if path == CHAT_PATH else (TEXTS, TEXT)
    for stop in (expected_text(prompt, 1).strip(), [expected_text(prompt, 1).strip(), "x"]):
        first = await pair.context_answer(path, body | {"stop": stop})
        choice = first["choices"][0]
        assert (choice["finish_reason"], choice["disaggregated_params"]) == ("stop", None)
        assert first["usage"]["completion_tokens"] == 1
    await until(lambda: pair.is_idle)


async def test_what_was_cached_is_told(pair: TrtllmPair) -> None:
    """In the context leg's usage; two ranks in turn."""
    told = [await pair.context_answer(TEXT_PATH, TEXTS) for _ in range(4)]
    assert [t["usage"]["prompt_tokens_details"]["cached_tokens"] for t in told] == [0, 0, 128, 128]
    assert [t["choices"][0]["disaggregated_params"]["ctx_dp_rank"] for t in told] == [0, 1, 0, 1]


BAD_CONTEXTS: list[tuple[dict[str, Any], str]] = [
    ({"disaggregated_params": None}, "no_disaggregated_params"),
    ({"max_tokens": 2}, "context_not_one_token"),
    ({"max_tokens": None}, "context_not_one_token"),
    ({"max_completion_tokens": 1}, "unknown_field"),
    ({"stream": True}, "context_streams"),
    ({"stream_options": {"include_usage": True}}, "bad_request"),
    ({"n": 2}, "several_prompts"),
    ({"n": 0}, "bad_request"),
    ({"rid": "x"}, "unknown_field"),
    ({"kv_transfer_params": {}}, "unknown_field"),
    ({"model": None}, "bad_request"),
]


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
@pytest.mark.parametrize(("fields", "code"), BAD_CONTEXTS)
async def test_a_wrong_context_leg_is_refused(pair: TrtllmPair, path: str, fields: dict[str, Any], code: str) -> None:
    """400 in TensorRT-LLM's error shape, counted, and nothing is held."""
    body = CHAT if path == CHAT_PATH else TEXTS
    reply = await pair.context_leg(path, body, **fields)
    assert reply.status == 400
    assert {"object": "error", "code": 400}.items() <= reply.json().items()
    assert pair.context.snapshot().errors == {code: 1}
    assert pair.is_idle


BAD_OBJECTS: list[tuple[dict[str, Any], str]] = [
    ({"disagg_request_id": None}, "no_id"),
    ({"disagg_request_id": (1 << 42) - 1}, "id_out_of_range"),
    ({"disagg_request_id": 1 << 63}, "id_out_of_range"),
    ({"disagg_request_id": -1}, "id_out_of_range"),
    ({"disagg_request_id": 7e18}, "bad_request"),
    ({"disagg_request_id": str(FIRST_ID)}, "bad_request"),
    ({"request_type": None}, "bad_request"),
    ({"request_type": "context"}, "bad_request_type"),
    ({"request_type": "generation_only"}, "wrong_role"),
    ({"ctx_request_id": FIRST_ID}, "bad_context"),
    ({"encoded_opaque_state": "AA=="}, "bad_context"),
    ({"room": 5}, "bad_request"),
]


@pytest.mark.parametrize(("fields", "code"), BAD_OBJECTS)
async def test_a_wrong_context_object_is_refused(pair: TrtllmPair, fields: dict[str, Any], code: str) -> None:
    """Whatever of it is wrong; an id must be an integer in its range."""
    reply = await pair.context_leg(CHAT_PATH, CHAT, disaggregated_params=pair.params(**fields))
    assert reply.status == 400
    assert pair.context.snapshot().errors == {code: 1}
    assert pair.is_idle


async def test_an_id_is_used_once(pair: TrtllmPair) -> None:
    """Also when the first leg with it is long over; the ends of the range are in it."""
    for number in (1 << 42, (1 << 63) - 1):
        params = pair.params(disagg_request_id=number)
        assert (await pair.context_leg(CHAT_PATH, CHAT, disaggregated_params=params)).status == 200
        assert (await pair.context_leg(CHAT_PATH, CHAT, disaggregated_params=params)).status == 400
    assert pair.context.snapshot().errors == {"disagg_request_id_reused": 2}


async def test_lists_of_prompts_have_no_legs(pair: TrtllmPair) -> None:
    """One object can't stand for two prompts."""
    reply = await pair.context_leg(TEXT_PATH, TEXTS, prompt=[TEXT, "b"])
    assert reply.status == 400
    assert pair.context.snapshot().errors == {"several_prompts": 1}


BAD_GENERATIONS: list[tuple[dict[str, Any], int, str]] = [
    ({"request_type": "context_only"}, 400, "wrong_role"),
    ({"request_type": "context_and_generation"}, 400, "bad_request_type"),
    ({"disagg_request_id": None}, 400, "no_id"),
    ({"disagg_request_id": 5}, 400, "id_out_of_range"),
    ({"disagg_request_id": float(FIRST_ID)}, 400, "bad_request"),
    ({"ctx_request_id": float(FIRST_ID)}, 400, "bad_request"),
    ({"first_gen_tokens": [1.5]}, 400, "bad_request"),
    ({"ctx_info_endpoint": None}, 400, "bad_endpoint"),
    ({"ctx_info_endpoint": "here"}, 400, "bad_endpoint"),
    ({"ctx_info_endpoint": "tcp://127.0.0.1:99999"}, 400, "bad_endpoint"),
    ({"unheard_of": 1}, 400, "bad_request"),
    ({"ctx_info_endpoint": "tcp://127.0.0.1:1"}, 500, "context_unreachable"),
    ({"disagg_request_id": FIRST_ID + 1}, 500, "kv_not_held"),
    ({"ctx_request_id": FIRST_ID + 1}, 500, "params_changed"),
    ({"ctx_request_id": None}, 500, "params_changed"),
    ({"first_gen_tokens": [1]}, 500, "params_changed"),
    ({"encoded_opaque_state": "AQID"}, 500, "params_changed"),
    ({"ctx_dp_rank": 1}, 500, "params_changed"),
    ({"draft_tokens": []}, 500, "params_changed"),
]


@pytest.mark.parametrize(("fields", "status", "code"), BAD_GENERATIONS)
async def test_a_generation_leg_must_bring_what_was_given(
    pair: TrtllmPair, fields: dict[str, Any], status: int, code: str
) -> None:
    """Every id exactly, as an integer; the KV stays held for the right one."""
    first = await pair.context_answer(CHAT_PATH, CHAT)
    reply = await pair.generation_leg(CHAT_PATH, CHAT, first, **fields)
    assert reply.status == status, reply.body
    assert pair.generation.snapshot().errors == {code: 1}
    assert pair.generation.snapshot().is_idle
    assert pair.context.snapshot().held_requests == 1
    assert (await pair.generation_leg(CHAT_PATH, CHAT, first)).status == 200


async def test_a_float_is_told_from_an_integer_of_the_same_value(pair: TrtllmPair) -> None:
    """As a router that reads numbers writes it: here 7000000000000000001 has become 7e18."""
    first = await pair.context_answer(CHAT_PATH, CHAT)
    first["choices"][0]["disaggregated_params"] = json.loads(
        json.dumps(first["choices"][0]["disaggregated_params"]), parse_int=float
    )
    assert (await pair.generation_leg(CHAT_PATH, CHAT, first)).status == 400


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
async def test_a_generation_leg_has_the_ids_of_its_prompt(pair: TrtllmPair, path: str) -> None:
    """Not the text, and not those of another."""
    body = CHAT if path == CHAT_PATH else TEXTS
    name = "prompt_token_ids" if path == CHAT_PATH else "prompt"
    first = await pair.context_answer(path, body)
    params = first["choices"][0]["disaggregated_params"] | {"request_type": "generation_only"}
    leg = body | {"disaggregated_params": params}
    assert (await pair.client.send(pair.generation.url, path, leg)).status == 400
    assert (await pair.client.send(pair.generation.url, path, leg | {name: [1, 2, 3]})).status == 500
    assert pair.generation.snapshot().errors == {"no_prompt_token_ids": 1, "prompt_mismatch": 1}
    assert pair.context.snapshot().held_requests == 1


async def test_kv_is_fetched_once(pair: TrtllmPair, until: Any) -> None:
    """It is held after the answer, free when the other side has it, and not there a second time."""
    first = await pair.context_answer(TEXT_PATH, TEXTS)
    held = pair.context.snapshot()
    assert (held.requests, held.held_requests, held.used_tokens) == (0, 1, first["usage"]["prompt_tokens"])
    assert (await pair.generation_leg(TEXT_PATH, TEXTS, first)).status == 200
    await until(lambda: pair.is_idle)
    assert (await pair.generation_leg(TEXT_PATH, TEXTS, first)).status == 500
    assert pair.generation.snapshot().errors == {"kv_not_held": 1}


async def test_kv_that_nobody_fetches_is_stranded(client: Any, until: Any) -> None:
    """After the time limit it is freed and counted; who comes later fails."""
    async with make_trtllm_pair(client, kv_hold_timeout_s=1.0) as pair:
        first = await pair.context_answer(TEXT_PATH, TEXTS)
        await until(lambda: pair.context.snapshot().is_idle)
        assert pair.context.snapshot().stranded_requests == 1
        assert (await pair.generation_leg(TEXT_PATH, TEXTS, first)).status == 500
        assert pair.generation.snapshot().errors == {"kv_not_held": 1}


async def test_a_generation_leg_that_leaves_early_strands_kv(client: Any, until: Any) -> None:
    """Nobody tells the context engine, which waits for its time limit; while it writes nothing is held any more."""
    async with make_trtllm_pair(client, kv_capacity_tokens=1000, speed=1.0) as pair:
        body = TEXTS | {"max_tokens": 800, "prompt": TEXT[:64]}
        calls = []
        for _ in range(2):  # the second has no room
            first = await pair.context_answer(TEXT_PATH, body)
            params = first["choices"][0]["disaggregated_params"] | {"request_type": "generation_only"}
            leg = body | {"prompt": first["prompt_token_ids"], "disaggregated_params": params}
            calls.append(await client.start(pair.generation.url, TEXT_PATH, leg))
            await until(lambda: pair.generation.snapshot().requests == len(calls))
        await until(lambda: pair.context.snapshot().held_requests == 1)
        for call in reversed(calls):
            await call.abandon()
        await until(lambda: pair.generation.snapshot().is_idle)
        assert pair.context.snapshot().held_requests == 1


async def test_a_context_engine_that_is_gone(client: Any) -> None:
    """The generation leg fails, and says why."""
    async with make_trtllm_pair(client) as pair:
        first = await pair.context_answer(TEXT_PATH, TEXTS)
        await pair.context.stop()
        assert (await pair.generation_leg(TEXT_PATH, TEXTS, first)).status == 500
        assert pair.generation.snapshot().errors == {"context_unreachable": 1}


async def test_a_transfer_has_a_time_limit(client: Any) -> None:
    """Of a peer that never answers."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server, make_trtllm_pair(client, handshake_timeout_s=1.0) as pair:
        first = await pair.context_answer(TEXT_PATH, TEXTS)
        place = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert (await pair.generation_leg(TEXT_PATH, TEXTS, first, ctx_info_endpoint=place)).status == 500
        assert pair.generation.snapshot().errors == {"handshake_timeout": 1}


async def test_thirty_two_at_once(pair: TrtllmPair, until: Any) -> None:
    """Every answer is that of its own prompt, and all is free at the end."""
    bodies = [TEXTS | {"prompt": f"{i} {TEXT}"} for i in range(32)]
    replies = await asyncio.gather(*(pair.both(TEXT_PATH, body) for body in bodies))
    texts = [reply.json()["choices"][0]["text"] for reply in replies]
    assert texts == [expected_text(body["prompt"], 6) for body in bodies]
    await until(lambda: pair.is_idle)
    assert pair.context.snapshot().requests_by_rank == [16, 16]
