"""A prefill engine that is gone, or not ready yet: what an emulated SGLang decode engine does, and ``/health``."""

import asyncio
from typing import Any

import msgspec
import pytest

from pdrouter.sim.emulator import EmulatorSettings, start_emulator

GENERATE = {"text": "hello", "sampling_params": {"max_new_tokens": 2}}
QUICK = {"speed": 200.0, "prefill_patience_s": 10.0}


@pytest.mark.parametrize("is_stream", [False, True])
async def test_what_waits_fails_when_the_prefill_is_gone(new_pair: Any, until: Any, is_stream: bool) -> None:
    """Not at once, and long before its own time limit."""
    async with new_pair(**QUICK) as pair:
        body = GENERATE | pair.bootstrap() | {"stream": is_stream}
        call = await pair.client.start(pair.decode.url, "/generate", body)
        await until(lambda: pair.prefill.snapshot().wanted_rooms == [body["bootstrap_room"]])
        began_s = asyncio.get_running_loop().time()
        await pair.prefill.stop()
        reply = await call.finish()
        assert asyncio.get_running_loop().time() - began_s >= 10.0 / 200.0
        assert b"Lost connection with prefill instance" in reply.body
        assert reply.status == (200 if is_stream else 500)
        assert pair.decode.snapshot().errors == {"prefill_lost": 1}
        await until(lambda: pair.decode.snapshot().is_idle)


async def test_one_that_is_there_again_is_not_missed(new_pair: Any, until: Any) -> None:
    """Its heartbeats are answered; what waits for KV of the old one waits on."""
    async with new_pair(**QUICK) as pair:
        body = GENERATE | pair.bootstrap()
        call = await pair.client.start(pair.decode.url, "/generate", body)
        await until(lambda: pair.prefill.snapshot().wanted_rooms == [body["bootstrap_room"]])
        port = pair.prefill.bootstrap_port
        await pair.prefill.stop()
        asked = asyncio.Event()

        async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.set()
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", port):
            await asked.wait()
        assert pair.decode.snapshot().requests == 1
        await call.abandon()
        await until(lambda: pair.decode.snapshot().is_idle)
        assert pair.decode.snapshot().errors == {}


async def test_a_handshake_is_tried_again(new_pair: Any, until: Any) -> None:
    """A prefill that is there within that time is found."""
    async with new_pair(speed=200.0, prefill_patience_s=600.0) as pair:
        settings = EmulatorSettings(role="prefill", speed=200.0, dp_size=4, dp_attention=True)
        async with start_emulator(settings) as first:
            port = first.bootstrap_port or 0
        body = GENERATE | pair.bootstrap(bootstrap_port=port)
        decode = await pair.client.start(pair.decode.url, "/generate", body)
        await until(lambda: pair.decode.snapshot().requests == 1)
        async with start_emulator(msgspec.structs.replace(settings, bootstrap_port=port)) as second:
            prefill = await pair.client.send(second.url, "/generate", body)
            assert (prefill.status, (await decode.finish()).status) == (200, 200)
        assert pair.decode.snapshot().errors == {}


@pytest.mark.parametrize("path", ["/health", "/health_generate"])
async def test_health_while_it_starts(client: Any, path: str) -> None:
    """503, though it listens and describes itself."""
    async with start_emulator(EmulatorSettings(start_s=1e6)) as emulator:
        assert (await client.send(emulator.url, path)).status == 503
        assert (await client.send(emulator.url, "/server_info")).status == 200
    async with start_emulator(EmulatorSettings(start_s=0.2, speed=10.0)) as emulator:
        while (await client.send(emulator.url, path)).status != 200:
            assert emulator.engine.now_s() < 60.0
