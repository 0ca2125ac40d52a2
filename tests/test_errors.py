"""The failures: what a client may rely on, and who is to blame."""

import pytest

from pdrouter import errors
from pdrouter.errors import ClientError, ConfigError, RouterError, UpstreamError

KNOWN = {
    "RouterError": (500, "internal_error", "server_error", False, False),
    "ClientError": (400, "invalid_request", "invalid_request_error", False, False),
    "InvalidJson": (400, "invalid_json", "invalid_request_error", False, False),
    "InvalidRequest": (400, "invalid_request", "invalid_request_error", False, False),
    "DuplicateField": (400, "duplicate_field", "invalid_request_error", False, False),
    "InvalidRank": (400, "invalid_rank", "invalid_request_error", False, False),
    "NotFound": (404, "not_found", "invalid_request_error", False, False),
    "UnknownRequest": (404, "unknown_request", "invalid_request_error", False, False),
    "ModelNotFound": (404, "model_not_found", "invalid_request_error", False, False),
    "MethodNotAllowed": (405, "method_not_allowed", "invalid_request_error", False, False),
    "PayloadTooLarge": (413, "payload_too_large", "invalid_request_error", False, False),
    "UnsupportedEncoding": (415, "unsupported_encoding", "invalid_request_error", False, False),
    "WaitedTooLong": (408, "queue_timeout", "invalid_request_error", False, False),
    "SuspectRequest": (422, "suspect_request", "invalid_request_error", False, False),
    "Unauthorized": (401, "unauthorized", "invalid_request_error", False, False),
    "CrossSite": (403, "cross_site", "invalid_request_error", False, False),
    "HostNotAllowed": (403, "host_not_allowed", "invalid_request_error", False, False),
    "KeyNeeded": (403, "key_needed", "invalid_request_error", False, False),
    "QueueFull": (429, "queue_full", "invalid_request_error", False, False),
    "InvalidHttp": (400, "invalid_http", "invalid_request_error", False, False),
    "SenderTimeout": (408, "request_timeout", "invalid_request_error", False, False),
    "RateLimited": (429, "rate_limit_exceeded", "invalid_request_error", False, False),
    "TargetTooLong": (414, "target_too_long", "invalid_request_error", False, False),
    "ExpectationFailed": (417, "expectation_failed", "invalid_request_error", False, False),
    "HeadTooLarge": (431, "head_too_large", "invalid_request_error", False, False),
    "ClientGone": (499, "client_gone", "invalid_request_error", False, False),
    "SampleNotNeeded": (499, "sample_not_needed", "invalid_request_error", False, False),
    "NoReadyPair": (503, "no_ready_pair", "server_error", True, False),
    "PoolExhausted": (503, "connection_limit", "server_error", True, False),
    "NameNotResolved": (502, "name_not_resolved", "server_error", True, False),
    "TooManyConnections": (503, "too_many_connections", "server_error", False, False),
    "BodyBudgetSpent": (503, "body_budget", "server_error", False, False),
    "ShuttingDown": (503, "shutting_down", "server_error", False, False),
    "DeadlineExceeded": (504, "deadline_exceeded", "server_error", False, False),
    "NotSupported": (501, "not_supported", "server_error", False, False),
    "NotImplementedHere": (501, "not_implemented", "server_error", False, False),
    "HttpVersionNotSupported": (505, "http_version_not_supported", "server_error", False, False),
    "UpstreamError": (502, "upstream_error", "server_error", True, True),
    "ConnectFailed": (502, "upstream_unreachable", "server_error", True, True),
    "ConnectTimeout": (502, "upstream_unreachable", "server_error", True, True),
    "UpstreamClosed": (502, "upstream_closed", "server_error", True, True),
    "UpstreamProtocol": (502, "upstream_protocol", "server_error", True, True),
    "UpstreamRedirect": (502, "upstream_redirect", "server_error", True, True),
    "EmptyStream": (502, "empty_stream", "server_error", True, True),
    "UpstreamTimeout": (504, "upstream_timeout", "server_error", True, True),
    "PrefillTimeout": (504, "prefill_timeout", "server_error", True, True),
    "FirstTokenTimeout": (504, "first_token_timeout", "server_error", True, True),
    "DecodeNeverStarted": (504, "decode_never_started", "server_error", True, True),
    "StreamStalled": (504, "stream_stalled", "server_error", True, True),
    "InvariantViolation": (500, "invariant_violation", "server_error", False, False),
}
"""Status, code, type, is_retryable, counts_against_health."""

CLASSES = {
    name: value for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, RouterError)
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_clients_may_rely_on(name: str) -> None:
    """Statuses and codes are stable: a change here is a change of the API."""
    error = CLASSES[name]
    told = (error.status, error.code, error.type, error.is_retryable, error.counts_against_health)
    assert told == KNOWN[name]


def test_every_failure_is_known() -> None:
    """A new class comes with its line in the table."""
    assert set(CLASSES) == set(KNOWN)


@pytest.mark.parametrize("error", CLASSES.values())
def test_blame(error: type[RouterError]) -> None:
    """A client's fault never counts against an engine and isn't tried again; an engine's does and may be."""
    is_clients = 400 <= error.status < 500
    assert issubclass(error, ClientError) == is_clients
    assert error.counts_against_health == issubclass(error, UpstreamError)
    assert not (is_clients and error.is_retryable)
    assert (error.type == "invalid_request_error") == is_clients


def test_a_failure_says_what_and_where() -> None:
    """Its message is its text; the field is named apart."""
    error = errors.InvalidRequest("n must be at least 1", param="n")
    assert (str(error), error.message, error.param) == ("n must be at least 1", "n must be at least 1", "n")
    assert errors.NotFound("no").param is None


def test_a_config_error_holds_all_problems() -> None:
    """One clear line each; it is no reply to a client."""
    error = ConfigError(["port: no number", "prefill: no URL"])
    assert error.problems == ["port: no number", "prefill: no URL"]
    assert str(error) == "port: no number; prefill: no URL"
    assert not isinstance(error, RouterError)
