"""Static discovery: from settings to endpoints."""

from pdrouter.control.discovery import static_endpoints
from pdrouter.core.fleet import Role
from pdrouter.engines.sglang import DEFAULT_BOOTSTRAP_PORT
from pdrouter.loading import load_settings


def test_roles_and_addresses() -> None:
    """Each listed URL is an endpoint of its role, known by host and port."""
    flags = {"prefill": ["http://p:1"], "decode": ["http://10.0.0.2:2"], "worker": ["http://[::1]:3"]}
    endpoints = [found.endpoint for found in static_endpoints(load_settings(None, {}, flags))]
    assert [(e.role, e.address, e.host, e.port) for e in endpoints] == [
        (Role.PREFILL, "p:1", "p", 1),
        (Role.DECODE, "10.0.0.2:2", "10.0.0.2", 2),
        (Role.REGULAR, "[::1]:3", "::1", 3),
    ]


def test_bootstrap_ports() -> None:
    """A port that is given stands; none stays none; one that isn't given is the engine's default until told."""
    flags = {"prefill": ["http://a:1 9000", "http://b:1 none", "http://c:1"]}
    found = list(static_endpoints(load_settings(None, {}, flags)))
    assert [f.endpoint.bootstrap_port for f in found] == [9000, None, DEFAULT_BOOTSTRAP_PORT]
    assert ["bootstrap_port" in f.fixed for f in found] == [True, True, False]


def test_what_is_fixed() -> None:
    """What the settings say of an endpoint is fixed, the rest is the engine's to tell."""
    flags = {"decode": [{"url": "http://a:1", "group": "g", "model": "m", "dp_size": 4}, "http://b:1"]}
    first, second = static_endpoints(load_settings(None, {}, flags))
    assert first.fixed == {"model", "dp_size"}
    assert (first.endpoint.group, first.endpoint.model, first.endpoint.dp_size) == ("g", "m", 4)
    assert (second.fixed, second.endpoint.model, second.endpoint.dp_size) == (frozenset(), None, 1)
