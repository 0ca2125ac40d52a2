"""CORS: which pages of other origins may call the router from a browser, and read its replies.

Source: the Fetch standard, CORS protocol. As in sglang-router (``server.rs``, ``create_cors_layer``): methods, age and
exposed header. It lets a page send whatever headers it asks for, as API clients have many of their own.
"""

from collections.abc import Collection

import msgspec

from pdrouter.proxy.client import Client

_ANY = b"*"
_METHODS = b"GET, POST, OPTIONS"
_MAX_AGE_S = 3600


class Cors(msgspec.Struct, frozen=True):
    """The origins that are allowed; ``*`` is any."""

    origins: Collection[bytes]

    def allow(self, client: Client) -> None:
        """Let the page that sent a request read the reply, if its origin is allowed."""
        origin = client.header.get(b"origin")
        if origin is None:
            return
        if _ANY in self.origins:
            client.lines = b"access-control-allow-origin: *\r\naccess-control-expose-headers: x-request-id\r\n"
        elif origin in self.origins:
            client.lines = (
                b"access-control-allow-origin: %b\r\nvary: origin\r\naccess-control-expose-headers: x-request-id\r\n"
                % origin
            )

    def is_preflight(self, client: Client) -> bool:
        """Whether a browser asks what an allowed page may send."""
        is_asking = client.method == b"OPTIONS" and b"access-control-request-method" in client.header
        return is_asking and bool(client.lines)

    def reply(self, client: Client) -> None:
        """Answer a preflight request."""
        headers = [(b"access-control-allow-methods", _METHODS), (b"access-control-max-age", b"%d" % _MAX_AGE_S)]
        asked = client.header.get(b"access-control-request-headers")
        if asked:
            headers.append((b"access-control-allow-headers", asked))
        client.reply(200, headers, b"")
