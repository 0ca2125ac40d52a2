"""The ``openai`` client over every engine and every way in which KV is handed over."""

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from pdrouter.sim.emulator import expected_text, render_chat
from tests.clients.fleets import MODEL, QUESTION, TOOL, answer_to
from tests.lab import Lab, make_lab

KINDS: Mapping[str, Mapping[str, Any]] = {
    "sglang": {"engine": "sglang"},
    "nixl": {"engine": "vllm", "kv_connector": "nixl"},
    "mooncake": {"engine": "vllm", "kv_connector": "mooncake"},
    "p2p_nccl": {"engine": "vllm", "kv_connector": "p2p_nccl"},
    "shared_storage": {"engine": "vllm", "kv_connector": "shared_storage"},
    "trtllm": {"engine": "trtllm"},
    "openai": {"engine": "openai"},
}
MESSAGES: Any = [{"role": "user", "content": QUESTION}]


@pytest.fixture(params=KINDS)
async def lab(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Lab]:
    """A pair of one rank each that always divides the work, or a plain engine; after each test it is at rest."""
    engine = {"dp_size": 1, **KINDS[request.param]}
    if request.param == "shared_storage":
        engine["storage_dir"] = str(tmp_path)
    sides = (0, 0, 1) if request.param == "openai" else (1, 1, 0)
    async with make_lab(*sides, engine=engine, disaggregation="always") as lab:
        yield lab
        await lab.settled(5.0)
        assert [emulator.snapshot().errors for emulator in lab.emulators] == [{}] * len(lab.emulators)
        assert [emulator.snapshot().recomputed_requests for emulator in lab.decodes] == [0] * len(lab.decodes)


@pytest.fixture
async def client(lab: Lab) -> AsyncIterator[AsyncOpenAI]:
    """A client without retries of its own."""
    async with AsyncOpenAI(base_url=f"{lab.url}/v1", api_key="none", max_retries=0, timeout=15) as client:
        yield client


async def test_logprobs(client: AsyncOpenAI) -> None:
    """Each token of the answer has its own, whole and streamed."""
    asking: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 6, "logprobs": True}
    whole = await client.chat.completions.create(**asking)
    entries = whole.choices[0].logprobs
    assert entries is not None
    tokens = entries.content or []
    assert "".join(token.token for token in tokens) == answer_to(QUESTION, 6)
    streamed: list[Any] = []
    async for event in await client.chat.completions.create(**asking, stream=True):
        if event.choices and event.choices[0].logprobs:
            streamed += event.choices[0].logprobs.content or []
    assert [(t.token, t.logprob) for t in streamed] == [(t.token, t.logprob) for t in tokens]


async def test_tools(client: AsyncOpenAI) -> None:
    """They are a part of the prompt that both legs read."""
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[TOOL], max_tokens=6)  # type: ignore[list-item]
    assert answer.choices[0].message.content == expected_text(render_chat(MESSAGES, [TOOL]), 6)


async def test_cached_tokens(client: AsyncOpenAI) -> None:
    """The usage tells how much of the prompt the engine that read it had: nothing at first, then all whole blocks."""
    asking: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4}
    usages = [(await client.chat.completions.create(**asking)).usage for _ in range(2)]
    options: Any = {"include_usage": True}
    events = await client.chat.completions.create(**asking, stream=True, stream_options=options)
    usages += [event.usage async for event in events if event.usage]
    details = [usage.prompt_tokens_details if usage else None for usage in usages]
    assert [told.cached_tokens if told else None for told in details] == [0, 128, 128]
