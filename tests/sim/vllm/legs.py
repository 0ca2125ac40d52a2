"""Pairs of emulated vLLM engines, and the two legs that a router would send them."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import Any

from pdrouter.sim.emulator import Emulator, EmulatorSettings, start_emulator

FAST = 200.0
TEXT = "The prompt of these tests is long enough to fill a block or two. " * 8
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 6}
TEXTS: dict[str, Any] = {"prompt": TEXT, "max_tokens": 6}
PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"


class VllmPair:
    """A prefill and a decode emulator with one connector, and the right two legs for it."""

    def __init__(self, client: Any, prefill: Emulator, decode: Emulator) -> None:
        self.client = client
        self.prefill = prefill
        self.decode = decode

    async def prefill_leg(self, path: str, body: dict[str, Any], headers: Any = None, **fields: Any) -> Any:
        """Send a serial prefill leg as a router should; ``fields`` change it."""
        leg = body | {"max_tokens": 1, "stream": False} | fields
        return await self.client.send(self.prefill.url, path, leg, headers)

    async def nixl(self, path: str, body: dict[str, Any], **decode: Any) -> tuple[Any, Any]:
        """Send both NIXL legs, one after the other; ``decode`` changes the params between them."""
        first = await self.prefill_leg(path, body, kv_transfer_params=PREFILL_PARAMS)
        assert first.status == 200, first.body
        params = first.json()["kv_transfer_params"] | decode
        return first, await self.client.send(self.decode.url, path, body | {"kv_transfer_params": params})

    async def engine_ids(self) -> list[str]:
        """Engine ids by rank, as Mooncake's bootstrap server tells them."""
        reply = await self.client.send(f"http://127.0.0.1:{self.prefill.bootstrap_port}", "/query")
        return [engine["engine_id"] for engine in reply.json().values()]

    async def mooncake_legs(self, body: dict[str, Any], rank: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
        """Bodies of both Mooncake legs."""
        transfer_id = f"xfer-{uuid.uuid4()}"
        send = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        fetch = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "remote_bootstrap_addr": f"http://127.0.0.1:{self.prefill.bootstrap_port}",
            "remote_engine_id": (await self.engine_ids())[rank],
        }
        prefill = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": send}
        return prefill, body | {"kv_transfer_params": fetch}

    async def both(self, path: str, prefill: Any, decode: Any) -> tuple[Any, Any]:
        """Send both legs at once."""
        return await asyncio.gather(
            self.client.send(self.prefill.url, path, prefill), self.client.send(self.decode.url, path, decode)
        )

    def p2p_id(self) -> dict[str, str]:
        """A new P2P NCCL request id that names both engines."""
        prefill, decode = f"127.0.0.1:{self.prefill.bootstrap_port}", f"127.0.0.1:{self.decode.bootstrap_port}"
        return {"X-Request-Id": f"___prefill_addr_{prefill}___decode_addr_{decode}_{uuid.uuid4().hex}"}

    @property
    def is_idle(self) -> bool:
        return self.prefill.snapshot().is_idle and self.decode.snapshot().is_idle


@contextlib.asynccontextmanager
async def make_pair(client: Any, **settings: Any) -> AsyncIterator[VllmPair]:
    """Pair of emulators with these settings; nothing times out unless they say so."""
    defaults: dict[str, Any] = {"engine": "vllm", "speed": FAST, "handshake_timeout_s": 1e6, "kv_hold_timeout_s": 1e6}
    settings = defaults | settings
    async with (
        start_emulator(EmulatorSettings(role="prefill", **settings)) as prefill,
        start_emulator(EmulatorSettings(role="decode", **settings)) as decode,
    ):
        yield VllmPair(client, prefill, decode)
