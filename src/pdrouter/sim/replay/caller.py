"""One request to a live endpoint as an application makes it, by the ``openai`` client, with stamps of what came when.

Its connections, retries (none) and errors are the client's; events of a stream are read as bytes, because the client's
own objects cost it 90 us each, which at a few thousand a second would be measured in place of the endpoint.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_DATA, _DONE = b"data:", b"[DONE]"
_MAX_CAUSE_CHARS = 120
_PREFILL, _DECODE = "x-pdrouter-prefill", "x-pdrouter-decode"


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked: a prompt as text goes to chat completions, as token ids to completions."""

    model: str
    prompt: str | list[int]
    output_tokens: int
    extra: Mapping[str, object] = {}


class Seen:
    """What has come of one request. Stamps are of the monotonic clock, 0 if it never came to that.

    Tokens are the endpoint's count, ``None`` if it doesn't tell; ``prefill`` and ``decode`` are the router's words for
    who served it. ``problem`` is what failed, empty if nothing did.
    """

    __slots__ = (
        "cached_tokens", "decode", "first_s", "is_done", "last_s", "output_tokens", "prefill", "problem",
        "prompt_tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self.first_s = self.last_s = 0.0
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.prefill = self.decode = self.problem = ""
        self.is_done = False


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Failure(msgspec.Struct):
    code: str | int | None = None
    message: str = ""


class _Event(msgspec.Struct):
    choices: Sequence[_Choice] = ()
    usage: _Usage | None = None
    error: _Failure | None = None


class CannotAsk(Exception):
    """The endpoint doesn't answer as it must."""


class Caller:
    """Asks an endpoint, over at most ``most_connections`` (I9)."""

    def __init__(self, url: str, api_key: str, most_connections: int, timeout_s: float) -> None:
        import openai  # noqa: PLC0415 - an extra, and heavy

        limits = type(openai.DEFAULT_CONNECTION_LIMITS)(
            max_connections=most_connections, max_keepalive_connections=most_connections
        )
        self._openai: AsyncOpenAI = openai.AsyncOpenAI(
            base_url=f"{url}/v1",
            api_key=api_key,
            max_retries=0,
            timeout=timeout_s,
            http_client=openai.DefaultAsyncHttpxClient(limits=limits),
        )
        self._timeout_s = timeout_s
        self._decode = msgspec.json.Decoder(_Event).decode

    async def models(self) -> list[str]:
        """Return the models that the endpoint says it serves. Raises: CannotAsk."""
        from openai import OpenAIError  # noqa: PLC0415 - an extra, and heavy

        try:
            return [model.id async for model in self._openai.models.list()]
        except OpenAIError as error:
            raise CannotAsk(f"it doesn't say what it serves: {cause_of(error)}") from None

    async def ask(self, ask: Ask) -> Seen:
        """Ask, and wait for the end of the answer or of one's patience."""
        seen = Seen()
        reading = asyncio.create_task(self._read(ask, seen))
        try:
            await asyncio.wait([reading], timeout=self._timeout_s)
            if not reading.done():
                seen.problem = f"no end after {self._timeout_s:g} s"
            elif (error := reading.exception()) is not None:
                seen.problem = cause_of(error)
        finally:
            reading.cancel()
        if not seen.problem and not seen.first_s:
            seen.problem = "no token"
        if not seen.problem and not seen.is_done:
            seen.problem = "stream without its end"
        return seen

    async def aclose(self) -> None:
        """Close all connections."""
        await self._openai.close()

    async def _read(self, ask: Ask, seen: Seen) -> None:
        body = {"stream": True, "stream_options": {"include_usage": True}, **ask.extra}
        if isinstance(ask.prompt, str):
            calling = self._openai.chat.completions.with_streaming_response.create(
                model=ask.model,
                messages=[{"role": "user", "content": ask.prompt}],
                max_tokens=ask.output_tokens,
                extra_body=body,
            )
        else:
            calling = self._openai.completions.with_streaming_response.create(  # type: ignore[assignment]
                model=ask.model, prompt=ask.prompt, max_tokens=ask.output_tokens, extra_body=body
            )
        async with calling as reply:
            seen.prefill, seen.decode = reply.headers.get(_PREFILL, ""), reply.headers.get(_DECODE, "")
            async for line, now_s in _lines(reply.iter_bytes()):
                self._take(line, now_s, seen)

    def _take(self, line: bytes, now_s: float, seen: Seen) -> None:
        if not line.startswith(_DATA):
            return
        data = line[len(_DATA) :].strip()
        if data == _DONE:
            seen.is_done = True
            return
        event = self._decode(data)
        if event.error is not None:
            seen.problem = f"stream: {event.error.code or event.error.message}"[:_MAX_CAUSE_CHARS]
        if event.usage is not None:
            usage = event.usage
            seen.prompt_tokens, seen.output_tokens = usage.prompt_tokens, usage.completion_tokens
            if usage.prompt_tokens_details is not None:
                seen.cached_tokens = usage.prompt_tokens_details.cached_tokens
        if any(map(_has_text, event.choices)):
            seen.last_s = now_s
            seen.first_s = seen.first_s or now_s


def _has_text(choice: _Choice) -> bool:
    delta = choice.delta
    return bool(choice.text or (delta is not None and (delta.content or delta.reasoning_content)))


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[tuple[bytes, float]]:
    """Yield whole lines, each with the moment at which its end came."""
    rest = b""
    async for piece in pieces:
        now_s = time.monotonic()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line, now_s


def cause_of(error: BaseException) -> str:
    """Return what failed in few words that are alike for alike failures: a status and its code, or what broke."""
    status = getattr(error, "status_code", None)
    if status is not None:
        return f"{status} {getattr(error, 'code', None) or ''}".strip()
    cause = error.__cause__ or error
    return type(cause).__name__
