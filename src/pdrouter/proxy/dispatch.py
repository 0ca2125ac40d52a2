"""[5] What all requests under way share: the router, the engines, the pools, the limits. Read next: ``flight.py``."""

from collections.abc import Callable, Mapping
from typing import cast

import msgspec

from pdrouter.core.admission import Admission
from pdrouter.core.request import RequestFacts
from pdrouter.core.retry import RetryOptions
from pdrouter.core.router import Router
from pdrouter.engines.base import Engine, Inbound
from pdrouter.engines.samples import one_sample_body
from pdrouter.errors import ConnectFailed, InvalidRequest, RouterError, ShuttingDown
from pdrouter.proxy.abort import Aborter
from pdrouter.proxy.bodies import Api
from pdrouter.proxy.client import Client
from pdrouter.proxy.deadlines import Deadlines, Sweep, TimeLimits
from pdrouter.proxy.flight import Flight, OnEnd
from pdrouter.proxy.handovers import HandOvers
from pdrouter.proxy.ids import Ids
from pdrouter.proxy.leftovers import Leftovers
from pdrouter.proxy.relay import Observer
from pdrouter.proxy.retries import Retries
from pdrouter.proxy.samples import Samples
from pdrouter.proxy.suspects import SuspectOptions, Suspects
from pdrouter.proxy.waitroom import Waiter, Waitroom
from pdrouter.telemetry.journal_file import JournalFile
from pdrouter.telemetry.logs import DecisionLog
from pdrouter.telemetry.metrics import Metrics
from pdrouter.upstream.pools import Pools

Read = Callable[[bytes, str], tuple[RequestFacts, Inbound]]
"""Reads a request's body, with the request's id."""

_PREFILL_GRACE_S = 5.0
"""How long a prefill reply may still come once the whole answer is there; it is normally there before."""


class DispatchOptions(msgspec.Struct, frozen=True):
    """Settings of the dispatcher; ``config.py`` says what they mean."""

    limits: TimeLimits
    max_reply_bytes: int
    max_samples: int
    decision_headers: bool
    max_attempts: int
    falls_back_to_decode: bool
    retry: RetryOptions
    suspects: SuspectOptions


class Dispatcher:
    """Starts requests, and is what they have in common."""

    def __init__(
        self,
        router: Router,
        engines: Mapping[str, Engine],
        pools: Pools,
        aborter: Aborter,
        metrics: Metrics,
        log: DecisionLog,
        ids: Ids,
        clock: Callable[[], float],
        options: DispatchOptions,
    ) -> None:
        self.router = router
        self.pools = pools
        self.aborter = aborter
        self.metrics = metrics
        self.log = log
        self.clock = clock
        self.options = options
        self.journal_file: JournalFile | None = None
        self.under_way: Sweep[Flight] = Sweep(lambda: self.options.limits)
        self.on_unreachable: Callable[[str, ConnectFailed], None] = lambda _address, _error: None
        self.late_prefills: Deadlines[Flight] = Deadlines(_PREFILL_GRACE_S, Flight.end_prefill)
        self.leftovers = Leftovers()
        self.engines = engines
        self.ids = ids
        entrance = router.entrance
        self.waitroom = None if entrance is None else Waitroom(cast("Admission[Waiter]", entrance.admission), clock)
        self.retries = Retries(options.retry, ids.fraction, clock)
        self.hand_overs = HandOvers(clock)
        self.suspects = Suspects(options.suspects, clock)

    def set_options(self, options: DispatchOptions) -> None:
        """Use other settings, also for what is under way."""
        self.options = options
        self.retries.set_options(options.retry)
        self.suspects.options = options.suspects

    def split(self, facts: RequestFacts, inbound: Inbound, read: Read) -> tuple[RequestFacts, Inbound]:
        """Return the requests that a request for several answers is made into: all are the same.

        ``read`` reads one's body. Raises: InvalidRequest if they are too many.
        """
        copies, most = facts.copies, self.options.max_samples
        if copies > most:  # I9
            raise InvalidRequest(f"n is {copies}; this fleet takes {most} at most (max_samples)", param="n")
        body = one_sample_body(inbound.body, is_generate=inbound.path == Api.GENERATE)
        one, part = read(body, inbound.request_id)
        return one, msgspec.structs.replace(part, sample_of=copies)

    def start(self, facts: RequestFacts, inbound: Inbound, client: Client, on_end: OnEnd) -> None:
        """Begin to serve one request; ``on_end`` is called when it is over.

        Raises: RouterError if it can't be placed; then ``on_end`` isn't called.
        """
        if inbound.sample_of > 1:
            Samples(self, facts, inbound, client, on_end).start()
            return
        try:
            Flight(self, facts, inbound, client, on_end).start()
        except RouterError as error:
            self.ended(facts, client, None, error)
            raise

    def ended(self, facts: RequestFacts, client: Client, observer: Observer | None, error: RouterError | None) -> None:
        """Let the journal's file know of a request's end, if there is one."""
        if self.journal_file is not None:
            answered = None if observer is None else observer.answered()
            self.journal_file.ended(facts, client.began_s, answered, error, self.clock())

    def end_all(self) -> None:
        """End all that are under way, because the router stops."""
        for flight in self.under_way:
            flight.turn_away(ShuttingDown("the router is shutting down; send the request again"))
