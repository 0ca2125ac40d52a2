"""Traces made by chance: how requests come, how long they are, what their prompts share. Each kind is a preset.

``sessions:requests=5000,turns=8`` is a preset with changes. The same seed gives the same trace.
"""

import random
from collections.abc import Iterator, Mapping
from heapq import heappop, heappush
from itertools import count
from math import cos, exp, log, pi

import msgspec

from pdrouter.sim.virtual.trace import Request, Trace

_WARM_UP_SESSIONS = 3
"""Mean session lengths before the trace begins."""


class Generator(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is made. Units: tokens, seconds, requests.

    ``burstiness`` is the coefficient of variation of the gaps (1: Poisson); ``swing`` how far the rate goes up and down
    around its mean, in one period over the whole trace. ``prompt_tokens`` and ``output_tokens`` are means of lognormal
    lengths with ``sigma`` (0: all alike). ``system_tokens`` begin a prompt: one of ``systems`` texts. ``turns`` is the
    mean length of a session: each turn's prompt is the last one, its answer, and new text; ``think_s`` between them.
    ``models`` are taken in turns, separated by ``+``.
    """

    requests: int = 10_000
    rate: float = 10.0
    burstiness: float = 1.0
    swing: float = 0.0
    prompt_tokens: float = 2000.0
    output_tokens: float = 300.0
    sigma: float = 0.8
    system_tokens: int = 0
    systems: int = 1
    turns: float = 1.0
    think_s: float = 30.0
    models: str = ""
    block_tokens: int = 64

    def __post_init__(self) -> None:
        positive = (self.requests, self.rate, self.burstiness, self.prompt_tokens, self.output_tokens)
        if min(positive) <= 0 or min(self.systems, self.turns, self.block_tokens) < 1:
            raise ValueError("requests, rate, burstiness and lengths must be positive; systems, turns from 1")
        if not 0 <= self.swing <= 1 or min(self.sigma, self.system_tokens, self.think_s) < 0:
            raise ValueError("swing must be from 0 to 1; sigma, system_tokens and think_s not negative")


PRESETS: Mapping[str, Generator] = {
    "poisson": Generator(),
    "bursty": Generator(burstiness=4.0),
    "diurnal": Generator(swing=0.8),
    "sessions": Generator(turns=6.0, prompt_tokens=600.0),
    "shared": Generator(system_tokens=3000, systems=20, prompt_tokens=500.0),
    "heavy": Generator(sigma=1.5, prompt_tokens=4000.0),
    "mixed": Generator(models="small+large"),
}


def read_generator(text: str) -> Generator | None:
    """Return what a line such as ``bursty:rate=20`` names, ``None`` if it begins with no preset's name.

    Raises: ValueError that says what is wrong.
    """
    name, _, changes = text.partition(":")
    preset = PRESETS.get(name)
    if preset is None or not changes:
        return preset
    fields = msgspec.structs.asdict(preset)
    for change in changes.split(","):
        key, _, value = change.partition("=")
        if key not in fields:
            raise ValueError(f"{text}: {key!r} isn't one of {', '.join(fields)}")
        fields[key] = value
    try:
        return msgspec.convert(fields, Generator, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{text}: {error}") from None


def generate(what: Generator, seed: int) -> Trace:
    """Return a trace by chance: of sessions that began before it, too, so that it begins as it goes on."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    blocks, order = count(1), count()
    systems = [_fresh(blocks, what.system_tokens // what.block_tokens) for _ in range(what.systems)]
    models = what.models.split("+") if what.models else [None]
    requests: list[Request] = []
    to_come: list[tuple[float, int, Request]] = []
    for number, start_s in enumerate(_starts(what, chance)):
        while to_come and to_come[0][0] <= start_s:
            at_s, _, request = heappop(to_come)
            if at_s >= 0:
                requests.append(request)
        if len(requests) >= what.requests:
            break
        system, model = chance.choice(systems), models[number % len(models)]
        for request in _session(what, chance, blocks, system, start_s, model):
            heappush(to_come, (request.at_s, next(order), request))
    del requests[what.requests :]
    return Trace(requests=requests, span_s=requests[-1].at_s or 1.0, block_tokens=what.block_tokens)


def _starts(what: Generator, chance: random.Random) -> Iterator[float]:
    """Return when sessions begin."""
    mean_s = what.turns / what.rate
    shape = 1 / what.burstiness**2
    period_s = what.requests / what.rate
    at_s = -_WARM_UP_SESSIONS * (what.turns - 1) * what.think_s
    while True:
        # The lower the rate at the moment, the longer the gap.
        now = 1 - what.swing * cos(2 * pi * at_s / period_s)
        at_s += chance.gammavariate(shape, mean_s / shape) / max(now, 0.01)
        yield at_s


def _session(
    what: Generator, chance: random.Random, blocks: Iterator[int], system: list[int], at_s: float, model: str | None
) -> Iterator[Request]:
    context = list(system)
    tokens = what.system_tokens
    while True:
        tokens += _length(what.prompt_tokens, what.sigma, chance)
        context += _fresh(blocks, tokens // what.block_tokens - len(context))
        output_tokens = _length(what.output_tokens, what.sigma, chance)
        yield Request(at_s, tokens, output_tokens, tuple(context), model)
        if chance.random() * what.turns < 1:
            return
        tokens += output_tokens
        at_s += chance.expovariate(1 / what.think_s) if what.think_s else 0.0


def _length(mean: float, sigma: float, chance: random.Random) -> int:
    return max(1, round(exp(chance.gauss(log(mean) - sigma**2 / 2, sigma))))


def _fresh(blocks: Iterator[int], size: int) -> list[int]:
    return [next(blocks) for _ in range(size)]
