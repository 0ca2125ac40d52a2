"""Recorded requests to replay: the shipped excerpt of the Mooncake conversation trace, and prompts made from it.

The trace has lengths and ids of prompt blocks, but no text. Here a block's text is a pure function of its id, so
that prompts share exactly the prefixes that the recorded ones shared. Knows no engine and no clock.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from importlib import resources
from itertools import count

import msgspec

from pdrouter.sim.text import BYTES_PER_TOKEN, answer_text

TRACE_BLOCK_TOKENS = 512
TRACE_TICK_S = 3.0
"""Step of the recorded time stamps; requests of one step are spread evenly over it."""

_TEXTS_KEPT = 16_384


class Row(msgspec.Struct, frozen=True):
    """One recorded request. Units: ms since the start, tokens; ``hash_ids`` names its 512-token blocks."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How a replay differs from the record: lengths divided, arrivals faster by these factors."""

    lengths: int
    arrivals: float


class Planned(msgspec.Struct, frozen=True):
    """One request to send: when (seconds from the start), its prompt's blocks, its lengths in tokens."""

    at_s: float
    blocks: tuple[int, ...]
    block_tokens: int
    prompt_tokens: int
    output_tokens: int

    def prompt(self) -> str:
        """Text of ``prompt_tokens`` that begins as every prompt with the same leading blocks."""
        text = "".join([_block_text(block, self.block_tokens) for block in self.blocks])
        return text[: self.prompt_tokens * BYTES_PER_TOKEN]


@cache
def load_excerpt() -> tuple[Row, ...]:
    """Rows of the shipped excerpt, in order of time."""
    raw = resources.files("pdrouter").joinpath("data/mooncake_conversation_excerpt.jsonl").read_bytes()
    return tuple(msgspec.json.Decoder(Row).decode_lines(raw))


def plan(rows: Sequence[Row], seconds: float, scale: Scale) -> Iterator[Planned]:
    """Requests that arrive within ``seconds``; a record that is over begins anew, with prompts of its own."""
    per_tick = Counter(row.timestamp for row in rows)
    lap_s = rows[-1].timestamp / 1000 + TRACE_TICK_S
    lap_ids = 1 + max(block for row in rows for block in row.hash_ids)
    for lap in count():
        seen: Counter[int] = Counter()
        for row in rows:
            tick = row.timestamp
            offset_s = TRACE_TICK_S * seen[tick] / per_tick[tick]
            seen[tick] += 1
            at_s = (lap * lap_s + tick / 1000 + offset_s) / scale.arrivals
            if at_s >= seconds:
                return
            yield _planned(row, at_s, lap * lap_ids, scale.lengths)


def _planned(row: Row, at_s: float, first_id: int, divisor: int) -> Planned:
    return Planned(
        at_s,
        tuple(first_id + block for block in row.hash_ids),
        TRACE_BLOCK_TOKENS // divisor,
        max(1, row.input_length // divisor),
        max(1, row.output_length // divisor),
    )


@lru_cache(maxsize=_TEXTS_KEPT)
def _block_text(block: int, tokens: int) -> str:
    return answer_text(block, 0, tokens)
