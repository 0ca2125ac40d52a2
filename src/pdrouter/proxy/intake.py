"""[1] From the client's bytes to RequestFacts and Inbound: what the body says, the headers, and what is known of both.

It knows which fields the router writes itself, and takes the client's own out of the body. Read next: ``reading.py``.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter

import msgspec
import xxhash
from msgspec import UNSET, Struct, UnsetType

from pdrouter.core.prefix import block_hashes
from pdrouter.core.request import RequestFacts, Task
from pdrouter.core.router import Router
from pdrouter.engines.base import Inbound
from pdrouter.engines.sglang import OWNED_FIELDS, RESPONSE_ID
from pdrouter.engines.sglang_ranks import DECODE_RANK_FIELDS, PREFILL_RANK_FIELDS, RANK_FIELDS
from pdrouter.errors import InvalidRequest, QueueFull
from pdrouter.proxy.bodies import MAX_ID_CHARS, Api, Body, Whole, client_rid
from pdrouter.proxy.client import Client
from pdrouter.proxy.credentials import API_KEY, AUTHORIZATION, identity, repeated
from pdrouter.proxy.offload import Done, Offload
from pdrouter.proxy.prompts import Prompt, adapter_of, cache_key
from pdrouter.proxy.reading import Reading, ReadingOptions, read_body, takes_long
from pdrouter.proxy.salts import salted
from pdrouter.proxy.scalars import boolean, integer

__all__ = ["Api", "Intake", "IntakeOptions"]

_RANK_HEADER = b"x-data-parallel-rank"
_MAX_RANK_DIGITS = 9
_PRIORITY = re.compile(rb"-?\d{1,9}")

_ROUTING_KEY = b"x-smg-routing-key"
_CLIENT_KEYS = (_ROUTING_KEY, AUTHORIZATION, API_KEY, b"x-forwarded-for", b"cookie")
"""What tells clients apart, the first that there is. Source: the SGLang router's consistent hashing; and x-api-key."""

_LISTS = frozenset((b"x-forwarded-for", b"cookie"))
"""Headers whose value is a list: lines of them may repeat. Source: RFC 9110, 5.3; RFC 6265, 5.4."""

_FORWARDED = frozenset(
    b"accept traceparent tracestate x-smg-routing-key user-agent"
    b" x-correlation-id x-trace-id request-id anthropic-version anthropic-beta".split()
)
_CREDENTIALS = frozenset((AUTHORIZATION, API_KEY))
_THREADS = 2
"""Threads that read long bodies; chosen: more would only wait for each other."""

_MAX_WAITING = 1024
"""Long bodies that are being read or wait for it (I9); chosen."""

_JSON_LINE = b"content-type: application/json\r\n"
_ID_PREFIXES: Mapping[Api, str] = {
    Api.CHAT: "chatcmpl-",
    Api.COMPLETIONS: "cmpl-",
    Api.GENERATE: "gnt-",
    Api.RESPONSES: "resp-",
    Api.MESSAGES: "msg-",
}
_WITHOUT_OUTPUT = frozenset((Api.COUNT_TOKENS, Api.TOKENIZE, Api.DETOKENIZE))
"""What generates nothing: no answer's tokens are booked."""

_OTHER_PREFIX = "req-"
_OTHER = Task.OTHER

_OWNED_NAMES = tuple(sorted(OWNED_FIELDS | {RESPONSE_ID, "kv_transfer_params", "disaggregated_params"}))
_DROPPED = frozenset(_OWNED_NAMES) - {RESPONSE_ID}
"""What is left out of a body that one engine gets as it is otherwise: ids of others' requests, rooms, ranks."""

_OWNED_VALUES = attrgetter(*_OWNED_NAMES)
_ALL_UNSET = (UNSET,) * len(_OWNED_NAMES)


class IntakeOptions(Struct, frozen=True):
    """Settings of the intake; ``config.py`` says what they mean."""

    request_id_headers: Sequence[bytes]
    forwarded: frozenset[bytes]
    reading: ReadingOptions
    owns_ranks: bool
    priority_header: bytes
    tenant_header: bytes
    rate_header: bytes
    tenant_weights: Mapping[bytes, float]
    max_priority: int
    takes_any_tenant: bool
    keeps_credentials: bool
    salts_tenants: bool


class Intake:
    """Reads requests of the inference paths."""

    def __init__(self, router: Router, options: IntakeOptions) -> None:
        self.counts: Counter[str] = Counter()
        self._router = router
        self._options = options
        self._threads = Offload("reader", _THREADS, _MAX_WAITING)
        single = {options.priority_header, options.tenant_header, options.rate_header}
        self._keys = single | {_RANK_HEADER, *_CLIENT_KEYS}
        self._lists = _LISTS - single
        # Where ranks aren't ours to write, the client's own go through.
        self._dropped = _DROPPED if options.owns_ranks else _DROPPED - RANK_FIELDS
        self._forwarded = _FORWARDED | options.forwarded | (set() if options.owns_ranks else {_RANK_HEADER})

    def read(
        self, api: Api, headers: Iterable[tuple[bytes, bytes]], body: bytes, request_id: str
    ) -> tuple[RequestFacts, Inbound]:
        """Return what the decision and the engine must know.

        Raises: InvalidJson, InvalidRequest, DuplicateField.
        """
        return self.place(read_body(api, headers, body, self._options.reading), headers, request_id)

    def takes_long(self, body: bytes) -> bool:
        """Whether a body is to be read in a thread, by ``read_later``."""
        return takes_long(body, self._options.reading)

    def read_later(self, api: Api, client: Client, body: bytes, done: "Done[Reading]") -> None:
        """Read a body in a thread; ``done`` is called then, in the loop.

        Raises: QueueFull.
        """
        if not self._threads.start(partial(read_body, api, client.headers, body, self._options.reading), client, done):
            self.counts["refused"] += 1
            raise QueueFull(f"{_MAX_WAITING} long bodies are being read; come again", retry_after_s=1)
        self.counts["read"] += 1

    def counters(self) -> Counter[str]:
        """Return the bodies that were read in threads, and those for which there was no room."""
        return self.counts

    def close(self) -> None:
        """Read no more in threads."""
        self._threads.close()

    def place(
        self, reading: Reading, headers: Iterable[tuple[bytes, bytes]], request_id: str
    ) -> tuple[RequestFacts, Inbound]:
        """Return what the decision and the engine must know of a request whose body was read.

        Raises: InvalidRequest.
        """
        told, prompt, body = reading.told, reading.prompt, reading.body
        if isinstance(told, Whole) or prompt is None:
            return self._place_whole(reading, headers, request_id)
        keys: dict[bytes, bytes] = {}
        lines, credentials, header_rank = self._read_headers(headers, keys)
        if self._options.salts_tenants:
            tenant = identity(keys, self._options.tenant_header)
            body, told = salted(reading.api, body, told, tenant)
        fields = _set_fields(told)
        ranks = self._ranks(told, header_rank) if fields else (header_rank, header_rank)
        facts = self._facts(reading, told, prompt, request_id, ranks, keys)
        priority = 0 if told.priority is None else integer("priority", told.priority) or 0
        return facts, Inbound(
            path=reading.api,
            body=body,
            start=body.index(b"{") + 1,
            fields=fields,
            headers=_JSON_LINE + lines,
            request_id=request_id,
            is_stream=boolean("stream", told.stream),
            batch=reading.batch,
            rid=client_rid(told, reading.batch),
            wants_prompt_logprobs=told.wants_prompt_logprobs(),
            credentials=credentials,
            keeps_credentials=self._options.keeps_credentials,
            priority=priority,
            is_low_first=bool(priority) and self._reads_low_first(facts.model, facts.adapter),
        )

    def _reads_low_first(self, model: str | None, adapter: str | None) -> bool:
        """Whether a body's priority is meant so: as most engines of its model read it."""
        fleet = self._router.fleet
        return fleet.puts_low_first(fleet.names.base(model, adapter))

    def _place_whole(
        self, reading: Reading, headers: Iterable[tuple[bytes, bytes]], request_id: str
    ) -> tuple[RequestFacts, Inbound]:
        """Return what routing must know of a body that one engine gets as it is, multipart or JSON."""
        keys: dict[bytes, bytes] = {}
        lines, credentials, rank = self._read_headers(headers, keys)
        told, text = reading.told, reading.shape
        model, adapter = told.model, None if told.lora_path is UNSET else adapter_of(told.lora_path)
        fields = [name for name in _set_fields(told) if name in self._dropped]
        rank = self._ranks(told, rank)[1] if fields else rank
        tokens = self._router.tokens.estimate(self._router.fleet.names.base(model, adapter), text) if text else 1
        facts = RequestFacts(
            request_id=request_id,
            prompt_tokens=max(1, tokens),
            task=reading.task,
            model=model,
            adapter=adapter,
            decode_rank=rank,
            max_output_tokens=1 if reading.api in _WITHOUT_OUTPUT else None,
            routing_key=_first_hash(keys, (_ROUTING_KEY,)) if keys else None,
            client_key=_first_hash(keys, _CLIENT_KEYS) if keys else None,
        )
        return facts, Inbound(
            path=reading.api,
            body=reading.body,
            start=0,
            fields=fields,
            headers=b"content-type: %b\r\n%b" % (reading.content_type, lines),
            request_id=request_id,
            is_stream=boolean("stream", told.stream),
            batch=None,
            rid=None,
            wants_prompt_logprobs=False,
            is_opaque=True,
            credentials=credentials,
            keeps_credentials=self._options.keeps_credentials,
        )

    def request_id(self, headers: Mapping[bytes, bytes], api: Api, new_letters: Callable[[], str]) -> str:
        """Return the client's request id, or a new one with the prefix of its path."""
        for name in self._options.request_id_headers:
            value = headers.get(name)
            if value and len(value) <= MAX_ID_CHARS:
                return value.decode("latin-1")
        return _ID_PREFIXES.get(api, _OTHER_PREFIX) + new_letters()

    def _read_headers(
        self, headers: Iterable[tuple[bytes, bytes]], keys: dict[bytes, bytes]
    ) -> tuple[bytes, bytes, int | None]:
        """Return the header lines to send on, those with its key, and the rank that it asks for; note its ``keys``.

        Raises: InvalidRequest for a rank that is none, and for a key that stands twice: others may take the first.
        """
        lines, credentials, rank = b"", b"", None
        for name, value in headers:
            if name in self._keys:
                if name in keys and name not in self._lists:
                    raise repeated(name)
                keys[name] = value
            if name in self._forwarded:
                lines += name + b": " + value + b"\r\n"
            elif name in _CREDENTIALS:
                credentials += name + b": " + value + b"\r\n"
            elif name == _RANK_HEADER:
                if not value.isdigit() or len(value) > _MAX_RANK_DIGITS:
                    raise InvalidRequest(
                        f"the header {_RANK_HEADER.decode()} must be a rank", param=_RANK_HEADER.decode()
                    )
                rank = int(value)
        return lines, credentials, rank

    def _ranks(self, body: Body, header_rank: int | None) -> tuple[int | None, int | None]:
        """Return the prefill and the decode rank that the client asked for; a header beats the body, as in SGLang."""
        if header_rank is not None or not self._options.owns_ranks:
            return header_rank, header_rank
        return _first_rank(PREFILL_RANK_FIELDS, body), _first_rank(DECODE_RANK_FIELDS, body)

    def _priority(self, body: Body, base: str | None, keys: Mapping[bytes, bytes]) -> int:
        """Return whose turn comes before others', the higher the sooner; the header's word counts more.

        The body's is meant as the engines of the model read it. Raises: InvalidRequest.
        """
        name, most = self._options.priority_header, self._options.max_priority
        text = keys.get(name)
        if text is None:
            priority = integer("priority", body.priority) or 0
            if priority and self._router.fleet.puts_low_first(base):
                priority = -priority
        elif _PRIORITY.fullmatch(text):
            priority = int(text)
        else:
            raise InvalidRequest(f"the header {name.decode()} must be an integer", param=name.decode())
        return max(-most, min(priority, most))

    def _tenant(self, keys: Mapping[bytes, bytes]) -> tuple[int | None, float]:
        """Return whose share of the router a request takes, and how large that is beside others'."""
        name = identity(keys, self._options.tenant_header)
        weight = self._options.tenant_weights.get(name)
        if not name or (weight is None and not self._options.takes_any_tenant):
            return None, 1.0
        return xxhash.xxh3_64_intdigest(name), 1.0 if weight is None else weight

    def _facts(
        self,
        reading: Reading,
        body: Body,
        prompt: Prompt,
        request_id: str,
        ranks: tuple[int | None, int | None],
        keys: Mapping[bytes, bytes],
    ) -> RequestFacts:
        samples, text, blocks = reading.batch or 1, reading.shape, reading.blocks
        tenant, weight = self._tenant(keys) if keys else (None, 1.0)
        names, model = self._router.fleet.names, body.model
        adapter = None if body.lora_path is UNSET else adapter_of(body.lora_path)
        base = names.base(model, adapter)
        tokens = prompt.tokens + (self._router.tokens.estimate(base, text) if text else 0)
        is_text = samples == 1 and not prompt.tokens and not prompt.media_ends
        is_short = samples == 1 and not blocks and bool(prompt.raw)
        if is_short:
            blocks = [memoryview(prompt.raw)]
        media_bytes = prompt.media_bytes * len(prompt.media_ends)
        compared = (sum(map(len, blocks)) + media_bytes) / (len(prompt.raw) + media_bytes) if blocks else 0.0
        return RequestFacts(
            request_id=request_id,
            task=reading.task,
            model=model,
            adapter=adapter,
            prompt_tokens=max(1, tokens) * (samples // (prompt.samples or 1)),
            prompt_bytes=max(1, int(text.size)) if text and is_text else 0,
            text=text if is_text else None,
            prompts=samples,
            copies=samples // (prompt.samples or 1),
            is_list=(prompt.samples or 1) > 1,
            prefix_blocks=block_hashes(blocks, cache_key(body, names.cache_key(model, adapter))),
            block_tokens=compared * tokens / len(blocks) if blocks else 0.0,
            is_short=is_short,
            prefill_rank=ranks[0],
            decode_rank=ranks[1],
            max_output_tokens=body.max_output_tokens(),
            priority=self._priority(body, base, keys) if keys or body.priority else 0,
            tenant=tenant,
            weight=weight,
            routing_key=_first_hash(keys, (_ROUTING_KEY,)) if keys else None,
            client_key=_first_hash(keys, _CLIENT_KEYS) if keys else None,
        )


def _first_hash(keys: Mapping[bytes, bytes], names: Iterable[bytes]) -> int | None:
    """Return a hash of the first of these headers; what it says, a password perhaps, goes no further."""
    return next((xxhash.xxh3_64_intdigest(keys[name]) for name in names if keys.get(name)), None)


def _set_fields(body: Body) -> list[str]:
    """Return which of the fields that the router writes the client's body carries: most often none."""
    fields = _OWNED_VALUES(body)
    return [] if fields == _ALL_UNSET else [n for n, v in zip(_OWNED_NAMES, fields, strict=True) if v is not UNSET]


def _first_rank(names: Iterable[str], body: Body) -> int | None:
    """Return the rank in the first of these fields that isn't null."""
    for name in names:
        field = getattr(body, name)
        if isinstance(field, UnsetType):
            continue
        try:
            rank = msgspec.json.decode(field, type=int | None)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidRequest(f"the field {name!r} must be an integer", param=name) from error
        if rank is not None:
            return rank
    return None
