"""Static discovery: from settings to endpoints."""

from collections.abc import Mapping, Sequence

import pytest

from pdrouter.control.discovery import Found, static_endpoints
from pdrouter.core.fleet import Role
from pdrouter.engines.sglang import DEFAULT_BOOTSTRAP_PORT
from pdrouter.errors import ConfigError
from pdrouter.loading import load_settings
from pdrouter.server import make_engines


def found_in(flags: Mapping[str, object]) -> Sequence[Found]:
    """Return the endpoints of settings."""
    settings = load_settings(None, {}, flags)
    return tuple(static_endpoints(settings, make_engines(settings)))


def test_roles_and_addresses() -> None:
    """Each listed URL is an endpoint of its role, known by host and port."""
    flags = {"prefill": ["http://p:1"], "decode": ["http://10.0.0.2:2"], "worker": ["http://[::1]:3"]}
    endpoints = [found.endpoint for found in found_in(flags)]
    assert [(e.role, e.address, e.host, e.port) for e in endpoints] == [
        (Role.PREFILL, "p:1", "p", 1),
        (Role.DECODE, "10.0.0.2:2", "10.0.0.2", 2),
        (Role.REGULAR, "[::1]:3", "::1", 3),
    ]


def test_bootstrap_ports() -> None:
    """A port that is given stands; none stays none; one that isn't given is the engine's default until told."""
    flags = {"prefill": ["http://a:1 9000", "http://b:1 none", "http://c:1"]}
    found = list(found_in(flags))
    assert [f.endpoint.bootstrap_port for f in found] == [9000, None, DEFAULT_BOOTSTRAP_PORT]
    assert ["bootstrap_port" in f.fixed for f in found] == [True, True, False]


def test_what_is_fixed() -> None:
    """What the settings say of an endpoint is fixed, the rest is the engine's to tell."""
    flags = {"decode": [{"url": "http://a:1", "group": "g", "model": "m", "dp_size": 4}, "http://b:1"]}
    first, second = found_in(flags)
    assert first.fixed == {"model", "dp_size"}
    assert (first.endpoint.group, first.endpoint.model, first.endpoint.dp_size) == ("g", "m", 4)
    assert (second.fixed, second.endpoint.model, second.endpoint.dp_size) == (frozenset(), None, 1)


def test_engines_side_by_side() -> None:
    """Each endpoint has its engine and transport, or those of all; what its engine can do is known."""
    flags = {
        "engine": "vllm",
        "prefill": [{"url": "http://a:1", "kv_transport": "mooncake"}, {"url": "http://b:1", "engine": "sglang"}],
        "decode": [{"url": "http://c:1", "dp_start_rank": 4, "kv_address": "10.0.0.1:9"}],
    }
    a, b, c = (found.endpoint for found in found_in(flags))
    assert [(e.engine, e.kv_transport, e.bootstrap_port) for e in (a, b, c)] == [
        ("vllm", "mooncake", 8998),
        ("sglang", "bootstrap", 8998),
        ("vllm", "nixl", None),
    ]
    assert (b.reads_prompts, c.reads_prompts, b.pairs_lists, c.pairs_lists) == (False, True, True, False)
    assert (c.rank_base, c.kv_address) == (4, "10.0.0.1:9")


def test_a_transport_that_an_engine_doesnt_have() -> None:
    """The start fails, and says which there are."""
    with pytest.raises(ConfigError, match="sglang has no kv_transport nixl; write one of bootstrap"):
        found_in({"kv_transport": "nixl", "decode": ["http://a:1"]})
