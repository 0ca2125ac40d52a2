"""RequestFacts: all that a decision may know about a request.

``proxy/intake.py`` learns them from the bytes; the simulator learns them from a trace. Nothing here knows HTTP.
"""

from enum import StrEnum

import msgspec

from pdrouter.core.tokens import TextShape


class Task(StrEnum):
    """What is asked of an engine.

    The first three read a prompt and write an answer, which a pair may share (``Endpoint.pair_tasks``); ``read`` only
    reads (embeddings, scores); ``count`` asks for the number of tokens in messages, which not every engine can tell;
    ``other`` is for any endpoint (tokenizing, audio, images).
    """

    GENERATE = "generate"
    RESPONSES = "responses"
    MESSAGES = "messages"
    READ = "read"
    COUNT = "count"
    OTHER = "other"


PAIRED = frozenset({Task.GENERATE, Task.RESPONSES, Task.MESSAGES})
"""What a prefill and a decode endpoint may share."""


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a decision may know.

    ``request_id`` is the client's label and never a key. ``prompt_tokens`` is an estimate for the whole request,
    all prompts of a batch together; ``prompt_bytes`` and ``text`` are what it was estimated from (0 and ``None``
    where nothing can be learned from a count: ids, images, batches).
    ``adapter`` is a LoRA adapter that the request names beside the model.
    ``prompts`` is how many answers there will be, ``copies`` how many of them to each prompt, ``is_list`` says that
    they are to more than one prompt, ``is_whole`` that one endpoint shall do it all.
    ``prefix_blocks`` are the chained block hashes of the prompt (``core/prefix.py``), ``block_tokens`` the estimated
    tokens in one block; of a prompt that ``is_short`` of a block there is one hash, which only an equal prompt has.
    ``prefill_rank`` and ``decode_rank`` are the ranks that the client asked for, ``max_output_tokens`` the limit that
    it set for each answer.
    A higher ``priority`` goes first; ``tenant`` is a hash of whose share of the router it takes, ``weight`` how large
    that is beside others'. ``routing_key`` and ``client_key`` are hashes of the key that the client gave, and of that
    or else what tells the client.
    """

    request_id: str
    prompt_tokens: int
    task: Task = Task.GENERATE
    model: str | None = None
    adapter: str | None = None
    prompt_bytes: int = 0
    text: TextShape | None = None
    prompts: int = 1
    copies: int = 1
    is_list: bool = False
    is_whole: bool = False
    prefix_blocks: tuple[int, ...] = ()
    block_tokens: float = 0.0
    is_short: bool = False
    prefill_rank: int | None = None
    decode_rank: int | None = None
    max_output_tokens: int | None = None
    priority: int = 0
    tenant: int | None = None
    weight: float = 1.0
    routing_key: int | None = None
    client_key: int | None = None
