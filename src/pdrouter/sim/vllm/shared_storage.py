"""vLLM's ExampleConnector (SharedStorageConnector), and LMCache in its simple mode: KV goes through a folder.

The legs say nothing of each other: what a prefill engine has read lies in the store, by the digest of the prompt.
Simplified against vLLM: whole prompts only, where the real one also finds prefixes.
"""

from pathlib import Path

from pdrouter.sim.call import Handoff
from pdrouter.sim.job import Role
from pdrouter.sim.live_engine import LiveEngine
from pdrouter.sim.ticket import Ticket
from pdrouter.sim.vllm.connector import Connector, LegRequest, check_prefill, refuse_params


class _Stored(Handoff, frozen=True):
    """A leg whose KV goes through the store."""


class SharedStorageConnector(Connector):
    """Serial. A prefill engine writes, a decode engine reads, a regular engine does both."""

    def __init__(self, engine: LiveEngine) -> None:
        super().__init__(engine)
        self._folder = Path(engine.settings.storage_dir or ".")

    def place(self, leg: LegRequest) -> tuple[Role, Handoff | None]:
        """Hold a prefill engine to legs of one token. Raises: ``EngineError``."""
        refuse_params(leg)
        if self.engine.role is Role.PREFILL:
            check_prefill(leg)
        return self.engine.role, _Stored()

    def opened(self, ticket: Ticket) -> None:
        """Look for the prompt in the store; what isn't there is read here."""
        if self.engine.role is not Role.PREFILL:
            ticket.job.role = Role.DECODE if self._file(ticket).exists() else Role.REGULAR
        super().opened(ticket)

    def prefilled(self, ticket: Ticket) -> None:
        """Store the KV and answer."""
        self._file(ticket).write_text(str(ticket.job.prompt_tokens))
        self.engine.finish(ticket)

    def reserved(self, ticket: Ticket) -> None:
        """Load the KV."""
        self.take_remote(ticket, ticket.job.prompt_tokens - 1)

    def _file(self, ticket: Ticket) -> Path:
        return self._folder / f"{ticket.digest:016x}.kv"
