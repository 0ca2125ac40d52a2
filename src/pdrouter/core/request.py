"""RequestFacts: all that a decision may know about a request.

``proxy/intake.py`` learns them from the bytes; the simulator learns them from a trace. Nothing here knows HTTP.
"""

import msgspec

from pdrouter.core.tokens import TextShape


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a decision may know.

    ``request_id`` is the client's label and never a key. ``prompt_tokens`` is an estimate for the whole request,
    all prompts of a batch together; ``prompt_bytes`` and ``text`` are what it was estimated from (0 and ``None``
    where nothing can be learned from a count: ids, images, batches).
    ``prefix_blocks`` are the chained block hashes of the prompt (``core/prefix.py``), ``block_tokens`` the estimated
    tokens in one block. ``prefill_rank`` and ``decode_rank`` are the ranks that the client asked for,
    ``max_output_tokens`` the limit that it set for each answer. ``routing_key`` and ``client_key`` are hashes of the
    key that the client gave, and of that or else what tells the client.
    """

    request_id: str
    prompt_tokens: int
    model: str | None = None
    prompt_bytes: int = 0
    text: TextShape | None = None
    prompts: int = 1
    prefix_blocks: tuple[int, ...] = ()
    block_tokens: float = 0.0
    prefill_rank: int | None = None
    decode_rank: int | None = None
    max_output_tokens: int | None = None
    routing_key: int | None = None
    client_key: int | None = None
