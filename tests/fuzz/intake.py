"""The intake: any body and headers become facts within bounds, as another reader sees them, or a client's error."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from pydantic import TypeAdapter

from pdrouter.config import Settings
from pdrouter.core.decision import Decision, Rejection
from pdrouter.core.request import PAIRED, RequestFacts
from pdrouter.engines.base import Inbound
from pdrouter.errors import ClientError, RouterError
from pdrouter.options import intake_options
from pdrouter.proxy.bodies import MAX_BATCH, Api
from pdrouter.proxy.content import MAX_MEDIA
from pdrouter.proxy.intake import Intake
from pdrouter.proxy.replies import error_body
from tests.core.builders import decode, make_options, make_router, prefill, regular
from tests.fuzz.asked import body, headers
from tests.fuzz.source import Source

APIS = (*Api,)
OPTIONS = intake_options(msgspec.structs.replace(Settings(), prefix_block_bytes=32))
FLEETS = (
    (prefill("p:1", dp_size=2), decode("d:1", dp_size=2)),
    (prefill("p:1", model="m"), decode("d:1", model="m"), regular("r:1", model="other")),
)
NUMBER, FLAG = TypeAdapter(int), TypeAdapter(bool)
"""How engines read a number and a boolean."""

LIMITS: Mapping[str, Sequence[str]] = {
    Api.CHAT: ("max_tokens", "max_completion_tokens"),
    Api.COMPLETIONS: ("max_tokens",),
    Api.RESPONSES: ("max_output_tokens",),
    Api.MESSAGES: ("max_tokens",),
}
FIELDS = frozenset(
    {
        *("rid", "bootstrap_host", "bootstrap_port", "bootstrap_room", "kv_transfer_params", "disaggregated_params"),
        *("routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank"),
        *("data_parallel_rank_decode", "decode_dp_rank"),
    }
)


def one_input(raw: bytes) -> None:
    """Read a request, hold the facts to another reading of it, and let it be decided."""
    source = Source(raw)
    api = source.pick(APIS)
    owns_ranks, most, fleet = source.once_in(2), source.pick((0, 7)), source.pick(FLEETS)
    lines = headers(source)
    asked = body(source, api)
    router = make_router(fleet, make_options(policy="least_work"))
    options = msgspec.structs.replace(OPTIONS, owns_ranks=owns_ranks, max_priority=most)
    intake = Intake(router, options)
    try:
        facts, inbound = intake.read(api, lines, asked, "r")
    except ClientError as error:
        json.loads(error_body(error, api))
        return
    assert inbound.body is asked
    assert all(b"\n" not in line for line in inbound.headers.split(b"\r\n"))
    hold_bounds(facts, asked, options.reading.prefix_block_bytes)
    if facts.task in PAIRED:
        hold_reading(facts, inbound, asked)
    assert (facts, inbound) == intake.read(api, lines, asked, "r")
    decision = router.decide(facts, 1.0)
    assert isinstance(decision, Decision | Rejection)
    if isinstance(decision, Decision):
        router.settle(decision, 2.0)
    else:
        assert isinstance(decision.error, RouterError)
    router.validate()


def hold_bounds(facts: RequestFacts, asked: bytes, block_bytes: int) -> None:
    """Hold that the facts are in proportion to the body."""
    media = min(MAX_MEDIA, asked.count(b"{") + asked.count(b'"') // 2)  # each is an object or a string
    most = 4 * len(asked) + 512 + OPTIONS.reading.image_tokens * media
    assert 1 <= facts.prompts <= MAX_BATCH
    assert 1 <= facts.prompt_tokens <= most * facts.prompts
    assert 0 <= facts.prompt_bytes <= len(asked)
    width = (
        block_bytes + (OPTIONS.reading.image_tokens * 4 + block_bytes) * media
    )  # an image is as wide as so much text
    assert len(facts.prefix_blocks) * block_bytes <= len(asked) + width
    assert all(-(2**63) <= block < 2**63 for block in facts.prefix_blocks)
    assert math.isfinite(facts.block_tokens)
    assert 0 <= facts.block_tokens * len(facts.prefix_blocks) <= facts.prompt_tokens + 1e-6
    assert facts.weight > 0


def hold_reading(facts: RequestFacts, inbound: Inbound, asked: bytes) -> None:
    """Hold what was read to what Python's own JSON reader sees."""
    told: Mapping[str, Any] = json.loads(asked.decode("utf-8", "surrogateescape"))
    assert asked[: inbound.start].strip() == b"{"
    assert facts.model == told.get("model")
    assert inbound.is_stream is (told.get("stream") is not None and FLAG.validate_python(told["stream"]))
    assert set(inbound.fields) == FIELDS & told.keys()
    copies = _integer(told.get("n")) if inbound.path in (Api.CHAT, Api.COMPLETIONS) else None
    limits = [_integer(told.get(name)) for name in LIMITS.get(inbound.path, ())]
    if inbound.path == Api.GENERATE:
        given = told.get("sampling_params")
        params = given if isinstance(given, list) else [given or {}]
        copies = params[0].get("n") if params else None
        limits = [p.get("max_new_tokens") for p in params]
    limit = max((number for number in limits if number is not None), default=None)
    prompts = _prompts(told, inbound.path)
    copies = 1 if copies is None else copies
    assert inbound.batch == (None if prompts is None and copies == 1 else (prompts or 1) * copies)
    assert facts.prompts == (inbound.batch or 1)
    assert facts.copies == copies
    assert facts.is_list == ((prompts or 1) > 1)
    assert facts.max_output_tokens == limit


def _integer(value: object) -> int | None:
    return None if value is None else NUMBER.validate_python(value)


def _prompts(told: Mapping[str, Any], path: str) -> int | None:
    """Return how many prompts stand in a list, ``None`` where one stands alone."""
    if path == Api.COMPLETIONS:
        prompt = told["prompt"]
        return len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], str | list) else None
    if path != Api.GENERATE:
        return None
    if told.get("input_embeds") is not None:
        rows = told["input_embeds"]
        return len(rows) if any(isinstance(item, list) for item in rows[0][:1]) else None
    prompt = told["input_ids"] if told.get("text") is None else told["text"]
    return len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], str | list) else None
