"""What one kind of engine adds to what all emulated engines share: requests, handshake, replies, pages, load.

``emulator.py`` serves a kind over HTTP, ``live_engine.py`` calls its handshake. Kinds: ``emulator_sglang.py``,
``vllm/``, ``trtllm/``, ``emulator_openai.py``.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Protocol

from pdrouter.sim.call import Call
from pdrouter.sim.emulator_replies import Reply
from pdrouter.sim.emulator_settings import EngineError
from pdrouter.sim.faults import FaultRule
from pdrouter.sim.http_exchange import Exchange
from pdrouter.sim.ticket import Ticket

Handler = Callable[[Exchange, list[FaultRule]], Awaitable[None]]
Routes = dict[str, dict[str, Handler]]


class Ports(Protocol):
    """Where a handshake opens ports beside the main one. Both return the port that was opened (0 asks for any)."""

    async def listen(self, factory: Callable[[], asyncio.BaseProtocol], port: int) -> int:
        """Serve any protocol."""

    async def serve(self, routes: Routes, port: int) -> int:
        """Serve HTTP."""


class Handshake:
    """How the legs of one kind of engine find each other; called by the engine as a prompt goes along.

    This one is of engines without legs: every request stands alone.
    """

    port: int | None = None
    """Where the other side reaches this one, once started."""

    async def start(self, ports: Ports) -> None:
        """Open ports."""

    def opened(self, ticket: Ticket) -> None:
        """Take note of a prompt before the engine has it. Raises: ``EngineError`` to refuse it."""

    def refused(self, ticket: Ticket) -> None:
        """Take note that the engine has no room for a prompt of this length, whatever the future brings."""

    def submitted(self, ticket: Ticket) -> None:
        """Take note that the engine has it."""

    def prefilled(self, ticket: Ticket) -> None:
        """Prefill: the prompt's KV is there; finish it, hold it or hand it on."""

    def reserved(self, ticket: Ticket) -> None:
        """Decode: slot and KV are reserved; fetch the prompt's KV."""

    def received(self, ticket: Ticket) -> None:
        """Decode: the KV has arrived."""

    def closed(self, ticket: Ticket) -> None:
        """Take note of its end, however it came; what it holds is freed afterwards."""

    def rooms(self) -> list[int]:
        """Rooms with a live request here (SGLang)."""
        return []

    def wanted_rooms(self) -> list[int]:
        """Rooms whose decode side waits or receives (SGLang)."""
        return []

    async def shut(self) -> None:
        """End connections and tasks."""


class PlainFailures:
    """Failures as most kinds tell them: alike on each endpoint, and by a status as long as no stream has begun."""

    def error_body(self, error: EngineError) -> object:
        """Return an error as this kind tells it."""
        raise NotImplementedError

    def error_reply(self, _path: str, error: EngineError) -> tuple[int, object]:
        """Return status and body of a request that failed as a whole."""
        return error.status, self.error_body(error)

    def refused_stream(self, _path: str, _raw: bytes, _error: EngineError) -> bytes | None:
        """Return the stream that tells a refusal inside a 200: none."""
        return None


class EngineKind(Protocol):
    """One kind of engine over one ``LiveEngine``."""

    @property
    def paths(self) -> Collection[str]:
        """Endpoints that generate."""

    @property
    def load_paths(self) -> Collection[str]:
        """Endpoints that tell load, for the faults of load reports."""

    def routes(self) -> Routes:
        """All other endpoints: health, information, load."""

    def read(self, path: str, raw: bytes, headers: Mapping[str, str]) -> Call:
        """Read and check a request. Raises: ``EngineError``."""

    def reply(self, call: Call, tickets: Sequence[Ticket]) -> Reply:
        """Make the format of its answer."""

    def error_reply(self, path: str, error: EngineError) -> tuple[int, object]:
        """Return status and body of a request to an endpoint that failed as a whole."""

    def refused_stream(self, path: str, raw: bytes, error: EngineError) -> bytes | None:
        """Return the stream that tells a refusal inside a 200; None: it is a status."""

    def error_event(self, error: EngineError) -> bytes:
        """Return an error in the middle of a stream, and its end."""
