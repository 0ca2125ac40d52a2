"""Listens, and stops in good order: unready first, then deaf, then the streams that are left are told of the end.

Of uvicorn's server it uses the wiring of protocols to sockets and the taking of signals. It knows nothing of requests
but how to end those that are under way.
"""

import asyncio
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Protocol, cast

import msgspec
import uvicorn

from pdrouter.proxy.app import App
from pdrouter.proxy.connection import Connection

_BACKLOG = 4096

_LOOK_S = 0.01
"""Time between two looks whether all connections are gone; chosen."""

_PARTING_S = 1.0
"""Time for the last words to reach the clients; chosen."""


class CannotListen(Exception):
    """The address is taken, or isn't ours."""


class DrainOptions(msgspec.Struct, frozen=True):
    """Times of a stop; ``config.py`` says what they mean."""

    notice_s: float
    grace_s: float


class InFlight(Protocol):
    """The requests that are under way."""

    def end_all(self) -> None:
        """End them, and tell their clients why."""


class Listener(uvicorn.Server):
    """A server on one socket.

    The first stop signal starts a stop in good order: for ``notice_s`` it goes on serving while ``/readiness`` says
    that it won't for long, because whoever sends requests learns of it late. Ctrl-C comes from a person, who needs no
    notice. The second signal ends now.
    """

    def __init__(self, app: App, requests: InFlight, options: Callable[[], DrainOptions]) -> None:
        self.is_up = asyncio.Event()
        self._app = app
        self._requests = requests
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._signals: list[int] = []
        self._told = asyncio.Event()
        self._hurried = asyncio.Event()
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                log_level="critical",
                server_header=False,
                date_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self.is_up.set()

    def stop(self) -> None:
        """Stop without notice; what runs has its time of grace."""
        self._told.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal, wherever in the code it comes; uvicorn raises it again at the end."""
        super().handle_exit(sig, frame)
        self._loop.call_soon_threadsafe(self._signalled, sig)

    def _signalled(self, sig: int) -> None:
        self._signals.append(sig)
        self._told.set()
        if len(self._signals) > 1:
            self._hurried.set()

    async def main_loop(self) -> None:
        """Serve until it is time to stop listening."""
        await self._told.wait()
        self._app.clients.is_draining = True
        if self._signals == [signal.SIGTERM]:
            await self._wait(self._hurried.is_set, self._options().notice_s)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen no more; let the requests end, tell those that are left, and close what is left of connections."""
        for server in self.servers:
            server.close()
        for sock in sockets or ():
            sock.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await self._wait(lambda: self._hurried.is_set() or self._are_gone(), self._options().grace_s)
        self._requests.end_all()
        await self._wait(self._are_gone, _PARTING_S)
        for connection in list(self.server_state.connections):
            cast("Connection", connection).abort()
        await asyncio.gather(*self.server_state.tasks)
        for server in self.servers:
            await server.wait_closed()

    def _are_gone(self) -> bool:
        return not self.server_state.connections

    async def _wait(self, is_over: Callable[[], bool], within_s: float) -> None:
        until_s = self._loop.time() + within_s
        while not is_over() and self._loop.time() < until_s:  # noqa: ASYNC110 - plain state has no event
            await asyncio.sleep(_LOOK_S)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that has the address, and takes no connection yet.

    Raises: CannotListen.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise _cannot_listen(host, port, error) from error
    sock.setblocking(False)
    return sock


def open_port(sock: socket.socket) -> None:
    """Let a bound socket take connections.

    Raises: CannotListen if another process has been faster.
    """
    try:
        sock.listen(_BACKLOG)
    except OSError as error:
        host, port = sock.getsockname()[:2]
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> CannotListen:
    return CannotListen(f"can't listen on {host}:{port}: {error.strerror}")


def url_of(sock: socket.socket) -> str:
    """Return where a socket listens."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
