"""Pairs of emulated TensorRT-LLM engines, and the two legs that a router would send them."""

import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

from pdrouter.sim.emulator import Emulator, EmulatorSettings, start_emulator

FAST = 200.0
TEXT = "The prompt of these tests is long enough to fill a block or two. " * 8
CHAT: dict[str, Any] = {"model": "emulated", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 6}
TEXTS: dict[str, Any] = {"model": "emulated", "prompt": TEXT, "max_tokens": 6}
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
FIRST_ID = 7_000_000_000_000_000_001
"""Beyond 2^53, so that a float on the way would show."""


class TrtllmPair:
    """A context and a generation emulator, and the right two legs for them."""

    def __init__(self, client: Any, context: Emulator, generation: Emulator) -> None:
        self.client = client
        self.context = context
        self.generation = generation
        self._ids = itertools.count(FIRST_ID)

    def params(self, **fields: object) -> dict[str, object]:
        """A context leg's object, with a new id."""
        return {"request_type": "context_only", "disagg_request_id": next(self._ids)} | fields

    async def context_leg(self, path: str, body: dict[str, Any], **fields: Any) -> Any:
        """Send a context leg as a router should; ``fields`` change it."""
        leg = body | {"max_tokens": 1, "stream": False, "disaggregated_params": self.params()} | fields
        return await self.client.send(self.context.url, path, leg)

    async def context_answer(self, path: str, body: dict[str, Any]) -> Any:
        """Send a good context leg; return its answer."""
        reply = await self.context_leg(path, body)
        assert reply.status == 200, reply.body
        return reply.json()

    async def generation_leg(self, path: str, body: dict[str, Any], answer: Any, **fields: Any) -> Any:
        """Send the leg that follows an answer; ``fields`` change its object, None takes a field out."""
        params = answer["choices"][0]["disaggregated_params"] | {"request_type": "generation_only"} | fields
        name = "prompt_token_ids" if path == CHAT_PATH else "prompt"
        leg = body | {name: answer["prompt_token_ids"], "disaggregated_params": params}
        return await self.client.send(self.generation.url, path, leg)

    async def both(self, path: str, body: dict[str, Any], **fields: Any) -> Any:
        """Send both legs, one after the other; return the second's reply."""
        return await self.generation_leg(path, body, await self.context_answer(path, body), **fields)

    @property
    def is_idle(self) -> bool:
        return self.context.snapshot().is_idle and self.generation.snapshot().is_idle


@contextlib.asynccontextmanager
async def make_trtllm_pair(client: Any, **settings: Any) -> AsyncIterator[TrtllmPair]:
    """Pair of emulators with these settings; nothing times out unless they say so."""
    defaults: dict[str, Any] = {"engine": "trtllm", "speed": FAST, "handshake_timeout_s": 1e6, "kv_hold_timeout_s": 1e6}
    settings = defaults | settings
    async with (
        start_emulator(EmulatorSettings(role="prefill", **settings)) as context,
        start_emulator(EmulatorSettings(role="decode", **settings)) as generation,
    ):
        yield TrtllmPair(client, context, generation)
