"""SGLang's data-parallel ranks by version: how a leg names them, and which rooms fit the prefill's rank.

Source: the released packages 0.5.6 to 0.5.23 (``managers/io_struct.py``, ``managers/data_parallel_controller.py``,
``disaggregation/decode.py``, ``disaggregation/common/conn.py``); docs/engines.md has the rules in a table. A prefill
leg fails, and its decode leg waits for minutes, where rank and room don't agree.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from functools import lru_cache

import msgspec

from pdrouter.core.decision import Placement
from pdrouter.core.fleet import Endpoint
from pdrouter.engines.base import Inbound, rank_line

PREFILL_RANK_FIELDS = ("disagg_prefill_dp_rank", "data_parallel_rank", "routed_dp_rank")
"""Where a client may name the prefill rank, the most specific first."""

DECODE_RANK_FIELDS = ("decode_dp_rank", "data_parallel_rank_decode", "routed_dp_rank", "data_parallel_rank")
"""Where a client may name the decode rank, the most specific first."""

RANK_FIELDS = frozenset(PREFILL_RANK_FIELDS + DECODE_RANK_FIELDS)

MAX_ROOM = 2**63 - 1

_ROUTED_SINCE = (0, 5, 10)
"""Has ``routed_dp_rank``, ``disagg_prefill_dp_rank`` and the rank header. Before, a decode engine knows the prefill's
rank by the room, or takes its own ``data_parallel_rank`` for it."""

_CHECKED_SINCE = (0, 5, 11)
"""A prefill compares the room with its rank inside the tensor-parallel group: 0 where ranks are replicas. Since 0.5.16
not if the request has ``disagg_prefill_dp_rank``."""

_WITHOUT_HEADER = "/generate"
"""The path that doesn't read ``X-Data-Parallel-Rank`` (``openai/serving_base.py``)."""

_NUMBERS = re.compile(r"v?(\d{1,6}(?:\.\d{1,6})*)", re.ASCII)

_HEADER_RANK = re.compile(rb"x-data-parallel-rank: (\d{1,9})\r\n")


class RankFields(StrEnum):
    """How ranks are written: by version, newer names, names of #13208, header, or not at all."""

    AUTO = "auto"
    ROUTED = "routed"
    LEGACY = "legacy"
    HEADER = "header"
    NONE = "none"


def version_numbers(text: str | None) -> tuple[int, ...] | None:
    """Return the leading numbers of a version, ``None`` if it says nothing: a source build calls itself 0.0.0."""
    found = _NUMBERS.match(text or "")
    numbers = tuple(map(int, found[1].split("."))) if found else ()
    return numbers if any(numbers) else None


def rank_fields(
    spelling: RankFields, path: str, place: Placement, prefill: Placement | None, *, is_decode: bool
) -> tuple[bytes, bytes]:
    """Return the rank fields of a leg and its rank header line; ranks that aren't chosen are left out.

    ``prefill`` is where a pair's prompt is read, for both of its legs; ``is_decode`` says that this is the other leg.
    """
    endpoint, reader = place.endpoint, None if prefill is None else prefill.rank
    return _written(
        spelling, endpoint.version, path == _WITHOUT_HEADER, endpoint.dp_size, place.rank, reader, is_decode
    )


@lru_cache(maxsize=65536)
def _written(
    spelling: RankFields,
    version: str | None,
    reads_no_header: bool,
    dp_size: int,
    rank: int | None,
    prefill_rank: int | None,
    is_decode: bool,
) -> tuple[bytes, bytes]:
    is_old = is_older(spelling, version)
    if spelling is RankFields.AUTO or (spelling is RankFields.HEADER and (is_old or reads_no_header)):
        spelling = RankFields.LEGACY if is_old else RankFields.ROUTED
    if spelling is RankFields.NONE:
        return b"", b""
    header = b"" if rank is None or spelling is not RankFields.HEADER else rank_line(rank)
    fields = b""
    if spelling is RankFields.ROUTED:
        fields = _field(b"routed_dp_rank", rank)
    elif spelling is RankFields.LEGACY and not is_decode:
        fields = _field(b"data_parallel_rank", rank)
    elif spelling is RankFields.LEGACY:
        # Releases run it on the prefill's rank then, so it must have that rank.
        reader = prefill_rank if prefill_rank is not None and prefill_rank < dp_size else None
        fields = _field(b"decode_dp_rank", rank) + _field(b"data_parallel_rank", reader)
    if not (is_old and spelling is RankFields.LEGACY):
        fields += _field(b"disagg_prefill_dp_rank", prefill_rank)
    return fields, header


def _field(name: bytes, rank: int | None) -> bytes:
    return b"" if rank is None else b',"%b":%d' % (name, rank)


@lru_cache(maxsize=256)
def is_older(spelling: RankFields, version: str | None) -> bool:
    """Whether an engine is older than ``routed_dp_rank``; one that doesn't tell its version is so if set to be."""
    numbers = version_numbers(version)
    return spelling is RankFields.LEGACY if numbers is None else numbers < _ROUTED_SINCE


class RoomRule:
    """Which rooms a prefill takes: those that leave ``remainder`` when divided by ``size``; with ``None`` all."""

    __slots__ = ("_multiples", "_remainder", "_size")

    def __init__(self, size: int, remainder: int | None) -> None:
        self._size = size
        self._remainder = remainder
        self._multiples = (MAX_ROOM + 1) // size

    def fit(self, room: int) -> int:
        """Return a room that is taken; random rooms stay random and, but for the remainder, of 63 bits."""
        return room if self._remainder is None else room % self._multiples * self._size + self._remainder

    def fit_all(self, rooms: Sequence[int]) -> Sequence[int]:
        """Return as many rooms that are taken."""
        return rooms if self._remainder is None else [self.fit(room) for room in rooms]


def room_rule(spelling: RankFields, prefill: Placement, inbound: Inbound) -> RoomRule:
    """Return which rooms fit the rank of a prefill leg."""
    endpoint, rank = prefill.endpoint, prefill.rank
    if rank is None and spelling is RankFields.NONE:
        rank = _clients_rank(endpoint, inbound)
    return _rule(spelling, endpoint.version, endpoint.dp_size, endpoint.dp_attention, rank)


@lru_cache(maxsize=65536)
def _rule(spelling: RankFields, version: str | None, dp_size: int, dp_attention: bool, rank: int | None) -> RoomRule:
    if dp_size == 1:
        return RoomRule(1, None)
    if dp_attention or is_older(spelling, version):
        return RoomRule(dp_size, rank)
    numbers = version_numbers(version)
    return RoomRule(dp_size, 0 if numbers is None or numbers >= _CHECKED_SINCE else None)


def _clients_rank(endpoint: Endpoint, inbound: Inbound) -> int | None:
    """Return the rank that a client names by itself where the router writes none, as the engine reads it."""
    found = _HEADER_RANK.search(inbound.headers) if inbound.path != _WITHOUT_HEADER else None
    rank = int(found[1]) if found else None
    if rank is None and inbound.fields:
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # the engine refuses it
            told = _TOLD.decode(inbound.body)
            rank = told.data_parallel_rank if told.routed_dp_rank is None else told.routed_dp_rank
    return rank if rank is not None and 0 <= rank < endpoint.dp_size else None


class _Told(msgspec.Struct):
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None


_TOLD = msgspec.json.Decoder(_Told)
