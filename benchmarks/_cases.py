"""What the benchmark sends: small and large requests, and streams; the same bytes in every run."""

import json
import random

from _load import Case
from _worker import ANSWER, CHUNK, DONE, MODEL

CHUNKS = 512
LARGE_BYTES = 130_000
SMALL_BYTES = 60
DISTINCT_REQUESTS = 32


def make_cases() -> dict[str, Case]:
    """Return the cases by name."""
    rng = random.Random(0)
    streamed_bytes = CHUNKS * len(CHUNK) + len(DONE)
    return {
        "small": Case("small", _requests(rng, SMALL_BYTES), len(ANSWER), ANSWER[-16:]),
        "large": Case("large", _requests(rng, LARGE_BYTES), len(ANSWER), ANSWER[-16:]),
        "stream": Case("stream", _requests(rng, SMALL_BYTES, CHUNKS), streamed_bytes, DONE),
    }


def _requests(rng: random.Random, prompt_bytes: int, chunks: int = 0) -> tuple[bytes, ...]:
    return tuple(_request(_prompt(rng, prompt_bytes), chunks) for _ in range(DISTINCT_REQUESTS))


def _request(prompt: str, chunks: int) -> bytes:
    fields = {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": prompt},
        ],
        "max_tokens": chunks or 16,
        "temperature": 0.7,
        "stream": bool(chunks),
    }
    body = json.dumps(fields).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    head += "accept: */*\r\nuser-agent: benchmark\r\nauthorization: Bearer none\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def _prompt(rng: random.Random, length: int) -> str:
    """Return words and line ends, so that JSON has something to escape."""
    words: list[str] = []
    written = 0
    while written < length:
        word = "".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9)))
        words.append(word + ("\n" if rng.random() < 0.05 else " "))
        written += len(words[-1])
    return "".join(words)[:length]
