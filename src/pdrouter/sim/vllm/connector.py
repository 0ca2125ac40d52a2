"""What vLLM's connectors have in common: reading of a leg's request, rules of a prefill leg, counts of prompt tokens.

A connector decides per request what the engine does for it: prefill for others, decode with KV of others, or both
itself. The connectors: ``nixl.py``, ``mooncake.py``, ``p2p_nccl.py``, ``shared_storage.py``.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping

import msgspec

from pdrouter.sim.call import Handoff
from pdrouter.sim.emulator_kind import Handshake
from pdrouter.sim.emulator_settings import EngineError
from pdrouter.sim.job import Role
from pdrouter.sim.live_engine import LiveEngine
from pdrouter.sim.ticket import Ticket

_IDS_REMEMBERED = 1 << 17  # I9: the oldest are forgotten


class LegRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a connector may know of a request. ``params``: ``kv_transfer_params``; ``prompts`` counts samples too."""

    params: Mapping[str, object] | None
    request_id: str
    max_tokens: int | None
    is_stream: bool
    has_stream_options: bool
    prompts: int


class UsedIds:
    """Ids used so far, the newest ``2**17`` of them: an id used twice is an error."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._seen: OrderedDict[str, None] = OrderedDict()

    def add(self, used: str) -> None:
        """Note an id. Raises: ``EngineError`` if it was used before."""
        if used in self._seen:
            raise EngineError(400, f"{self._name}_reused", f"{self._name} {used} was used before")
        self._seen[used] = None
        if len(self._seen) > _IDS_REMEMBERED:
            self._seen.popitem(last=False)


class Connector(Handshake):
    """No connector: every request is served alone, and fields of a handshake are refused.

    The real one warns of such fields and goes on without a transfer.
    """

    is_nixl = False

    def __init__(self, engine: LiveEngine) -> None:
        self.engine = engine
        self.settings = engine.settings
        self.prompt_tokens_by_source = [Counter[str]() for _ in range(engine.settings.dp_size)]
        self.failed_transfers = [0] * engine.settings.dp_size
        self.expired_requests = [0] * engine.settings.dp_size

    def place(self, leg: LegRequest) -> tuple[Role, Handoff | None]:
        """Return what the engine does for a request, and how it meets its other leg. Raises: ``EngineError``."""
        refuse_params(leg)
        return Role.REGULAR, None

    def opened(self, ticket: Ticket) -> None:
        """Count a decode engine that reads a prompt itself."""
        if self.engine.role is Role.DECODE and ticket.job.role is Role.REGULAR:
            self.engine.recomputed_requests += 1

    def closed(self, ticket: Ticket) -> None:
        """Count where the prompt came from, if there's an answer."""
        if ticket.tokens:
            self.count_prompt(ticket)

    def count_prompt(self, ticket: Ticket) -> None:
        """Count where the prompt's tokens came from."""
        job = ticket.job
        counts = self.prompt_tokens_by_source[job.rank]
        counts["local_cache_hit"] += job.cached_tokens
        counts["external_kv_transfer"] += ticket.external_tokens
        counts["local_compute"] += job.prompt_tokens - job.cached_tokens - ticket.external_tokens

    def hold(self, ticket: Ticket) -> None:
        """Answer a prefill leg and keep its KV until it is fetched or the time is over."""
        self.count_prompt(ticket)
        self.engine.hold(ticket, self.settings.kv_hold_timeout_s, self.forget)

    def forget(self, ticket: Ticket) -> None:
        """Take note that a held prompt was never fetched."""

    def rejected(self, params: Mapping[str, object], prompts: int) -> None:
        """Take note that a request with these ``kv_transfer_params`` was refused."""

    def take_remote(self, ticket: Ticket, cached_tokens: int) -> None:
        """Decode: let the KV come. ``cached_tokens``: what usage will tell."""
        ticket.external_tokens = ticket.job.prompt_tokens
        ticket.remote_cached_tokens = cached_tokens
        self.engine.expected(ticket)
        self.engine.start_transfer(ticket)

    def refuse(self, ticket: Ticket, error: EngineError) -> None:
        """Decode: end a prompt whose KV can't be had, and count it."""
        self.failed_transfers[ticket.rank] += 1
        self.engine.count_error(error)
        self.engine.fail(ticket, error)

    def expect_prefill(self, ticket: Ticket) -> None:
        """Decode: end the prompt if the KV doesn't come in time."""
        self.engine.expect(ticket, self.settings.handshake_timeout_s, self._timed_out)

    def _timed_out(self, ticket: Ticket) -> None:
        self.refuse(ticket, EngineError(500, "handshake_timeout", f"KV of {ticket.rid} didn't come in time"))


def refuse_params(leg: LegRequest) -> None:
    """Hold a request to say nothing in ``kv_transfer_params``. Raises: ``EngineError``."""
    if leg.params:
        text = "Got kv_transfer_params, but no KVConnector that reads them"
        raise EngineError(400, "unknown_kv_transfer_params", text)


def check_prefill(leg: LegRequest) -> None:
    """Hold a prefill leg to one token and one whole answer. Raises: ``EngineError``."""
    if leg.max_tokens != 1:
        raise EngineError(400, "prefill_not_one_token", f"a prefill leg has max_tokens 1, not {leg.max_tokens}")
    if leg.is_stream:
        raise EngineError(400, "prefill_streams", "a prefill leg isn't streamed: its kv_transfer_params would be lost")
    if leg.has_stream_options:
        raise EngineError(400, "prefill_streams", "Stream options can only be defined when `stream=True`.")


def read_direction(leg: LegRequest, role: Role) -> Role:
    """Return what ``do_remote_decode`` and ``do_remote_prefill`` ask for, held to the engine's role.

    Raises: ``EngineError``.
    """
    params = leg.params
    if not params:
        if role is Role.PREFILL:
            raise EngineError(400, "no_kv_transfer_params", "a prefill engine needs kv_transfer_params")
        return Role.REGULAR
    is_prefill, is_decode = params.get("do_remote_decode", False), params.get("do_remote_prefill", False)
    if not isinstance(is_prefill, bool) or not isinstance(is_decode, bool) or is_prefill == is_decode:
        text = "one of do_remote_decode and do_remote_prefill must be true, the other false"
        raise EngineError(400, "bad_kv_transfer_params", text)
    asked = Role.PREFILL if is_prefill else Role.DECODE
    if role not in {asked, Role.REGULAR}:
        raise EngineError(400, "wrong_role", f"a {role} engine was asked to {'prefill' if is_prefill else 'decode'}")
    return asked


def read_text(params: Mapping[str, object], name: str) -> str:
    """Return a field that must be a text. Raises: ``EngineError``."""
    value = params.get(name)
    if not isinstance(value, str) or not value:
        raise EngineError(400, "bad_kv_transfer_params", f"{name} must be a text, got {value!r}")
    return value
