"""One request as a client makes it, against an engine that says what it is told to."""

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.lab import CHAT, COMPLETIONS, Script, ScriptedEngine, always, hang, http, make_lab

from pdrouter.sim.replay.caller import Ask, Caller, CannotAsk, Seen

HELLO = Ask(model="m", prompt="hello", output_tokens=3, extra={"ignore_eos": True})
USAGE = {"usage": {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}}


def events(*values: object, done: bool = True) -> bytes:
    """Return a stream's events."""
    lines = [f"data: {json.dumps(value)}\n\n" for value in values] + (["data: [DONE]\n\n"] if done else [])
    return "".join(lines).encode()


def delta(**fields: object) -> dict[str, Any]:
    """Return an event with a piece of the answer."""
    return {"choices": [{"index": 0, "delta": fields}]}


@contextlib.asynccontextmanager
async def calling(url: str, timeout_s: float = 5.0) -> AsyncIterator[Caller]:
    """Have a caller, and close it."""
    caller = Caller(url, "secret", 10, timeout_s)
    try:
        yield caller
    finally:
        await caller.aclose()


async def ask(script: Script, asked: Ask = HELLO, path: str = CHAT, timeout_s: float = 5.0) -> tuple[Seen, Any]:
    """Ask a scripted engine; return what was seen, and what the engine was asked."""
    async with ScriptedEngine(None, {path: script}).listen() as engine, calling(engine.url, timeout_s) as caller:
        seen = await caller.ask(asked)
        return seen, engine.asked_for(path)[0]


async def test_an_answer() -> None:
    """Stamps of the first and the last text, the endpoint's counts, who served it; the body is an application's."""
    body = events(delta(role="assistant", content=""), delta(content="a"), delta(content="b"), {"choices": []} | USAGE)
    seen, asked = await ask(always(200, body, "x-pdrouter-prefill: p:1; rank=3", "x-pdrouter-decode: d:1; rank=0"))
    assert seen.problem == ""
    assert 0 < seen.first_s <= seen.last_s
    assert (seen.prompt_tokens, seen.output_tokens, seen.cached_tokens) == (7, 2, 4)
    assert (seen.prefill, seen.decode) == ("p:1; rank=3", "d:1; rank=0")
    assert asked.json() == {
        "model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    assert b"authorization: bearer secret" in asked.head.lower()


async def test_stamps() -> None:
    """The first token's is the first, the last one's the last; what has no text is none."""
    seen = Seen()
    async with calling("http://x") as caller:
        for now_s, event in enumerate([delta(role="assistant"), delta(content="a"), delta(content="b"), delta()], 1):
            caller._take(b"data: " + json.dumps(event).encode(), float(now_s), seen)
    assert (seen.first_s, seen.last_s) == (2.0, 3.0)


async def test_thoughts_are_tokens() -> None:
    """A reasoning model's first token is one that is read."""
    seen, _ = await ask(always(200, events(delta(reasoning_content="hm"))))
    assert seen.problem == ""


async def test_token_ids_go_to_completions() -> None:
    """As they are."""
    body = events({"choices": [{"index": 0, "text": "a"}]})
    seen, asked = await ask(always(200, body), Ask(model="m", prompt=[5, 6], output_tokens=1), COMPLETIONS)
    assert (seen.problem, asked.json()["prompt"], seen.prompt_tokens) == ("", [5, 6], None)


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (always(429, {"error": {"message": "full", "code": "queue_full", "type": "x", "param": None}}),
         "429 queue_full"),
        (always(500, b"oh"), "500"),
        (always(200, events(delta(content="a"), {"error": {"code": "stream_stalled", "message": "x"}}, done=False)),
         "stream: stream_stalled"),
        (always(200, events(delta(content="a"), done=False)), "stream without its end"),
        (always(200, events(delta(content=""))), "no token"),
        (always(200, b"data: {oh\n\n"), "DecodeError"),
    ],
)  # fmt: skip
async def test_failures_by_cause(script: Script, problem: str) -> None:
    """In words that are alike for alike failures."""
    seen, _ = await ask(script)
    assert seen.problem == problem


async def test_a_stream_that_breaks() -> None:
    """What the connection died of."""

    async def break_off(asked: Any) -> bytes | None:
        asked.writer.write(http(200, b"", "transfer-encoding: chunked").replace(b"content-length: 0\r\n", b""))
        asked.writer.write(b"5\r\ndata:")
        await asked.writer.drain()
        asked.writer.close()
        return b""

    seen, _ = await ask(break_off)
    assert seen.problem == "RemoteProtocolError"


async def test_nobody_waits_for_ever() -> None:
    """The limit is for the whole answer."""
    seen, _ = await ask(hang, timeout_s=0.1)
    assert seen.problem in ("no end after 0.1 s", "ReadTimeout")


async def test_nobody_there() -> None:
    """A connection that is refused is a failure as others, and for the list of models one to tell at once."""
    async with calling("http://127.0.0.1:1") as caller:
        assert (await caller.ask(HELLO)).problem == "ConnectError"
        with pytest.raises(CannotAsk, match="ConnectError"):
            await caller.models()


async def test_models() -> None:
    """What a router says it serves."""
    async with make_lab(1, 1) as lab, calling(lab.url) as caller:
        assert await caller.models() == ["emulated"]
