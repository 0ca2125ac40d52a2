"""``python -m tests.abuse.honest URL RATE``: honest traffic from a process of its own, so that nobody's work delays it.

Requests are due at a steady rate, and latency runs from when a request was due. For each line on its input it prints
one of JSON: what has ended since the line before.
"""

import asyncio
import json
import sys
import time
from typing import Any

import msgspec
import uvloop

from pdrouter.sim.emulator import expected_text, render_chat
from tests.lab import CHAT, Call, chat, connect

TOKENS = 4
TIMEOUT_S = 20.0
KEY = {"authorization": "Bearer honest", "content-type": "application/json"}


class Report(msgspec.Struct):
    """What has ended: latencies in seconds, and what was wrong."""

    latencies_s: list[float]
    wrong: list[str]

    def percentile_s(self, share: float) -> float:
        """Return the latency that this share of the requests did not exceed."""
        ordered = sorted(self.latencies_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


class Honest:
    """Sends requests over connections that are kept."""

    def __init__(self, url: str) -> None:
        self.report = Report([], [])
        self._url = url
        self._kept: list[Call] = []

    async def run(self, rate_per_s: float) -> None:
        """Send requests for ever."""
        began_s, number = time.monotonic(), 0
        async with asyncio.TaskGroup() as group:
            while True:
                due_s = began_s + number / rate_per_s
                await asyncio.sleep(due_s - time.monotonic())
                group.create_task(self._one(number, due_s))
                number += 1

    async def _one(self, number: int, due_s: float) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                wrong = await self._ask(number)
        except (OSError, EOFError, TimeoutError) as error:
            wrong = repr(error)
        if wrong:
            self.report.wrong.append(wrong)
        else:
            self.report.latencies_s.append(time.monotonic() - due_s)

    async def _connection(self) -> Call:
        """Return one that the router hasn't closed meanwhile, as it does with idle ones."""
        while self._kept:
            call = self._kept.pop()
            if not call.reader.at_eof():
                return call
            await call.leave()
        return await connect(self._url)

    async def _ask(self, number: int) -> str:
        """Return what is wrong with the answer, if anything is."""
        call = await self._connection()
        body: Any = chat(f"honest {number}", TOKENS)
        call.send("POST", CHAT, json.dumps(body).encode(), KEY)
        reply = await call.finish()
        if reply.headers.get("connection") != "close":
            self._kept.append(call)
        else:
            await call.leave()
        if reply.status != 200:
            return f"{reply.status} {reply.body[:120]!r}"
        text = reply.json()["choices"][0]["message"]["content"]
        return "" if text == expected_text(render_chat(body["messages"]), TOKENS) else f"another text: {text[:80]}"


async def main() -> None:
    """Run until the input ends."""
    honest = Honest(sys.argv[1])
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    traffic = asyncio.create_task(honest.run(float(sys.argv[2])))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while await reader.readline():
        report, honest.report = honest.report, Report([], [])
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
        sys.stdout.flush()
    traffic.cancel()


if __name__ == "__main__":
    uvloop.run(main())
