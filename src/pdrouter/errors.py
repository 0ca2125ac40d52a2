"""Every failure: its HTTP status, whether another attempt may help, and whether an engine is to blame.

Grouped by cause: client, capacity, upstream, internal. ``proxy/replies.py`` turns them into replies;
foreign exceptions are mapped where they enter (``upstream/connection.py``).
"""

from typing import ClassVar


class RouterError(Exception):
    """Base of all failures that a client may see.

    ``status`` and ``code`` are stable; ``is_retryable`` says that another attempt may succeed;
    ``counts_against_health`` says that the engine involved is at fault.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    type: ClassVar[str] = "server_error"
    is_retryable: ClassVar[bool] = False
    counts_against_health: ClassVar[bool] = False

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


class ClientGone(ClientError):
    """The client closed its connection; nobody reads the reply."""

    status = 499
    code = "client_gone"


# Capacity: the fleet can't take the request now.


class NoReadyPair(RouterError):
    """No ready endpoint, or no compatible pair of them; the message says who was there and why each was out."""

    status = 503
    code = "no_ready_pair"
    is_retryable = True


class PoolExhausted(RouterError):
    """An endpoint's connection limit is reached."""

    status = 503
    code = "connection_limit"
    is_retryable = True


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


class UpstreamTimeout(UpstreamError):
    """The engine's reply didn't come in time."""

    status = 504
    code = "upstream_timeout"


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
