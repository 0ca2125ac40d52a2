"""The Engine protocol: from a decision and the client's bytes to a Plan of legs, and from an engine's bytes to facts.

Everything here is pure: what is random (ids, rooms) comes in as an ``Attempt``. ``proxy/dispatch.py`` runs the Plan.
"""

import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Protocol

import msgspec

from pdrouter.core.decision import Decision, Placement
from pdrouter.core.fleet import Endpoint, Role
from pdrouter.core.load import RankReport
from pdrouter.errors import DuplicateField, InvalidJson

Piece = bytes | memoryview

_END = re.compile(rb"\s*\}")
_QUOTE = ord('"')


class Inbound(msgspec.Struct, frozen=True, kw_only=True):
    """The client's request as bytes, and what an engine must know of them.

    ``rest`` is the body behind its opening brace, without the fields that the router writes itself. ``headers`` are the
    header lines to send on, each with its line end. ``batch`` is the number of samples the engine makes of one request,
    ``None`` where the request isn't a batch.
    """

    path: str
    rest: bytes | memoryview
    headers: bytes
    request_id: str
    is_stream: bool
    batch: int | None
    rid: str | None
    wants_prompt_logprobs: bool


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
    """The legs of a request. With a prefill leg both run at once; ``decode`` answers the client.

    ``rid`` is what the engines know the request by. ``merges_logprobs``: the prompt's logprobs come from the prefill
    leg and go before the decode leg's.
    """

    rid: str
    prefill: Leg | None
    decode: Leg
    merges_logprobs: bool


class Described(msgspec.Struct, frozen=True):
    """What an engine tells of itself; ``None`` where it doesn't."""

    role: Role | None = None
    model: str | None = None
    dp_size: int | None = None
    bootstrap_port: int | None = None
    version: str | None = None


class LoadReply(msgspec.Struct, frozen=True):
    """An engine's load by rank; ``unix_s`` is the engine's own time stamp, if it gives one."""

    ranks: Sequence[RankReport]
    unix_s: float | None = None


class Engine(Protocol):
    """One kind of engine."""

    info_paths: Sequence[str]
    """Where it tells of itself, the newest first."""

    load_paths: Sequence[str]
    """Where it tells its load, the newest first."""

    def plan(self, decision: Decision, inbound: Inbound, attempt: Attempt) -> Plan:
        """Return what to send, and to whom."""
        ...

    def abort(self, endpoint: Endpoint, rid: str) -> bytes:
        """Return the whole request that ends ``rid`` at an endpoint."""
        ...

    def describe(self, body: bytes) -> Described | None:
        """Read what the engine tells of itself; ``None`` if that isn't understood."""
        ...

    def read_load(self, body: bytes) -> LoadReply | None:
        """Read a load reply; ``None`` if that isn't understood."""
        ...


def request_head(method: str, path: str, endpoint: Endpoint, headers: bytes, content_length: int) -> bytes:
    """Return the head of an HTTP/1.1 request, blank line included."""
    return b"%b%bcontent-length: %d\r\n\r\n" % (_head_start(method, path, endpoint.address), headers, content_length)


@lru_cache(maxsize=65536)
def _head_start(method: str, path: str, address: str) -> bytes:
    return f"{method} {path} HTTP/1.1\r\nhost: {address}\r\n".encode()


def splice(inbound: Inbound, fields: bytes) -> tuple[Piece, ...]:
    """Return the client's body with ``fields`` (``"a":1,"b":2``) behind its opening brace; nothing is copied (I10)."""
    rest = inbound.rest
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


class _Name:
    """A field's name. Each differs from any other, so that a dict keeps a field that stands twice."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


_FIELDS = msgspec.json.Decoder(dict[_Name, msgspec.Raw], dec_hook=lambda _, text: _Name(text))
