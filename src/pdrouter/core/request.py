"""RequestFacts: all that a decision may know about a request.

``proxy/intake.py`` learns them from the bytes; the simulator learns them from a trace. Nothing here knows HTTP.
"""

import msgspec


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a decision may know.

    ``request_id`` is the client's label and never a key. ``prompt_tokens`` is an estimate for the whole request,
    all prompts of a batch together; ``prompt_bytes`` is what it was estimated from (0: counted exactly).
    ``prefix_blocks`` are the chained block hashes of the prompt (``core/prefix.py``), ``block_tokens`` the estimated
    tokens in one block. ``prefill_rank`` and ``decode_rank`` are the ranks that the client asked for.
    """

    request_id: str
    prompt_tokens: int
    model: str | None = None
    prompt_bytes: int = 0
    prompts: int = 1
    prefix_blocks: tuple[int, ...] = ()
    block_tokens: float = 0.0
    prefill_rank: int | None = None
    decode_rank: int | None = None
