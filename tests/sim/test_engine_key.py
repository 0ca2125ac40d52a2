"""What an emulated engine that was started with a key leaves open; as SGLang and vLLM do."""

import pytest
from tests.lab import get, post

from pdrouter.sim.emulator import EmulatorSettings, start_emulator

HEADERS = {"authorization": "Bearer k"}


@pytest.mark.parametrize(
    ("engine", "opened", "closed"),
    [
        ("sglang", ["/health", "/health_generate"], ["/server_info", "/v1/models", "/v1/loads", "/model_info", "/no"]),
        ("vllm", ["/health", "/metrics", "/version", "/load"], ["/v1/models"]),
    ],
)
async def test_what_is_open(engine: str, opened: list[str], closed: list[str]) -> None:
    """Without the key."""
    async with start_emulator(EmulatorSettings(engine=engine, speed=100.0, api_key="k")) as emulator:  # type: ignore[arg-type]
        assert [(await get(emulator.url, path)).status for path in opened] == [200] * len(opened)
        for path in closed:
            reply = await get(emulator.url, path)
            assert (reply.status, reply.json()) == (401, {"error": "Unauthorized"})
        body = {"model": "emulated", "prompt": "x", "max_tokens": 2}
        assert (await post(emulator.url, "/v1/completions", body)).status == 401
        assert (await post(emulator.url, "/v1/completions", body, {"authorization": "Bearer x"})).status == 401
        assert (await post(emulator.url, "/v1/completions", body, HEADERS)).status == 200


def test_others_have_no_key() -> None:
    """Nothing is known of theirs."""
    with pytest.raises(ValueError, match="api_key"):
        EmulatorSettings(engine="trtllm", api_key="k")
