"""What engines do about KV that runs out while answers grow: whom they preempt, and what is left free for growth.

Rules and figures only, in tokens: pages and their rounding are left out. Who applies them: ``engine_rank.py``.
"""

from enum import StrEnum, auto

RESERVED_ANSWER_TOKENS = 512
"""Room that SGLang's decode side leaves for each answer under way (``--num-reserved-decode-tokens``)."""

_FIRST_SHARE, _LEAST_SHARE, _STEPS_BETWEEN, _STEPS_AHEAD = 0.7, 0.098, 600, 20
"""Source: SGLang 0.5, ``environ.py``: SGLANG_INIT_NEW_TOKEN_RATIO, ..._MIN_NEW_TOKEN_RATIO_FACTOR (0.14 of it),
..._NEW_TOKEN_RATIO_DECAY_STEPS, SGLANG_RETRACT_DECODE_STEPS."""


class WhenFull(StrEnum):
    """What happens when the next step's tokens don't fit."""

    KEEP = auto()
    """Never: room for the whole answer is kept from the start. Source: TensorRT-LLM, ``GUARANTEED_NO_EVICT``."""
    RECOMPUTE = auto()
    """Who was admitted last lets go of all, goes to the head of the queue and is read anew, with what it has answered.
    Source: vLLM 1, ``v1/core/sched/scheduler.py``."""
    RETRACT = auto()
    """Who has answered least does, of equals the longest prompt: a prompt read here goes to the end of the queue and is
    read anew; KV that came from elsewhere waits in the host's memory, ahead of newcomers, and comes back as it came.
    Source: SGLang 0.5, ``schedule_batch.py`` (``retract_decode``), ``disaggregation/decode.py``."""


def rule_of(engine: str) -> WhenFull:
    """Return what an engine of this name does by default."""
    rules = {"vllm": WhenFull.RECOMPUTE, "sglang": WhenFull.RETRACT}
    return rules.get(engine.partition(" ")[0], WhenFull.KEEP)


class AnswerShare:
    """The share of what running answers may still become that SGLang keeps free (``new_token_ratio``).

    It falls with every step, and is set by how far answers have come when some must be retracted.
    """

    __slots__ = ("_share", "_since_step")

    def __init__(self) -> None:
        self._share = _FIRST_SHARE
        self._since_step = 0

    def at(self, step: int) -> float:
        """Return the share at a step."""
        fallen = (step - self._since_step) * (_FIRST_SHARE - _LEAST_SHARE) / _STEPS_BETWEEN
        return max(_LEAST_SHARE, self._share - fallen)

    def begin(self, step: int) -> None:
        """Begin anew: nobody runs."""
        self._share, self._since_step = _FIRST_SHARE, step

    def learn(self, step: int, answers: int, tokens: int, most_tokens: int) -> None:
        """Take in that so many answers still run after some were retracted: what they have, and may have, of tokens."""
        share = (tokens + _STEPS_AHEAD * answers) / (most_tokens + 1)
        self._share, self._since_step = min(1.0, share), step
