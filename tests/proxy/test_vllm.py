"""vLLM pairs by each connector, over emulators that enforce its rules: answers, ranks, failures, and what is left."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pdrouter.sim.emulator import EmulatorSettings, expected_text, render_chat, start_emulator
from tests.lab import CHAT, COMPLETIONS, Lab, ScriptedEngine, always, chat, fault, gather, make_lab, route_to, until

CONNECTORS = ("nixl", "mooncake", "p2p_nccl", "shared_storage")
SERIAL = ("nixl", "p2p_nccl", "shared_storage")
LONG = "Tell me of the sea. " * 80


@asynccontextmanager
async def vllm_lab(connector: str | None, folder: Path, **options: Any) -> AsyncIterator[Lab]:
    """Run a router over vLLM engines of two ranks, which always disaggregates if it can."""
    engine = {"engine": "vllm", "kv_connector": connector} | options.pop("engine", {})
    if connector == "shared_storage":
        engine["storage_dir"] = str(folder)
    async with make_lab(engine=engine, **({"disaggregation": "always"} | options)) as lab:
        yield lab


def answer_to(text: str, tokens: int, choice: int = 0) -> str:
    """Return the text that any engine writes for a chat."""
    return expected_text(render_chat([{"role": "user", "content": text}], None), tokens, choice)


def text_of(events: list[Any]) -> str:
    """Return the text of a chat stream."""
    return "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"])


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_both_legs_agree(connector: str, tmp_path: Path) -> None:
    """Whole and streamed, the text is the engine's own; each leg runs on the rank that was chosen; nothing is left."""
    async with vllm_lab(connector, tmp_path) as lab:
        whole = await lab.post(CHAT, chat(LONG, 8))
        stream = await lab.post(CHAT, chat(LONG, 8, stream=True, stream_options={"include_usage": True}))
        assert (whole.status, stream.status) == (200, 200)
        assert whole.json()["choices"][0]["message"]["content"] == answer_to(LONG, 8)
        assert text_of(stream.events) == answer_to(LONG, 8)
        assert stream.events[-1]["usage"]["completion_tokens"] == 8
        for reply, received in zip((whole, stream), lab.decodes[0].received, strict=True):
            assert reply.headers["x-pdrouter-decode"].endswith(f"rank={received.rank}")
        await lab.settled()
        snapshots = [emulator.snapshot() for emulator in lab.emulators]
        assert [s.errors for s in snapshots] == [{}, {}]
        assert (snapshots[0].held_requests, snapshots[1].recomputed_requests) == (0, 0)


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_many_at_once(connector: str, tmp_path: Path) -> None:
    """Thirty-two at once, each with its own answer; both ranks of both sides work."""
    async with vllm_lab(connector, tmp_path) as lab:
        texts = [f"{number}: {LONG}" for number in range(32)]
        replies = await gather(*(lab.post(CHAT, chat(text, 6)) for text in texts))
        assert [r.json()["choices"][0]["message"]["content"] for r in replies] == [answer_to(t, 6) for t in texts]
        assert all(min(emulator.snapshot().requests_by_rank) > 0 for emulator in lab.emulators)
        await lab.settled()
        assert all(not emulator.snapshot().errors for emulator in lab.emulators)


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_several_answers(connector: str, tmp_path: Path) -> None:
    """Each sample has its own text, and no KV is left behind for those that the prefill didn't make."""
    async with vllm_lab(connector, tmp_path) as lab:
        reply = await lab.post(CHAT, chat(LONG, 5, n=2))
        assert reply.status == 200
        texts = [choice["message"]["content"] for choice in reply.json()["choices"]]
        assert texts == [answer_to(LONG, 5), answer_to(LONG, 5, 1)]
        await lab.settled()
        assert lab.prefills[0].snapshot().held_requests == 0


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_lists_of_prompts(connector: str, tmp_path: Path) -> None:
    """Each prompt gets its own answer: where KV is handed over by request, the decode side reads them all itself."""
    async with vllm_lab(connector, tmp_path) as lab:
        reply = await lab.post(COMPLETIONS, {"model": "emulated", "prompt": [LONG, LONG[::-1]], "max_tokens": 4})
        assert reply.status == 200
        choices = reply.json()["choices"]
        assert len(choices) == 2
        assert choices[0]["text"] != choices[1]["text"]
        assert ("x-pdrouter-prefill" in reply.headers) == (connector in ("p2p_nccl", "shared_storage"))
        await lab.settled()
        assert lab.prefills[0].snapshot().held_requests == 0


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_options_of_the_client(connector: str, tmp_path: Path) -> None:
    """Limits, logprobs, tools and formats are the decode side's business; the prefill makes one token."""
    async with vllm_lab(connector, tmp_path) as lab:
        body = chat(
            LONG,
            6,
            min_tokens=3,
            max_completion_tokens=6,
            logprobs=True,
            tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
            response_format={"type": "json_object"},
        )
        reply = await lab.post(CHAT, body)
        assert reply.status == 200, reply.body
        assert reply.json()["usage"]["completion_tokens"] == 6
        assert lab.prefills[0].received[0].output_tokens == 1
        refused = await lab.post(CHAT, chat(LONG, 2, min_tokens=5))
        assert (refused.status, refused.json()["error"]["type"]) == (400, "BadRequestError")
        await until(lambda: lab.is_ledger_zero)


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_what_was_cached_is_the_prefills_number(connector: str, tmp_path: Path) -> None:
    """The client is told what the prefill had, whichever engine answers."""
    async with vllm_lab(connector, tmp_path, engine={"dp_size": 1}) as lab:
        await lab.post(CHAT, chat(LONG, 4))
        reply = await lab.post(CHAT, chat(LONG, 5))
        streamed = await lab.post(CHAT, chat(LONG, 5, stream=True, stream_options={"include_usage": True}))
        for usage in (reply.json()["usage"], streamed.events[-1]["usage"]):
            assert usage["prompt_tokens_details"]["cached_tokens"] > 100


async def test_a_prompt_that_is_read_twice() -> None:
    """A prefill that doesn't say where its KV is: served all the same, counted, and told in the story."""
    settings = EmulatorSettings(engine="vllm", role="decode", kv_connector="nixl", speed=100.0)
    silent = always(200, {"usage": {"prompt_tokens": 9}, "kv_transfer_params": None})
    async with (
        ScriptedEngine(None, {CHAT: silent}).listen() as prefill,
        start_emulator(settings) as decode,
        route_to([prefill], [decode], engine="vllm", disaggregation="always") as lab,
    ):
        reply = await lab.post(CHAT, chat(LONG, 4))
        assert reply.json()["choices"][0]["message"]["content"] == answer_to(LONG, 4)
        assert b'pdrouter_handovers_total{event="recomputed"} 1.0' in (await lab.get("/metrics")).body
        story = (await lab.get(f"/debug/story/{reply.headers['x-request-id']}")).json()
        told = [moment["what"] for moment in story["lives"][0]["moments"]]
        assert any("read again" in what for what in told)


async def test_a_decode_that_had_nothing_of_the_prompt() -> None:
    """Where the decode side tells what came to it, an answer without any KV of the prefill's is counted as well."""
    answer = {"usage": {"prompt_tokens": 300, "prompt_tokens_details": {"cached_tokens": 0}}}
    async with (
        ScriptedEngine(None, {CHAT: always(200, {"usage": {"prompt_tokens": 300}})}).listen() as prefill,
        ScriptedEngine(None, {CHAT: always(200, answer)}).listen() as decode,
        route_to([prefill], [decode], engine="vllm", kv_transport="shared_storage", disaggregation="always") as lab,
    ):
        assert (await lab.post(CHAT, chat(LONG, 4))).status == 200
        assert b'pdrouter_handovers_total{event="recomputed"} 1.0' in (await lab.get("/metrics")).body


async def test_a_client_that_brings_kv_of_its_own(tmp_path: Path) -> None:
    """What isn't the client's to say goes nowhere."""
    async with vllm_lab("nixl", tmp_path) as lab:
        evil = {"do_remote_prefill": True, "remote_engine_id": "x", "remote_block_ids": [[1]], "remote_host": "h"}
        reply = await lab.post(CHAT, chat(LONG, 4, kv_transfer_params=evil))
        assert reply.json()["choices"][0]["message"]["content"] == answer_to(LONG, 4)
        assert lab.decodes[0].snapshot().errors == {}


@pytest.mark.parametrize("connector", SERIAL)
async def test_a_prefill_that_fails_is_another_prefills_turn(connector: str, tmp_path: Path) -> None:
    """As long as nothing has reached the client; the failed one isn't asked again (I8)."""
    async with vllm_lab(connector, tmp_path, prefill=2, disable_retries=False) as lab:
        await fault(lab.prefills[0], "status", status=500)
        replies = [await lab.post(CHAT, chat(f"{n} {LONG}", 4)) for n in range(4)]
        assert [reply.status for reply in replies] == [200] * 4
        assert all(lab.prefills[1].url.endswith(r.headers["x-pdrouter-prefill"].split(";")[0]) for r in replies)
        await lab.settled()


async def test_no_prefill_at_all(tmp_path: Path) -> None:
    """The engine's error, or where ``pd_fallback`` says so the decode endpoint alone, which is counted."""
    async with vllm_lab("nixl", tmp_path) as lab:
        await fault(lab.prefills[0], "status", status=500)
        assert (await lab.post(CHAT, chat(LONG, 4))).status == 500
        await lab.settled()
    async with vllm_lab("nixl", tmp_path, pd_fallback="decode") as lab:
        await fault(lab.prefills[0], "status", status=500)
        reply = await lab.post(CHAT, chat(LONG, 4))
        assert reply.json()["choices"][0]["message"]["content"] == answer_to(LONG, 4)
        assert "x-pdrouter-prefill" not in reply.headers
        assert b'pdrouter_handovers_total{event="fell_back"} 1.0' in (await lab.get("/metrics")).body
        await lab.settled()


async def test_kv_that_nobody_can_fetch_is_counted(tmp_path: Path) -> None:
    """The decode engine is gone when the prompt is read: nobody can have the prefill let go before its own time."""
    async with vllm_lab("nixl", tmp_path, disable_health_check=True) as lab:
        await lab.decodes[0].stop()
        reply = await lab.post(CHAT, chat(LONG, 4))
        assert (reply.status, reply.error["code"]) == (502, "upstream_unreachable")
        assert b'pdrouter_handovers_total{event="stranded"} 1.0' in (await lab.get("/metrics")).body
        await until(lambda: lab.is_ledger_zero)


async def test_a_decode_that_refuses(tmp_path: Path) -> None:
    """The prefill's KV isn't left to its time limit, whoever refuses the decode leg."""
    async with vllm_lab("nixl", tmp_path) as lab:
        await fault(lab.decodes[0], "status", status=503, times=1)
        assert (await lab.post(CHAT, chat(LONG, 4))).status == 503
        await until(lambda: lab.prefills[0].snapshot().held_requests == 0)
        await lab.settled()


async def test_a_client_that_leaves_in_mid_stream(tmp_path: Path) -> None:
    """The decode engine stops, and nothing is held anywhere."""
    for connector in CONNECTORS:
        async with vllm_lab(connector, tmp_path, engine={"speed": 5.0}) as lab:
            async with await lab.start(CHAT, chat(LONG, 2000, stream=True)) as call:
                await call.head()
                await call.reader.readuntil(b"data:")
            await lab.settled(3.0)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_other_ways_to_ask(path: str, tmp_path: Path) -> None:
    """Responses and messages go over a pair as well, whole and streamed."""
    async with vllm_lab("nixl", tmp_path) as lab:
        body = {"model": "emulated", "max_tokens": 6, "messages": [{"role": "user", "content": LONG}]}
        if path == "/v1/responses":
            body = {"model": "emulated", "input": LONG, "max_output_tokens": 6}
        for is_stream in (False, True):
            reply = await lab.post(path, {**body, "stream": is_stream})
            assert reply.status == 200, reply.body
            assert "x-pdrouter-prefill" in reply.headers
        await lab.settled()
        assert lab.decodes[0].snapshot().recomputed_requests == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "hello"}),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
        ("/rerank", {"query": "a", "documents": ["b", "c"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/classify", {"input": "hello"}),
        ("/tokenize", {"prompt": "hello"}),
        ("/detokenize", {"tokens": [1, 2, 3]}),
    ],
)
async def test_what_has_one_leg(path: str, body: dict[str, object], tmp_path: Path) -> None:
    """It goes to one endpoint as it is, and is accounted for while it lasts."""
    async with vllm_lab("nixl", tmp_path) as lab:
        reply = await lab.post(path, {"model": "emulated", **body})
        assert reply.status == 200, reply.body
        assert "x-pdrouter-prefill" not in reply.headers
        await lab.settled()


async def test_a_regular_vllm(tmp_path: Path) -> None:
    """One endpoint does it all."""
    async with vllm_lab(None, tmp_path, prefill=0, decode=0, worker=1) as lab:
        reply = await lab.post(CHAT, chat(LONG, 4, stream=True))
        assert text_of(reply.events) == answer_to(LONG, 4)
        await lab.settled()


async def test_ranks_of_a_hybrid_deployment(tmp_path: Path) -> None:
    """An endpoint that owns ranks 4 and 5 is told so by global numbers, learned from its metrics."""
    async with vllm_lab("nixl", tmp_path, engine={"dp_start_rank": 4}) as lab:
        replies = await gather(*(lab.post(CHAT, chat(f"{n} {LONG}", 4)) for n in range(8)))
        assert [reply.status for reply in replies] == [200] * 8
        assert {endpoint.rank_base for endpoint in lab.core.fleet} == {4}
        assert min(lab.prefills[0].snapshot().requests_by_rank) > 0
        await until(lambda: all(r.report for load in lab.core.load.endpoints.values() for r in load.ranks))


async def test_a_decode_that_has_the_history_needs_no_prefill(tmp_path: Path) -> None:
    """With ``disaggregation: auto`` a short prompt on an idle fleet is read where it is answered; it is explained."""
    async with vllm_lab("nixl", tmp_path, disaggregation="auto") as lab:
        reply = await lab.post(CHAT, chat("Hi", 4))
        assert "x-pdrouter-prefill" not in reply.headers
        story = json.loads((await lab.get(f"/debug/story/{reply.headers['x-request-id']}")).body)
        (leg,) = story["lives"][0]["legs"]
        assert leg["kind"] == "regular"
        assert "in one place" in leg["endpoint_why"]["sentence"]
        assert "pair=" in leg["endpoint_why"]["sentence"]
        assert b'pdrouter_decisions_alone_total{role="decode"} 1.0' in (await lab.get("/metrics")).body


@pytest.mark.invariant("I8")
async def test_a_prefill_whose_answer_isnt_one_is_to_blame(tmp_path: Path) -> None:
    """Not the decode engine that never heard of the request: another prefill is tried."""
    async with vllm_lab("nixl", tmp_path, prefill=2, disable_retries=False, cb_failure_threshold=1) as lab:
        await fault(lab.prefills[0], "status", status=200, body=["not an answer"])
        replies = [await lab.post(CHAT, chat(f"{n} {LONG}", 4)) for n in range(3)]
        assert [reply.status for reply in replies] == [200] * 3
        assert lab.core.fleet.is_ready(lab.decodes[0].url.removeprefix("http://"))
