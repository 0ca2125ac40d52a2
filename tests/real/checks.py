"""What must hold of a router in front of real vLLM, whether one engine does it all or a pair does.

The truth is the answer of an engine that is asked directly. Each check tells what it saw; none raises.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import openai
from openai import AsyncOpenAI

from tests.real.asking import Answer, Question, ask, client_of, ledger_left, metric, page
from tests.real.processes import MODEL, Server
from tests.real.record import Record

AT_ONCE = 32
TOKENS = 24
ENDLESS_TOKENS = 1500
GONE_S = 10.0
"""Longest time for an engine to stop work that nobody waits for, and for the ledger to be zero again."""

_POLL_S = 0.05

STORY = "The river ran down from the hills, past the mill and the old stone bridge, and on to the town. " * 12
"""Some 300 tokens: more than one block of vLLM's KV cache on a CPU, which has 128."""


class Fleet:
    """A router, the engines behind it, and the one among them that tells the truth."""

    def __init__(self, record: Record, router: Server, engines: Sequence[Server]) -> None:
        self.record = record
        self.router = router
        self.engines = engines
        self.client = client_of(router.url)
        self.truth = client_of(engines[0].url)

    async def hold(self, promise: str, check: Callable[[], Awaitable[tuple[bool, str]]]) -> None:
        """Run a check and take down what it found; whatever the client raises is a finding."""
        try:
            held, seen = await check()
        except (openai.OpenAIError, OSError, TimeoutError, AssertionError, LookupError) as error:
            held, seen = False, f"{type(error).__name__}: {error}"
        self.record.check(promise, held, seen)

    async def idle(self) -> tuple[bool, str]:
        """Tell whether the ledger comes to zero and the engines let go of everything, and how soon."""
        began_s = time.monotonic()
        while rest := [*ledger_left(self.router.url), *self._work_left()]:
            if time.monotonic() - began_s > GONE_S:
                return False, f"after {GONE_S:.0f} s still {', '.join(rest)}"
            await asyncio.sleep(_POLL_S)
        return True, f"within {time.monotonic() - began_s:.2f} s"

    def _work_left(self) -> list[str]:
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        found = ((engine.name, name, metric(engine.url, name)) for engine in self.engines for name in names)
        left = [f"{engine} {name} {value:g}" for engine, name, value in found if value]
        return left + [f"{engine.name} answers {n}" for engine in self.engines if (n := _in_flight(engine))]


async def check_common(fleet: Fleet) -> None:
    """Check what holds with any engines."""
    await fleet.hold("the model is listed", lambda: _model_is_listed(fleet.client))
    for is_chat in (False, True):
        for is_stream in (False, True):
            question = Question(STORY + "The river ran past", TOKENS, is_chat=is_chat, is_stream=is_stream)
            await fleet.hold(f"{question.kind}: the engine's own text", lambda q=question: _same(fleet, q))  # type: ignore[misc]
    await fleet.hold("a list of prompts: each its own text", lambda: _same_list(fleet))
    await fleet.hold("two samples", lambda: _two_samples(fleet))
    await fleet.hold("min_tokens is kept", lambda: _min_tokens(fleet))
    await fleet.hold("one token", lambda: _same(fleet, Question(STORY + "One word:", 1)))
    await fleet.hold("an engine's 400 comes through", lambda: _bad_request(fleet))
    await fleet.hold(f"{AT_ONCE} at once", lambda: _at_once(fleet))
    await fleet.hold("nothing is left", fleet.idle)
    for is_chat in (False, True):
        question = Question("Once upon a time", ENDLESS_TOKENS, is_chat=is_chat, is_stream=True)
        await fleet.hold(f"{question.kind}: left in mid-stream", lambda q=question: _left(fleet, q))  # type: ignore[misc]
    await fleet.hold("left before the answer", lambda: _left_early(fleet))


async def _model_is_listed(client: AsyncOpenAI) -> tuple[bool, str]:
    models = [model.id async for model in client.models.list()]
    return models == [MODEL], ", ".join(models)


async def _same(fleet: Fleet, question: Question) -> tuple[bool, str]:
    seen = await ask(fleet.client, question)
    truth = await ask(fleet.truth, question)
    return _alike(seen, truth)


async def _same_list(fleet: Fleet) -> tuple[bool, str]:
    prompts = [
        STORY + "The river ran past",
        "Water is made of hydrogen and " + "very " * 150 + "much oxygen. Two and two is",
    ]
    seen = await fleet.client.completions.create(model=MODEL, prompt=prompts, max_tokens=TOKENS, temperature=0)
    truth = [await ask(fleet.truth, Question(prompt, TOKENS)) for prompt in prompts]
    texts = [choice.text for choice in sorted(seen.choices, key=lambda choice: choice.index)]
    return texts == [answer.text for answer in truth], repr(texts)[:160]


async def _two_samples(fleet: Fleet) -> tuple[bool, str]:
    question = Question(STORY + "Then", TOKENS, more={"n": 2, "temperature": 0.01, "seed": 1})
    seen = await ask(fleet.client, question, ignore_eos=True)
    whole = len(seen.texts) == 2 and all(seen.texts) and seen.completion_tokens == 2 * TOKENS
    return whole, f"{len(seen.texts)} texts, {seen.completion_tokens} tokens"


async def _min_tokens(fleet: Fleet) -> tuple[bool, str]:
    question = Question("Say hi.", TOKENS, is_chat=True)
    seen = await ask(fleet.client, question, min_tokens=TOKENS)
    return seen.completion_tokens == TOKENS, f"{seen.completion_tokens} of {TOKENS} tokens"


async def _bad_request(fleet: Fleet) -> tuple[bool, str]:
    try:
        await ask(fleet.client, Question("x", 100_000))
    except openai.BadRequestError as error:
        return "max_tokens" in error.message, error.message[:160]
    return False, "it was answered"


async def _at_once(fleet: Fleet) -> tuple[bool, str]:
    began_s = time.monotonic()
    questions = [
        Question(f"Number {n}. {STORY}Tell it again:", TOKENS, is_chat=n % 4 < 2, is_stream=n % 2 == 0)
        for n in range(AT_ONCE)
    ]
    answers = await asyncio.gather(*(ask(fleet.client, question, ignore_eos=True) for question in questions))
    whole = [a for a in answers if a.text and a.completion_tokens == TOKENS and a.finish_reasons == {"length"}]
    return len(whole) == AT_ONCE, f"{len(whole)} whole answers in {time.monotonic() - began_s:.1f} s"


async def _left(fleet: Fleet, question: Question) -> tuple[bool, str]:
    """Leave a stream after its first words."""
    api = fleet.client.chat.completions if question.is_chat else fleet.client.completions
    asked = (
        {"messages": [{"role": "user", "content": question.prompt}]}
        if question.is_chat
        else {"prompt": question.prompt}
    )
    stream = await api.create(
        model=MODEL, max_tokens=question.max_tokens, stream=True, extra_body={"ignore_eos": True}, **asked
    )
    events = 0
    async for _ in stream:
        events += 1
        if events == 5:
            break
    running = sum(_in_flight(engine) for engine in fleet.engines)
    await stream.close()
    held, seen = await fleet.idle()
    return held and running > 0, f"{running} ran, nothing is left {seen}"


async def _left_early(fleet: Fleet) -> tuple[bool, str]:
    """Leave while the prompt is read."""
    asking = asyncio.create_task(ask(fleet.client, Question(f"{time.time_ns()} " + STORY * 5, TOKENS)))
    began_s = time.monotonic()
    while not _in_flight(fleet.engines[0]):
        if time.monotonic() - began_s > GONE_S:
            return False, "it never got to an engine"
        await asyncio.sleep(_POLL_S)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    return await fleet.idle()


def _in_flight(engine: Server) -> int:
    """Return the requests that an engine is answering; its gauges show them only once a step has ended."""
    return int(page(f"{engine.url}/load")["server_load"])


def _alike(seen: Answer, truth: Answer) -> tuple[bool, str]:
    counts = f"{seen.prompt_tokens} + {seen.completion_tokens} tokens"
    held = (seen.texts, seen.prompt_tokens, seen.completion_tokens) == (
        truth.texts,
        truth.prompt_tokens,
        truth.completion_tokens,
    )
    return held and bool(seen.text), f"{counts}, {seen.text[:50]!r}" if held else f"{seen} instead of {truth}"
