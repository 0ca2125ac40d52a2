"""Ask as clients do in each of SGLang's APIs, by plain HTTP, and read what comes to the last byte."""

import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx

from tests.real.sglang.servers import BOOTSTRAP_PORT, MODEL

TIMEOUT_S = 60.0
Body = Mapping[str, Any]


@dataclass(frozen=True)
class Reply:
    """An answer, whole; or cut off, if the connection ended before it did."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    is_cut: bool = False

    def json(self) -> Any:
        """Return the decoded body."""
        return json.loads(self.body)

    @property
    def is_stream(self) -> bool:
        """Whether it consists of events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def events(self) -> list[Any]:
        """What each event says, without the end mark."""
        data = [line[5:].strip() for line in self.body.splitlines() if line.startswith(b"data:")]
        return [json.loads(piece) for piece in data if piece != b"[DONE]"]

    @property
    def ranks(self) -> tuple[int, int]:
        """The prefill and the decode rank that the router says it chose."""
        chosen = (self.headers[f"x-pdrouter-{side}"].rpartition("rank=")[2] for side in ("prefill", "decode"))
        prefill, decode = map(int, chosen)
        return prefill, decode

    def __str__(self) -> str:
        return f"{self.status}{' (cut off)' if self.is_cut else ''} {self.body[:300].decode(errors='replace')}"


@dataclass(frozen=True)
class Answer:
    """What an answer says: the text and the finish reason of each choice, and the tokens told."""

    texts: list[str]
    reasons: list[str | None]
    prompt_tokens: int
    completion_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.prompt_tokens} + {self.completion_tokens} tokens, {self.reasons}, {' | '.join(self.texts)[:60]!r}"
        )


@dataclass(frozen=True)
class Api:
    """One way to ask: its path, how a prompt becomes a body, and how an answer is read."""

    name: str
    path: str
    make: Callable[[Any, int], dict[str, Any]]
    read: Callable[[Reply], Answer]

    def body(self, prompt: Any, tokens: int, *, is_stream: bool = False, **more: Any) -> dict[str, Any]:
        """Return the body of a greedy question."""
        body = self.make(prompt, tokens) | more
        if is_stream:
            body["stream"] = True
            if self.name in ("chat", "completions"):
                body["stream_options"] = {"include_usage": True}
        return body


class Client:
    """One client with as many connections as it likes."""

    def __init__(self, url: str) -> None:
        self.url = url
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits, trust_env=False)

    async def post(self, path: str, body: Body, headers: Mapping[str, str] | None = None) -> Reply:
        """Send a body and return the answer."""
        pieces: list[bytes] = []
        async with self.http.stream("POST", path, json=dict(body), headers=headers) as reply:
            try:
                async for piece in reply.aiter_bytes():
                    pieces.append(piece)  # noqa: PERF401 - what came before a cut is kept
            except httpx.RemoteProtocolError:
                return Reply(reply.status_code, reply.headers, b"".join(pieces), is_cut=True)
        return Reply(reply.status_code, reply.headers, b"".join(pieces))

    async def get(self, path: str) -> Reply:
        """Return a page."""
        reply = await self.http.get(path)
        return Reply(reply.status_code, reply.headers, reply.content)


def room_fields(size: int | None, prefill_rank: int, decode_rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what both legs need beside the body, ``size`` prompts in a list; the prefill's first."""
    rooms = [secrets.randbits(62) for _ in range(size or 1)]
    meeting: dict[str, Any] = {
        "bootstrap_host": ["127.0.0.1"] * len(rooms),
        "bootstrap_port": [BOOTSTRAP_PORT] * len(rooms),
        "bootstrap_room": rooms,
    }
    if size is None:
        meeting = {name: values[0] for name, values in meeting.items()}
    meeting["disagg_prefill_dp_rank"] = prefill_rank
    return meeting | {"routed_dp_rank": prefill_rank}, meeting | {"routed_dp_rank": decode_rank}


def _chat(prompt: str, tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": MODEL, "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def _completions(prompt: Any, tokens: int) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def _generate(prompt: Any, tokens: int) -> dict[str, Any]:
    return {"text": prompt, "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}}


def _responses(prompt: str, tokens: int) -> dict[str, Any]:
    return {"model": MODEL, "input": prompt, "max_output_tokens": tokens, "temperature": 0}


def _messages(prompt: str, tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": MODEL, "messages": messages, "max_tokens": tokens, "temperature": 0}


def _read_openai(reply: Reply) -> Answer:
    parts = reply.events if reply.is_stream else [reply.json()]
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    usage: Any = None
    for part in parts:
        usage = part.get("usage") or usage
        for choice in part["choices"]:
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            index = choice["index"]
            texts[index] = texts.get(index, "") + (said.get("content") or "")
            reasons[index] = choice.get("finish_reason") or reasons.get(index)
    order = sorted(texts)
    counts = usage["prompt_tokens"], usage["completion_tokens"]
    return Answer([texts[index] for index in order], [reasons[index] for index in order], *counts)


def _read_generate(reply: Reply) -> Answer:
    """In a stream each event has the whole text so far, and the last of a part counts."""
    if reply.is_stream:
        found = {event.get("index", 0): event for event in reply.events}
        last = [found[index] for index in sorted(found)]
    else:
        said = reply.json()
        last = said if isinstance(said, list) else [said]
    told = [part["meta_info"] for part in last]
    reasons = [part["finish_reason"] and part["finish_reason"]["type"] for part in told]
    counts = (sum(part[name] for part in told) for name in ("prompt_tokens", "completion_tokens"))
    return Answer([part["text"] for part in last], reasons, *counts)


def _read_responses(reply: Reply) -> Answer:
    whole = reply.events[-1]["response"] if reply.is_stream else reply.json()
    text = "".join(part["text"] for item in whole["output"] for part in item["content"])
    return Answer([text], [whole["status"]], whole["usage"]["input_tokens"], whole["usage"]["output_tokens"])


def _read_messages(reply: Reply) -> Answer:
    if not reply.is_stream:
        whole = reply.json()
        text = "".join(block["text"] for block in whole["content"])
        return Answer([text], [whole["stop_reason"]], whole["usage"]["input_tokens"], whole["usage"]["output_tokens"])
    events = {event["type"]: event for event in reply.events}
    text = "".join(e["delta"]["text"] for e in reply.events if e["type"] == "content_block_delta")
    start, end = events["message_start"]["message"], events["message_delta"]
    return Answer([text], [end["delta"]["stop_reason"]], start["usage"]["input_tokens"], end["usage"]["output_tokens"])


CHAT = Api("chat", "/v1/chat/completions", _chat, _read_openai)
COMPLETIONS = Api("completions", "/v1/completions", _completions, _read_openai)
GENERATE = Api("generate", "/generate", _generate, _read_generate)
RESPONSES = Api("responses", "/v1/responses", _responses, _read_responses)
MESSAGES = Api("messages", "/v1/messages", _messages, _read_messages)
APIS = (CHAT, COMPLETIONS, GENERATE, RESPONSES, MESSAGES)


def unique(prompt: str) -> str:
    """Return a prompt that no engine has seen."""
    return f"{time.monotonic_ns():x} {prompt}"
