"""A request's head: what the parser lets through and the router doesn't, and what belongs to the connection alone.

Pure functions. httptools refuses what breaks the grammar (bare LF, obs-fold, two lengths, a length beside chunks); here
is the rest of what RFC 9110 and 9112 ask of a server, and the limits. Read next: ``connection.py``, which calls it.
"""

import re
from collections.abc import Mapping

from httptools import HttpParserError, HttpParserInvalidMethodError, parse_url

from pdrouter.errors import (
    ExpectationFailed,
    HeadTooLarge,
    HttpVersionNotSupported,
    InvalidHttp,
    NotImplementedHere,
    RouterError,
    TargetTooLong,
    UnsupportedEncoding,
)
from pdrouter.proxy.limits import ClientLimits

Header = tuple[bytes, bytes]

_METHODS = frozenset(b"GET HEAD POST PUT PATCH DELETE OPTIONS TRACE".split())
_FRAMING_BYTES = 16_384
_FRAMING_PER_BODY_BYTE = 8
"""What chunk sizes, chunk extensions and trailers may take together (I9), by far the most for chunks of one byte."""

_CONNECTION_OPTIONS = frozenset((b"", b"keep-alive", b"close", b"upgrade"))
_REQUEST_LINE = re.compile(rb"(?:^|\n)([!#$%&'*+.^_`|~0-9A-Za-z-]+) [!-~]+ HTTP/1\.[01]\r\n")


def check(
    method: bytes,
    target: bytes,
    version: str,
    headers: list[Header],
    header: Mapping[bytes, bytes],
    limits: ClientLimits,
) -> None:
    """Refuse a head that is against the rules or a limit; ``header`` is of ``headers``, names in lower case.

    Raises: RouterError.
    """
    if version not in ("1.1", "1.0"):
        raise HttpVersionNotSupported(f"HTTP/{version} isn't served; send HTTP/1.1")
    if method not in _METHODS:
        raise NotImplementedHere(f"the method {method.decode('latin-1')} isn't known here")
    if len(target) > limits.max_target_bytes:  # I9
        raise target_too_long(limits)
    if len(headers) > limits.max_headers:  # I9
        raise HeadTooLarge(f"{len(headers)} headers exceed {limits.max_headers} (client_max_headers)")
    if version == "1.1" and b"host" not in header:
        raise InvalidHttp("a request of HTTP/1.1 must have a Host header")
    if len(header) != len(headers) and sum(name == b"host" for name, _ in headers) > 1:
        raise InvalidHttp("a request must have one Host header, not several")
    if b"transfer-encoding" in header:
        _check_coding(version, [value for name, value in headers if name == b"transfer-encoding"])
    if header.get(b"expect", b"100-continue").lower() != b"100-continue":
        raise ExpectationFailed("of expectations only 100-continue is met")


def _check_coding(version: str, codings: list[bytes]) -> None:
    if version == "1.0":
        raise InvalidHttp("HTTP/1.0 has no Transfer-Encoding")
    if [coding.lower() for coding in codings] != [b"chunked"]:
        raise NotImplementedHere("of transfer codings only one, chunked, is known here")


def check_encoding(header: Mapping[bytes, bytes]) -> None:
    """Refuse a body that is compressed: nothing could be read of it.

    Raises: UnsupportedEncoding.
    """
    coding = header.get(b"content-encoding", b"")
    if coding and coding.lower() != b"identity":
        text = coding.decode("latin-1")
        raise UnsupportedEncoding(f"the body has content-encoding {text[:64]}; send it uncompressed")


def check_size(target: bytes, headers: list[Header], limits: ClientLimits) -> None:
    """Refuse a head that is too large.

    Raises: HeadTooLarge.
    """
    size_bytes = len(target) + sum(len(name) + len(value) + 4 for name, value in headers)
    if size_bytes > limits.max_head_bytes:  # I9
        raise head_too_large(limits)


def most_framed(body_bytes: int, limits: ClientLimits) -> int:
    """Return how many bytes may have come, the head's too, for so much of a chunked body."""
    return limits.max_head_bytes + _FRAMING_BYTES + (_FRAMING_PER_BODY_BYTE + 1) * body_bytes


def head_too_large(limits: ClientLimits) -> HeadTooLarge:
    """Return what to say of a head that is too large, or has no end."""
    return HeadTooLarge(f"the head exceeds {limits.max_head_bytes} bytes (client_max_head_bytes)")


def target_too_long(limits: ClientLimits) -> TargetTooLong:
    """Return what to say of a target that is too long, or has no end."""
    return TargetTooLong(f"the request's target exceeds {limits.max_target_bytes} bytes (client_max_target_bytes)")


def end_to_end(headers: list[Header], header: Mapping[bytes, bytes]) -> list[Header]:
    """Return headers without those that a Connection header names; ``header`` is of ``headers``, names in lower case.

    Source: RFC 9110, 7.6.1.
    """
    is_repeated = len(header) != len(headers)
    if not is_repeated and header.get(b"connection", b"").lower() in _CONNECTION_OPTIONS:
        return headers
    options = b",".join([value for name, value in headers if name == b"connection"]).lower().split(b",")
    named = {option.strip() for option in options} - _CONNECTION_OPTIONS
    return [pair for pair in headers if pair[0] not in named] if named else headers


def path_of(target: bytes) -> bytes:
    """Return the path of a request's target, without its query."""
    if target.startswith(b"/"):
        return target.partition(b"?")[0]
    try:
        return parse_url(target).path or b"/"
    except HttpParserError:
        return target


def without_offer(method: bytes, target: bytes, version: str, headers: list[Header]) -> bytes:
    """Return a request's head as if it hadn't offered another protocol."""
    lines = [b"%b: %b\r\n" % pair for pair in headers if pair[0] != b"upgrade"]
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, target, version.encode(), b"".join(lines))


def unparsable(error: HttpParserError, data: bytes | memoryview) -> RouterError:
    """Return what to say of bytes that the parser doesn't take."""
    if isinstance(error, HttpParserInvalidMethodError) and not _METHODS.issuperset(_REQUEST_LINE.findall(data)):
        return NotImplementedHere("the request's method isn't known here")
    return InvalidHttp(f"this isn't a valid HTTP/1.1 request: {error}")
