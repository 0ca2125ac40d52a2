"""Threads for what would stop the event loop: a piece of work for a client's request, and what follows in the loop.

It knows no requests. Pieces of different clients may overtake each other; a client's own are one at a time.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from pdrouter.proxy.client import Client

T = TypeVar("T")
Done = Callable[["asyncio.Future[T] | None"], None]
"""What is called in the loop when a piece of work is done; with ``None`` if its client has left by then."""


class Offload:
    """A few threads; at most ``max_waiting`` pieces of work are there at once (I9)."""

    def __init__(self, name: str, threads: int, max_waiting: int) -> None:
        self._threads = ThreadPoolExecutor(threads, name)
        self._places = threading.BoundedSemaphore(max_waiting)

    def start(self, work: Callable[[], T], client: Client, done: "Done[T]") -> bool:
        """Let work be done, and ``done`` be called then; ``False`` if there is too much of it."""
        if not self._places.acquire(blocking=False):
            return False
        submitted = self._threads.submit(work)
        submitted.add_done_callback(lambda _: self._places.release())
        future = asyncio.wrap_future(submitted)
        waiter = client.listener = _Waiter(future)
        client.asked_s = client.asked_s or time.monotonic()
        future.add_done_callback(partial(_end, client, waiter, done))
        return True

    def close(self) -> None:
        """Begin no more; what has begun comes to its end."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Waiter:
    """Hears that a client has left while its work is done."""

    __slots__ = ("_future", "is_gone")

    def __init__(self, future: "asyncio.Future[T]") -> None:
        self._future: asyncio.Future[object] = future  # type: ignore[assignment]  # only to be cancelled
        self.is_gone = False

    def client_drained(self) -> None:
        """Nothing is being written."""

    def client_gone(self) -> None:
        """Nobody needs the result any more."""
        self.is_gone = True
        self._future.cancel()


def _end(client: Client, waiter: _Waiter, done: "Done[T]", future: "asyncio.Future[T]") -> None:
    client.listener = None
    done(None if waiter.is_gone or future.cancelled() else future)
