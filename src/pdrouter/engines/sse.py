r"""Server-sent events cut out of a stream, however it comes in pieces.

Source: SGLang, vLLM and TensorRT-LLM end each event with an empty line (``\n\n``).
"""

from pdrouter.errors import UpstreamProtocol

END = b"\n\n"
DONE = b"[DONE]"
_DATA = b"data:"


class EventSplitter:
    """Returns whole events without their end; of an unfinished one there may be ``max_bytes`` (I9)."""

    __slots__ = ("_max_bytes", "_rest")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rest = b""

    @property
    def held_bytes(self) -> int:
        """Size of the unfinished event."""
        return len(self._rest)

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the events that ``piece`` completes.

        Raises: UpstreamProtocol for an event that is too long.
        """
        *events, self._rest = (self._rest + piece).split(END)
        if len(self._rest) > self._max_bytes:  # I9
            raise UpstreamProtocol(f"a stream event exceeds {self._max_bytes} bytes")
        return events

    def finish(self) -> bytes:
        """Return what is left at the end of the stream."""
        rest, self._rest = self._rest, b""
        return rest


def split_data(event: bytes) -> tuple[bytes, bytes]:
    """Return an event as the lines before its data, and its data; a comment has none."""
    start = 0 if event.startswith(_DATA) else event.find(b"\n" + _DATA) + 1
    if not event.startswith(_DATA, start):
        return event, b""
    return event[:start], event[start + len(_DATA) :].strip()
