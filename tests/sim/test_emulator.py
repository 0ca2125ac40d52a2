"""The emulated server as a caller sees it: replies, streams, usage, loads, aborts, its life as a process."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdrouter.sim.emulator import (
    Emulator,
    EmulatorSettings,
    expected_text,
    render_chat,
    start_emulator,
)

CHAT: dict[str, Any] = {"model": "emulated", "messages": [{"role": "user", "content": "hello there"}]}
PROMPT = render_chat(CHAT["messages"])
PROMPT_TOKENS = -(-len(PROMPT) // 4)
SLOW = {"text": "slow", "sampling_params": {"max_new_tokens": 100_000}, "rid": "slow-1"}


@pytest.fixture
async def emulator() -> AsyncIterator[Emulator]:
    """Fast engine of two ranks."""
    async with start_emulator(EmulatorSettings(dp_size=2, speed=200.0)) as emulator:
        yield emulator


async def test_chat(client: Any, emulator: Emulator) -> None:
    """The text is the expected one, usage is exact, the finish reason is right."""
    reply = (await client.send(emulator.url, "/v1/chat/completions", CHAT | {"max_tokens": 7})).json()
    assert reply["object"] == "chat.completion"
    assert reply["choices"][0]["message"]["content"] == expected_text(PROMPT, 7)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"] == {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": 7,
        "total_tokens": PROMPT_TOKENS + 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    reply = (await client.send(emulator.url, "/v1/chat/completions", CHAT)).json()
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] == 128


@pytest.mark.parametrize(("interval", "chunks"), [(1, 9), (4, 3), (100, 2)])
async def test_a_chat_stream_has_chunks_of_the_interval(client: Any, interval: int, chunks: int) -> None:
    """First token at once, then every interval, then the rest; usage if asked for."""
    settings = EmulatorSettings(speed=200.0, stream_interval=interval)
    body = CHAT | {"max_completion_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}
    async with start_emulator(settings) as emulator:
        events = (await client.send(emulator.url, "/v1/chat/completions", body)).events()
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    texts = [delta["content"] for delta in deltas[1:] if "content" in delta]
    assert len(texts) == chunks
    assert "".join(texts) == expected_text(PROMPT, 9)
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 9
    assert len({event["id"] for event in events}) == 1


async def test_completions_of_lists_and_choices(client: Any, emulator: Emulator) -> None:
    """Prompts in order, choices of one prompt together, each with its own text; prompts counted once."""
    body = {"prompt": ["abcd", "efgh"], "n": 2, "max_tokens": 3, "rid": "mine"}
    reply = (await client.send(emulator.url, "/v1/completions", body)).json()
    texts = [choice["text"] for choice in reply["choices"]]
    assert texts == [expected_text(p, 3, choice=c) for p in ("abcd", "efgh") for c in (0, 1)]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (2, 12)
    assert reply["id"] == "mine_0"
    body = {"prompt": ["abcd", "efgh"], "max_tokens": 3, "stream": True}
    events = (await client.send(emulator.url, "/v1/completions", body)).events()
    for index, prompt in enumerate(("abcd", "efgh")):
        parts = [e["choices"][0]["text"] for e in events if e["choices"][0]["index"] == index]
        assert "".join(parts) == expected_text(prompt, 3)
    reply = (await client.send(emulator.url, "/v1/completions", {"prompt": [1, 2], "max_tokens": 2})).json()
    assert reply["choices"][0]["text"] == expected_text([1, 2], 2)


async def test_generate_streams_the_text_so_far(client: Any, emulator: Emulator) -> None:
    """Cumulative text and ids, and meta_info as SGLang has it."""
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 3}, "stream": True, "rid": "r"}
    events = (await client.send(emulator.url, "/generate", body)).events()
    assert [event["text"] for event in events] == [expected_text("hello", n) for n in (1, 2, 3)]
    assert [len(event["output_ids"]) for event in events] == [1, 2, 3]
    reasons = [event["meta_info"]["finish_reason"] for event in events]
    assert reasons == [None, None, {"type": "length", "length": 3}]
    meta = events[-1]["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("r", 2, 3)


async def test_the_openai_client_understands_all_of_it(emulator: Emulator) -> None:
    """Streaming or not, models, and errors."""
    async with openai.AsyncOpenAI(base_url=f"{emulator.url}/v1", api_key="x", max_retries=0) as openai_client:
        models = await openai_client.models.list()
        assert [model.id for model in models.data] == ["emulated"]
        reply = await openai_client.chat.completions.create(**CHAT, max_tokens=5, n=2, logprobs=True)
        contents = [choice.message.content for choice in reply.choices]
        assert contents == [expected_text(PROMPT, 5, choice=c) for c in (0, 1)]
        logprobs = reply.choices[0].logprobs
        assert logprobs is not None
        assert "".join(entry.token for entry in logprobs.content or []) == contents[0]
        text = ""
        async for chunk in await openai_client.chat.completions.create(**CHAT, max_tokens=5, stream=True):
            text += chunk.choices[0].delta.content or ""
        assert text == contents[0]
        with pytest.raises(openai.BadRequestError):
            await openai_client.chat.completions.create(**CHAT, max_tokens=-1)


async def test_cached_tokens_are_told(pair: Any) -> None:
    """A prompt seen before is found in the cache of its rank, and decode tells the prefill's number."""
    body = {"text": "x" * 4 * 640, "sampling_params": {"max_new_tokens": 2}}
    for room, cached in ((4, 0), (8, 576), (9, 0)):
        prefill, decode = await pair.send("/generate", body | {"bootstrap_room": room})
        for leg in (prefill, decode):
            assert leg.json()["meta_info"]["cached_tokens"] == cached
    assert pair.is_idle
    assert (await pair.client.send(pair.prefill.url, "/flush_cache", b"")).status == 200
    prefill, _ = await pair.send("/generate", body | {"bootstrap_room": 12})
    assert prefill.json()["meta_info"]["cached_tokens"] == 0


@pytest.mark.parametrize("is_stream", [False, True])
async def test_logprobs_of_the_prompt_come_from_the_prefill_leg(pair: Any, is_stream: bool) -> None:
    """Prefill tells the prompt's, decode the answer's and an empty list, so that a router must merge."""
    body = {"input_ids": [1, 2, 3], "return_logprob": True, "sampling_params": {"max_new_tokens": 2}}
    replies = await pair.send("/generate", body | {"stream": is_stream, "logprob_start_len": 1})
    metas = [(reply.events()[-1] if is_stream else reply.json())["meta_info"] for reply in replies]
    assert [len(meta["input_token_logprobs"]) for meta in metas] == [2, 0]
    assert [len(meta["output_token_logprobs"]) for meta in metas] == [1, 2]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_logprobs_of_an_echoed_prompt_come_from_the_prefill_leg(pair: Any, is_stream: bool) -> None:
    """Both legs repeat the text; the prompt's tokens are told by prefill alone, with its own token behind them.

    Source: seen on SGLang 0.5.23.
    """
    body = {"prompt": "twelve bytes", "echo": True, "logprobs": 1, "max_tokens": 2, "stream": is_stream}
    replies = await pair.send("/v1/completions", body)
    legs = [reply.events() if is_stream else [reply.json()] for reply in replies]
    choices = [[choice for event in events for choice in event["choices"]] for events in legs]
    assert [leg[0]["text"].startswith("twelve bytes") for leg in choices] == [True, True]
    told = [[choice["logprobs"] for choice in leg if choice["logprobs"]] for leg in choices]
    assert [sum(len(logprobs["tokens"]) for logprobs in leg) for leg in told] == [4, 2]
    first = told[0][0]
    assert (first["token_logprobs"][0], first["top_logprobs"][0], first["text_offset"]) == (None, None, [-1] * 4)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", b"{"),
        ("/generate", b"[]"),
        ("/generate", {}),
        ("/generate", {"text": ""}),
        ("/generate", {"text": []}),
        ("/generate", {"text": ["a", 1]}),
        ("/generate", {"text": "a", "input_ids": [1]}),
        ("/generate", {"input_ids": [2**63]}),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 0}}),
        ("/generate", {"text": ["a", "b"], "rid": ["one"]}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2_000_000}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", CHAT | {"n": 0}),
        ("/v1/completions", {"max_tokens": 3}),
    ],
)
async def test_bad_requests_are_refused(client: Any, emulator: Emulator, path: str, body: object) -> None:
    """400 in SGLang's error shape, and nothing is held."""
    reply = await client.send(emulator.url, path, body)
    assert reply.status == 400
    assert reply.json() | {"message": ""} == {
        "object": "error",
        "message": "",
        "type": "BadRequestError",
        "param": None,
        "code": 400,
    }
    assert emulator.snapshot().is_idle


async def test_paths_and_methods(client: Any, emulator: Emulator) -> None:
    """404 and 405 as an HTTP server does; health, models and model info are there."""
    assert (await client.send(emulator.url, "/nope")).status == 404
    assert (await client.send(emulator.url, "/generate")).status == 405
    for path in ("/health", "/health_generate", "/v1/models", "/model_info", "/get_model_info"):
        assert (await client.send(emulator.url, path)).status == 200


@pytest.mark.parametrize(
    ("load_api", "found"), [("both", (200, 200)), ("v1", (200, 404)), ("legacy", (404, 200)), ("none", (404, 404))]
)
async def test_only_the_chosen_load_endpoints_exist(client: Any, load_api: Any, found: tuple[int, int]) -> None:
    """The other one is a 404, as on engines of another version."""
    async with start_emulator(EmulatorSettings(load_api=load_api)) as emulator:
        paths = ("/v1/loads?include=core,disagg,queues", "/get_load")
        assert tuple([(await client.send(emulator.url, path)).status for path in paths]) == found


async def test_reports_equal_the_model(client: Any, until: Any) -> None:
    """Both load endpoints, the metrics and the snapshot tell the same numbers."""
    settings = EmulatorSettings(dp_size=2, kv_capacity_tokens=100_200, speed=0.001, load_api="both")
    async with start_emulator(settings) as emulator:
        bodies = [SLOW | {"rid": f"r{i}", "routed_dp_rank": 1} for i in range(3)]
        calls = [await client.start(emulator.url, "/generate", body) for body in bodies]
        await until(lambda: emulator.snapshot().requests == 3)
        snapshot = emulator.snapshot()
        idle, busy = snapshot.ranks
        assert idle.is_idle
        assert (busy.running, busy.waiting, busy.used_tokens, busy.total_tokens) == (1, 2, 1, 3)
        new = (await client.send(emulator.url, "/v1/loads")).json()["loads"][1]
        assert (new["num_running_reqs"], new["num_waiting_reqs"]) == (1, 2)
        assert (new["num_used_tokens"], new["num_total_tokens"]) == (1, 3)
        assert new["num_waiting_uncached_tokens"] == 2
        assert new["max_total_num_tokens"] == 100_200
        assert new["disaggregation"] == {"mode": "null"}
        old = (await client.send(emulator.url, "/get_load")).json()[1]
        assert old == {"dp_rank": 1, "num_reqs": 3, "num_waiting_reqs": 2, "num_tokens": 3}
        text = (await client.send(emulator.url, "/metrics")).body.decode()
        values = {
            (sample.name, sample.labels["dp_rank"]): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert values["sglang:num_running_reqs", "1"] == 1
        assert values["sglang:num_queue_reqs", "1"] == 2
        assert values["sglang:num_used_tokens", "0"] == 0
        shown = (await client.send(emulator.url, "/_snapshot")).json()
        assert shown["ranks"][1]["waiting"] == 2
        assert (await client.send(emulator.url, "/flush_cache", b"")).status == 400
        for call in calls:
            await call.abandon()
        await until(lambda: emulator.snapshot().is_idle)


async def test_retractions_are_told(client: Any, until: Any) -> None:
    """An answer that the KV had no room for is retracted, read anew and comes whole; reply and metrics say so."""
    async with start_emulator(EmulatorSettings(kv_capacity_tokens=2000, speed=10.0)) as emulator:
        old, new = ({"text": "hi", "sampling_params": {"max_new_tokens": tokens}} for tokens in (1500, 900))
        first = await client.start(emulator.url, "/generate", old)
        await until(lambda: emulator.snapshot().ranks[0].used_tokens > 250)
        second = await client.start(emulator.url, "/generate", new)
        metas = [(await call.finish()).json()["meta_info"] for call in (first, second)]
        assert [meta["completion_tokens"] for meta in metas] == [1500, 900]
        assert [meta["total_retractions"] for meta in metas] == [0, 1]
        text = (await client.send(emulator.url, "/metrics")).body.decode()
        assert 'sglang:num_retracted_requests_total{dp_rank="0",model_name="emulated"} 1.0' in text


async def test_an_abort_needs_the_exact_id(client: Any, until: Any) -> None:
    """It ends that request with what it has, and those whose ids begin with it; an unknown id is a 200 and no more."""
    async with start_emulator(EmulatorSettings(dp_size=2)) as emulator:
        calls = {}
        for rid, stream in (("a-1", False), ("a-12", True), ("b-1", False)):
            body = SLOW | {"rid": rid, "stream": stream}
            calls[rid] = await client.start(emulator.url, "/generate", body)
        await until(lambda: emulator.snapshot().requests == 3)
        for unknown in ("nobody", "", "a-", "b"):
            assert (await client.send(emulator.url, "/abort_request", {"rid": unknown})).status == 200
        assert emulator.snapshot().requests == 3
        await client.send(emulator.url, "/abort_request", {"rid": "a-1"})
        whole, stream = await calls["a-1"].finish(), await calls["a-12"].finish()
        assert whole.json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert stream.events()[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert emulator.snapshot().requests == 1
        await client.send(emulator.url, "/abort_request", {"abort_all": True})
        await calls["b-1"].finish()
        assert emulator.snapshot().is_idle


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_caller_that_leaves_frees_all(client: Any, until: Any, is_stream: bool) -> None:
    """Slots and KV are free at once, for whole replies and streams, single and batch."""
    async with start_emulator(EmulatorSettings(dp_size=2)) as emulator:
        for text in ("one", ["one", "two"]):
            body = SLOW | {"text": text, "stream": is_stream}
            call = await client.start(emulator.url, "/generate", body)
            await until(lambda: emulator.snapshot().used_tokens > 0)
            if is_stream:
                await call.reader.readuntil(b"data: ")
            await call.abandon()
            await until(lambda: emulator.snapshot().is_idle)


async def test_time_is_the_profile_s_divided_by_speed(client: Any) -> None:
    """A request takes at least what the formulas say."""
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 101}}
    async with start_emulator(EmulatorSettings(speed=10.0)) as emulator:
        start = time.monotonic()
        await client.send(emulator.url, "/generate", body)
        took_s = time.monotonic() - start
        assert took_s >= (8.1 + 100 * 9.2) / 1000 / 10


async def test_connections_are_kept_and_requests_come_one_after_the_other(emulator: Emulator) -> None:
    """Keep-alive works, also after an error."""
    host, port = emulator.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for path, status in (("/nope", b"404"), ("/health", b"200"), ("/v1/models", b"200")):
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.split(b" ")[1] == status
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
    writer.close()
    await writer.wait_closed()


PROGRAM = """
import sys
from pdrouter.sim.emulator import EmulatorSettings, run
sys.exit(run(EmulatorSettings(role=sys.argv[1], dp_size=2, port=int(sys.argv[2]), speed=50.0)))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_process_says_where_it_listens_and_ends_cleanly(client: Any, number: int) -> None:
    """One JSON line on stdout; signals end it with status 0 even while requests run; nothing is on stderr."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, "prefill", "0", stdout=pipe, stderr=pipe, env=dict(os.environ)
    )
    assert process.stdout is not None
    line = json.loads(await process.stdout.readline())
    assert (line["event"], line["role"]) == ("listening", "prefill")
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": line["bootstrap_port"], "bootstrap_room": 2}
    call = await client.start(line["url"], "/generate", SLOW | room)
    while not (await client.send(line["url"], "/_snapshot")).json()["requests"]:
        pass
    process.send_signal(number)
    out, err = await process.communicate()
    assert (process.returncode, out, err) == (0, b"", b"")
    await call.abandon()


async def test_a_port_in_use_is_told(emulator: Emulator) -> None:
    """Exit status 1 and one line on stderr."""
    port = emulator.url.rsplit(":", 1)[1]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, "regular", port, stderr=asyncio.subprocess.PIPE
    )
    _, err = await process.communicate()
    assert process.returncode == 1
    assert err.decode().startswith("emulator: can't listen")


@pytest.mark.parametrize("bad", [{"dp_size": 0}, {"speed": 0.0}, {"stream_interval": 0}])
def test_settings_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    """At once, not at the first request."""
    with pytest.raises(ValueError, match="positive"):
        EmulatorSettings(**bad)


def test_an_unknown_profile_is_refused_with_one_line() -> None:
    """The settings name the profiles there are."""
    with pytest.raises(ValueError, match="unknown profile"):
        EmulatorSettings(profile="nope")
