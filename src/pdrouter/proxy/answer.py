"""[6] The answer of one attempt on its way from the decode leg to the client: passed on, held, or edited.

It starts with the leg's first body byte. Bytes go through as they come (I10), but what can only be passed on whole (an
error, or an answer that something of the prefill's is put into) is held first. It decides nothing: ``flight.py`` does.
"""

from pdrouter.core.decision import Decision
from pdrouter.engines.logprobs import StreamMerger, merge_reply, prompt_logprobs
from pdrouter.engines.usage import CachedTokens
from pdrouter.proxy.client import Client
from pdrouter.proxy.legs import STATUS_OK_BELOW, EngineReply, Held, PrefillLeg
from pdrouter.proxy.relay import Observer
from pdrouter.proxy.replies import JSON_HEADERS, STREAM_HEADERS, passed_on, unsized
from pdrouter.upstream.connection import Exchange


class Answer:
    """``exchange`` is the decode leg's, once it was sent; ``cached_tokens`` writes what the client is told of those.

    ``lines`` are header lines that the router adds; of what is held there may be ``max_bytes`` (I9). ``is_whole`` says
    that the client has been given all of it.
    """

    __slots__ = (
        "_client",
        "_decision",
        "_held",
        "_is_stream",
        "_lines",
        "_max_bytes",
        "_merger",
        "_observer",
        "_prefill",
        "cached_tokens",
        "exchange",
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
        self._prefill: PrefillLeg | None = None
        self._held: Held | None = None
        self._merger: StreamMerger | None = None
        self.exchange: Exchange | None = None
        self.cached_tokens: CachedTokens | None = None
        self.is_whole = False

    def expect(self, exchange: Exchange, prefill: PrefillLeg | None) -> None:
        """Take what comes of a decode leg; ``prefill`` is the leg whose logprobs go before its own, if any do."""
        self.exchange = exchange
        self._prefill = prefill

    def relay(self) -> None:
        """Pass on what has arrived, unless the client is behind: then the engine is held back as well (I9).

        Raises: EngineReply, UpstreamError.
        """
        exchange, client = self.exchange, self._client
        if exchange is None or client.is_full or (self._prefill is not None and self._waits_for(self._prefill)):
            return
        piece = exchange.read_nowait()
        if piece is None:
            return
        if not client.is_started:
            if exchange.status >= STATUS_OK_BELOW or (self._is_edited and not self._is_stream):
                self._hold(exchange, piece)
                return
            self._begin(exchange)
        self._observer.piece(piece)
        is_last = exchange.is_complete
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
        headers = STREAM_HEADERS if self._is_stream else JSON_HEADERS
        self._client.reply(200, headers, body, self._lines)
        self.is_whole = True

    def pass_error(self, error: EngineReply) -> None:
        """Answer with an engine's own error."""
        self._client.reply(error.reply_status, unsized(passed_on(error.reply_headers)), error.body, self._lines)

    def _waits_for(self, prefill: PrefillLeg) -> bool:
        """Whether a good answer can't go on without the prompt's logprobs."""
        return self.exchange is not None and 0 < self.exchange.status < STATUS_OK_BELOW and not prefill.is_done

    @property
    def _is_edited(self) -> bool:
        """Whether the answer gets something of the prefill's."""
        return self._prefill is not None or self.cached_tokens is not None

    def _begin(self, exchange: Exchange) -> None:
        self._observer.first_piece()
        headers = passed_on(exchange.raw_headers)
        if self._is_edited or self._is_stream:  # an error event isn't counted in a length
            headers = unsized(headers)
        if self._prefill is not None:
            self._merger = StreamMerger(prompt_logprobs(self._prefill.reply(), is_stream=True), self._max_bytes)
        self._client.start(exchange.status, headers, self._lines)

    def _hold(self, exchange: Exchange, piece: bytes) -> None:
        """Keep what can only be passed on whole, and pass it on then; mostly it has come whole."""
        if self._held is None and exchange.is_complete and len(piece) <= self._max_bytes:
            self._reply(exchange, piece)
            return
        if self._held is None:
            self._held = Held(self._decision.decode, self._max_bytes)
        self._held.add(piece)
        if exchange.is_complete:
            self._reply(exchange, self._held.whole())

    def _reply(self, exchange: Exchange, body: bytes) -> None:
        if exchange.status >= STATUS_OK_BELOW:
            raise EngineReply(self._decision.decode, exchange.status, exchange.headers, body)
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
        self.is_whole = True
