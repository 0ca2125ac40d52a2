"""A worker that costs next to nothing: both sides of a prefill/decode pair, with canned answers.

It answers the questions that routers ask of an SGLang server and checks nothing of the handshake (the
emulator does that): what a benchmark sees is the router's work. Run as a script it binds two free ports of
127.0.0.1 and prints them as one JSON line. Next: _cases.py, which knows the length of these answers.
"""

import asyncio
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import httptools
import uvloop

MODEL = "m"
# A folder that exists: sglang-router looks there for a tokenizer, and for a path that does not exist it asks the
# Hugging Face hub.
MODEL_PATH = str(Path(__file__).parent)
DP_SIZE = 4
# One step for all streams at a time, as an engine decodes its batch: far enough apart that a router reads the
# chunks of a stream one by one, close enough for 16 streams to make 8000 chunks a second.
STEP_S = 0.002

ANSWER = json.dumps(
    {
        "id": "chatcmpl-5f0c2c1b9d7e4a6f8b3a",
        "object": "chat.completion",
        "created": 1760000000,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "The quick brown fox jumps over it."},
                "logprobs": None,
                "finish_reason": "stop",
                "matched_stop": 2,
            }
        ],
        "usage": {
            "prompt_tokens": 21,
            "completion_tokens": 9,
            "total_tokens": 30,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    },
    separators=(",", ":"),
).encode()
CHUNK = (
    b'data: {"id":"chatcmpl-5f0c2c1b9d7e4a6f8b3a","object":"chat.completion.chunk","created":1760000000,'
    b'"model":"m","choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}],'
    b'"usage":null}\n\n'
)
DONE = b"data: [DONE]\n\n"

_STREAMED = re.compile(rb'"stream":\s*true')
_MAX_TOKENS = re.compile(rb'"max_(?:completion_)?tokens":\s*(\d+)')


def _json_reply(payload: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        status,
        len(payload),
        payload,
    )


def _framed(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


_ANSWER_REPLY = _json_reply(ANSWER)
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_STREAM_CHUNK = _framed(CHUNK)
_STREAM_END = _framed(DONE) + b"0\r\n\r\n"


def _facts(role: str) -> dict[bytes, bytes]:
    """Return replies to the questions that a router asks, by path."""
    server = {
        "model_path": MODEL_PATH,
        "served_model_name": MODEL,
        "tp_size": DP_SIZE,
        "dp_size": DP_SIZE,
        "disaggregation_mode": role,
        "disaggregation_bootstrap_port": 8998,
        "load_balance_method": "follow_bootstrap_room",
        "version": "0.5.10",
        "max_total_num_tokens": 1_000_000,
        "max_running_requests": 1024,
    }
    model = {"model_path": MODEL_PATH, "served_model_name": MODEL, "is_generation": True}
    card = {
        "id": MODEL,
        "object": "model",
        "created": 1760000000,
        "owned_by": "sglang",
        "max_model_len": 131072,
    }
    loads = [
        {
            "dp_rank": rank,
            "num_running_reqs": 0,
            "num_waiting_reqs": 0,
            "num_waiting_uncached_tokens": 0,
            "num_used_tokens": 0,
            "num_total_tokens": 0,
            "max_total_num_tokens": 1_000_000,
        }
        for rank in range(DP_SIZE)
    ]
    old_loads = [{"dp_rank": rank, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0} for rank in range(DP_SIZE)]
    bodies: dict[bytes, object] = {
        b"/health": {},
        b"/health_generate": {},
        b"/server_info": server,
        b"/get_server_info": server,
        b"/model_info": model,
        b"/get_model_info": model,
        b"/v1/models": {"object": "list", "data": [card]},
        b"/v1/loads": {"version": "0.5.10", "loads": loads},
        b"/get_load": old_loads,
        b"/abort_request": {},
    }
    return {path: _json_reply(json.dumps(body, separators=(",", ":")).encode()) for path, body in bodies.items()}


class Streams:
    """Writes one chunk to every open stream at each step; idle without streams."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._chunks_left: dict[asyncio.Transport, int] = {}
        self._next_at = 0.0
        self._is_stepping = False

    def open(self, transport: asyncio.Transport, chunks: int) -> None:
        """Start a stream of so many chunks; its head goes out now, its first chunk at the next step."""
        transport.write(_STREAM_HEAD)
        self._chunks_left[transport] = chunks
        if not self._is_stepping:
            self._is_stepping = True
            self._next_at = self._loop.time()
            self._loop.call_soon(self._step)

    def drop(self, transport: asyncio.Transport) -> None:
        """Forget a stream whose reader has gone."""
        self._chunks_left.pop(transport, None)

    def _step(self) -> None:
        for transport, left in list(self._chunks_left.items()):
            if left:
                transport.write(_STREAM_CHUNK)
                self._chunks_left[transport] = left - 1
            else:
                del self._chunks_left[transport]
                transport.write(_STREAM_END)
        self._is_stepping = bool(self._chunks_left)
        if self._is_stepping:
            # A step that came late does not make the next one early: two chunks would be read as one.
            self._next_at = max(self._next_at + STEP_S, self._loop.time() + STEP_S / 2)
            self._loop.call_at(self._next_at, self._step)


class Worker(asyncio.Protocol):
    """One connection of a router to the prefill or the decode side."""

    def __init__(self, facts: dict[bytes, bytes], chunks_of: Callable[[int], int], streams: Streams) -> None:
        self._facts = facts
        self._chunks_of = chunks_of
        self._streams = streams
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body: list[bytes] = []
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """End the stream that was being written, if any."""
        self._streams.drop(self._transport)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, which calls the `on_` methods."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:  # a router asks whether we speak HTTP/2
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        """Take the path; it comes in pieces when the head does."""
        self._url += url

    def on_body(self, body: bytes) -> None:
        """Collect the body."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """Answer the request."""
        path = self._url.partition(b"?")[0]
        body = b"".join(self._body)
        self._url, self._body = b"", []
        if path not in {b"/v1/chat/completions", b"/v1/completions", b"/generate"}:
            self._transport.write(self._facts.get(path) or _json_reply(b"{}", b"404 Not Found"))
        elif _STREAMED.search(body):
            asked = _MAX_TOKENS.search(body)
            self._streams.open(self._transport, self._chunks_of(int(asked[1]) if asked else 1))
        else:
            self._transport.write(_ANSWER_REPLY)


def _all(asked: int) -> int:
    return asked


def _first_only(asked: int) -> int:
    """Prefill makes one token."""
    return min(asked, 1)


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    streams = Streams(loop)
    servers: dict[str, asyncio.Server] = {}
    for role, chunks_of in (("prefill", _first_only), ("decode", _all)):
        connect = partial(Worker, _facts(role), chunks_of, streams)
        servers[role] = await loop.create_server(connect, "127.0.0.1", 0)
    print(json.dumps({role: server.sockets[0].getsockname()[1] for role, server in servers.items()}), flush=True)
    # The parent holds our stdin open as long as it lives.
    await loop.run_in_executor(None, sys.stdin.buffer.read)


if __name__ == "__main__":
    uvloop.run(_serve())
