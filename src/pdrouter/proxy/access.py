"""Who may use the API, and who may change the fleet: the router's key, and what stops web pages where there is none.

A browser sends requests for any page that it shows, from inside the network in which it runs. It can't set
``authorization`` across sites without asking first, so a key stops it; without a key these checks must.
Source: the Fetch standard (``Origin``), Fetch Metadata (``Sec-Fetch-Site``); DNS rebinding: a page's own host name,
which its owner lets point to the router, is in ``Host``.
"""

import ipaddress
from collections.abc import Collection, Mapping
from hmac import compare_digest

import msgspec

from pdrouter.errors import CrossSite, HostNotAllowed, KeyNeeded, Unauthorized
from pdrouter.proxy.client import Client
from pdrouter.proxy.credentials import API_KEY, AUTHORIZATION, check_once, credential
from pdrouter.setting import Secret

_OWN_SITES = frozenset((b"same-origin", b"none"))
_FORWARDING = (b"x-forwarded-for", b"forwarded", b"x-real-ip", b"via")
"""What proxies add: the address of the connection is theirs, not their client's."""


class Access(msgspec.Struct, frozen=True):
    """``config.py`` says what these mean; ``origins`` are those that CORS allows by name."""

    api_key: Secret | None
    allowed_hosts: Collection[bytes]
    origins: Collection[bytes]
    is_open: bool

    def check_key(self, header: Mapping[bytes, bytes]) -> None:
        """Refuse a request without the key, if there is one.

        Raises: Unauthorized.
        """
        if self.api_key is not None and not compare_digest(credential(header), self.api_key.reveal().encode()):
            raise Unauthorized("this needs the router's api_key: authorization: Bearer KEY, or x-api-key: KEY")

    def check_change(self, client: Client) -> None:
        """Refuse a request that would change the fleet, unless its sender may.

        Raises: InvalidRequest, Unauthorized, CrossSite, HostNotAllowed, KeyNeeded.
        """
        header = client.header
        check_once(client.headers, (AUTHORIZATION, API_KEY))
        self.check_key(header)
        self._check_site(header)
        if self.api_key is None:
            self._check_host(header)
            if not self.is_open and (not client.is_local or any(name in header for name in _FORWARDING)):
                raise KeyNeeded(
                    "without api_key the fleet is changed from this machine only; set api_key, or open_workers_api"
                )

    def _check_site(self, header: Mapping[bytes, bytes]) -> None:
        origin = header.get(b"origin")
        if origin is not None and origin in self.origins:
            return
        is_foreign = origin is not None and origin.partition(b"://")[2] != header.get(b"host", b"").lower()
        if is_foreign or header.get(b"sec-fetch-site", b"none") not in _OWN_SITES:
            raise CrossSite("the fleet isn't changed for a page of another site; cors_allowed_origins names exceptions")

    def _check_host(self, header: Mapping[bytes, bytes]) -> None:
        host = header.get(b"host")
        if host is None:  # every browser sends it
            return
        name = _name_of(host.lower())
        if name != b"localhost" and name not in self.allowed_hosts and not _is_ip(name):
            text = name.decode("latin-1")[:256]
            raise HostNotAllowed(f"the host {text} isn't known; set api_key, or name it in allowed_hosts")


def _name_of(host: bytes) -> bytes:
    """Return a ``Host`` header without its port, and without the brackets of IPv6."""
    if host.startswith(b"["):
        return host[1:].partition(b"]")[0]
    return host.partition(b":")[0].rstrip(b".")


def _is_ip(name: bytes) -> bool:
    try:
        ipaddress.ip_address(name.decode("latin-1"))
    except ValueError:
        return False
    return True
