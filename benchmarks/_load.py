"""Closed-loop load over raw sockets: one request in flight on each connection, every answer checked.

It must not know which router it talks to, and it must stay cheap: it shares two cores with what it measures.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import TYPE_CHECKING, cast

import httptools

if TYPE_CHECKING:
    from collections.abc import Iterator

LATE = "no answer in time"


@dataclass(frozen=True)
class Case:
    """Requests to send in turn, and what each answer must be.

    Units: `answer_bytes` is the length of the body without its chunked framing.
    """

    name: str
    requests: tuple[bytes, ...]
    answer_bytes: int
    answer_end: bytes


@dataclass
class Outcome:
    """What a run of load saw: answers that were right, failures by kind, reads of streamed bytes."""

    right: int = 0
    reads: int = 0
    seconds: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def failed(self) -> int:
        """Requests that got no right answer."""
        return self.failures.total()

    def add(self, other: "Outcome") -> None:
        """Take in what a later run saw."""
        self.right += other.right
        self.reads += other.reads
        self.seconds += other.seconds
        self.failures += other.failures


class _Run:
    """What the connections of one run share."""

    def __init__(self, case: Case, requests: int) -> None:
        self.case = case
        self.outcome = Outcome()
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._to_send: Iterator[bytes] = islice(cycle(case.requests), requests)
        self._unsettled = requests

    def next_request(self) -> bytes | None:
        return next(self._to_send, None)

    def settle(self, failure: str | None) -> None:
        if failure is None:
            self.outcome.right += 1
        else:
            self.outcome.failures[failure] += 1
        self._unsettled -= 1
        if not self._unsettled and not self.finished.done():
            self.finished.set_result(None)

    def give_up(self) -> None:
        self.outcome.failures[LATE] += self._unsettled
        self._unsettled = 0


class _Connection(asyncio.Protocol):
    """Sends a request, checks its answer, sends the next."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._is_waiting = False
        self._parser = httptools.HttpResponseParser(self)
        self._bytes = 0
        self._last = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._send_next()

    def data_received(self, data: bytes) -> None:
        self._run.outcome.reads += 1
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if self._is_waiting:
            self._settle("connection lost")

    def on_body(self, body: bytes) -> None:
        self._bytes += len(body)
        # An end that came in two pieces is still seen whole.
        self._last = body if len(body) > 64 else self._last[-64:] + body

    def on_message_complete(self) -> None:
        self._settle(self._failure())
        self._send_next()

    def _send_next(self) -> None:
        request = self._run.next_request()
        if request is not None:
            self._bytes, self._last, self._is_waiting = 0, b"", True
            self._transport.write(request)

    def _settle(self, failure: str | None) -> None:
        self._is_waiting = False
        self._run.settle(failure)

    def _failure(self) -> str | None:
        case = self._run.case
        status = self._parser.get_status_code()
        if status != 200:
            return f"status {status}: {self._last[:200].decode(errors='replace')}"
        if self._bytes != case.answer_bytes:
            return f"{self._bytes} bytes instead of {case.answer_bytes}"
        if not self._last.endswith(case.answer_end):
            return f"ends with {self._last[-16:]!r}"
        if not self._parser.should_keep_alive():
            return "connection not kept alive"
        return None

    def close(self) -> None:
        """End the connection; what it still waits for is no failure of the router any more."""
        self._is_waiting = False
        self._transport.close()


async def run_load(port: int, case: Case, requests: int, connections: int, deadline_s: float) -> Outcome:
    """Send so many requests over so many connections to a port of 127.0.0.1 and check every answer.

    What is unanswered at the deadline counts as failed. A lost connection is not made again: its request
    failed, and the others carry on.
    """
    loop = asyncio.get_running_loop()
    run = _Run(case, requests)
    started_at = loop.time()
    opened: list[_Connection] = []
    try:
        async with asyncio.timeout(deadline_s):
            for _ in range(min(connections, requests)):
                _, connection = await loop.create_connection(lambda: _Connection(run), "127.0.0.1", port)
                opened.append(connection)
            await run.finished
    except (TimeoutError, ConnectionError):
        run.give_up()
    finally:
        for connection in opened:
            connection.close()
    run.outcome.seconds = loop.time() - started_at
    return run.outcome
