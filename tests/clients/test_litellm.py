"""``litellm`` as its users call a vLLM server, blocking and async, over a pair of each kind of engine."""

import asyncio
import os
from typing import Any

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
    two_models,
    without_decode,
    write_json,
)
from tests.lab import Lab, fault

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or its import asks the network for prices
litellm: Any = pytest.importorskip("litellm", reason="make test-clients")

# litellm's use of pydantic, not ours.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


class Town(BaseModel):
    town: str


def said(text: str, lab: Lab, **options: Any) -> dict[str, Any]:
    """Return the arguments of a call with one message."""
    return {
        "model": f"hosted_vllm/{MODEL}",
        "api_base": f"{lab.url}/v1",
        "api_key": "none",
        "max_retries": 0,
        "messages": [{"role": "user", "content": text}],
    } | options


async def test_chat(pair: Lab) -> None:
    """Text and usage are right, whole, streamed, and in several answers."""
    whole = await litellm.acompletion(**said(QUESTION, pair, max_tokens=6, n=2))
    assert [c.message.content for c in whole.choices] == copies_of(pair, QUESTION, 6, 2)
    assert whole.usage.completion_tokens == 12
    options = {"max_tokens": 6, "stream": True, "stream_options": {"include_usage": True}}
    events = [event async for event in await litellm.acompletion(**said(QUESTION, pair, **options))]
    assert "".join(e.choices[0].delta.content or "" for e in events if e.choices) == answer_to(QUESTION, 6)
    assert [e.usage.completion_tokens for e in events if getattr(e, "usage", None)] == [6]


async def test_blocking_calls(pair: Lab) -> None:
    """Chat and completions, whole and streamed."""

    def run() -> list[str]:
        whole = litellm.completion(**said(QUESTION, pair, max_tokens=4))
        stream = litellm.completion(**said(QUESTION, pair, max_tokens=4, stream=True))
        asking = said("", pair, prompt="once", max_tokens=4)
        del asking["messages"]
        completion = litellm.text_completion(**asking)
        streamed = "".join(event.choices[0].delta.content or "" for event in stream)
        return [whole.choices[0].message.content, streamed, completion.choices[0].text]

    answer = answer_to(QUESTION, 4)
    assert await asyncio.to_thread(run) == [answer, answer, expected_text("once", 4)]


async def test_tools_and_structured_output() -> None:
    """Tools and schema reach the engine as they are; the call comes back whole and streamed."""
    async with decode_that_says(call_a_tool) as (lab, engine):
        whole = await litellm.acompletion(**said("Ulm?", lab, tools=[TOOL]))
        stream = await litellm.acompletion(**said("Ulm?", lab, tools=[TOOL], stream=True))
        streamed = litellm.stream_chunk_builder([event async for event in stream])
        for answer in (whole, streamed):
            function = answer.choices[0].message.tool_calls[0].function
            assert (function.name, function.arguments) == ("weather", '{"town": "Ulm"}')
        assert [asked.json()["tools"] for asked in engine.asked_for("/v1/chat/completions")] == [[TOOL]] * 2
    async with decode_that_says(write_json) as (lab, engine):
        answer = await litellm.acompletion(**said("Ulm?", lab, response_format=Town))
        assert Town.model_validate_json(answer.choices[0].message.content) == Town(**ARGUMENTS)
        wanted = engine.asked_for("/v1/chat/completions")[0].json()["response_format"]
        assert wanted["json_schema"]["schema"]["required"] == ["town"]


@pytest.mark.parametrize(
    ("status", "name"),
    [
        (400, "BadRequestError"),
        (404, "NotFoundError"),
        (429, "RateLimitError"),
        (500, "InternalServerError"),
        (503, "ServiceUnavailableError"),
    ],
)
async def test_errors_of_engines(pair: Lab, status: int, name: str) -> None:
    """Each is the exception that the client has for its status, whole and streamed."""
    await refuse(pair, status)
    for is_stream in (False, True):
        with pytest.raises(getattr(litellm, name)) as caught:
            await litellm.acompletion(**said("x", pair, stream=is_stream))
        assert getattr(caught.value, "status_code", None) == status


async def test_errors_of_the_router(pair: Lab) -> None:
    """They say what is wrong."""
    with pytest.raises(litellm.BadRequestError, match="messages"):
        await litellm.acompletion(**said("x", pair, messages=[]))
    async with two_models() as lab:
        with pytest.raises(litellm.NotFoundError, match="model_not_found"):
            await litellm.acompletion(**said("x", lab, model="hosted_vllm/nobody"))
    async with without_decode() as lab:
        with pytest.raises(litellm.ServiceUnavailableError, match="no_ready_pair"):
            await litellm.acompletion(**said("x", lab))


async def test_an_error_in_mid_stream(pair: Lab) -> None:
    """A stream that breaks raises; it never ends as if it were whole."""
    await fault(pair.decodes[0], "reset", after_chunks=2)
    stream = await litellm.acompletion(**said("x", pair, max_tokens=500, stream=True))
    with pytest.raises(litellm.exceptions.MidStreamFallbackError, match=r"reset|closed"):
        async for _ in stream:
            pass


async def test_a_stream_that_the_client_closes(pair: Lab) -> None:
    """The engines are free within a second."""
    stream = await litellm.acompletion(**said("x", pair, max_tokens=50_000, stream=True))
    async for _ in stream:
        break
    await stream.aclose()
    await pair.settled(within_s=1.0)
