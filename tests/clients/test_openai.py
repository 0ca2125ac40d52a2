"""The ``openai`` client, blocking and async, over a pair of each kind of engine."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from pdrouter.sim.emulator import expected_text
from tests.clients.fleets import (
    ARGUMENTS,
    MODEL,
    QUESTION,
    TOOL,
    answer_to,
    call_a_tool,
    copies_of,
    decode_that_says,
    refuse,
    two_models,
    without_decode,
    write_json,
)
from tests.lab import Lab, fault, make_lab


class Town(BaseModel):
    town: str


def connected(lab: Lab, max_retries: int = 0) -> AsyncOpenAI:
    """Return an async client without retries of its own."""
    return AsyncOpenAI(base_url=f"{lab.url}/v1", api_key="none", max_retries=max_retries, timeout=15)


@pytest.fixture
async def client(pair: Lab) -> AsyncIterator[AsyncOpenAI]:
    """A client of a pair."""
    async with connected(pair) as client:
        yield client


def said(text: str) -> Any:
    """Return a conversation of one message."""
    return [{"role": "user", "content": text}]


async def ask(client: AsyncOpenAI, text: str, tokens: int, *, is_stream: bool) -> None:
    """Ask one question, and check text and usage."""
    if is_stream:
        answer, usage = "", None
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=said(text),
            max_tokens=tokens,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for event in stream:
            usage = event.usage or usage
            answer += (event.choices[0].delta.content or "") if event.choices else ""
    else:
        whole = await client.chat.completions.create(model=MODEL, messages=said(text), max_tokens=tokens)
        answer, usage = whole.choices[0].message.content or "", whole.usage
    assert answer == answer_to(text, tokens)
    assert usage is not None
    assert usage.completion_tokens == tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("is_stream", [False, True])
async def test_chat(client: AsyncOpenAI, is_stream: bool) -> None:
    """Text and usage are right, whole and streamed."""
    await ask(client, QUESTION, 9, is_stream=is_stream)


@pytest.mark.invariant("I1")
@pytest.mark.invariant("I2")
async def test_two_hundred_at_once() -> None:
    """200 requests at once, half of them streamed: every text and usage is right, and the ledger is zero after."""
    async with make_lab(2, 2, engine={"dp_size": 4, "speed": 200.0}) as lab, connected(lab) as client:
        texts = [f"Question {number}: " + "why " * (number * 7 % 90) for number in range(200)]
        await asyncio.gather(*(ask(client, t, 2 + n % 30, is_stream=n % 2 == 1) for n, t in enumerate(texts)))
        await lab.settled()
        for side in (lab.prefills, lab.decodes):
            assert sum(e.snapshot().total_requests for e in side) == 200
            assert all(count > 0 for e in side for count in e.snapshot().requests_by_rank)
            assert not [error for e in side for error in e.snapshot().error_messages]


async def test_the_blocking_client(pair: Lab) -> None:
    """Completions whole and streamed, and a stream that it leaves."""

    def run() -> list[str]:
        with OpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0, timeout=10) as client:
            whole = client.completions.create(model=MODEL, prompt="once", max_tokens=5)
            stream = client.completions.create(model=MODEL, prompt="once", max_tokens=5, stream=True)
            texts = [whole.choices[0].text, "".join(event.choices[0].text for event in stream)]
            with client.completions.create(model=MODEL, prompt="x", max_tokens=50_000, stream=True) as left:
                next(iter(left))
            return texts

    assert await asyncio.to_thread(run) == [expected_text("once", 5)] * 2


async def test_lists_copies_and_models(pair: Lab, client: AsyncOpenAI) -> None:
    """A list of prompts, several answers to one, and the list of models."""
    prompts = ["one", "two", "three"]
    answer = await client.completions.create(model=MODEL, prompt=prompts, max_tokens=4)
    assert [choice.text for choice in answer.choices] == [expected_text(prompt, 4) for prompt in prompts]
    copies = await client.chat.completions.create(model=MODEL, messages=said(QUESTION), max_tokens=4, n=2)
    assert [c.message.content for c in copies.choices] == copies_of(pair, QUESTION, 4, 2)
    assert [model.id async for model in client.models.list()] == [MODEL]


async def test_tools() -> None:
    """The engine gets the tools as they are, the client its call, whole and streamed."""
    async with decode_that_says(call_a_tool) as (lab, engine), connected(lab) as client:
        asking: Any = {"model": MODEL, "messages": said("Ulm?"), "tools": [TOOL], "tool_choice": "auto"}
        whole = await client.chat.completions.create(**asking)
        async with client.chat.completions.stream(**asking) as stream:
            streamed = await stream.get_final_completion()
        for answer in (whole, streamed):
            call = (answer.choices[0].message.tool_calls or [])[0]
            assert (call.function.name, call.function.arguments) == ("weather", '{"town": "Ulm"}')
            assert answer.choices[0].finish_reason == "tool_calls"
        assert [asked.json()["tools"] for asked in engine.asked_for("/v1/chat/completions")] == [[TOOL]] * 2


async def test_structured_output() -> None:
    """The schema reaches the engine, and the answer comes back as the client's own type."""
    async with decode_that_says(write_json) as (lab, engine), connected(lab) as client:
        answer = await client.chat.completions.parse(model=MODEL, messages=said("Ulm?"), response_format=Town)
        assert answer.choices[0].message.parsed == Town(**ARGUMENTS)
        wanted = engine.asked_for("/v1/chat/completions")[0].json()["response_format"]
        assert wanted["json_schema"]["schema"]["required"] == ["town"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, openai.BadRequestError),
        (404, openai.NotFoundError),
        (429, openai.RateLimitError),
        (500, openai.InternalServerError),
        (503, openai.InternalServerError),
    ],
)
async def test_errors_of_engines(pair: Lab, client: AsyncOpenAI, status: int, kind: type[openai.APIError]) -> None:
    """Each is the exception that the client has for its status."""
    await refuse(pair, status)
    with pytest.raises(kind) as caught:
        await client.chat.completions.create(model=MODEL, messages=said("x"))
    assert getattr(caught.value, "status_code", None) == status


async def test_errors_of_the_router() -> None:
    """They have code and param, and those that pass say when to come again."""
    async with make_lab(rate_limit_requests_per_min=2) as lab, connected(lab) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model=MODEL, messages=[])
        assert (bad.value.code, bad.value.param) == ("invalid_request", "messages")
        for _ in range(2):
            await ask(client, "x", 2, is_stream=False)
        with pytest.raises(openai.RateLimitError) as limited:
            await client.chat.completions.create(model=MODEL, messages=said("x"))
        assert limited.value.code == "rate_limit_exceeded"
        assert int(limited.value.response.headers["retry-after"]) > 0
    async with two_models() as lab, connected(lab) as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="nobody", messages=said("x"))
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    async with without_decode() as lab, connected(lab) as client:
        with pytest.raises(openai.InternalServerError) as unready:
            await client.chat.completions.create(model=MODEL, messages=said("x"))
        assert (unready.value.status_code, unready.value.code) == (503, "no_ready_pair")
        assert unready.value.response.headers["retry-after"] == "1"


async def test_the_clients_own_retry(pair: Lab) -> None:
    """It comes again after a 503, and is served."""
    await refuse(pair, 503, times=1)
    async with connected(pair, max_retries=1) as client:
        await ask(client, QUESTION, 3, is_stream=False)


async def test_an_error_in_mid_stream(pair: Lab, client: AsyncOpenAI) -> None:
    """A stream that breaks raises in the client; it never ends as if it were whole."""
    await fault(pair.decodes[0], "reset", after_chunks=2)
    stream = await client.chat.completions.create(model=MODEL, messages=said("x"), max_tokens=500, stream=True)
    with pytest.raises(openai.APIError, match=r"reset|closed"):
        async for _ in stream:
            pass


async def test_a_stream_that_the_client_closes(pair: Lab, client: AsyncOpenAI) -> None:
    """``stream.close()`` frees the engines within a second."""
    stream = await client.chat.completions.create(model=MODEL, messages=said("x"), max_tokens=50_000, stream=True)
    async for _ in stream:
        break
    await stream.close()
    await pair.settled(within_s=1.0)


async def test_responses(vllm_pair: Lab) -> None:
    """The Responses API goes over a pair, whole and streamed."""
    async with connected(vllm_pair) as client:
        whole = await client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=6)
        assert whole.usage is not None
        assert whole.usage.output_tokens == 6
        text = ""
        async for event in await client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=6, stream=True):
            text += event.delta if event.type == "response.output_text.delta" else ""
        assert text == whole.output_text
        assert len(text.split()) == 6
        assert vllm_pair.prefills[0].snapshot().total_requests == 2
