"""One request of the soak as a client makes it, well or badly behaved, and what came of it.

Plain HTTP/1.1 over asyncio's streams and nothing of the router's own, so that a fault on one side isn't mirrored on the
other. It knows what an emulated engine answers to each prompt.
"""

import asyncio
import json
import random
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from pdrouter.sim.text import expected_text, render_chat

HOST = "127.0.0.1"
MODEL = "emulated"
OURS_BROKEN = frozenset({"internal_error", "invariant_violation"})
"""Codes that no fault of an engine or a client explains."""

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_CAUSE_LETTERS = 60
_ERROR = '{"error"'


class Manner(Enum):
    """How a client behaves."""

    WELL = "well"
    LEAVES = "leaves"
    READS_SLOWLY = "reads slowly"
    SENDS_SLOWLY = "sends slowly"


class Ask(NamedTuple):
    """One request. ``patience_s``: after which a client leaves, if that is its manner."""

    path: str
    text: str
    tokens: int
    is_stream: bool
    manner: Manner
    patience_s: float

    @property
    def body(self) -> bytes:
        """The request's body."""
        prompt: dict[str, object] = {"prompt": self.text}
        if self.path == _CHAT:
            prompt = {"messages": [{"role": "user", "content": self.text}]}
        return msgspec.json.encode({"model": MODEL, "max_tokens": self.tokens, "stream": self.is_stream} | prompt)

    @property
    def expected(self) -> str:
        """The answer of any emulated engine."""
        prompt = render_chat([{"role": "user", "content": self.text}]) if self.path == _CHAT else self.text
        return expected_text(prompt, self.tokens)


class End(NamedTuple):
    """What became of a request: ``right``, ``failed``, ``left`` or ``wrong``, and why."""

    kind: str
    cause: str = ""


class Limits(NamedTuple):
    """Units: s, bytes. Nothing takes longer than ``answer_s`` but a slow client."""

    answer_s: float
    slow_piece_bytes: int = 600
    slow_pause_s: float = 0.05
    slow_send_pieces: int = 8


def plan(chance: random.Random, number: int) -> Ask:
    """Return the request of this number: most are well behaved, and one in a few begins as others do."""
    shared = f"Story {chance.randrange(40)}. " * chance.randrange(1, 60) if chance.random() < 0.5 else ""
    manner = chance.choices(list(Manner), (88, 8, 2, 2))[0]
    return Ask(
        path=_CHAT if chance.random() < 0.8 else _COMPLETIONS,
        text=f"{shared}Tell me of {number}, in {chance.randrange(10**6)} words.",
        tokens=400 if manner is Manner.READS_SLOWLY else chance.randrange(1, 60),
        is_stream=chance.random() < 0.6,
        manner=manner,
        patience_s=chance.random() ** 2 * 0.5,
    )


class Caller:
    """Sends requests over connections that are kept while they are good."""

    def __init__(self, port: int, limits: Limits) -> None:
        self._port = port
        self._limits = limits
        self._kept: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def call(self, ask: Ask) -> End:
        """Ask, and judge the answer."""
        seen = Seen()
        limit_s = ask.patience_s if ask.manner is Manner.LEAVES else self._limits.answer_s
        try:
            reader, writer = await self._connection()
        except OSError as error:
            return End("wrong", f"no connection: {error}"[:_CAUSE_LETTERS])
        try:
            async with asyncio.timeout(limit_s):
                await self._send(writer, ask)
                await self._read(reader, ask, seen)
        except TimeoutError:
            if ask.manner is Manner.LEAVES:
                return End("left") if ask.expected.startswith(seen.text()) else End("wrong", "text of a broken answer")
            return End("wrong", f"no end after {limit_s:g} s")
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            return End("wrong", f"no answer: {type(error).__name__}: {error}"[:_CAUSE_LETTERS])
        finally:
            if seen.is_whole and seen.keeps:
                self._kept.append((reader, writer))
            else:
                writer.transport.abort()
        return judge(ask, seen)

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return one that the router hasn't closed."""
        while self._kept:
            reader, writer = self._kept.pop()
            if not reader.at_eof():
                return reader, writer
            writer.transport.abort()
        return await asyncio.open_connection(HOST, self._port)

    def close(self) -> None:
        """Part from the router."""
        while self._kept:
            _, writer = self._kept.pop()
            writer.transport.abort()

    async def _send(self, writer: asyncio.StreamWriter, ask: Ask) -> None:
        body = ask.body
        head = f"POST {ask.path} HTTP/1.1\r\nhost: soak\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        if ask.manner is not Manner.SENDS_SLOWLY:
            writer.write(head + body)
            return
        raw = head + body
        step = len(raw) // self._limits.slow_send_pieces + 1
        for start in range(0, len(raw), step):
            writer.write(raw[start : start + step])
            await asyncio.sleep(self._limits.slow_pause_s)

    async def _read(self, reader: asyncio.StreamReader, ask: Ask, seen: "Seen") -> None:
        seen.take_head(await reader.readuntil(b"\r\n\r\n"))
        try:
            while not seen.is_whole:
                await self._pause(ask)
                await self._some(reader, seen)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the answer was cut off

    async def _some(self, reader: asyncio.StreamReader, seen: "Seen") -> None:
        if not seen.is_chunked:
            seen.pieces.append(await reader.readexactly(seen.length_bytes))
            seen.is_whole = True
            return
        size = int(await reader.readuntil(b"\r\n"), 16)
        piece = await reader.readexactly(size + 2)
        seen.pieces.append(piece[:-2])
        seen.is_whole = not size

    async def _pause(self, ask: Ask) -> None:
        if ask.manner is Manner.READS_SLOWLY:
            await asyncio.sleep(self._limits.slow_pause_s)


class Seen:
    """What has come of one answer."""

    def __init__(self) -> None:
        self.status = 0
        self.length_bytes = 0
        self.is_chunked = False
        self.keeps = True
        self.is_whole = False
        self.pieces: list[bytes] = []

    def take_head(self, raw: bytes) -> None:
        """Read status and framing. Raises: ValueError."""
        head = raw.lower()
        self.status = int(head[9:12])
        self.is_chunked = b"transfer-encoding: chunked" in head
        self.keeps = b"connection: close" not in head
        if not self.is_chunked:
            self.length_bytes = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])

    @property
    def body(self) -> bytes:
        """What has come of the body."""
        return b"".join(self.pieces)

    @property
    def events(self) -> Sequence[str]:
        """What stands in each whole event of a stream."""
        whole = self.body.decode("utf-8", "replace").split("\n\n")[:-1]
        return [event.removeprefix("data: ") for event in whole]

    def text(self) -> str:
        """Return the text of the whole events of a stream; of anything else, nothing."""
        if self.status != 200 or not self.is_chunked:
            return ""
        events = self.events
        if events and events[-1].startswith(_ERROR):
            events = events[:-2]  # before the error may stand the first half of an event
        return "".join(_said(event) for event in events)


def judge(ask: Ask, seen: Seen) -> End:
    """Say whether an answer is right, failed and told so, or wrong."""
    try:
        if seen.status != 200:
            return _refused(seen)
        return _streamed(ask, seen) if ask.is_stream else _answered(ask, seen)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        return End("wrong", f"unreadable: {type(error).__name__}: {error}"[:_CAUSE_LETTERS])


def _refused(seen: Seen) -> End:
    told = json.loads(seen.body)
    if not seen.is_whole:
        return End("wrong", "an error that was cut off")
    return _failed(told, seen.status)


def _answered(ask: Ask, seen: Seen) -> End:
    if not seen.is_whole:
        return End("failed", "cut off")
    choice = json.loads(seen.body)["choices"][0]
    text = choice["message"]["content"] if ask.path == _CHAT else choice["text"]
    return End("right") if text == ask.expected else End("wrong", "text")


def _streamed(ask: Ask, seen: Seen) -> End:
    text, events = seen.text(), seen.events
    if not ask.expected.startswith(text):
        return End("wrong", "text")
    told = next((event for event in events if event.startswith(_ERROR)), None)
    if told is not None:
        return _failed(json.loads(told), 200)
    if not seen.is_whole:
        return End("failed", "cut off") if ask.manner is Manner.READS_SLOWLY else End("wrong", "cut off untold")
    if events[-1:] != ["[DONE]"]:
        return End("wrong", "a stream without its end")
    return End("right") if text == ask.expected else End("wrong", "text is short")


def _failed(told: dict[str, Any], status: int) -> End:
    """Name a failure by the router's code, or by the engine's status."""
    error = told.get("error")
    code = str(error.get("code")) if isinstance(error, dict) else ""
    if code in OURS_BROKEN:
        return End("wrong", code)
    return End("failed", f"{status} {code}" if error is not None and not code.isdigit() else f"engine's {status}")


def _said(event: str) -> str:
    if event == "[DONE]":
        return ""
    told = json.loads(event)
    choices = told.get("choices")
    if not choices:
        return ""
    choice = choices[0]
    return (choice["delta"].get("content") if "delta" in choice else choice.get("text")) or ""
