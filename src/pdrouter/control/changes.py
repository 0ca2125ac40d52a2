"""Changes of the fleet in words of the settings: from the workers API and from settings that were read again.

It knows what was said of each endpoint; ``members.py`` knows who is there.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from pdrouter.config import EndpointSettings, Settings
from pdrouter.control.discovery import Found, found_as, static_endpoints
from pdrouter.control.members import Members
from pdrouter.core.fleet import Role
from pdrouter.engines.base import Engine
from pdrouter.errors import ConfigError, InvalidRequest
from pdrouter.loading import read_endpoint

_LISTS: Final[Mapping[Role, str]] = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.REGULAR: "worker"}
"""The setting that lists the endpoints of a role."""


class Changes:
    """Applies changes to the members."""

    def __init__(self, settings: Settings, engines: Mapping[str, Engine], members: Members) -> None:
        self._settings = settings
        self._engines = engines
        self._members = members
        self._entries: dict[str, EndpointSettings] = {}

    def start(self) -> None:
        """Let those join that the settings name.

        Raises: ConfigError.
        """
        for found in self.found_in(self._settings):
            self._members.join(found)

    def found_in(self, settings: Settings) -> list[Found]:
        """Return the endpoints that settings name.

        Raises: ConfigError.
        """
        return list(static_endpoints(settings, self._engines))

    def check(self, settings: Settings) -> None:
        """Refuse settings whose lists of endpoints look cut off: all are empty, or one side of the pairs is.

        Raises: ConfigError.
        """
        before, after = _listed(self._settings), _listed(settings)
        lost = before - after
        if before and not after:
            raise ConfigError(
                ["no endpoint is named any more; the fleet stays (let its last one go by DELETE /workers)"]
            )
        for one, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
            if one in lost and other in after:
                raise ConfigError(
                    [f"{_LISTS[one]}: none is named any more, but {_LISTS[other]} is; name both or neither"]
                )

    def follow(self, settings: Settings, found: list[Found]) -> None:
        """Let endpoints join, change and leave as settings now say of them; those that only the API named stay."""
        before = self.found_in(self._settings)
        self._settings = settings
        for one in found:
            if one not in before:
                self._entries.pop(one.endpoint.address, None)
        self._members.update(before, found, settings.shutdown_grace_period_secs)

    # The workers API.

    def add(self, worker_type: str, fields: Mapping[str, object]) -> str:
        """Let an endpoint join; return its address.

        Raises: InvalidRequest.
        """
        try:
            role = Role(worker_type)
        except ValueError:
            raise InvalidRequest(f"worker_type: write one of {', '.join(Role)}") from None
        _check_given(fields)
        entry, found = self._read(role, fields)
        if not self._members.join(found):
            raise InvalidRequest(f"{found.endpoint.address} is there already")
        self._entries[found.endpoint.address] = entry
        return found.endpoint.address

    def change(self, address: str, fields: Mapping[str, object]) -> None:
        """Say something else of an endpoint, which is known; what isn't named stays.

        Raises: InvalidRequest.
        """
        known = self._members.get(address)
        if known is None:
            return
        entry = self._entries.get(address) or self._of_settings(known)
        given = _given(entry)
        if "api_key" in fields:
            given.pop("api_key_file", None)
        _check_given(fields)
        entry, found = self._read(known.endpoint.role, given | dict(fields))
        if found.endpoint.address != address:
            raise InvalidRequest("url: an endpoint's address stays; remove it and add another")
        self._entries[address] = entry
        self._members.change(found)

    def set_draining(self, address: str, *, is_draining: bool) -> None:
        """Give an endpoint nothing new, or again."""
        if is_draining:
            self._members.drain(address)
        else:
            self._members.resume(address)

    def remove(self, address: str) -> None:
        """Let an endpoint go when its requests have ended."""
        self._entries.pop(address, None)
        self._members.part(address, self._settings.shutdown_grace_period_secs)

    def _read(self, role: Role, fields: Mapping[str, object]) -> tuple[EndpointSettings, Found]:
        try:
            entry = read_endpoint(_LISTS[role], fields)
            return entry, found_as(role, entry, self._settings, self._engines, is_listed=self._is_listed(entry))
        except ConfigError as error:
            raise InvalidRequest(str(error)) from error

    def _is_listed(self, entry: EndpointSettings) -> bool:
        return any(one.url == entry.url for name in _LISTS.values() for one in getattr(self._settings, name))

    def _of_settings(self, known: Found) -> EndpointSettings:
        listed: tuple[EndpointSettings, ...] = getattr(self._settings, _LISTS[known.endpoint.role])
        entry = next((entry for entry in listed if entry.url == known.endpoint.url), None)
        if entry is None:
            raise InvalidRequest(f"{known.endpoint.address} is leaving; add it anew")
        return entry


def _listed(settings: Settings) -> set[Role]:
    """Return the roles of the endpoints that settings name."""
    return {role for role, name in _LISTS.items() if getattr(settings, name)}


def _check_given(fields: Mapping[str, object]) -> None:
    """Refuse a file that the API names: the router would read it and send it to the endpoint.

    Raises: InvalidRequest.
    """
    if "api_key_file" in fields:
        raise InvalidRequest("api_key_file: only the settings name files; write api_key")


def _given(entry: EndpointSettings) -> dict[str, object]:
    """Return what an entry says, as it could be given again."""
    values = {field.name: (getattr(entry, field.name), field.default) for field in msgspec.structs.fields(entry)}
    return {name: value for name, (value, default) in values.items() if value != default}
