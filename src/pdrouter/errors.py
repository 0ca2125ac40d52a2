"""Every failure: its HTTP status, whether another attempt may help, and whether an engine is to blame.

Grouped by cause: client, capacity, upstream, internal. ``proxy/replies.py`` turns them into replies;
foreign exceptions are mapped where they enter (``upstream/connection.py``).
"""

from typing import ClassVar


class RouterError(Exception):
    """Base of all failures that a client may see.

    ``status`` and ``code`` are stable; ``is_retryable`` says that another attempt may succeed;
    ``counts_against_health`` says that the engine involved is at fault. ``message`` outlives the request, in stories,
    logs and reasons that others see; ``detail`` is what an engine said, perhaps with the prompt in it: for the
    request's own client, and for the log at debug level.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    type: ClassVar[str] = "server_error"
    is_retryable: ClassVar[bool] = False
    counts_against_health: ClassVar[bool] = False
    detail: str = ""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ConfigError(Exception):
    """The settings can't be used; ``problems`` holds one clear line each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


# Client: the request can't be served as sent.


class ClientError(RouterError):
    """Base of what the client can mend."""

    status = 400
    code = "invalid_request"
    type = "invalid_request_error"


class InvalidJson(ClientError):
    """The body isn't JSON."""

    code = "invalid_json"


class InvalidRequest(ClientError):
    """The body is JSON, but not a request of this API."""


class DuplicateField(ClientError):
    """A field that the router controls stands twice at the top level."""

    code = "duplicate_field"


class InvalidRank(ClientError):
    """The client asked for a data-parallel rank that isn't there."""

    code = "invalid_rank"


class NotFound(ClientError):
    """No such path."""

    status = 404
    code = "not_found"


class UnknownRequest(ClientError):
    """The journal doesn't have the request."""

    status = 404
    code = "unknown_request"


class ModelNotFound(ClientError):
    """No endpoint serves the model."""

    status = 404
    code = "model_not_found"


class MethodNotAllowed(ClientError):
    """The path exists, the method doesn't."""

    status = 405
    code = "method_not_allowed"


class PayloadTooLarge(ClientError):
    """The body exceeds ``max_payload_size``."""

    status = 413
    code = "payload_too_large"


class UnsupportedEncoding(ClientError):
    """The body is compressed (``content-encoding``)."""

    status = 415
    code = "unsupported_encoding"


class WaitedTooLong(ClientError):
    """It waited in the router for as long as it may; no engine could take it."""

    status = 408
    code = "queue_timeout"


class SuspectRequest(ClientError):
    """The request has failed on several engines, as if it broke them; the same one isn't given to more for a while."""

    status = 422
    code = "suspect_request"


class Unauthorized(ClientError):
    """The request doesn't carry the router's ``api_key``."""

    status = 401
    code = "unauthorized"


class CrossSite(ClientError):
    """A browser asks for a page of another site to change the fleet."""

    status = 403
    code = "cross_site"


class HostNotAllowed(ClientError):
    """Without ``api_key`` the fleet isn't changed under a host name that isn't in ``allowed_hosts``."""

    status = 403
    code = "host_not_allowed"


class KeyNeeded(ClientError):
    """Without ``api_key`` the fleet isn't changed from another machine, unless ``open_workers_api`` says so."""

    status = 403
    code = "key_needed"


class QueueFull(ClientError):
    """No more requests may wait; ``retry_after_s`` is whole seconds after which there is likely to be room."""

    status = 429
    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class InvalidHttp(ClientError):
    """The bytes aren't a request of HTTP/1.1, or one that could be read in two ways."""

    code = "invalid_http"


class SenderTimeout(ClientError):
    """The client took too long to send its request."""

    status = 408
    code = "request_timeout"


class RateLimited(ClientError):
    """The client's key has had its requests or tokens of this minute; ``retry_after_s`` is whole seconds."""

    status = 429
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TargetTooLong(ClientError):
    """The request's target exceeds ``client_max_target_bytes``."""

    status = 414
    code = "target_too_long"


class ExpectationFailed(ClientError):
    """The client expects what isn't done here."""

    status = 417
    code = "expectation_failed"


class HeadTooLarge(ClientError):
    """The request's head exceeds ``client_max_head_bytes`` or ``client_max_headers``."""

    status = 431
    code = "head_too_large"


class ClientGone(ClientError):
    """The client closed its connection; nobody reads the reply."""

    status = 499
    code = "client_gone"


class SampleNotNeeded(ClientGone):
    """Nobody reads this answer any more: another sample of the same request (``n`` > 1) has failed."""

    code = "sample_not_needed"


# Capacity: the fleet can't take the request now.


class NoReadyPair(RouterError):
    """No ready endpoint, or no compatible pair of them; the message says who was there and why each was out."""

    status = 503
    code = "no_ready_pair"
    is_retryable = True


class PoolExhausted(RouterError):
    """An endpoint's connection limit is reached, or the router's own of open files."""

    status = 503
    code = "connection_limit"
    is_retryable = True


class NameNotResolved(RouterError):
    """The engine's host name has no address, or the nameserver doesn't answer, which is no fault of the engine."""

    status = 502
    code = "name_not_resolved"
    is_retryable = True


class TooManyConnections(RouterError):
    """There are as many connections of clients, or of this client, as may be."""

    status = 503
    code = "too_many_connections"


class BodyBudgetSpent(RouterError):
    """The bodies of all requests together exceed ``client_body_budget_bytes``; this one was the largest to come in."""

    status = 503
    code = "body_budget"


class ShuttingDown(RouterError):
    """The router stops; another one may serve the request."""

    status = 503
    code = "shutting_down"


class DeadlineExceeded(RouterError):
    """It took longer than the client itself allows (``x-request-timeout-ms``)."""

    status = 504
    code = "deadline_exceeded"


# Beyond the router: no other request would fare better here.


class NotImplementedHere(RouterError):
    """HTTP has it, or may have it; the router doesn't."""

    status = 501
    code = "not_implemented"


class NotSupported(RouterError):
    """No endpoint of the fleet can do such a request, however ready; the message says why."""

    status = 501
    code = "not_supported"


class HttpVersionNotSupported(RouterError):
    """The request is in a version of HTTP other than 1.0 and 1.1."""

    status = 505
    code = "http_version_not_supported"


# Upstream: an engine failed.


class UpstreamError(RouterError):
    """Base of failures on the way to or from an engine."""

    status = 502
    code = "upstream_error"
    is_retryable = True
    counts_against_health = True


class ConnectFailed(UpstreamError):
    """The engine's port took no connection."""

    code = "upstream_unreachable"


class ConnectTimeout(ConnectFailed):
    """The engine's port didn't answer in time."""


class UpstreamClosed(UpstreamError):
    """The engine closed or reset the connection before its reply was whole."""

    code = "upstream_closed"


class UpstreamProtocol(UpstreamError):
    """The engine's reply isn't HTTP, or breaks a limit."""

    code = "upstream_protocol"


class UpstreamRedirect(UpstreamProtocol):
    """The engine answered with a redirect, which isn't followed: it could lead anywhere, with the client's key."""

    code = "upstream_redirect"


class EmptyStream(UpstreamError):
    """The engine's stream came to its end without any event."""

    code = "empty_stream"


class UpstreamTimeout(UpstreamError):
    """The engine's reply didn't come in time."""

    status = 504
    code = "upstream_timeout"


class PrefillTimeout(UpstreamTimeout):
    """The prompt wasn't read in time."""

    code = "prefill_timeout"


class FirstTokenTimeout(UpstreamTimeout):
    """The answer didn't begin in time."""

    code = "first_token_timeout"


class DecodeNeverStarted(FirstTokenTimeout):
    """The prompt was read, but the decode engine didn't begin to answer in time."""

    code = "decode_never_started"


class StreamStalled(UpstreamTimeout):
    """An answer that had begun didn't go on in time."""

    code = "stream_stalled"


# Internal: ours.


class InvariantViolation(RouterError):
    """The router's own books are wrong; the message carries the story."""

    code = "invariant_violation"


FOREIGN_FAULTS = (
    RouterError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""What code that isn't ours may fail with, where its failure is an answer and not an accident."""
