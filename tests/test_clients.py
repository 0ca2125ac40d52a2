"""The real ``openai`` client, through the router, over emulated engines."""

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from pdrouter.sim.emulator import expected_text, render_chat
from tests.lab import Lab, fault, make_lab


@pytest.fixture
async def lab() -> AsyncIterator[Lab]:
    """Two prefill and two decode engines of four ranks each."""
    async with make_lab(2, 2, engine={"dp_size": 4, "speed": 200.0}) as lab:
        yield lab


@pytest.fixture
async def client(lab: Lab) -> AsyncIterator[AsyncOpenAI]:
    """An async client without retries of its own."""
    async with AsyncOpenAI(base_url=f"{lab.url}/v1", api_key="none", max_retries=0, timeout=15) as client:
        yield client


def prompt_of(number: int) -> str:
    """Return a prompt of its own length and text."""
    return f"Question {number}: " + "why " * (number * 7 % 90)


async def ask(client: AsyncOpenAI, number: int) -> None:
    """Ask one question, streaming or not, and check text and usage."""
    prompt, tokens = prompt_of(number), 2 + number % 30
    rendered = render_chat([{"role": "user", "content": prompt}])
    if number % 2:
        text, usage = "", None
        stream = await client.chat.completions.create(
            model="emulated",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=tokens,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for event in stream:
            usage = event.usage or usage
            text += (event.choices[0].delta.content or "") if event.choices else ""
    else:
        answer = await client.chat.completions.create(
            model="emulated", messages=[{"role": "user", "content": prompt}], max_tokens=tokens
        )
        text, usage = answer.choices[0].message.content or "", answer.usage
    assert text == expected_text(rendered, tokens)
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (-(-len(rendered) // 4), tokens)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.invariant("I1")
@pytest.mark.invariant("I2")
async def test_two_hundred_at_once(lab: Lab, client: AsyncOpenAI) -> None:
    """200 requests at once, half of them streamed: every text and usage is right, and the ledger is zero after."""
    await asyncio.gather(*(ask(client, number) for number in range(200)))
    await lab.settled()
    for side in (lab.prefills, lab.decodes):
        assert sum(e.snapshot().total_requests for e in side) == 200
        assert all(count > 0 for e in side for count in e.snapshot().requests_by_rank)
        assert not [error for e in side for error in e.snapshot().error_messages]


async def test_the_sync_client(lab: Lab) -> None:
    """The blocking client works as well, whole and streamed."""

    def run() -> list[str]:
        with OpenAI(base_url=f"{lab.url}/v1", api_key="none", max_retries=0, timeout=10) as client:
            whole = client.completions.create(model="emulated", prompt="once", max_tokens=5)
            stream = client.completions.create(model="emulated", prompt="once", max_tokens=5, stream=True)
            return [whole.choices[0].text, "".join(event.choices[0].text for event in stream)]

    assert await asyncio.to_thread(run) == [expected_text("once", 5)] * 2
    await lab.settled()


async def test_completions_models_and_batches(client: AsyncOpenAI) -> None:
    """Completions by text and by list, and the list of models."""
    prompts = ["one", "two", "three"]
    answer = await client.completions.create(model="emulated", prompt=prompts, max_tokens=4)
    assert [choice.text for choice in answer.choices] == [expected_text(prompt, 4) for prompt in prompts]
    assert [model.id async for model in client.models.list()] == ["emulated"]


async def test_errors_are_the_clients_own(lab: Lab, client: AsyncOpenAI) -> None:
    """Errors of router and engine arrive as the client's own exceptions, with message, code and param."""
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="emulated", messages=[])
    assert (caught.value.code, caught.value.param) == ("invalid_request", "messages")
    await fault(lab.decodes[0], "status", status=429)
    await fault(lab.decodes[1], "status", status=429)
    with pytest.raises(openai.RateLimitError):
        await client.chat.completions.create(model="emulated", messages=[{"role": "user", "content": "x"}])
    await lab.settled()


async def test_an_error_in_mid_stream(lab: Lab, client: AsyncOpenAI) -> None:
    """A stream that breaks raises in the client; it never ends as if it were whole."""
    for emulator in lab.decodes:
        await fault(emulator, "reset", after_chunks=2)
    stream = await client.chat.completions.create(
        model="emulated", messages=[{"role": "user", "content": "x"}], max_tokens=500, stream=True
    )
    with pytest.raises(openai.APIError, match=r"reset|closed"):
        async for _ in stream:
            pass
    await lab.settled()


async def test_a_stream_that_the_client_closes(lab: Lab, client: AsyncOpenAI) -> None:
    """``stream.close()`` frees the engines within a second."""
    stream = await client.chat.completions.create(
        model="emulated", messages=[{"role": "user", "content": "x"}], max_tokens=100_000, stream=True
    )
    async for _ in stream:
        break
    await stream.close()
    await lab.settled(within_s=1.0)
