"""Endpoints that generate nothing: formats, and answers that are functions of the texts."""

from typing import Any

import pytest

from pdrouter.sim.emulator import Emulator, EmulatorSettings, start_emulator


@pytest.fixture
async def emulator() -> Any:
    """Regular engine."""
    async with start_emulator(EmulatorSettings(engine="vllm")) as emulator:
        yield emulator


async def test_embeddings(client: Any, emulator: Emulator) -> None:
    """One vector for each text, the same for the same text."""
    body = {"input": ["one", "two", "one"]}
    reply = (await client.send(emulator.url, "/v1/embeddings", body)).json()
    first, second, third = (entry["embedding"] for entry in reply["data"])
    assert first == third != second
    assert [entry["index"] for entry in reply["data"]] == [0, 1, 2]
    assert reply["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
async def test_rerank(client: Any, emulator: Emulator, path: str) -> None:
    """The best document first."""
    body = {"query": "q", "documents": ["a", "b", "c", "d"]}
    results = (await client.send(emulator.url, path, body)).json()["results"]
    assert sorted(result["index"] for result in results) == [0, 1, 2, 3]
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True)
    assert all(body["documents"][r["index"]] == r["document"]["text"] for r in results)


async def test_score_and_classify(client: Any, emulator: Emulator) -> None:
    """One text against many, or pairs; classes with probabilities."""
    score = (await client.send(emulator.url, "/v1/score", {"text_1": "a", "text_2": ["b", "c"]})).json()
    assert [entry["index"] for entry in score["data"]] == [0, 1]
    pairs = (await client.send(emulator.url, "/v1/score", {"text_1": ["a", "a"], "text_2": ["b", "c"]})).json()
    assert pairs["data"] == score["data"]
    classes = (await client.send(emulator.url, "/v1/classify", {"input": ["x"]})).json()["data"][0]
    assert classes["label"] == f"LABEL_{classes['probs'].index(max(classes['probs']))}"


async def test_tokens_there_and_back(client: Any, emulator: Emulator) -> None:
    """As many as usage counts, and the text again."""
    told = (await client.send(emulator.url, "/tokenize", {"prompt": "a few words, é"})).json()
    assert told["count"] == len(told["tokens"]) == 4
    back = await client.send(emulator.url, "/detokenize", {"tokens": told["tokens"]})
    assert back.json() == {"prompt": "a few words, é"}
    chat = await client.send(emulator.url, "/tokenize", {"messages": [{"role": "user", "content": "hi"}]})
    assert chat.json()["count"] > 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", b"{"),
        ("/v1/embeddings", {}),
        ("/v1/rerank", {"query": "q"}),
        ("/v1/score", {"text_1": ["a", "b", "c"], "text_2": ["b"]}),
        ("/v1/classify", {"input": 3}),
        ("/tokenize", {}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [1 << 40]}),
    ],
)
async def test_bad_requests_are_refused(client: Any, emulator: Emulator, path: str, body: object) -> None:
    """400 in vLLM's shape, counted."""
    reply = await client.send(emulator.url, path, body)
    assert (reply.status, reply.json()["error"]["code"]) == (400, 400)
    assert emulator.snapshot().errors == {"bad_request": 1}
