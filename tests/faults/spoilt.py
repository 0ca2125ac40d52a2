"""The ways in which an engine's answer to one request can be spoilt, and what the client must see of each."""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tests.faults.saboteur import (
    ENGINES_OWN,
    EVENT,
    LINE_BYTES,
    SSE,
    chunk,
    ends_after,
    late,
    repeats,
    says,
    stalls_after,
)
from tests.lab import Reply, Script, http

CLOSED, PROTOCOL = "502 upstream_closed", "502 upstream_protocol"
TOO_LATE = "504 upstream_timeout"
CUT = "cut"
LEFT = "left"
"""Nobody can know that it won't go on: the client waits until it leaves, or the time is up."""

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
_GARBAGE = b"no: event\r\n\x00\xff{]\n\ndata\n\n"
_LONG_LINE = b"data: " + b"x" * LINE_BYTES + b"\n\n"


class Fault(NamedTuple):
    """One fault: what a client sees of it on the decode leg of a plain answer and of a stream, and on the prefill leg.

    On a prefill leg an answer that only looks good is dropped by SGLang's pair, whose decode engine then waits, and
    read by vLLM's. ``passes``: the body that goes through as it is.
    """

    script: Script
    plain: Sequence[str]
    stream: Sequence[str]
    prefill: Sequence[str]
    serial_prefill: Sequence[str]
    passes: bytes = b""


def _early(script: Script, *outcomes: str) -> Fault:
    """Return a fault that comes before anything of a body, and so is the same wherever it comes."""
    return Fault(script, outcomes, outcomes, outcomes, outcomes)


def _told(script: Script, cut: str, error: str) -> Fault:
    """Return a fault that comes when the answer has begun; a reset may overtake what came before it."""
    return Fault(script, (CUT, error), (cut, error), (error,), (error,))


def _cut_short(script: Script) -> Fault:
    """Return a fault that comes inside the first event of a stream, before anything of it is passed on."""
    return Fault(script, (CUT, CLOSED), (CLOSED,), (CLOSED,), (CLOSED,))


def _passed(body: bytes, script: Script) -> Fault:
    """Return an answer that is none, but comes to its end."""
    whole = ("200 whole",)
    return Fault(script, whole, whole, (LEFT,), (PROTOCOL,), body)


FAULTS: Mapping[str, Fault] = {
    "closes": _early(ends_after(b""), CLOSED),
    "resets": _early(ends_after(b"", resets=True), CLOSED),
    "half_a_head": _early(ends_after(b"HTTP/1.1 200 OK\r\ncontent-ty"), CLOSED),
    "head_only": _early(ends_after(_HEAD + b"content-length: 50\r\n\r\n"), CLOSED),
    "no_http": _early(says(b"SSH-2.0-OpenSSH_9.6\r\n"), PROTOCOL),
    "endless_head": _early(repeats(_HEAD, b"x-more: and more\r\n"), PROTOCOL),
    "long_header": _early(says(_HEAD + b"x-long: " + b"x" * LINE_BYTES + b"\r\n\r\n"), PROTOCOL),
    "endless_continue": _early(repeats(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), PROTOCOL),
    "switches": _early(
        says(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"), PROTOCOL
    ),
    "negative_length": _early(says(_HEAD + b"content-length: -5\r\n\r\nxxxxx"), PROTOCOL),
    "two_lengths": _early(says(_HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\nxxxxxx"), PROTOCOL),
    "bad_first_chunk": _early(says(SSE + b"ZZZ\r\nxxx\r\n"), PROTOCOL),
    "huge_chunk_size": _early(says(SSE + b"f" * 40 + b"\r\nxxx\r\n"), PROTOCOL),
    "endless_chunk_size": _early(repeats(SSE + b"1;x=", b"x" * 4096), PROTOCOL),
    "late_500": _early(late(500), "500"),
    "late_400": _early(late(400), "400"),
    "more_than_said": _early(
        says(http(200, b"x" * 10) + b"y" * 10), PROTOCOL, "200 whole", CUT, f"{CUT} upstream_protocol", LEFT
    ),
    "less_than_said": _told(ends_after(http(200, b"x" * 9000)[:-5000]), f"{CUT} upstream_closed", CLOSED),
    "half_an_event": _cut_short(ends_after(SSE + chunk(EVENT)[:30])),
    "half_and_reset": _cut_short(ends_after(SSE + chunk(EVENT)[:30], resets=True)),
    "bad_later_chunk": _told(says(SSE + chunk(EVENT) + b"ZZ\r\nxx\r\n"), f"{CUT} upstream_protocol", PROTOCOL),
    "no_sse": _passed(_GARBAGE, says(SSE + chunk(_GARBAGE) + b"0\r\n\r\n")),
    "long_line": _passed(_LONG_LINE, says(SSE + chunk(_LONG_LINE) + b"0\r\n\r\n")),
    "empty": _passed(b"", says(http(200, b"")))._replace(stream=("502 empty_stream",)),
}

STALLS: Mapping[str, Fault] = {
    "hangs": _early(stalls_after(b""), TOO_LATE),
    "stalls_in_its_head": _early(stalls_after(b"HTTP/1.1 200 OK\r\ncont"), TOO_LATE),
    "stalls_after_its_head": _early(stalls_after(SSE), TOO_LATE),
    "stalls_in_its_body": _told(stalls_after(SSE + chunk(EVENT)), f"{CUT} upstream_timeout", TOO_LATE),
}

AN_ERROR_OF_ITS_OWN = ENGINES_OWN


def outcome(reply: Reply) -> str:
    """Say what a client sees: status and code, a whole answer, or one that was cut and how that was told."""
    if reply.status != 200:
        error = reply.json().get("error")
        if error is None:
            return str(reply.status) if reply.body == AN_ERROR_OF_ITS_OWN else f"{reply.status} {reply.body!r}"
        return f"{reply.status} {reply.error['code']}"
    if reply.is_whole:
        return "200 whole"
    last = reply.body.rpartition(b"data: ")[2]
    return f"{CUT} {json.loads(last)['error']['code']}" if b'{"error"' in last else CUT
