"""What vLLM's endpoints take and refuse, and which rank serves."""

from typing import Any

import pytest

from pdrouter.sim.emulator import Emulator, EmulatorSettings, expected_text, render_chat, start_emulator

from .legs import CHAT, CHAT_PATH, FAST, TEXT_PATH, TEXTS


@pytest.fixture
async def emulator() -> Any:
    """Fast regular engine: the third and fourth of eight ranks."""
    settings = EmulatorSettings(engine="vllm", dp_size=2, dp_start_rank=2, speed=FAST)
    async with start_emulator(settings) as emulator:
        yield emulator


@pytest.mark.parametrize(("rank", "local"), [("2", 0), ("3", 1)])
async def test_ranks_are_global(client: Any, emulator: Emulator, rank: str, local: int) -> None:
    """The header's rank, counted over all servers of a deployment."""
    reply = await client.send(emulator.url, CHAT_PATH, CHAT, {"X-data-parallel-rank": rank})
    assert reply.status == 200
    assert emulator.received[0].rank == local


@pytest.mark.parametrize("rank", ["0", "1", "4", "-1", "x", "", "2.0", "²"])
async def test_a_rank_of_another_server_is_refused(client: Any, emulator: Emulator, rank: str) -> None:
    """400 for ranks out of range, and (stricter than vLLM) for what is no number."""
    reply = await client.send(emulator.url, CHAT_PATH, CHAT, {"X-data-parallel-rank": rank})
    assert reply.status == 400
    assert "out of range [2, 4)" in reply.json()["error"]["message"]
    assert emulator.snapshot().errors == {"rank_out_of_range": 1}


async def test_requests_that_name_no_rank_go_round(client: Any, emulator: Emulator) -> None:
    """The engine's own balancer."""
    for _ in range(4):
        await client.send(emulator.url, TEXT_PATH, TEXTS)
    assert emulator.snapshot().requests_by_rank == [2, 2]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT_PATH, b"{"),
        (CHAT_PATH, {"messages": []}),
        (CHAT_PATH, CHAT | {"n": 0}),
        (CHAT_PATH, CHAT | {"max_tokens": 0}),
        (CHAT_PATH, CHAT | {"min_tokens": 7}),
        (CHAT_PATH, CHAT | {"min_tokens": -1}),
        (TEXT_PATH, {"max_tokens": 3}),
        (TEXT_PATH, TEXTS | {"prompt": ""}),
        (TEXT_PATH, TEXTS | {"prompt": ["a", 1]}),
        (TEXT_PATH, TEXTS | {"prompt": [2**63]}),
        (TEXT_PATH, TEXTS | {"max_tokens": 20_000_000}),
        (TEXT_PATH, TEXTS | {"kv_transfer_params": {"do_remote_decode": True}}),
        (TEXT_PATH, TEXTS | {"kv_transfer_params": "x"}),
        ("/v1/messages", {"messages": CHAT["messages"]}),
        ("/v1/responses", {"input": []}),
    ],
)
async def test_bad_requests_are_refused(client: Any, emulator: Emulator, path: str, body: object) -> None:
    """400 in vLLM's error shape, counted, and nothing is held."""
    reply = await client.send(emulator.url, path, body)
    assert reply.status == 400
    error = reply.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", None, 400)
    assert error["message"]
    assert sum(emulator.snapshot().errors.values()) == 1
    assert emulator.snapshot().is_idle


async def test_an_unknown_model_is_a_404(client: Any, emulator: Emulator) -> None:
    """As on the real one."""
    reply = await client.send(emulator.url, CHAT_PATH, CHAT | {"model": "other"})
    assert (reply.status, reply.json()["error"]["type"]) == (404, "NotFoundError")


@pytest.mark.parametrize(
    ("path", "body", "prompt"),
    [
        (CHAT_PATH, CHAT, render_chat(CHAT["messages"])),
        (TEXT_PATH, TEXTS, TEXTS["prompt"]),
        (TEXT_PATH, TEXTS | {"prompt": [1, 2, 3]}, [1, 2, 3]),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 6}, render_chat([{"role": "user", "content": "hi"}])),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": "hi"}], "instructions": "be brief", "max_output_tokens": 6},
            render_chat([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]),
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "hi"}], "system": "be brief", "max_tokens": 6},
            render_chat([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]),
        ),
    ],
)
async def test_every_endpoint_reads_its_prompt(
    client: Any, emulator: Emulator, path: str, body: dict[str, Any], prompt: str | list[int]
) -> None:
    """The answer is that of the prompt, so it tells how the prompt was read."""
    reply = await client.send(emulator.url, path, body)
    assert reply.status == 200
    assert expected_text(prompt, 6) in reply.body.decode()


async def test_limits_of_the_answer(client: Any, emulator: Emulator) -> None:
    """``max_completion_tokens`` beats ``max_tokens``; completions have 16 tokens unless told; chat ends by itself."""
    for path, body, tokens, finish in (
        (CHAT_PATH, CHAT | {"max_completion_tokens": 3}, 3, "length"),
        (CHAT_PATH, {"messages": CHAT["messages"]}, 128, "stop"),
        (TEXT_PATH, {"prompt": "hi"}, 16, "length"),
    ):
        reply = (await client.send(emulator.url, path, body)).json()
        assert (reply["usage"]["completion_tokens"], reply["choices"][0]["finish_reason"]) == (tokens, finish)


async def test_request_ids(client: Any, emulator: Emulator) -> None:
    """The answer has the header's id behind a prefix; inside, each sample has one of its own."""
    headers = {"X-Request-Id": "req-1"}
    chat = await client.send(emulator.url, CHAT_PATH, CHAT, headers)
    text = await client.send(emulator.url, TEXT_PATH, TEXTS | {"n": 2}, headers)
    assert (chat.json()["id"], text.json()["id"]) == ("chatcmpl-req-1", "cmpl-req-1")
    rids = [received.rid.rsplit("-", 1)[0] for received in emulator.received]
    assert rids == ["chatcmpl-req-1", "0_cmpl-req-1-0", "1_cmpl-req-1-0"]
