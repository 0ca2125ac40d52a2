"""Ask a server as clients do, by the real ``openai`` package, and read what vLLM and the router tell of themselves."""

import json
import re
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI
from openai.types import Completion, CompletionUsage
from openai.types.chat import ChatCompletion

from tests.real.processes import MODEL

TIMEOUT_S = 120.0
_SERIES = re.compile(r"^(?P<name>[^{\s]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")


@dataclass(frozen=True)
class Question:
    """A greedy question; ``is_chat`` and ``is_stream`` say how it is asked, ``more`` has further fields."""

    prompt: str
    max_tokens: int
    is_chat: bool = False
    is_stream: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """How it is asked, in words."""
        return f"{'chat' if self.is_chat else 'completions'}, {'streamed' if self.is_stream else 'whole'}"


@dataclass(frozen=True)
class Answer:
    """What came back."""

    texts: list[str]
    finish_reasons: set[str | None]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None

    @property
    def text(self) -> str:
        """The first text."""
        return self.texts[0]


def client_of(url: str) -> AsyncOpenAI:
    """Return a client without retries of its own."""
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)


async def ask(client: AsyncOpenAI, question: Question, **extra: Any) -> Answer:
    """Ask and read to the end; ``extra`` are fields that the client doesn't know."""
    common: dict[str, Any] = {"model": MODEL, "max_tokens": question.max_tokens, "temperature": 0} | dict(question.more)
    if extra:
        common["extra_body"] = extra
    if question.is_stream:
        common |= {"stream": True, "stream_options": {"include_usage": True}}
    reply: Any
    if question.is_chat:
        messages: Any = [{"role": "user", "content": question.prompt}]
        reply = await client.chat.completions.create(messages=messages, **common)
    else:
        reply = await client.completions.create(prompt=question.prompt, **common)
    return await _read_stream(reply) if question.is_stream else _read_whole(reply)


def _read_whole(reply: ChatCompletion | Completion) -> Answer:
    if isinstance(reply, ChatCompletion):
        texts = [choice.message.content or "" for choice in reply.choices]
    else:
        texts = [choice.text for choice in reply.choices]
    return _answer(texts, {choice.finish_reason for choice in reply.choices}, reply.usage)


async def _read_stream(stream: Any) -> Answer:
    texts: dict[int, str] = {}
    reasons: set[str | None] = set()
    usage: CompletionUsage | None = None
    async for event in stream:
        usage = event.usage or usage
        for choice in event.choices:
            piece = choice.delta.content if hasattr(choice, "delta") else choice.text
            texts[choice.index] = texts.get(choice.index, "") + (piece or "")
            reasons |= {choice.finish_reason} if choice.finish_reason else set()
    return _answer([texts[index] for index in sorted(texts)], reasons, usage)


def _answer(texts: list[str], reasons: set[Any], usage: CompletionUsage | None) -> Answer:
    assert usage is not None, "the answer has no usage"
    details = usage.prompt_tokens_details
    cached = None if details is None else details.cached_tokens
    return Answer(texts, reasons, usage.prompt_tokens, usage.completion_tokens, cached)


def post(url: str, body: object, headers: Mapping[str, str]) -> Any:
    """Send a body as it is and return the decoded answer."""
    raw = json.dumps(body).encode()
    request = urllib.request.Request(url, raw, {"content-type": "application/json"} | dict(headers))
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
        return json.load(reply)


def page(url: str) -> Any:
    """Return a JSON page."""
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply:
        return json.load(reply)


def ledger_left(url: str) -> list[str]:
    """Return what a router's ledger still holds, in words; nothing: it is zero."""
    fleet = page(f"{url}/debug/fleet")
    left = [f"{fleet['live_decisions']} live decisions"] if fleet["live_decisions"] else []
    for endpoint in fleet["endpoints"]:
        accounts = [endpoint["unassigned"], *(rank["ledger"] for rank in endpoint["ranks"])]
        left += [f"{endpoint['address']} {account}" for account in accounts if any(account.values())]
    return left


def metric(url: str, name: str, **labels: str) -> float:
    """Return the sum of the series of a metric that have these labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT_S) as reply:
        text = reply.read().decode()
    found = [match for line in text.splitlines() if (match := _SERIES.match(line)) and match["name"] == name]
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(float(match["value"]) for match in found if all(pair in (match["labels"] or "") for pair in wanted))
