"""Which profile an endpoint has: its own, else by model and GPU, else that of all.

It knows names and patterns, not what the numbers mean (``cost.py``), nor what is learned while running (``speed.py``).
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import msgspec

from pdrouter.core.cost import Profile
from pdrouter.core.fleet import Endpoint

_CAPACITY_DIGITS = 2
"""Digits of a told KV capacity that count. Chosen: engines alike differ by less, so that they share a heap."""


class ProfileRule(msgspec.Struct, frozen=True):
    """The profile of endpoints whose model and GPU match these patterns (``*``, ``?``, ``[...]``)."""

    model: str
    gpu: str
    name: str

    def fits(self, endpoint: Endpoint) -> bool:
        """Whether it says something of an endpoint; what isn't told matches ``*`` alone."""
        return fnmatchcase(endpoint.model or "", self.model) and fnmatchcase(endpoint.gpu or "", self.gpu)


class Profiles:
    """The profiles by name, and who has which."""

    def __init__(
        self, default: Profile, named: Mapping[str, Profile], rules: Sequence[ProfileRule] | None = None
    ) -> None:
        self._default = default
        self._named = named
        self._rules = rules or ()

    def of(self, endpoint: Endpoint) -> Profile:
        """Return an endpoint's profile; a KV capacity that its engine told stands above it, rounded down."""
        name = endpoint.profile or next((rule.name for rule in self._rules if rule.fits(endpoint)), "")
        profile = self._named.get(name, self._default)
        told = endpoint.kv_capacity_tokens
        return profile if not told else msgspec.structs.replace(profile, kv_capacity_tokens=_rounded_down(told))


def _rounded_down(tokens: int) -> int:
    return tokens - tokens % int(10 ** max(0, len(str(tokens)) - _CAPACITY_DIGITS))
