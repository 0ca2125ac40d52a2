"""``langchain-openai``, blocking and async, over a pair of each kind of engine."""

import asyncio
from typing import Any

import openai
import pytest
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
    without_decode,
    write_json,
)
from tests.lab import Lab, fault

langchain: Any = pytest.importorskip("langchain_openai", reason="make test-clients")
prompts: Any = pytest.importorskip("langchain_core.prompt_values", reason="make test-clients")


class Town(BaseModel):
    town: str


def chat_of(lab: Lab, **options: Any) -> Any:
    """Return a chat model of a router."""
    return langchain.ChatOpenAI(model=MODEL, base_url=f"{lab.url}/v1", api_key="none", max_retries=0, **options)


async def test_chat(pair: Lab) -> None:
    """Text and usage are right, whole, streamed, and of several conversations at once."""
    chat = chat_of(pair, max_tokens=6, stream_usage=True)
    whole = await chat.ainvoke(QUESTION)
    pieces = [piece async for piece in chat.astream(QUESTION)]
    streamed = pieces[0]
    for piece in pieces[1:]:
        streamed += piece
    for answer in (whole, streamed):
        assert answer.content == answer_to(QUESTION, 6)
        assert answer.usage_metadata["output_tokens"] == 6
    texts = [f"{number}: {QUESTION}" for number in range(8)]
    assert [answer.content for answer in await chat.abatch(texts)] == [answer_to(text, 6) for text in texts]


async def test_blocking_calls(pair: Lab) -> None:
    """Chat and completions, whole and streamed."""

    def run() -> list[str]:
        chat = chat_of(pair, max_tokens=4)
        model = langchain.OpenAI(
            model=MODEL, base_url=f"{pair.url}/v1", api_key="none", max_retries=0, max_tokens=4, temperature=0.5
        )
        texts = [chat.invoke(QUESTION).content, "".join(piece.content for piece in chat.stream(QUESTION))]
        return [*texts, model.invoke("once"), "".join(model.stream("once"))]

    answer, text = answer_to(QUESTION, 4), expected_text("once", 4)
    assert await asyncio.to_thread(run) == [answer, answer, text, text]


async def test_several_answers(pair: Lab) -> None:
    """Each is its own."""
    result = await chat_of(pair, max_tokens=4, n=2).agenerate_prompt([prompts.StringPromptValue(text=QUESTION)])
    texts = [generation.text for generation in result.generations[0]]
    assert texts == copies_of(pair, QUESTION, 4, 2)


async def test_tools_and_structured_output() -> None:
    """Tools and schema reach the engine as they are; the call comes back whole and streamed."""
    async with decode_that_says(call_a_tool) as (lab, engine):
        chat = chat_of(lab).bind_tools([TOOL])
        whole = await chat.ainvoke("Ulm?")
        pieces = [piece async for piece in chat.astream("Ulm?")]
        streamed = pieces[0]
        for piece in pieces[1:]:
            streamed += piece
        for answer in (whole, streamed):
            assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("weather", ARGUMENTS)]
        assert [asked.json()["tools"] for asked in engine.asked_for("/v1/chat/completions")] == [[TOOL]] * 2
    async with decode_that_says(write_json) as (lab, engine):
        answer = await chat_of(lab).with_structured_output(Town, method="json_schema").ainvoke("Ulm?")
        assert answer == Town(**ARGUMENTS)
        assert engine.asked_for("/v1/chat/completions")[0].json()["response_format"]["type"] == "json_schema"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, openai.BadRequestError),
        (404, openai.NotFoundError),
        (429, openai.RateLimitError),
        (503, openai.InternalServerError),
    ],
)
async def test_errors_of_engines(pair: Lab, status: int, kind: type[openai.APIError]) -> None:
    """Each is the exception that the client has for its status, whole and streamed."""
    await refuse(pair, status)
    with pytest.raises(kind):
        await chat_of(pair).ainvoke("x")
    with pytest.raises(kind):
        [piece async for piece in chat_of(pair).astream("x")]


async def test_an_error_of_the_router() -> None:
    """It says what is wrong."""
    async with without_decode() as lab:
        with pytest.raises(openai.InternalServerError, match=r"503.*no decode endpoint"):
            await chat_of(lab).ainvoke("x")


async def test_an_error_in_mid_stream(pair: Lab) -> None:
    """A stream that breaks raises; it never ends as if it were whole."""
    await fault(pair.decodes[0], "reset", after_chunks=2)
    with pytest.raises(openai.APIError, match=r"reset|closed"):
        [piece async for piece in chat_of(pair, max_tokens=500).astream("x")]


async def test_a_stream_that_the_client_closes(pair: Lab) -> None:
    """The engines are free within a second."""
    stream = chat_of(pair, max_tokens=50_000).astream("x")
    async for _ in stream:
        break
    await stream.aclose()
    await pair.settled(within_s=1.0)
