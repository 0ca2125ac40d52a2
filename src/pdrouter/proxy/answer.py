"""[6] The answer of one attempt on its way from the decode leg to the client: passed on, held, or edited.

It begins with the leg's first token, or with the first bytes of a reply that isn't streamed: what comes before (head,
comments, events without content) is held, so that a failure up to there is no answer (I7). From then on bytes go
through as they come (I10); what can only be passed on whole is held to its end: an error, or a reply that something of
the prefill's is put into. It decides nothing: ``flight.py`` does.
"""

from pdrouter.core.decision import Decision
from pdrouter.engines.failures import MOST_ERROR_BYTES, reply_failure
from pdrouter.engines.logprobs import StreamMerger, merge_reply, prompt_logprobs
from pdrouter.engines.streams import StreamReader, are_events
from pdrouter.engines.usage import CachedTokens
from pdrouter.errors import EmptyStream, UpstreamProtocol
from pdrouter.proxy.client import Client
from pdrouter.proxy.legs import STATUS_OK_BELOW, EngineFailure, EngineReply, Held, PrefillLeg
from pdrouter.proxy.relay import Observer
from pdrouter.proxy.replies import JSON_HEADERS, STREAM_HEADERS, passed_on, unsized
from pdrouter.upstream.exchange import Exchange

_MOST_OPENING_BYTES = 65_536
"""What is held of a stream before its first token; with more the answer has begun (I9). Chosen: a role event may carry
the prompt's token ids."""

_MOST_EVENTS_BYTES = 16_384
"""What is read of a stream in one turn of the loop: thousands of the smallest events, some milliseconds. Chosen."""


class Answer:
    """``exchange`` is the decode leg's, once it was sent; ``cached_tokens`` writes what the client is told of those.

    ``lines`` are header lines that the router adds; of what is held there may be ``max_bytes`` (I9). ``has_begun`` says
    that bytes of it were given to the client, ``is_whole`` that all were.
    """

    __slots__ = (
        "_client",
        "_decision",
        "_held",
        "_is_known",
        "_is_stream",
        "_lines",
        "_max_bytes",
        "_merger",
        "_observer",
        "_opening",
        "_prefill",
        "cached_tokens",
        "exchange",
        "has_begun",
        "is_whole",
    )

    def __init__(
        self,
        client: Client,
        decision: Decision,
        observer: Observer,
        lines: bytes,
        max_bytes: int,
        *,
        is_stream: bool,
    ) -> None:
        self._client = client
        self._decision = decision
        self._observer = observer
        self._lines = lines
        self._max_bytes = max_bytes
        self._is_stream = is_stream
        self._is_known = False  # whether a stream's body is events
        self._prefill: PrefillLeg | None = None
        self._opening = b""
        self._held: Held | None = None
        self._merger: StreamMerger | None = None
        self.exchange: Exchange | None = None
        self.cached_tokens: CachedTokens | None = None
        self.has_begun = False
        self.is_whole = False

    def expect(self, exchange: Exchange, prefill: PrefillLeg | None) -> None:
        """Take what comes of a decode leg; ``prefill`` is the leg whose logprobs go before its own, if any do."""
        self.exchange = exchange
        self._prefill = prefill

    def relay(self) -> None:
        """Pass on what has arrived, unless the client is behind: then the engine is held back as well (I9).

        Raises: EngineReply, EmptyStream, UpstreamError.
        """
        exchange, client = self.exchange, self._client
        if exchange is None or client.is_full or (self._prefill is not None and self._waits_for(self._prefill)):
            return
        piece = exchange.read_nowait(_MOST_EVENTS_BYTES if self._is_stream else None)
        if piece is None:
            return
        if self.has_begun:
            is_over = self._observer.piece(piece)
        else:
            opening = self._open(exchange, piece)
            if opening is None:
                return
            piece, is_over = opening, self._observer.is_over
        is_last = is_over or exchange.is_at_end
        if is_over:
            piece = self._observer.without_surplus(piece)
        if self.cached_tokens is not None:
            piece = self.cached_tokens.feed(piece) + (self.cached_tokens.finish() if is_last else b"")
        if self._merger is not None:
            piece = self._merger.feed(piece) + (self._merger.finish() if is_last else b"")
        if is_last:
            client.end(piece)
            self.is_whole = True
        else:
            client.write(piece)

    def give(self, body: bytes) -> None:
        """Answer with the prefill's answer, which is all there is."""
        self._observer.first_piece()
        self._observer.piece(body)
        self.has_begun = self.is_whole = True
        if self._client.is_started:
            self._client.end(body)
        else:
            headers = STREAM_HEADERS if self._is_stream else JSON_HEADERS
            self._client.reply(200, headers, body, self._lines)

    def pass_error(self, error: EngineReply) -> None:
        """Answer with an engine's own error."""
        self._client.reply(error.reply_status, unsized(passed_on(error.reply_headers)), error.body, self._lines)

    def failure(self) -> EngineFailure | None:
        """Return the failure that the engine told in its stream, if it did."""
        reader = self._observer.reader
        if reader is None or reader.failure is None:
            return None
        return EngineFailure(self._decision.decode, reader.failure)

    def _waits_for(self, prefill: PrefillLeg) -> bool:
        """Whether a good answer can't go on without the prompt's logprobs."""
        return self.exchange is not None and 0 < self.exchange.status < STATUS_OK_BELOW and not prefill.is_done

    @property
    def _is_edited(self) -> bool:
        """Whether the answer gets something of the prefill's."""
        return self._prefill is not None or self.cached_tokens is not None

    def _open(self, exchange: Exchange, piece: bytes) -> bytes | None:
        """Return the beginning of the answer, once it is sure that there is one; ``None`` if more must come first.

        Raises: EngineReply, EmptyStream, UpstreamProtocol.
        """
        opening = self._opening + piece
        if exchange.status >= STATUS_OK_BELOW or (self._is_edited and not self._is_stream):
            self._opening = b""
            self._hold(exchange, opening)
            return None
        self._opening = opening
        if self._is_stream and not self._is_known:
            are_known = are_events(opening)
            if are_known is None and not exchange.is_at_end:
                return None
            self._is_known, piece = True, opening
            if are_known is False:
                self._observer.reads_no_events()
        reader = self._observer.reader
        if reader is None:
            is_sure = self._is_reply(exchange, opening)
        else:
            is_sure = self._is_stream_begun(exchange, reader, piece)
        if not is_sure:
            return None
        if reader is None and self._is_stream and self._client.is_started:  # by a comment, as a stream of events
            raise UpstreamProtocol(f"{self._decision.decode.label} answered a stream with something else than events")
        self._opening = b""
        self._begin(exchange)
        if reader is None:
            self._observer.piece(opening)
        return opening

    def _is_reply(self, exchange: Exchange, opening: bytes) -> bool:
        """Whether a reply that isn't a stream of events can be no error object any more.

        Raises: EngineFailure if it is one.
        """
        if not exchange.is_at_end:
            return len(opening) > MOST_ERROR_BYTES or opening.lstrip()[:1] not in (b"", b"{")
        self._refuse_error(opening)
        return True

    def _is_stream_begun(self, exchange: Exchange, reader: StreamReader, piece: bytes) -> bool:
        """Whether a stream has begun to answer, or is over, or what is held of it grows too long.

        Raises: EngineFailure, EmptyStream.
        """
        self._observer.piece(piece)
        is_over = exchange.is_at_end or reader.is_over
        if exchange.is_at_end:
            reader.finish()
        if reader.failure is not None and not reader.has_begun:
            raise EngineFailure(self._decision.decode, reader.failure)
        if is_over and not reader.has_events:
            raise EmptyStream(f"the stream of {self._decision.decode.label} ended without an event")
        return reader.has_begun or is_over or len(self._opening) > _MOST_OPENING_BYTES  # I9

    def _begin(self, exchange: Exchange) -> None:
        self._observer.first_piece()
        self.has_begun = True
        if self._prefill is not None:
            self._merger = StreamMerger(prompt_logprobs(self._prefill.reply(), is_stream=True), self._max_bytes)
        if self._client.is_started:
            return
        headers = passed_on(exchange.raw_headers)
        if self._is_edited or self._is_stream:  # an error event isn't counted in a length
            headers = unsized(headers)
        self._client.start(exchange.status, headers, self._lines)

    def _hold(self, exchange: Exchange, piece: bytes) -> None:
        """Keep what can only be passed on whole, and pass it on then; mostly it has come whole."""
        if self._held is None and exchange.is_at_end and len(piece) <= self._max_bytes:
            self._reply(exchange, piece)
            return
        if self._held is None:
            self._held = Held(self._decision.decode, self._max_bytes)
        self._held.add(piece)
        if exchange.is_at_end:
            self._reply(exchange, self._held.whole())

    def _reply(self, exchange: Exchange, body: bytes) -> None:
        if exchange.status >= STATUS_OK_BELOW:
            raise EngineReply(self._decision.decode, exchange.status, exchange.headers, body)
        self._refuse_error(body)
        self._observer.first_piece()
        self._observer.piece(body)
        engines_bytes = len(body)
        if self.cached_tokens is not None:
            body = self.cached_tokens.whole(body)
        if self._prefill is not None:
            body = merge_reply(body, prompt_logprobs(self._prefill.reply(), is_stream=False))
        headers = passed_on(exchange.raw_headers)
        if len(body) != engines_bytes:
            headers = [*unsized(headers), (b"content-length", b"%d" % len(body))]
        self._client.start(exchange.status, headers, self._lines)
        self._client.end(body)
        self.has_begun = self.is_whole = True

    def _refuse_error(self, body: bytes) -> None:
        """Raise: EngineFailure if a whole reply of a good status is an error."""
        failure = reply_failure(body, self._observer.dialect)
        if failure is not None:
            raise EngineFailure(self._decision.decode, failure)
