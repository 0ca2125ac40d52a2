"""The ``anthropic`` client over a vLLM pair, which serves ``/v1/messages``."""

import asyncio
from typing import Any

import pytest

from tests.clients.fleets import MODEL, QUESTION, answer_to, refuse, without_decode
from tests.lab import Lab, fault

anthropic: Any = pytest.importorskip("anthropic", reason="make test-clients")


def asking(tokens: int) -> dict[str, Any]:
    """Return the arguments of a question."""
    return {"model": MODEL, "max_tokens": tokens, "messages": [{"role": "user", "content": QUESTION}]}


def connected(lab: Lab) -> Any:
    """Return an async client without retries of its own."""
    return anthropic.AsyncAnthropic(base_url=lab.url, api_key="none", max_retries=0, timeout=15)


async def test_messages(vllm_pair: Lab) -> None:
    """Whole and streamed, the text and the usage are right, and both go over the pair."""
    async with connected(vllm_pair) as client:
        whole = await client.messages.create(**asking(6))
        async with client.messages.stream(**asking(6)) as stream:
            streamed = await stream.get_final_message()
        for answer in (whole, streamed):
            assert answer.content[0].text == answer_to(QUESTION, 6)
            assert (answer.usage.output_tokens, answer.stop_reason) == (6, "max_tokens")
    assert vllm_pair.prefills[0].snapshot().total_requests == 2


async def test_the_blocking_client(vllm_pair: Lab) -> None:
    """It works as well."""

    def run() -> str:
        with anthropic.Anthropic(base_url=vllm_pair.url, api_key="none", max_retries=0, timeout=10) as client:
            return str(client.messages.create(**asking(3)).content[0].text)

    assert await asyncio.to_thread(run) == answer_to(QUESTION, 3)


@pytest.mark.parametrize(
    ("status", "name"),
    [(400, "BadRequestError"), (404, "NotFoundError"), (429, "RateLimitError"), (503, "InternalServerError")],
)
async def test_errors_of_engines(vllm_pair: Lab, status: int, name: str) -> None:
    """Each is the exception that the client has for its status."""
    await refuse(vllm_pair, status)
    async with connected(vllm_pair) as client:
        with pytest.raises(getattr(anthropic, name)) as caught:
            await client.messages.create(**asking(3))
        assert caught.value.status_code == status


async def test_an_error_of_the_router() -> None:
    """It says what is wrong."""
    async with without_decode() as lab, connected(lab) as client:
        with pytest.raises(anthropic.InternalServerError, match="no_ready_pair") as caught:
            await client.messages.create(**asking(3))
        assert caught.value.type == "overloaded_error"


async def test_a_stream_that_the_client_leaves(vllm_pair: Lab) -> None:
    """The engines are free within a second."""
    async with connected(vllm_pair) as client:
        async with client.messages.stream(**asking(50_000)) as stream:
            async for _ in stream.text_stream:
                break
        await vllm_pair.settled(within_s=1.0)


async def test_an_error_in_mid_stream(vllm_pair: Lab) -> None:
    """A stream that breaks raises what the router says of it; it never ends as if it were whole."""
    await fault(vllm_pair.decodes[0], "reset", "/v1/messages", after_chunks=2)
    async with connected(vllm_pair) as client, client.messages.stream(**asking(500)) as stream:
        with pytest.raises(anthropic.APIStatusError, match="upstream_closed") as caught:
            await stream.get_final_message()
    assert caught.value.body["error"]["type"] == "api_error"
