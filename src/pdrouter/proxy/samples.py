"""[5] A request for ``n`` answers where each has to be a request of its own: ``n`` flights, and one client.

Each flight has its own decision, attempts and end (``flight.py``), and a client of its own to answer; what these get is
joined for the real one (``engines/samples.py``). If one fails for good, the request fails, and the others are ended
(I12). A client that is behind holds all engines back.
"""

from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from pdrouter.core.request import RequestFacts
from pdrouter.engines.base import Inbound
from pdrouter.engines.samples import StreamJoiner, join_replies
from pdrouter.errors import ClientGone, RouterError, SampleNotNeeded, UpstreamClosed, UpstreamError, UpstreamProtocol
from pdrouter.proxy.client import Client, Headers
from pdrouter.proxy.edge import attempt
from pdrouter.proxy.flight import Flight, OnEnd
from pdrouter.proxy.legs import STATUS_OK_BELOW
from pdrouter.proxy.replies import error_event, unsized

if TYPE_CHECKING:
    from pdrouter.proxy.dispatch import Dispatcher


class Samples:
    """One request, and a flight for each of its samples. To the clients of the flights it is their connection."""

    __slots__ = (
        "_client",
        "_facts",
        "_failure",
        "_flights",
        "_held_bytes",
        "_inbound",
        "_is_over",
        "_joiner",
        "_max_bytes",
        "_on_end",
        "_open",
        "_owner",
        "_samples",
    )

    def __init__(
        self, owner: "Dispatcher", facts: RequestFacts, inbound: Inbound, client: Client, on_end: OnEnd
    ) -> None:
        self._owner = owner
        self._facts = facts
        self._inbound = inbound
        self._client = client
        self._on_end = on_end
        self._is_over = False
        self._failure: RouterError | None = None
        self._held_bytes = 0
        self._max_bytes = owner.options.max_reply_bytes
        self._joiner = StreamJoiner(inbound.sample_of, self._max_bytes)
        self._samples = deque(SampleClient(self, client, number) for number in range(inbound.sample_of))
        self._open = set(self._samples)
        self._flights: dict[SampleClient, Flight] = {}

    def start(self) -> None:
        """Place all samples, one after the other, and send their legs, or let them wait."""
        self._client.listener = self
        for sample in tuple(self._samples):
            if self._is_over:
                return
            flight = Flight(self._owner, self._facts, self._inbound, sample, partial(self._sample_ended, sample))
            self._flights[sample] = flight
            error = attempt(flight.start)
            if error is not None:
                del self._flights[sample]
                self._owner.ended(self._facts, sample, None, error)
                self._end(error)

    # What the real client does.

    def client_drained(self) -> None:
        """Let the flights go on, another one first each time."""
        self._samples.rotate(-1)
        for sample in tuple(self._samples):
            if self._client.is_full:
                return
            if sample.listener is not None:
                sample.listener.client_drained()

    def client_gone(self) -> None:
        """Nobody waits any more."""
        self._end(ClientGone("the client closed its connection"))

    # What the flights answer.

    def begin(self, sample: "SampleClient") -> None:
        """A sample's answer begins; the first of a stream begins the client's."""
        if self._inbound.is_stream and sample.status < STATUS_OK_BELOW and not self._is_over:
            if not self._client.is_started:
                self._client.start(sample.status, sample.reply_headers, sample.reply_lines)
            sample.is_streamed = True

    def take(self, sample: "SampleClient", piece: bytes) -> None:
        """Pass on a piece of a streamed sample, or keep that of any other.

        Raises: UpstreamProtocol if more is held than may be.
        """
        if self._is_over or sample not in self._open:
            return
        if not sample.is_streamed:
            self._held_bytes += len(piece)
            if self._held_bytes > self._max_bytes:  # I9
                what = f"the answers of {self._inbound.sample_of} samples"
                self._failure = UpstreamProtocol(f"{what} exceed {self._max_bytes} bytes (upstream_max_reply_bytes)")
                raise self._failure
            sample.pieces.append(piece)
            return
        self._write(self._joiner.feed(sample.number, piece))
        if self._joiner.has_failed:  # as an engine that makes all samples ends them all
            self._open = {sample}
            for flight in self._flights_but(sample):
                flight.turn_away(_not_needed())

    # The connection of the flights' clients.

    @property
    def is_full(self) -> bool:
        """Whether the real client is behind."""
        return self._client.is_full

    @property
    def is_local(self) -> bool:
        """Whether the real client is on this machine."""
        return self._client.is_local

    def write(self, data: bytes) -> None:
        """Never called: what a sample's client is given comes by ``take``."""

    def replied(self, client: Client) -> None:
        """Never called: a sample's client is done when its flight is."""

    def close(self) -> None:
        """A sample broke off in its middle, and has told so if it is streamed."""
        self._end(self._failure or UpstreamClosed("the answer of a sample broke off"))

    def abort(self) -> None:
        """A sample broke off, and the client is too far behind to be told."""
        if not self._is_over:
            self._client.abort()
            self._end(None)

    # Ends.

    def _sample_ended(
        self, sample: "SampleClient", _client: Client, _path: str, _request_id: str, error: RouterError | None
    ) -> None:
        self._flights.pop(sample, None)
        if self._is_over or sample not in self._open:
            return
        self._open.discard(sample)
        if error is None:
            error = attempt(self._answered, sample)
        if error is not None:
            self._end(error)

    def _answered(self, sample: "SampleClient") -> None:
        if sample.status >= STATUS_OK_BELOW:
            self._refused(sample)
            return
        if sample.is_streamed:
            self._write(self._joiner.end(sample.number))
        if not self._open:
            self._finish()

    def _refused(self, sample: "SampleClient") -> None:
        """Pass on an engine's own error.

        Raises: UpstreamError where the client has had a part of the answer.
        """
        if self._client.is_started:
            raise UpstreamError(f"an engine answered {sample.status} for a sample: {sample.answer()[:512]!r}")
        self._client.start(sample.status, sample.reply_headers, sample.reply_lines)
        self._client.end(sample.answer())
        self._end(None)

    def _finish(self) -> None:
        """All samples have been answered."""
        if self._inbound.is_stream:
            self._client.end(self._joiner.finish())
        else:
            samples = sorted(self._samples, key=lambda sample: sample.number)
            body = join_replies([sample.answer() for sample in samples])
            first = samples[0]
            self._client.reply(first.status, unsized(first.reply_headers), body, first.reply_lines)
        self._end(None)

    def _write(self, events: bytes) -> None:
        if events:
            self._client.write(events)

    def _end(self, error: RouterError | None) -> None:
        """Leave no flight behind; the first to come here says why."""
        if self._is_over:
            return
        self._is_over = True
        self._client.listener = None
        untold = None if error is None else self._tell(error)
        for flight in self._flights_but(None):
            if isinstance(error, ClientGone):
                flight.client_gone()
            else:
                flight.turn_away(_not_needed())
        self._samples.clear()
        self._open.clear()
        self._on_end(self._client, self._inbound.path, self._inbound.request_id, untold)

    def _flights_but(self, one: "SampleClient | None") -> list[Flight]:
        return [flight for sample, flight in self._flights.items() if sample is not one]

    def _tell(self, error: RouterError) -> RouterError | None:
        """Tell a client that has had a part of the answer; return what is to be told by a reply of its own."""
        client = self._client
        if isinstance(error, ClientGone):
            return None
        if not client.is_started:
            return error
        if client.is_full:
            client.abort()
            return None
        if not self._joiner.has_failed:
            client.write(error_event(error, self._inbound.path, b""))
        client.cut()
        return None


def _not_needed() -> SampleNotNeeded:
    return SampleNotNeeded("another sample of the request has failed")


class SampleClient(Client):
    """The client of one sample, as its flight sees it; ``number`` counts from 0."""

    __slots__ = ("_samples", "is_streamed", "number", "pieces", "reply_headers", "reply_lines")

    def __init__(self, samples: Samples, client: Client, number: int) -> None:
        super().__init__(
            samples,
            client.method,
            client.path,
            client.headers,
            client.header,
            client.began_s,
            takes_chunks=False,
            keeps_alive=False,
        )
        self.asked_s = client.asked_s
        self._samples = samples
        self.number = number
        self.is_streamed = False
        self.reply_lines = b""
        self.pieces: list[bytes] = []
        self.reply_headers: Headers = ()

    @property
    def is_full(self) -> bool:
        """Whether the real client is behind; a first piece is taken all the same, or its engine would seem silent."""
        return self.is_started and self._samples.is_full

    def start(self, status: int, headers: Headers, lines: bytes = b"") -> None:
        """Begin the sample's reply."""
        self.is_started = True
        self.status = status
        self.reply_headers = headers
        self.reply_lines = lines
        self._samples.begin(self)

    def write(self, piece: bytes) -> None:
        """Take a piece of the sample's answer."""
        self._samples.take(self, piece)

    def end(self, piece: bytes = b"") -> None:
        """Take the last piece."""
        self._samples.take(self, piece)

    def answer(self) -> bytes:
        """Return what was kept of the answer."""
        return b"".join(self.pieces)
