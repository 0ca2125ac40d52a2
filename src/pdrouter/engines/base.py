"""The Engine protocol: from a decision and the client's bytes to a Plan of legs, and from an engine's bytes to facts.

Everything here is pure: what is random (ids, rooms) comes in as an ``Attempt``. ``proxy/flight.py`` runs the Plan.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

import msgspec

from pdrouter.core.decision import Decision, Placement
from pdrouter.core.fleet import Endpoint, Role
from pdrouter.core.load import RankReport
from pdrouter.core.names import Card
from pdrouter.core.request import Task
from pdrouter.engines.usage import PromptCount
from pdrouter.errors import DuplicateField, InvalidJson
from pdrouter.setting import Secret

Piece = bytes | memoryview

MAX_ID_CHARS = 256
"""A longer id of a model isn't taken (I9); chosen."""

_END = re.compile(rb"\s*\}")
_QUOTE = ord('"')


class Inbound(msgspec.Struct, frozen=True, kw_only=True):
    """The client's request as bytes, and what an engine must know of them.

    ``start`` is where ``body`` goes on behind its opening brace, ``fields`` are those of its top-level fields that some
    engine's leg may carry for us. ``headers`` are the header lines to send on, each with its line end. ``batch`` is the
    number of samples the engine makes of one request, ``None`` where the request isn't a batch. ``rid`` is the client's
    own id for engines, of a batch perhaps one for each prompt. An opaque body goes to one engine as it is, but for
    its ``fields``.
    ``sample_of`` is how many requests the client's was made into, one for each sample.
    ``priority`` is the body's, and ``is_low_first`` how the client is taken to mean it.
    ``credentials`` are the header lines with the client's key, apart from ``headers``; an engine that wants a key of
    its own gets that instead, unless ``keeps_credentials``.
    """

    path: str
    body: bytes
    start: int
    fields: Sequence[str]
    headers: bytes
    request_id: str
    is_stream: bool
    batch: int | None
    rid: str | tuple[str, ...] | None
    wants_prompt_logprobs: bool
    is_opaque: bool = False
    sample_of: int = 1
    credentials: bytes = b""
    keeps_credentials: bool = False
    priority: int = 0
    is_low_first: bool = False

    @property
    def id_line(self) -> bytes:
        """The header line by which engines are told the request's id."""
        return b"x-request-id: %b\r\n" % self.request_id.encode("latin-1", "replace")

    def rest(self, owned: Collection[str]) -> bytes | memoryview:
        """Return the body behind its opening brace, without the ``owned`` ones of ``fields``.

        Raises: InvalidJson, DuplicateField.
        """
        if self.fields and any(name in owned for name in self.fields):
            return rest_without(self.body, owned)
        return memoryview(self.body)[self.start :]


class Attempt(msgspec.Struct, frozen=True):
    """What must be new for every attempt: a suffix for ids, and rooms, one for each sample."""

    suffix: str
    rooms: Sequence[int]


class Leg(msgspec.Struct, frozen=True, eq=False):
    """One upstream call: where it goes, and its bytes."""

    placement: Placement
    head: bytes
    body: tuple[Piece, ...]


class Plan(msgspec.Struct, frozen=True, eq=False):
    """The legs of a request; ``decode`` answers the client.

    With both legs given, both run at once. Without ``decode`` they run in turn: ``Engine.hand_over`` makes it from the
    prefill's answer. ``rid`` is what the engines know the request by, ``parts`` what they call the requests that they
    make of a batch; empty where they can't be told. ``merges_logprobs``: the prompt's logprobs come from the prefill
    leg and go before the decode leg's.
    """

    rid: str
    prefill: Leg | None
    decode: Leg | None
    merges_logprobs: bool = False
    parts: Sequence[str] = ()


class HandOver(msgspec.Struct, frozen=True, eq=False):
    """What follows a prefill's answer: the decode leg, or where there is nothing left to do the client's answer.

    ``has_kv``: whether the decode leg was told where the prompt's KV is; otherwise it reads the prompt itself.
    ``count`` is what the prefill tells of the prompt.
    """

    decode: Leg | None
    answer: bytes = b""
    has_kv: bool = True
    count: PromptCount | None = None


class Described(msgspec.Struct, frozen=True):
    """What an engine tells of itself; ``None`` where it doesn't. The names are those of ``Endpoint``.

    ``rank_base`` is the first of its ranks among those of its deployment, ``kv_capacity_tokens`` that of one rank,
    ``kv_engine_ids`` what its KV transport calls its ranks, ``cards`` the ids that it lists.
    What can't be counts as not told.
    ``contradiction`` is no field of ``Endpoint``: it says which parts of the reply disagree on the number of ranks;
    ``dp_size`` is then the largest number.
    """

    role: Role | None = None
    model: str | None = None
    dp_size: int | None = None
    rank_base: int | None = None
    bootstrap_port: int | None = None
    version: str | None = None
    kv_capacity_tokens: int | None = None
    kv_engine_ids: tuple[str, ...] | None = None
    dp_attention: bool | None = None
    puts_low_first: bool | None = None
    contradiction: str | None = None
    cards: tuple[Card, ...] | None = None

    def __post_init__(self) -> None:
        """Leave out what can't be: the core makes room for each rank (I9)."""
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                msgspec.structs.force_setattr(self, name, None)
        if self.model is not None and len(self.model) > MAX_ID_CHARS:
            msgspec.structs.force_setattr(self, "model", None)


_BOUNDS: Mapping[str, tuple[int, int]] = {
    "dp_size": (1, 4096),
    "rank_base": (0, 2**31),
    "bootstrap_port": (1, 65_535),
    "kv_capacity_tokens": (1, 2**63 - 1),
}


class LoadReply(msgspec.Struct, frozen=True):
    """An engine's load by rank, as the engine numbers them.

    ``unix_s`` is its own time stamp, ``started_unix_s`` when its process began, if it tells them.
    """

    ranks: Sequence[RankReport]
    unix_s: float | None = None
    started_unix_s: float | None = None


class Traits(msgspec.Struct, frozen=True):
    """What an endpoint can do, by its KV transport and its version; the names are those of ``Endpoint``."""

    pair_tasks: frozenset[Task]
    pairs_lists: bool
    pairs_copies: bool
    reads_prompts: bool
    takes_ranks: bool = True
    reports_lag: bool = False
    tells_transfer: bool = False
    counts_messages: bool = False
    puts_low_first: bool = False


class Engine(Protocol):
    """One kind of engine."""

    kv_transports: Sequence[str]
    """How it hands over KV, the usual one first."""

    info_paths: Sequence[Sequence[str]]
    """Where it tells of itself: of each group of paths the first that is understood."""

    tells: Collection[str]
    """Names of ``Described`` that each server of it tells once it runs; while one is missing it is asked again."""

    load_paths: Sequence[str]
    """Where it tells its load, the newest first; none if it doesn't."""

    def traits(self, endpoint: Endpoint) -> Traits:
        """Return what an endpoint can do, as far as its version is known."""
        ...

    def plan(self, decision: Decision, inbound: Inbound, attempt: Attempt) -> Plan:
        """Return what to send, and to whom.

        Raises: InvalidJson, DuplicateField.
        """
        ...

    def hand_over(self, decision: Decision, inbound: Inbound, plan: Plan, reply: bytes) -> HandOver:
        """Return what follows the prefill's good answer, where the legs run in turn.

        Raises: UpstreamProtocol if the answer isn't understood.
        """
        ...

    def abort(self, endpoint: Endpoint, plan: Plan) -> Sequence[bytes] | None:
        """Return the whole requests that end a plan's leg at an endpoint; none where a closed connection does it."""
        ...

    def release(self, decision: Decision, reply: bytes) -> tuple[Endpoint, bytes] | None:
        """Return a whole request, and to whom, that frees the KV of a prefill which nobody will fetch, if there is one.

        ``reply`` is the prefill's answer.
        """
        ...

    def bootstrap_path(self, endpoint: Endpoint) -> str | None:
        """Return what to ask at an endpoint's bootstrap port for its KV engine ids, ``None`` where it has none."""
        ...

    def describe(self, path: str, body: bytes) -> Described | None:
        """Read what the engine tells of itself under a path; ``None`` if that isn't understood."""
        ...

    def read_load(self, body: bytes) -> LoadReply | None:
        """Read a load reply; ``None`` if that isn't understood."""
        ...


def with_traits(engine: Engine, endpoint: Endpoint) -> Endpoint:
    """Return the endpoint with what it can do."""
    return msgspec.structs.replace(endpoint, **msgspec.structs.asdict(engine.traits(endpoint)))


def request_head(method: str, path: str, endpoint: Endpoint, headers: bytes, content_length: int) -> bytes:
    """Return the head of an HTTP/1.1 request of the router's own, blank line included."""
    start = _head_start(method, path, endpoint.address, endpoint.api_key)
    return b"%b%bcontent-length: %d\r\n\r\n" % (start, headers, content_length)


def leg_head(inbound: Inbound, endpoint: Endpoint, headers: bytes, content_length: int) -> bytes:
    """Return the head of a leg, with the engine's key or the client's own, and ``headers`` beside."""
    credentials, key = inbound.credentials, endpoint.api_key
    if key is not None and not (inbound.keeps_credentials and credentials):
        return request_head("POST", inbound.path, endpoint, headers, content_length)
    start = _head_start("POST", inbound.path, endpoint.address, None)
    return b"%b%b%bcontent-length: %d\r\n\r\n" % (start, credentials, headers, content_length)


@lru_cache(maxsize=65536)
def _head_start(method: str, path: str, address: str, key: Secret | None) -> bytes:
    authorization = "" if key is None else f"authorization: Bearer {key.reveal()}\r\n"
    return f"{method} {path} HTTP/1.1\r\nhost: {address}\r\n{authorization}".encode()


def forward(decision: Decision, inbound: Inbound) -> Plan:
    """Return one leg with the client's body, but for ``fields``; the rank is told by header (SGLang and vLLM).

    Raises: InvalidJson, DuplicateField.
    """
    place = decision.decode
    endpoint, headers = place.endpoint, inbound.headers + inbound.id_line
    if place.rank is not None and endpoint.dp_size > 1:
        headers += rank_line(endpoint.rank_base + place.rank)
    body = splice(inbound.rest(inbound.fields), b"") if inbound.fields else (inbound.body,)
    head = leg_head(inbound, endpoint, headers, sum(map(len, body)))
    return Plan("", None, Leg(place, head, body))


def rank_line(rank: int) -> bytes:
    """Return the header line that names a rank, as SGLang and vLLM read it."""
    return b"x-data-parallel-rank: %d\r\n" % rank


def splice(rest: bytes | memoryview, fields: bytes) -> tuple[Piece, ...]:
    """Return a body: ``fields`` (``"a":1,"b":2``) behind its opening brace, then the rest; nothing is copied (I10)."""
    is_empty = rest[0] != _QUOTE and _END.match(rest) is not None
    return (b"{%b" if is_empty or not fields else b"{%b,") % fields, rest


def rest_without(body: bytes, owned: Collection[str]) -> bytes:
    """Return a JSON object behind its opening brace, without the fields that are ours; the others in order, raw (I10).

    Raises: InvalidJson; DuplicateField if one of ours stands there twice.
    """
    try:
        fields = _FIELDS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidJson(f"the body isn't JSON: {error}") from error
    names = [name.text for name in fields]
    twice = next((text for text in names if text in owned and names.count(text) > 1), None)
    if twice is not None:
        raise DuplicateField(f"the field {twice!r} stands twice at the top level; send it once", param=twice)
    kept = (
        msgspec.json.encode(name.text) + b":" + bytes(raw) for name, raw in fields.items() if name.text not in owned
    )
    return b",".join(kept) + b"}"


def with_priority(inbound: Inbound, endpoint: Endpoint, rest: Piece) -> tuple[Piece, bytes]:
    """Return what is behind a body's opening brace, and the field for an engine that reads priorities the other way.

    Raises: InvalidJson; DuplicateField if a priority that must change stands there twice.
    """
    if not inbound.priority or inbound.is_low_first == endpoint.puts_low_first:
        return rest, b""
    return rest_without(b"".join((b"{", rest)), _PRIORITY), b'"priority":%d' % -inbound.priority


_PRIORITY = frozenset({"priority"})


class _Name:
    """A field's name. Each differs from any other, so that a dict keeps a field that stands twice."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


_FIELDS = msgspec.json.Decoder(dict[_Name, msgspec.Raw], dec_hook=lambda _, text: _Name(text))
