"""How much memory do clients that hardly read cost? Each reads 1 KB a second of a stream that comes as fast as it can.

A process of its own plays both engines of a pair, whose streams have no end; this one plays the readers. Exit status 1:
the router's memory with all of them is beyond 300 MiB, or 1 MiB for each above what it is without them. See README.md.
"""

import argparse
import asyncio
import json
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import uvloop

from _routers import Ports, Router, pdrouter

HOST = "127.0.0.1"
MIB = 1 << 20
MOST_BYTES = 300 * MIB
MOST_BYTES_EACH = MIB
START_S = 30.0
RECEIVE_BYTES = 4096
FILES_EACH = 4

EVENT = b'data: {"id":"chatcmpl-5f0c","choices":[{"index":0,"delta":{"content":" token"},"finish_reason":null}]}\n\n'
CHUNKS = b"%x\r\n%b\r\n" % (len(EVENT), EVENT) * 100
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true,"max_tokens":1000000}'
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)


async def answer(role: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Be an engine on one connection."""
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int((head.partition(b"content-length: ")[2] or b"0\r\n").split(b"\r\n")[0]))
            if head.startswith(b"post /v1/chat") and role == "decode":
                writer.write(STREAM)
                while True:
                    writer.write(CHUNKS)
                    await writer.drain()
            body = json.dumps({"disaggregation_mode": role, "dp_size": 4, "served_model_name": "m"}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    except (OSError, asyncio.IncompleteReadError):
        writer.transport.abort()


async def play_engines() -> None:
    """Be both engines until standard input ends."""
    ports = []
    for role in ("prefill", "decode"):
        server = await asyncio.start_server(partial(answer, role), HOST, 0)
        ports.append(server.sockets[0].getsockname()[1])
    print(json.dumps(ports), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


@contextmanager
def engines() -> Iterator[Ports]:
    """Run the engines."""
    command = [sys.executable, __file__, "--play-engines"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield Ports(*json.loads(process.stdout.readline()))
        finally:
            process.stdin.close()
            process.terminate()


class Readers:
    """Clients that take a little now and then."""

    def __init__(self, port: int, bytes_per_s: int) -> None:
        self.port = port
        self.bytes_per_s = bytes_per_s
        self.taken_bytes = 0
        self.ended = 0

    async def read(self) -> None:
        """Be one of them."""
        loop = asyncio.get_running_loop()
        with socket.socket() as sock:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
            await loop.sock_connect(sock, (HOST, self.port))
            await loop.sock_sendall(sock, REQUEST)
            while taken := await loop.sock_recv(sock, self.bytes_per_s):
                self.taken_bytes += len(taken)
                await asyncio.sleep(1.0)
            self.ended += 1


async def measure(options: argparse.Namespace, router: Router) -> bool:
    """Print the figures; return whether they are good."""
    process = psutil.Process(router.pid)
    before = process.memory_info().rss
    readers = Readers(router.port, options.bytes_per_s)
    reading = [asyncio.ensure_future(readers.read()) for _ in range(options.readers)]
    peak, cpu_s, began_s = before, router.cpu_s(), time.perf_counter()
    while time.perf_counter() - began_s < options.seconds:
        await asyncio.sleep(0.25)
        peak = max(peak, process.memory_info().rss)
    cpu_s = router.cpu_s() - cpu_s
    for task in reading:
        task.cancel()
    failed = [e for e in await asyncio.gather(*reading, return_exceptions=True) if isinstance(e, OSError)]
    each = (peak - before) / options.readers
    print(f"{options.readers} readers of {options.bytes_per_s} bytes/s for {options.seconds:g} s")
    print(f"router memory: {before / MIB:.1f} MiB, with them {peak / MIB:.1f} MiB at most: {each / 1024:.0f} KiB each")
    print(f"taken by a reader: {readers.taken_bytes / options.readers / 1024:.1f} KiB; router CPU: {cpu_s:.1f} s")
    print(f"ended early: {readers.ended + len(failed)}")
    return peak < MOST_BYTES and each < MOST_BYTES_EACH and not readers.ended and not failed


def main() -> int:
    """Measure; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--readers", type=int, default=500, help="how many (%(default)s)")
    parser.add_argument("--bytes-per-s", type=int, default=1024, help="what each reads (%(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="for how long (%(default)s)")
    parser.add_argument("--play-engines", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the others inherit it
    if options.play_engines:
        uvloop.run(play_engines())
        return 0
    if 0 <= hard < options.readers * FILES_EACH:
        print(f"only {hard} files may be open: fewer readers", file=sys.stderr)
        options.readers = hard // FILES_EACH
    with (
        tempfile.TemporaryDirectory() as scratch,
        engines() as ports,
        pdrouter([sys.executable, "-m", "pdrouter", "serve"], ports, Path(scratch), START_S) as router,
    ):
        return 0 if uvloop.run(measure(options, router)) else 1


if __name__ == "__main__":
    sys.exit(main())
