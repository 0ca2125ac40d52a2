"""Static discovery: the endpoints that the settings name."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from msgspec import UNSET, Struct

from pdrouter.config import EndpointSettings, Settings
from pdrouter.core.fleet import Endpoint, Role
from pdrouter.engines.sglang import DEFAULT_BOOTSTRAP_PORT


class Found(Struct, frozen=True):
    """An endpoint, and which of its facts the settings have fixed."""

    endpoint: Endpoint
    fixed: frozenset[str]


def static_endpoints(settings: Settings) -> Iterator[Found]:
    """Yield the endpoints of the settings."""
    for role, listed in (
        (Role.PREFILL, settings.prefill),
        (Role.DECODE, settings.decode),
        (Role.REGULAR, settings.worker),
    ):
        for entry in listed:
            yield _found(role, entry)


def _found(role: Role, entry: EndpointSettings) -> Found:
    parts = urlsplit(entry.url)
    host, port = parts.hostname or "", parts.port or 80
    fixed = {name for name, value in (("model", entry.model), ("dp_size", entry.dp_size)) if value is not None}
    bootstrap_port = entry.bootstrap_port
    if bootstrap_port is UNSET:
        bootstrap_port = DEFAULT_BOOTSTRAP_PORT if role is Role.PREFILL else None
    else:
        fixed.add("bootstrap_port")
    endpoint = Endpoint(
        address=parts.netloc,
        host=host,
        port=port,
        role=role,
        group=entry.group,
        model=entry.model,
        dp_size=entry.dp_size or 1,
        bootstrap_port=bootstrap_port,
        profile=entry.profile,
    )
    return Found(endpoint, frozenset(fixed))
