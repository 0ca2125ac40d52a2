"""Any engine with OpenAI's API, as a regular worker: the client's body goes through as it is.

Nothing is known of its ranks and its load but what the ledger says. A closed connection ends a request.
"""

from collections.abc import Collection, Sequence

from pdrouter.core.decision import Decision
from pdrouter.core.fleet import Endpoint
from pdrouter.engines.about import described
from pdrouter.engines.base import Attempt, Described, HandOver, Inbound, LoadReply, Plan, Traits, forward


class OpenAi:
    """Passes requests on."""

    kv_transports: Sequence[str] = ("none",)
    info_paths: Sequence[Sequence[str]] = (("/v1/models",),)
    tells: Collection[str] = ("model",)
    load_paths: Sequence[str] = ()

    def traits(self, _endpoint: Endpoint) -> Traits:
        """Return that it does everything alone; what it lacks it says itself."""
        return Traits(frozenset(), pairs_lists=False, pairs_copies=False, reads_prompts=True, counts_messages=True)

    def plan(self, decision: Decision, inbound: Inbound, _attempt: Attempt) -> Plan:
        """Return the one leg."""
        return forward(decision, inbound)

    def hand_over(self, decision: Decision, inbound: Inbound, plan: Plan, reply: bytes) -> HandOver:
        """Never asked: there is one leg."""
        raise NotImplementedError

    def abort(self, endpoint: Endpoint, plan: Plan) -> None:
        """Nothing: the connection closes."""

    def release(self, decision: Decision, reply: bytes) -> None:
        """Nothing: it holds no KV for others."""

    def bootstrap_path(self, endpoint: Endpoint) -> None:
        """Nothing: it meets nobody."""

    def describe(self, path: str, body: bytes) -> Described | None:
        """Read ``/v1/models``; of several the first."""
        return described(path, body)

    def read_load(self, body: bytes) -> LoadReply | None:
        """Never asked."""
        raise NotImplementedError
