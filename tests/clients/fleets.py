"""What all clients are tried with: the right answers, engines that refuse, an engine that calls tools."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from pdrouter.sim.emulator import EmulatorSettings, expected_text, render_chat, start_emulator
from tests.lab import CHAT, Asked, Lab, Script, ScriptedEngine, always, fault, http, route_to, until

MODEL = "emulated"
QUESTION = "Why is the sea salt? " * 30
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
ARGUMENTS = {"town": "Ulm"}


def answer_to(text: str, tokens: int, choice: int = 0) -> str:
    """Return the text that any engine writes for a chat of one message."""
    return expected_text(render_chat([{"role": "user", "content": text}]), tokens, choice)


def copies_of(lab: Lab, text: str, tokens: int, copies: int) -> list[str]:
    """Return the texts of several answers; SGLang's pairs get a request for each, which emulators answer alike."""
    is_split = lab.prefills[0].settings.engine == "sglang"
    return [answer_to(text, tokens, 0 if is_split else choice) for choice in range(copies)]


async def nothing_left(lab: Lab) -> None:
    """Wait until ledger and decode engines are at rest; a prefill may hold the KV of what was refused there."""
    await until(lambda: lab.is_ledger_zero and lab.is_quiet and all(e.snapshot().is_idle for e in lab.decodes))


async def refuse(lab: Lab, status: int, times: int | None = None) -> None:
    """Make the engines that answer refuse all that comes."""
    for emulator in lab.decodes:
        await fault(emulator, "status", "/v1/", status=status, times=times)


@asynccontextmanager
async def without_decode() -> AsyncIterator[Lab]:
    """A router that has no decode engine."""
    settings = EmulatorSettings(role="prefill", speed=100.0)
    async with start_emulator(settings) as prefill, route_to([prefill], waits=False) as lab:
        await until(lambda: lab.core.fleet.is_ready(prefill.url.removeprefix("http://")))
        yield lab


@asynccontextmanager
async def two_models() -> AsyncIterator[Lab]:
    """A router over engines of two models."""
    one, other = (EmulatorSettings(model=model, speed=100.0) for model in (MODEL, "another"))
    async with (
        start_emulator(one) as first,
        start_emulator(other) as second,
        route_to(workers=[first, second]) as lab,
    ):
        yield lab


@asynccontextmanager
async def decode_that_says(script: Script) -> AsyncIterator[tuple[Lab, ScriptedEngine]]:
    """A pair whose decode engine answers every chat by a script."""
    scripts = {CHAT: script, "/v1/models": always(200, {"data": [{"id": MODEL}]})}
    settings = EmulatorSettings(engine="vllm", role="prefill", speed=100.0)
    async with ScriptedEngine(None, scripts).listen() as engine, start_emulator(settings) as prefill:
        decode: Any = [{"url": engine.url, "engine": "vllm"}]
        async with route_to([prefill], disaggregation="always", decode=decode) as lab:
            yield lab, engine


async def call_a_tool(asked: Asked) -> bytes:
    """Answer as an engine that calls ``TOOL``, whole or streamed."""
    arguments = json.dumps(ARGUMENTS)
    call: dict[str, Any] = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    if not asked.json().get("stream"):
        return _whole({"content": None, "tool_calls": [call]}, "tool_calls")
    parts: list[dict[str, Any]] = [{**call, "function": {"name": "weather", "arguments": ""}}]
    parts += [{"function": {"arguments": piece}} for piece in (arguments[:4], arguments[4:])]
    return _streamed([{"tool_calls": [{"index": 0, **part}]} for part in parts], "tool_calls")


async def write_json(asked: Asked) -> bytes:
    """Answer with an object, whole or streamed."""
    text = json.dumps(ARGUMENTS)
    if not asked.json().get("stream"):
        return _whole({"content": text}, "stop")
    return _streamed([{"content": text[:5]}, {"content": text[5:]}], "stop")


def _base(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": MODEL}


def _whole(message: dict[str, Any], reason: str) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
    body = _base("chat.completion") | {"choices": [choice], "usage": usage}
    return http(200, body, "content-type: application/json")


def _streamed(deltas: Sequence[dict[str, Any]], reason: str) -> bytes:
    choices: list[dict[str, Any]] = [
        {"index": 0, "delta": {"role": "assistant", **delta}, "finish_reason": None} for delta in deltas
    ]
    choices.append({"index": 0, "delta": {}, "finish_reason": reason})
    events = [json.dumps(_base("chat.completion.chunk") | {"choices": [choice]}) for choice in choices]
    body = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
    return http(200, body.encode(), "content-type: text/event-stream")
