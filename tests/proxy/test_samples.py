"""``n`` > 1 over SGLang pairs: a request for each sample, and one answer for the client."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from pdrouter.sim.emulator import expected_text, render_chat
from tests.lab import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    Asked,
    Lab,
    Script,
    ScriptedEngine,
    always,
    chat,
    hang,
    http,
    make_lab,
    route_to,
    until,
)

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PATHS = (CHAT, COMPLETIONS, GENERATE)


def chunk(text: str, finish: str | None = None, **more: object) -> bytes:
    """Return an event of a streamed chat."""
    value = {"id": f"id-{text}", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]} | more
    return b"data: " + json.dumps(value).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error": {"object": "error", "message": "KV is lost", "code": 500}}\n\n'


def answer_to(text: str, tokens: int, choice: int = 0) -> str:
    """Return what an engine answers to this chat."""
    return expected_text(render_chat([{"role": "user", "content": text}]), tokens, choice)


def framed(data: bytes) -> bytes:
    """Return a chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class Pair:
    """Two scripted engines: the prefill answers at once, the decode engine as its script says."""

    def __init__(self, decode: Script, prefill: Script | None = None) -> None:
        self.prefill = ScriptedEngine("prefill", dict.fromkeys(PATHS, prefill or always(200, {})))
        self.decode = ScriptedEngine("decode", dict.fromkeys(PATHS, decode))

    @contextlib.asynccontextmanager
    async def routed(self, **flags: Any) -> AsyncIterator[Lab]:
        """Run a router over them."""
        async with (
            self.prefill.listen(),
            self.decode.listen(),
            route_to([self.prefill], [self.decode], **flags) as lab,
        ):
            yield lab

    def aborted(self) -> set[str]:
        """Return the ids of the requests that the decode engine was told to end."""
        return {asked.json()["rid"] for asked in self.decode.asked_for("/abort_request")}

    def rids(self) -> list[str]:
        """Return the ids of the requests that the decode engine has got, in order."""
        return [asked.json()["rid"] for path in PATHS for asked in self.decode.asked_for(path)]


def in_turn(*scripts: Script) -> Script:
    """Return a script that does one thing after the other, and the last one for ever."""
    left = list(scripts)

    async def run(asked: Asked) -> bytes | None:
        script = left.pop(0) if len(left) > 1 else left[0]
        return await script(asked)

    return run


def streaming(*events: bytes, after: asyncio.Event | None = None, rest: Sequence[bytes] = ()) -> Script:
    """Return a script that streams these events, the rest once something has happened, and an end if it has a rest."""

    async def run(asked: Asked) -> bytes | None:
        asked.writer.write(HEAD + framed(b"".join(events)))
        await asked.writer.drain()
        if after is not None:
            await after.wait()
        if rest:
            return framed(b"".join(rest)) + b"0\r\n\r\n"
        asked.writer.close()
        return None

    return run


def choices_of(events: list[Any]) -> dict[int, list[Any]]:
    """Return the choices of a stream by index, in order."""
    found: dict[int, list[Any]] = {}
    for event in events:
        for choice in event["choices"]:
            found.setdefault(choice["index"], []).append(choice)
    return found


# Over emulators, which hang like SGLang where n isn't taken out.


async def test_a_chat() -> None:
    """Three choices, their usage as a regular engine tells it, and three requests with rooms, ids and ranks."""
    async with make_lab() as lab, make_lab(0, 0, 1) as plain:
        reply = await lab.post(CHAT, chat("a question", 5, n=3))
        whole = (await plain.post(CHAT, chat("a question", 5, n=3))).json()
        answer = reply.json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert [c["message"]["content"] for c in answer["choices"]] == [answer_to("a question", 5)] * 3
        assert [c["finish_reason"] for c in answer["choices"]] == ["length"] * 3
        assert answer["usage"] == whole["usage"]
        assert answer.keys() == whole.keys()
        for engine in (lab.prefills[0], lab.decodes[0]):
            received = engine.received
            assert len(received) == len({r.room for r in received}) == len({r.rid for r in received}) == 3
            assert engine.snapshot().errors == {}
        assert {r.rank for r in lab.decodes[0].received} == {0, 1}
        assert "x-pdrouter-decode" in reply.headers
        await lab.settled()


async def test_a_streamed_chat() -> None:
    """A role for each choice, one id for all, usage once and last, one end."""
    async with make_lab() as lab, make_lab(0, 0, 1) as plain:
        body = chat("a question", 5, n=3, stream=True, stream_options={"include_usage": True})
        *events, last = (await lab.post(CHAT, body)).events
        whole = (await plain.post(CHAT, body)).events[-1]
        assert last["usage"] == whole["usage"]
        assert [event["usage"] for event in events] == [None] * len(events)
        assert len({event["id"] for event in [*events, last]}) == 1
        choices = choices_of(events)
        assert sorted(choices) == [0, 1, 2]
        for told in choices.values():
            deltas = [choice["delta"] for choice in told]
            assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
            assert "".join(delta.get("content") or "" for delta in deltas) == answer_to("a question", 5)
            assert [c["finish_reason"] for c in told] == [None] * (len(told) - 1) + ["length"]
        await lab.settled()


@pytest.mark.parametrize("prompt", ["one", ["one", "two"], [1, 2, 3], [[1, 2], [3]], ["one"]])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_completions(is_stream: bool, prompt: object) -> None:
    """Sample k of prompt j has the index j * n + k; each request stays a list."""
    prompts: list[Any] = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    body = {"prompt": prompt, "n": 2, "max_tokens": 4, "stream": is_stream, "echo": True, "logprobs": 1}
    async with make_lab() as lab, make_lab(0, 0, 1) as plain:
        whole = (await plain.post(COMPLETIONS, body | {"n": 1, "stream": False})).json()["choices"]
        reply = await lab.post(COMPLETIONS, body)
        choices = choices_of(reply.events if is_stream else [reply.json()])
        assert list(range(2 * len(prompts))) == sorted(choices)
        for index, told in choices.items():
            expected = whole[index // 2]
            assert "".join(choice["text"] for choice in told) == expected["text"]
            tokens = [token for choice in told if choice["logprobs"] for token in choice["logprobs"]["tokens"]]
            assert tokens == expected["logprobs"]["tokens"]
        assert len(lab.decodes[0].received) == 2 * len(prompts)
        await lab.settled()


@pytest.mark.parametrize("text", ["one", ["one", "two"]])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_list", [False, True])
async def test_generate(is_stream: bool, text: str | list[str], is_list: bool) -> None:
    """A list of answers, or events with an index; logprobs of the prompt in each. Parameters may be a list."""
    prompts = text if isinstance(text, list) else [text]
    params: Any = {"max_new_tokens": 3, "n": 2}
    body = {"text": text, "sampling_params": [params] * len(prompts) if is_list else params, "stream": is_stream}
    async with make_lab() as lab:
        reply = await lab.post(GENERATE, body | {"return_logprob": True, "logprob_start_len": 0})
        last = {event["index"]: event for event in reply.events} if is_stream else dict(enumerate(reply.json()))
        assert sorted(last) == list(range(2 * len(prompts)))
        for index, answer in last.items():
            assert answer["text"] == expected_text(prompts[index // 2], 3)
            assert len(answer["meta_info"]["input_token_logprobs"]) == answer["meta_info"]["prompt_tokens"]
        assert lab.decodes[0].snapshot().errors == {}
        await lab.settled()


@pytest.mark.parametrize("counts", [(0, 0, 1), (1, 1, 1)])
async def test_a_regular_engine_makes_all_samples(counts: tuple[int, int, int]) -> None:
    """Where there is one, it gets the request as it is."""
    async with make_lab(*counts) as lab:
        answer = (await lab.post(CHAT, chat("x", 3, n=2))).json()
        assert [c["message"]["content"] for c in answer["choices"]] == [answer_to("x", 3, choice=c) for c in (0, 1)]
        assert len(lab.workers[0].received) == 2
        assert lab.core.decided == 1


async def test_the_story_tells_of_each_sample() -> None:
    """All under the request's id; metrics count one request."""
    async with make_lab() as lab:
        await lab.post(CHAT, chat("x", 3, n=3), {"x-request-id": "mine"})
        lives = (await lab.get("/debug/story/mine")).json()["lives"]
        assert [life["outcome"] for life in lives] == ["answered"] * 3
        page = (await lab.get("/metrics")).body.decode()
        counts = [line for line in page.splitlines() if line.startswith("pdrouter_requests_total{")]
        assert [line.rpartition(" ")[2] for line in counts] == ["1.0"]


async def test_rates_count_one_request() -> None:
    """With the tokens of all samples."""
    async with make_lab(rate_limit_requests_per_min=2) as lab:
        assert [(await lab.post(CHAT, chat("x", 1, n=3))).status for _ in range(3)] == [200, 200, 429]
    async with make_lab(rate_limit_tokens_per_min=1000) as lab:
        assert [(await lab.post(CHAT, chat("x", 200, n=4))).status for _ in range(2)] == [200, 429]


async def test_each_sample_is_placed_by_its_prefix() -> None:
    """A prompt that stands alone is compared with others', as it is without ``n``."""
    async with make_lab(2, 1, prefix_block_bytes=64) as lab:
        await lab.post(CHAT, chat("word " * 100, 2))
        await lab.post(CHAT, chat("word " * 100, 2, n=2), {"x-request-id": "mine"})
        lives = (await lab.get("/debug/story/mine")).json()["lives"]
        assert (len(lives), lives[0]["prefix_tokens"] > 0) == (2, True)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves(is_stream: bool) -> None:
    """All samples are ended at the engines within a second, streamed or not."""
    async with make_lab(engine={"dp_size": 1, "speed": 1.0}) as lab:
        async with await lab.start(CHAT, chat("x", 2000, n=3, stream=is_stream)):
            await until(lambda: lab.decodes[0].snapshot().requests == 3)
        await lab.settled(within_s=2.0)


# Limits.


async def test_too_many_samples() -> None:
    """A clear error, and nothing is placed."""
    async with make_lab(max_samples=4) as lab:
        assert (await lab.post(CHAT, chat("x", 1, n=4))).status == 200
        decided = lab.core.decided
        reply = await lab.post(CHAT, chat("x", 1, n=5))
        assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "invalid_request", "n")
        assert "max_samples" in reply.error["message"]
        assert lab.core.decided == decided


async def test_one_that_finds_no_place_in_the_queue() -> None:
    """The request fails with that, and the samples that were placed are ended."""
    async with make_lab(
        engine={"dp_size": 1, "speed": 1.0}, max_concurrent_requests=1, queue_size=1, queue_timeout_secs=30
    ) as lab:
        reply = await lab.post(CHAT, chat("x", 2000, n=3))
        assert (reply.status, reply.error["code"]) == (429, "queue_full")
        await lab.settled(within_s=3.0)


async def test_samples_wait_for_their_turns() -> None:
    """More than may run at once are answered one after the other."""
    async with make_lab(max_concurrent_requests=1, queue_size=10) as lab:
        answer = (await lab.post(CHAT, chat("x", 3, n=4))).json()
        assert len(answer["choices"]) == 4
        await lab.settled()


@pytest.mark.invariant("I9")
@pytest.mark.parametrize(("limit_bytes", "status"), [(2200, 200), (2000, 502)])
async def test_whole_answers_have_one_limit_together(limit_bytes: int, status: int) -> None:
    """What is held of all samples of a request."""
    pair = Pair(always(200, {"choices": [{"index": 0, "text": "x" * 1000}]}))
    async with pair.routed(upstream_max_reply_bytes=limit_bytes) as lab:
        reply = await lab.post(CHAT, chat("x", n=2))
        assert reply.status == status
        if status != 200:
            assert (reply.error["code"], "2000 bytes" in reply.error["message"]) == ("upstream_protocol", True)
        await until(lambda: lab.is_ledger_zero)


@pytest.mark.invariant("I9")
async def test_a_slow_client_holds_all_engines_back() -> None:
    """None of them is read while the client reads nothing, and each gets its turn when it does."""
    written = [0, 0, 0]

    async def endless(asked: Asked) -> bytes | None:
        number = len(started)
        started.append(asked)
        asked.writer.write(HEAD)
        while True:
            asked.writer.write(framed(chunk(f"{number}" * 5000)))
            await asked.writer.drain()
            written[number] += 5000
            await asyncio.sleep(0)

    started: list[Asked] = []
    pair = Pair(endless)
    async with (
        pair.routed(client_write_buffer_bytes=10_000, upstream_read_buffer_bytes=16_384) as lab,
        await lab.start(CHAT, chat("x", n=3, stream=True), receive_bytes=8192) as call,
    ):
        await call.head()
        async with asyncio.timeout(8):
            before = [-1, -1, -1]
            while before != written:
                before = list(written)
                for _ in range(200):
                    await asyncio.sleep(0)
        stalled = list(written)
        assert max(stalled) < 8_000_000
        async with asyncio.timeout(8):
            while any(now <= then for now, then in zip(written, stalled, strict=True)):
                await call.some()


async def test_a_sample_begins_though_the_client_is_behind() -> None:
    """Its engine isn't silent: the client is slow to read the others."""
    is_full = asyncio.Event()

    async def late(asked: Asked) -> bytes | None:
        await is_full.wait()
        asked.writer.write(HEAD + framed(chunk("late")))
        return await hang(asked)

    async def endless(asked: Asked) -> bytes | None:
        asked.writer.write(HEAD)
        while True:
            asked.writer.write(framed(chunk("x" * 5000)))
            await asked.writer.drain()

    pair = Pair(in_turn(endless, late))
    async with (
        pair.routed(client_write_buffer_bytes=10_000) as lab,
        await lab.start(CHAT, chat("x", n=2, stream=True), receive_bytes=8192) as call,
    ):
        await call.head()
        await until(lambda: lab.router.service.app.clients.counts["write_buffer_full"] > 0)
        is_full.set()
        begun = b"pdrouter_time_to_first_token_seconds_count 2.0"
        await until(lambda: begun in lab.router.service.metrics.render())
        assert len(lab.core.live) == 2


# Failures.


async def test_a_sample_is_tried_again_by_itself() -> None:
    """The others go on; the client sees nothing of it."""
    good = always(200, {"id": "a", "choices": [{"index": 0, "message": {"content": "good"}}]})
    pair = Pair(in_turn(good, always(500, {"error": "x"}), good))
    async with pair.routed(disable_retries=False, retry_initial_backoff_ms=1) as lab:
        reply = await lab.post(CHAT, chat("x", n=2))
        assert [c["message"]["content"] for c in reply.json()["choices"]] == ["good", "good"]
        assert len(pair.rids()) == 3
        await until(lambda: lab.is_ledger_zero)


async def test_a_streamed_sample_is_tried_again_while_others_stream() -> None:
    """Nothing of its own answer has reached the client (I7)."""
    is_answered = asyncio.Event()
    pair = Pair(
        in_turn(
            streaming(chunk("a"), after=is_answered, rest=[DONE]),
            always(503, {"error": "x"}),
            streaming(chunk("b"), rest=[DONE]),
        )
    )
    async with (
        pair.routed(disable_retries=False, retry_initial_backoff_ms=1) as lab,
        await lab.start(CHAT, chat("x", n=2, stream=True)) as call,
    ):
        await until(lambda: len(pair.rids()) == 3)
        is_answered.set()
        reply = await call.finish()
        texts = {
            index: "".join(c["delta"]["content"] for c in told) for index, told in choices_of(reply.events).items()
        }
        assert sorted(texts.values()) == ["a", "b"]
        await until(lambda: lab.is_ledger_zero)


@pytest.mark.invariant("I12")
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_sample_that_fails_for_good(is_stream: bool) -> None:
    """The engine's own error is passed on, and the other samples are ended at the engines."""
    failure = {"object": "error", "message": "no KV", "code": 500}

    pair = Pair(in_turn(hang, always(500, failure, "x-odd: 1"), hang), prefill=hang)
    async with pair.routed() as lab:
        reply = await lab.post(CHAT, chat("x", n=3, stream=is_stream))
        assert (reply.status, reply.json(), reply.headers["x-odd"]) == (500, failure, "1")
        first, _, third = pair.rids()
        await until(lambda: pair.aborted() == {first, third})
        await until(lambda: lab.is_ledger_zero and lab.is_quiet)
        page = (await lab.get("/metrics")).body.decode()
        assert 'code="500"' in page or 'status="500"' in page


@pytest.mark.invariant("I12")
async def test_a_stream_that_breaks_off() -> None:
    """After the first byte the client gets an error event and no proper end; the others are ended."""
    is_begun = asyncio.Event()
    pair = Pair(
        in_turn(
            streaming(chunk("a"), after=asyncio.Event()),
            streaming(chunk("b") + b"data: {", after=is_begun),
        )
    )
    async with (
        pair.routed() as lab,
        await lab.start(CHAT, chat("x", n=2, stream=True)) as call,
    ):
        await call.head()
        await until(lambda: len(pair.rids()) == 2)
        is_begun.set()
        reply = await call.finish()
        assert not reply.is_whole
        errors = [json.loads(piece)["error"] for piece in reply.pieces if piece.startswith('{"error"')]
        assert [error["code"] for error in errors] == ["upstream_closed"]
        await until(lambda: pair.rids()[0] in pair.aborted())
        await until(lambda: lab.is_ledger_zero and lab.is_quiet)


@pytest.mark.invariant("I12")
async def test_an_error_inside_a_stream() -> None:
    """It passes as it came, ends the other samples, and the stream."""
    is_begun = asyncio.Event()
    pair = Pair(
        in_turn(
            streaming(chunk("a"), after=asyncio.Event()),
            streaming(chunk("b"), after=is_begun, rest=[ERROR, DONE]),
        )
    )
    async with (
        pair.routed() as lab,
        await lab.start(CHAT, chat("x", n=2, stream=True)) as call,
    ):
        await call.head()
        await until(lambda: len(pair.rids()) == 2)
        is_begun.set()
        reply = await call.finish()
        assert ERROR in reply.body
        assert reply.body.count(b'data: {"error"') == 1
        await until(lambda: pair.rids()[0] in pair.aborted())
        await until(lambda: lab.is_ledger_zero and lab.is_quiet)


async def test_an_error_after_others_have_begun() -> None:
    """An engine's refusal of one sample can only be told by an event then."""
    is_begun = asyncio.Event()

    async def refuse(asked: Asked) -> bytes | None:
        await is_begun.wait()
        return http(400, {"error": {"message": "too long"}})

    pair = Pair(in_turn(streaming(chunk("a"), after=asyncio.Event()), refuse))
    async with (
        pair.routed() as lab,
        await lab.start(CHAT, chat("x", n=2, stream=True)) as call,
    ):
        await call.head()
        is_begun.set()
        reply = await call.finish()
        assert (reply.status, reply.is_whole) == (200, False)
        error = json.loads(reply.pieces[-1])["error"]
        assert "too long" in error["message"]
        await until(lambda: lab.is_ledger_zero and lab.is_quiet)


async def test_whole_answers_that_break_off() -> None:
    """Nothing has reached the client, so it gets a proper error."""

    async def half(asked: Asked) -> bytes | None:
        asked.writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"choices":')
        await asked.writer.drain()
        asked.writer.close()
        return None

    good = always(200, {"choices": [{"index": 0}]})
    pair = Pair(in_turn(good, half))
    async with pair.routed() as lab:
        reply = await lab.post(CHAT, chat("x", n=2))
        assert (reply.status, reply.error["code"]) == (502, "upstream_closed")
        await until(lambda: lab.is_ledger_zero and lab.is_quiet)


async def test_whole_answers_that_are_not_understood() -> None:
    """They can't be joined."""
    pair = Pair(in_turn(always(200, {"choices": [{"index": 0}]}), always(200, b"oops")))
    async with pair.routed() as lab:
        reply = await lab.post(CHAT, chat("x", n=2))
        assert (reply.status, reply.error["code"]) == (502, "upstream_protocol")
        await until(lambda: lab.is_ledger_zero and lab.is_quiet)


async def test_the_router_stops() -> None:
    """The client is told once."""
    pair = Pair(hang)
    async with (
        pair.routed() as lab,
        await lab.start(CHAT, chat("x", n=3)) as call,
    ):
        await until(lambda: len(pair.rids()) == 3)
        lab.router.service.dispatcher.end_all()
        reply = await call.finish()
        assert (reply.status, reply.error["code"]) == (503, "shutting_down")
        await until(lambda: lab.is_ledger_zero and lab.is_quiet)


# What the engines get.


@pytest.mark.invariant("I10")
async def test_the_bodies_of_the_samples() -> None:
    """The client's bytes without ``n``: seed and all else are the same for each, as in SGLang."""
    pair = Pair(always(200, {"choices": [{"index": 0}]}))
    async with pair.routed() as lab:
        rest = b'"seed": 7, "x": 1e-05, "messages": [{"role":"user","content":"\\u00e9"}]'
        assert (await lab.post(CHAT, b'{"n": 2, ' + rest + b"}")).status == 200
        bodies = [asked.body for engine in (pair.prefill, pair.decode) for asked in engine.asked_for(CHAT)]
        kept = b'"seed":7,"x":1e-05,"messages":[{"role":"user","content":"\\u00e9"}]}'
        assert [body.endswith(kept) for body in bodies] == [True] * 4
        assert not any(b'"n"' in body for body in bodies)
        assert len({json.loads(body)["bootstrap_room"] for body in bodies}) == 2
