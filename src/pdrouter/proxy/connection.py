"""The client's connection: uvicorn's HTTP protocol, and a call at once when the client is gone.

ASGI tells of a closed connection only to a task that waits for it; this spares one task a request.
"""

from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

SCOPE_KEY = "pdrouter.connection"


class Connection(HttpToolsProtocol):
    """A client's connection; the application finds it in the scope's extensions."""

    on_gone: Callable[[], None] | None = None
    """Called once when the connection is lost while a request is under way."""

    def on_message_begin(self) -> None:
        """Let the scope of the request lead here."""
        super().on_message_begin()
        self.scope["extensions"] = {SCOPE_KEY: self}  # type: ignore[dict-item]

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever serves the request."""
        super().connection_lost(exc)
        on_gone, self.on_gone = self.on_gone, None
        if on_gone is not None:
            on_gone()
