"""The demo's client, a process of its own: replays the plan through a router with the ``openai`` client.

One ``Orders`` line on stdin, then messages on stdout, one JSON object a line: ``Warm``, an ``Answer`` for each
request, ``End``. Arrivals are open-loop: a request is sent when its time has come, whatever the others do, and
its time to first token counts from that moment.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import msgspec
import uvloop

from pdrouter.sim.text import BYTES_PER_TOKEN, Prompt, expected_text, render_chat
from pdrouter.sim.workload import Planned, Scale, load_excerpt, plan

if TYPE_CHECKING:
    from openai.types import CompletionUsage

WARM_UP_REQUESTS = 24
_WARM_UP_TOKENS = 32
_WARM_UP_BLOCK = 1 << 40  # no block of the trace
_LAG_PERIOD_S = 0.01


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What to replay, and where to. ``timeout_s`` bounds one request, ``most_in_flight`` all of them."""

    url: str
    model: str
    seconds: float
    scale: Scale
    timeout_s: float
    most_in_flight: int


class Warm(msgspec.Struct, frozen=True, tag="warm"):
    """The clock starts now; ``requests`` will be sent."""

    requests: int


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """What became of one request. ``problem``: why it isn't right. ``token_s``: time per token after the first."""

    ttft_s: float | None = None
    token_s: float | None = None
    problem: str = ""


class End(msgspec.Struct, frozen=True, tag="end"):
    """All answers are here. ``lag_s``: how late the client's own event loop was (99th percentile)."""

    lag_s: float


Message = Warm | Answer | End


def main() -> int:
    """Carry out the orders."""
    orders = msgspec.json.decode(sys.stdin.buffer.readline(), type=Orders)
    uvloop.run(_Client(orders).run())
    return 0


def _tell(message: Message) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


class Seen:
    """What has come of one stream."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.first_s = self.last_s = 0.0
        self.finish: str | None = None
        self.usage: CompletionUsage | None = None


class _Client:
    """One replay."""

    def __init__(self, orders: Orders) -> None:
        from openai import AsyncOpenAI  # noqa: PLC0415 - an extra, and heavy

        self._orders = orders
        self._openai = AsyncOpenAI(base_url=f"{orders.url}/v1", api_key="none", max_retries=0, timeout=orders.timeout_s)
        self._slots = asyncio.Semaphore(orders.most_in_flight)
        self._lags_s: list[float] = []

    async def run(self) -> None:
        """Warm up, then replay."""
        orders = self._orders
        async with self._openai:
            for answer in await asyncio.gather(*(self._ask(_warm_up(i), time.monotonic()) for i in _WARM_UPS)):
                if answer.problem:
                    _tell(answer)
            _tell(Warm(sum(1 for _ in plan(load_excerpt(), orders.seconds, orders.scale))))
            lags = asyncio.create_task(self._measure_lag())
            async with asyncio.TaskGroup() as group:
                async for planned, due_s in self._arrivals():
                    group.create_task(self._answer(planned, due_s))
            lags.cancel()
        lags_s = sorted(self._lags_s) or [0.0]
        _tell(End(lags_s[int(0.99 * (len(lags_s) - 1))]))

    async def _arrivals(self) -> AsyncIterator[tuple[Planned, float]]:
        start_s = time.monotonic()
        for planned in plan(load_excerpt(), self._orders.seconds, self._orders.scale):
            due_s = start_s + planned.at_s
            await asyncio.sleep(due_s - time.monotonic())
            await self._slots.acquire()
            yield planned, due_s

    async def _measure_lag(self) -> None:
        while True:
            due_s = time.monotonic() + _LAG_PERIOD_S
            await asyncio.sleep(_LAG_PERIOD_S)
            self._lags_s.append(time.monotonic() - due_s)

    async def _answer(self, planned: Planned, due_s: float) -> None:
        try:
            _tell(await self._ask(planned, due_s))
        finally:
            self._slots.release()

    async def _ask(self, planned: Planned, due_s: float) -> Answer:
        prompt, seen = planned.prompt(), Seen()
        reading = asyncio.create_task(self._read(prompt, planned.output_tokens, seen))
        await asyncio.wait([reading])
        error = reading.exception()
        if error is not None:
            return Answer(problem=f"{type(error).__name__}: {error}"[:200])
        tokens = planned.output_tokens
        return Answer(
            ttft_s=seen.first_s - due_s if seen.first_s else None,
            token_s=(seen.last_s - seen.first_s) / (tokens - 1) if tokens > 1 else None,
            problem=problem_of(prompt, tokens, seen),
        )

    async def _read(self, prompt: str, output_tokens: int, seen: Seen) -> None:
        stream = await self._openai.chat.completions.create(
            model=self._orders.model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=output_tokens,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            seen.usage = chunk.usage or seen.usage
            for choice in chunk.choices:
                seen.finish = choice.finish_reason or seen.finish
                if choice.delta.content:
                    seen.last_s = time.monotonic()
                    seen.first_s = seen.first_s or seen.last_s
                    seen.parts.append(choice.delta.content)


_WARM_UPS = range(WARM_UP_REQUESTS)


def _warm_up(index: int) -> Planned:
    block = _WARM_UP_BLOCK + index
    return Planned(0.0, (block,), _WARM_UP_TOKENS, _WARM_UP_TOKENS, _WARM_UP_TOKENS)


def problem_of(prompt: str, output_tokens: int, seen: Seen) -> str:
    """Say what isn't as an emulated engine answers this prompt; empty if all is right."""
    rendered = render_chat([{"role": "user", "content": prompt}])
    if "".join(seen.parts) != expected_text(rendered, output_tokens):
        return "wrong text"
    if seen.finish != "length":
        return f"wrong finish_reason: {seen.finish}"
    counted = (seen.usage.prompt_tokens, seen.usage.completion_tokens) if seen.usage else None
    if counted != (Prompt(rendered, BYTES_PER_TOKEN).tokens, output_tokens):
        return f"wrong usage: {counted}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
