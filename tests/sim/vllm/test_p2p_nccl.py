"""P2P NCCL over real sockets: the request id carries the handshake."""

import uuid
from typing import Any

import pytest

from pdrouter.sim.emulator import expected_text

from .legs import CHAT, CHAT_PATH, TEXT, TEXT_PATH, TEXTS, VllmPair


@pytest.fixture
async def pair(new_vllm_pair: Any) -> Any:
    """Fast P2P pair."""
    async with new_vllm_pair(kv_connector="p2p_nccl") as pair:
        yield pair


@pytest.mark.parametrize(
    "fields", [{}, {"stream": True}, {"n": 2}, {"prompt": [TEXT, "another"]}], ids=["one", "stream", "n", "list"]
)
async def test_prefill_then_decode(pair: VllmPair, until: Any, fields: dict[str, Any]) -> None:
    """Texts are right, nothing is read twice, and nothing is left, for lists and samples too."""
    ids = pair.p2p_id()
    body = TEXTS | fields
    assert (await pair.prefill_leg(TEXT_PATH, body, ids)).status == 200
    second = await pair.client.send(pair.decode.url, TEXT_PATH, body, ids)
    prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]] * body.get("n", 1)
    if "stream" in fields:
        texts = ["".join(c["text"] for event in second.events() for c in event["choices"])]
    else:
        texts = [choice["text"] for choice in second.json()["choices"]]
    is_sampled = "n" in fields
    assert texts == [expected_text(prompt, 6, i if is_sampled else 0) for i, prompt in enumerate(prompts)]
    await until(lambda: pair.is_idle)
    assert pair.prefill.snapshot().errors == pair.decode.snapshot().errors == {}
    assert pair.decode.snapshot().recomputed_requests == 0
    assert pair.prefill.snapshot().held_requests == pair.prefill.snapshot().stranded_requests == 0


async def test_decode_first_waits_for_the_prefill(pair: VllmPair, until: Any) -> None:
    """Within its timeout."""
    ids = pair.p2p_id()
    call = await pair.client.start(pair.decode.url, TEXT_PATH, TEXTS, ids)
    await until(lambda: pair.decode.snapshot().ranks[0].transfer == 1)
    await pair.prefill_leg(TEXT_PATH, TEXTS, ids)
    assert (await call.finish()).json()["choices"][0]["text"] == expected_text(TEXT, 6)
    assert pair.decode.snapshot().recomputed_requests == 0


async def test_decode_alone_reads_the_prompt_itself_in_the_end(new_vllm_pair: Any, until: Any) -> None:
    """After its timeout, counted; the KV that comes too late strands on the decode side."""
    async with new_vllm_pair(kv_connector="p2p_nccl", handshake_timeout_s=1.0, kv_hold_timeout_s=1.0) as pair:
        ids = pair.p2p_id()
        reply = await pair.client.send(pair.decode.url, TEXT_PATH, TEXTS, ids)
        assert reply.json()["choices"][0]["text"] == expected_text(TEXT, 6)
        assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert pair.decode.snapshot().recomputed_requests == 1
        await pair.prefill_leg(TEXT_PATH, TEXTS, ids)
        await until(lambda: pair.decode.snapshot().stranded_requests == 1)
        await until(lambda: pair.is_idle)


async def test_a_request_id_names_both_engines(pair: VllmPair) -> None:
    """None, a plain one, a malformed one, another's address: 400 on either side."""
    prefill, decode = (f"127.0.0.1:{e.bootstrap_port}" for e in (pair.prefill, pair.decode))
    unique = uuid.uuid4().hex
    cases = [
        (None, "bad_request_id"),
        ("req-1", "bad_request_id"),
        (f"___prefill_addr_{prefill}___decode_addr_{decode}_{unique[:31]}", "bad_request_id"),
        (f"___prefill_addr_{prefill}___decode_addr_{decode}", "bad_request_id"),
        (f"___prefill_addr_127.0.0.1:1___decode_addr_127.0.0.1:1_{unique}", "wrong_address"),
        (f"___prefill_addr_{decode}___decode_addr_{prefill}_{unique}", "wrong_address"),
    ]
    for request_id, code in cases:
        headers = {"X-Request-Id": request_id} if request_id else None
        for emulator in (pair.prefill, pair.decode):
            before = emulator.snapshot().errors.get(code, 0)
            reply = await pair.client.send(emulator.url, TEXT_PATH, TEXTS | {"max_tokens": 1}, headers)
            assert reply.status == 400
            assert emulator.snapshot().errors[code] == before + 1
    assert pair.is_idle


async def test_a_request_id_is_used_once(pair: VllmPair) -> None:
    """A retry needs a new one, on either side."""
    ids = pair.p2p_id()
    for emulator in (pair.prefill, pair.decode):
        body = TEXTS | {"max_tokens": 1}
        assert (await pair.client.send(emulator.url, TEXT_PATH, body, ids)).status == 200
        assert (await pair.client.send(emulator.url, TEXT_PATH, body, ids)).status == 400
        assert emulator.snapshot().errors == {"request_id_reused": 1}


@pytest.mark.parametrize("fields", [{"max_tokens": 2}, {"stream": True}])
async def test_a_wrong_prefill_leg_is_refused(pair: VllmPair, fields: dict[str, object]) -> None:
    """More than one token or a stream."""
    assert (await pair.prefill_leg(CHAT_PATH, CHAT, pair.p2p_id(), **fields)).status == 400


async def test_params_are_not_for_this_connector(pair: VllmPair) -> None:
    """They would be ignored by the real one: refused here, so that a wrong connector setting is seen."""
    body = TEXTS | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    for emulator in (pair.prefill, pair.decode):
        assert (await pair.client.send(emulator.url, TEXT_PATH, body, pair.p2p_id())).status == 400
        assert emulator.snapshot().errors == {"unknown_kv_transfer_params": 1}


async def test_different_prompts_are_refused(pair: VllmPair) -> None:
    """KV of another prompt would answer nonsense."""
    ids = pair.p2p_id()
    await pair.prefill_leg(TEXT_PATH, TEXTS | {"prompt": "another"}, ids)
    assert (await pair.client.send(pair.decode.url, TEXT_PATH, TEXTS, ids)).status == 500
    assert pair.decode.snapshot().errors == {"prompt_mismatch": 1}


async def test_a_decode_that_is_not_there(pair: VllmPair, until: Any) -> None:
    """The prefill answers, says that it couldn't put its KV, and frees it."""
    prefill = f"127.0.0.1:{pair.prefill.bootstrap_port}"
    ids = {"X-Request-Id": f"___prefill_addr_{prefill}___decode_addr_127.0.0.1:1_{uuid.uuid4().hex}"}
    assert (await pair.prefill_leg(TEXT_PATH, TEXTS, ids)).status == 200
    await until(lambda: pair.prefill.snapshot().is_idle)
    assert pair.prefill.snapshot().errors == {"decode_unreachable": 1}


async def test_a_client_that_leaves_frees_the_decode(pair: VllmPair, until: Any) -> None:
    """While it waits for KV; the KV that comes then is nobody's."""
    ids = pair.p2p_id()
    call = await pair.client.start(pair.decode.url, TEXT_PATH, TEXTS, ids)
    await until(lambda: pair.decode.snapshot().used_tokens > 0)
    await call.abandon()
    await until(lambda: pair.decode.snapshot().is_idle)
    await pair.prefill_leg(TEXT_PATH, TEXTS, ids)
    await until(lambda: pair.is_idle)
