"""What must hold of a real prefill/decode pair: alone, driven by hand, and behind the router."""

import time
import uuid

from tests.real.asking import Question, ask, metric, post
from tests.real.checks import AT_ONCE, STORY, TOKENS, Fleet
from tests.real.processes import MODEL, Server

_ASK_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
RANK_HEADER = "x-data-parallel-rank"
_BLOCK_TOKENS = 128
"""vLLM's KV block on a CPU; only whole blocks are found in its cache."""

MOVED_TOKENS = 2 * _BLOCK_TOKENS
"""Fewest tokens to move for a prompt with ``STORY`` in it that no engine has seen."""


def external_tokens(decode: Server) -> float:
    """Return how many prompt tokens' KV a decode engine has got from elsewhere."""
    return metric(decode.url, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer")


def fresh_prompt() -> str:
    """Return a long prompt that no engine has seen."""
    return f"Story {uuid.uuid4()}. {STORY}What comes next?"


def check_by_hand(fleet: Fleet, prefill: Server, decode: Server, ranks: tuple[int, int] | None = None) -> None:
    """Check that the pair itself works, without the router; the first transfer sets up the connection.

    ``ranks`` are those of prefill and decode, where there are several.
    """
    promise = "two legs by hand" if ranks is None else f"two legs by hand, ranks {ranks[0]} and {ranks[1]}"
    try:
        held, seen = _by_hand(prefill, decode, ranks)
    except (OSError, LookupError) as error:
        held, seen = False, f"{type(error).__name__}: {error}"
    fleet.record.check(promise, held, seen)


def _by_hand(prefill: Server, decode: Server, ranks: tuple[int, int] | None) -> tuple[bool, str]:
    began_s, before = time.monotonic(), external_tokens(decode)
    body = {"model": MODEL, "prompt": fresh_prompt(), "max_tokens": TOKENS, "temperature": 0}
    request_id = {"x-request-id": f"by-hand-{uuid.uuid4()}"}
    headers = [request_id | ({} if ranks is None else {RANK_HEADER: str(ranks[side])}) for side in (0, 1)]
    asked = body | {"max_tokens": 1, "kv_transfer_params": _ASK_PREFILL}
    told = post(f"{prefill.url}/v1/completions", asked, headers[0])["kv_transfer_params"]
    seen = post(f"{decode.url}/v1/completions", body | {"kv_transfer_params": told}, headers[1])
    truth = post(f"{prefill.url}/v1/completions", body, {})
    texts = [reply["choices"][0]["text"] for reply in (seen, truth)]
    moved = external_tokens(decode) - before
    held = texts[0] == texts[1] and moved == told["remote_num_tokens"]
    return held, f"{moved:g} tokens moved, {time.monotonic() - began_s:.1f} s, {texts[0][:40]!r}"


async def check_pair(fleet: Fleet, prefill: Server, decode: Server) -> None:
    """Check what only a pair shows."""
    await fleet.hold("KV moves for a fresh prompt", lambda: _kv_moves(fleet, decode))
    for is_stream in (False, True):
        name = f"cached_tokens are the prefill's, {'streamed' if is_stream else 'whole'}"
        await fleet.hold(name, lambda s=is_stream: _cached_tokens(fleet, s))  # type: ignore[misc]


def check_transfers(fleet: Fleet, prefill: Server, decode: Server, before: float) -> None:
    """Check at the end what the engines counted."""
    moved = external_tokens(decode) - before
    least = AT_ONCE * MOVED_TOKENS
    fleet.record.check(f"KV moved for the {AT_ONCE} at least", moved >= least, f"{moved:g} tokens, {least} at least")
    for name in ("vllm:nixl_num_failed_transfers_total", "vllm:nixl_num_failed_notifications_total"):
        counts = [metric(engine.url, name) for engine in (prefill, decode)]
        fleet.record.check(f"{name} is 0", not any(counts), f"{counts[0]:g} and {counts[1]:g}")
    expired = metric(prefill.url, "vllm:nixl_num_kv_expired_reqs_total")
    fleet.record.check("no KV was left on the prefill engine", not expired, f"{expired:g} expired")


async def _kv_moves(fleet: Fleet, decode: Server) -> tuple[bool, str]:
    before = external_tokens(decode)
    seen = await ask(fleet.client, Question(fresh_prompt(), TOKENS))
    moved = external_tokens(decode) - before
    return moved == seen.prompt_tokens, f"{moved:g} of {seen.prompt_tokens} tokens"


async def _cached_tokens(fleet: Fleet, is_stream: bool) -> tuple[bool, str]:
    """The prefill engine has read the prompt before, the decode engine hasn't."""
    question = Question(fresh_prompt(), TOKENS, is_stream=is_stream)
    fresh = await ask(fleet.client, Question(fresh_prompt(), TOKENS, is_stream=is_stream))
    await ask(fleet.truth, Question(question.prompt, 1))
    seen = await ask(fleet.client, question)
    expected = seen.prompt_tokens // _BLOCK_TOKENS * _BLOCK_TOKENS
    held = not fresh.cached_tokens and seen.cached_tokens == expected
    return held, f"{fresh.cached_tokens} when fresh, then {seen.cached_tokens} of {seen.prompt_tokens}"
