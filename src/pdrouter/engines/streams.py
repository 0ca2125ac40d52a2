"""Reads an answer's stream of server-sent events as it passes: when it begins, how many tokens, its end, a failure.

Most pieces are whole events with a token, and are only counted; an event is decoded where it may be something else.
What the events mean is in ``failures.py``.

Source of the framing: the HTML standard, section 9.2 (server-sent events).
"""

import re

from pdrouter.engines.failures import ERROR, Dialect, Failure, Kind, aborted, read_event, reply_failure
from pdrouter.engines.sse import DONE

_JSON_START = b"data: {"
_JSON_END = b"}\n\n"
_JSON_NEXT = _JSON_END + _JSON_START
"""How nearly every piece begins and ends: as one event with JSON in one line, or several of them."""

_EVENT_LINES = 2

_BLANK_LINE = re.compile(rb"\r?\n\r?\n")
_BLANK_BYTES = len(b"\r\n\r\n")

_MOST_EVENT_BYTES = 16_384
"""A longer event is counted as a token and not read: error events are shorter. Chosen; more would make small pieces
of a long event costly."""

_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")


class StreamReader:
    """What is known of a stream so far; at most ``_MOST_EVENT_BYTES`` of an unfinished event are kept (I9).

    ``has_events`` says that an event came, comments and ``[DONE]`` are none; ``has_begun`` that a part of the answer
    came; ``is_over`` that its end mark did: then ``surplus_bytes`` of the last piece are behind it, and no more may be
    fed. ``events`` counts those since it began. ``failure`` is the first that was told; behind one no answer begins.
    """

    __slots__ = (
        "_is_long",
        "_rest",
        "_spoken",
        "events",
        "failure",
        "has_begun",
        "has_events",
        "is_over",
        "surplus_bytes",
    )

    def __init__(self, spoken: Dialect) -> None:
        self._spoken = spoken
        self._rest = b""
        self._is_long = False
        self.events = 0
        self.surplus_bytes = 0
        self.has_events = False
        self.has_begun = False
        self.is_over = False
        self.failure: Failure | None = None

    def feed(self, piece: bytes) -> None:
        """Take in what comes next."""
        if (
            self.has_begun
            and not self._rest
            and piece.endswith(_JSON_END)
            and piece.startswith(_JSON_START)
            and ERROR not in piece
            and self._spoken.mark not in piece
        ):
            lines = piece.count(b"\n")
            if lines == _EVENT_LINES or lines == _EVENT_LINES * (piece.count(_JSON_NEXT) + 1):
                self.events += lines // _EVENT_LINES
                return
        self._split(piece)

    def finish(self) -> None:
        """Take in that nothing more comes: an event at the end needn't be closed by a blank line."""
        rest, self._rest = self._rest, b""
        if rest and not self._is_long:
            self._take(rest)

    def _split(self, piece: bytes) -> None:
        known_bytes = len(self._rest)
        text = self._rest + piece
        start, found = 0, _BLANK_LINE.search(text, max(0, known_bytes - _BLANK_BYTES))
        while found is not None and not self.is_over:
            if self._is_long:
                self._is_long = False
            else:
                self._take(text[start : found.start()])
            start = found.end()
            found = _BLANK_LINE.search(text, start)
        self._rest = text[start:]
        if self.is_over:
            self.surplus_bytes, self._rest = len(self._rest), b""
        elif self._is_long:
            self._rest = self._rest[-_BLANK_BYTES:]
        elif len(self._rest) >= _MOST_EVENT_BYTES + _BLANK_BYTES:  # I9; less may be the end of a shorter event
            self._take_long(self._rest)
            self._rest, self._is_long = self._rest[-_BLANK_BYTES:], True

    def _take(self, block: bytes) -> None:
        """Take in one event, or a comment."""
        if len(block) > _MOST_EVENT_BYTES:
            self._take_long(block)
            return
        data = event_data(block)
        if not data:
            return
        spoken = self._spoken
        self.has_events = self.has_events or data != DONE
        if self.has_begun and ERROR not in data and spoken.mark not in data and data != DONE:
            self.events += 1
            return
        said = read_event(data, spoken)
        if isinstance(said, Failure):
            self.failure = self.failure or said
            self.is_over = b'"response.failed"' in data
        elif said is Kind.END:
            self.is_over = True
        elif said is Kind.ABORT and not self.has_begun:
            self.failure = self.failure or aborted()
        else:
            self._count(said)

    def _take_long(self, block: bytes) -> None:
        """Take in a long event, or its beginning: it is a part of the answer, unless it is a comment."""
        if event_data(block[:_MOST_EVENT_BYTES]):
            self._count(Kind.PART)

    def _count(self, said: Kind) -> None:
        """Count an event of the answer, unless a failure came before all of it."""
        self.has_events = True
        if not self.has_begun and self.failure is None:
            self.has_begun = said is not Kind.NOTHING
        if self.has_begun:
            self.events += 1


def event_data(block: bytes) -> bytes:
    """Return the data of an event, without the blank line behind it; nothing where there is none, as in a comment."""
    if block.startswith(b"data: ") and b"\n" not in block and b"\r" not in block:
        return block[6:]
    values = [line[5:].removeprefix(b" ") for line in block.splitlines() if line.startswith(b"data:")]
    return b"\n".join(values)


def are_events(start: bytes) -> bool | None:
    """Return whether a body that begins so is a stream of events; ``None`` while that can't be known."""
    line = start.lstrip(b"\r\n")
    if line.startswith(_FIELDS):
        return True
    return None if any(field.startswith(line) for field in _FIELDS) else False


def trailing_events(tail: bytes, spoken: Dialect) -> int:
    """Return how many of the counted events at the end of a stream have no token: finish, usage and the like.

    ``tail`` is its end; ends and failures aren't counted in the first place.
    """
    count = 0
    for block in reversed(_BLANK_LINE.split(tail)):
        data = event_data(block)
        if not data:
            continue
        said = read_event(data, spoken)
        if said is Kind.PART:
            break
        count += said in (Kind.NOTHING, Kind.FINISH, Kind.ABORT)
    return count


def leg_failure(tail: bytes, spoken: Dialect) -> Failure | None:
    """Return the failure in the end of a prefill's reply, streamed or whole, if there is one."""
    if ERROR not in tail and spoken.mark not in tail:
        return None
    if tail.lstrip().startswith(b"{"):
        return reply_failure(tail, spoken)
    for block in _BLANK_LINE.split(tail):
        said = read_event(event_data(block), spoken)
        if isinstance(said, Failure):
            return said
        if said is Kind.ABORT:
            return aborted()
    return None
