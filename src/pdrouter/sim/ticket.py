"""What passes between an emulated engine and its HTTP side: tickets, and what an engine tells of itself."""

import asyncio

import msgspec

from pdrouter.sim.call import Handoff, RoomHandoff
from pdrouter.sim.emulator_settings import EngineError
from pdrouter.sim.job import Job, RankLoad, Role

Inbox = asyncio.Queue["Ticket | None"]


class Ticket:
    """One prompt of a request on its way through the engine. News about it go to the request's ``inbox``.

    ``handoff``: what the request says of the other leg; ``handover``: what the answer tells it. ``external_tokens``:
    those of the prompt whose KV came from another engine.
    """

    __slots__ = (
        "created_s",
        "digest",
        "error",
        "external_tokens",
        "finish",
        "handoff",
        "handover",
        "inbox",
        "index",
        "is_posted",
        "job",
        "remote_cached_tokens",
        "rid",
        "seed",
        "sent_tokens",
        "stops_early",
        "timeout",
        "tokens",
    )

    def __init__(self, job: Job, inbox: Inbox, *, rid: str, index: int, digest: int, seed: int) -> None:
        self.job = job
        self.inbox = inbox
        self.rid = rid
        self.index = index
        self.digest = digest
        self.seed = seed
        self.handoff: Handoff | None = None
        self.handover: dict[str, object] | None = None
        self.stops_early = False
        self.created_s = 0.0
        self.tokens = 0
        self.sent_tokens = 0
        self.finish: str | None = None
        self.error: EngineError | None = None
        self.remote_cached_tokens = 0
        self.external_tokens = 0
        self.is_posted = False
        self.timeout: asyncio.TimerHandle | None = None

    @property
    def rank(self) -> int:
        """DP rank that serves it."""
        return self.job.rank

    @property
    def room(self) -> int | None:
        """SGLang: the room in which its legs meet."""
        return self.handoff.room if isinstance(self.handoff, RoomHandoff) else None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from a prefix cache, or as the other leg or the handshake says."""
        return self.job.cached_tokens or self.remote_cached_tokens

    @property
    def is_over(self) -> bool:
        """Whether it has ended, well or not."""
        return self.finish is not None or self.error is not None

    def post(self) -> None:
        """Tell the request that there is news; many news are one message."""
        if not self.is_posted:
            self.is_posted = True
            self.inbox.put_nowait(self)


class Received(msgspec.Struct, frozen=True):
    """What the engine understood of one prompt of a request. ``rank`` is of this engine, from 0."""

    rid: str
    rank: int
    role: Role
    prefill_rank: int | None
    room: int | None
    prompt_tokens: int
    output_tokens: int


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All that an engine holds now, and what it refused so far (``errors`` by cause).

    ``rooms`` have a live request here; ``wanted_rooms``, on a prefill, a decode side that waits or receives.
    ``held_requests`` are answered, and their KV waits for a decode side; of ``stranded_requests`` nobody fetched
    it in time; ``recomputed_requests`` should have had their KV from a prefill side and hadn't.
    """

    ranks: list[RankLoad]
    requests: int
    requests_by_rank: list[int]
    rooms: list[int]
    wanted_rooms: list[int]
    errors: dict[str, int]
    error_messages: list[str]
    total_requests: int
    held_requests: int
    stranded_requests: int
    recomputed_requests: int

    @property
    def used_tokens(self) -> int:
        """KV held by live requests of all ranks."""
        return sum(rank.used_tokens for rank in self.ranks)

    @property
    def is_idle(self) -> bool:
        """No request, no room, no slot and no KV is held."""
        return not self.requests and not self.rooms and all(rank.is_idle for rank in self.ranks)
