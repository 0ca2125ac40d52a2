"""Static discovery: the endpoints that the settings name."""

from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from msgspec import UNSET, Struct

from pdrouter.config import EndpointSettings, Settings
from pdrouter.core.fleet import Endpoint, Role
from pdrouter.engines.base import Engine, with_traits
from pdrouter.engines.sglang import DEFAULT_BOOTSTRAP_PORT
from pdrouter.errors import ConfigError
from pdrouter.setting import Secret, is_key


class Found(Struct, frozen=True):
    """An endpoint, and which of its facts the settings have fixed."""

    endpoint: Endpoint
    fixed: frozenset[str]


_BOOTSTRAPPED = frozenset({"bootstrap", "mooncake"})
"""Transports with a port at which a prefill endpoint is met."""


def static_endpoints(settings: Settings, engines: Mapping[str, Engine]) -> Iterator[Found]:
    """Yield the endpoints of the settings.

    Raises: ConfigError for a KV transport that an engine doesn't have.
    """
    for role, listed in (
        (Role.PREFILL, settings.prefill),
        (Role.DECODE, settings.decode),
        (Role.REGULAR, settings.worker),
    ):
        for entry in listed:
            yield found_as(role, entry, settings, engines, is_listed=True)


def found_as(
    role: Role, entry: EndpointSettings, settings: Settings, engines: Mapping[str, Engine], *, is_listed: bool
) -> Found:
    """Return the endpoint that an entry describes; ``is_listed``: one of the settings, not of the workers API.

    Raises: ConfigError for a KV transport that its engine doesn't have.
    """
    parts = urlsplit(entry.url)
    host, port = parts.hostname or "", parts.port or 80
    told = (("model", entry.model), ("dp_size", entry.dp_size), ("rank_base", entry.dp_start_rank))
    fixed = {name for name, value in told if value is not None}
    name = entry.engine or settings.engine
    engine = engines[name]
    transport = entry.kv_transport or settings.kv_transport or engine.kv_transports[0]
    if transport not in engine.kv_transports:
        known = ", ".join(engine.kv_transports)
        raise ConfigError([f"{entry.url}: {name} has no kv_transport {transport}; write one of {known}"])
    bootstrap_port = entry.bootstrap_port
    if bootstrap_port is UNSET:
        is_bootstrapped = role is Role.PREFILL and transport in _BOOTSTRAPPED
        bootstrap_port = DEFAULT_BOOTSTRAP_PORT if is_bootstrapped else None
    else:
        fixed.add("bootstrap_port")
    endpoint = Endpoint(
        address=parts.netloc,
        host=host,
        port=port,
        role=role,
        engine=name,
        kv_transport=transport,
        group=entry.group,
        model=entry.model,
        dp_size=entry.dp_size or 1,
        bootstrap_port=bootstrap_port,
        profile=entry.profile,
        gpu=entry.gpu,
        rank_base=entry.dp_start_rank or 0,
        kv_address=entry.kv_address,
        api_key=_key(entry, settings, is_listed=is_listed),
    )
    return Found(with_traits(engine, endpoint), frozenset(fixed))


def _key(entry: EndpointSettings, settings: Settings, *, is_listed: bool) -> Secret | None:
    """Return the key that an endpoint's engine wants.

    Without an ``api_key`` anybody may add an endpoint by the API, so it gets no key of the settings. The router's own
    ``api_key`` goes to engines as in sglang-router 0.3.2: to those of the settings, as their clients bring it anyway.
    """
    own = entry.api_key or entry.api_key_file
    for_all = settings.engine_api_key or settings.engine_api_key_file if is_listed or settings.api_key else None
    routers = settings.api_key if is_listed and settings.api_key and is_key(settings.api_key.reveal()) else None
    key = own or for_all or routers
    return None if key is None else Secret(key.reveal())
