"""Settings of an emulated engine, and the error that it answers with."""

from typing import Literal

import msgspec

from pdrouter.sim.profiles import DEFAULT_PROFILE, load_profile
from pdrouter.sim.text import BYTES_PER_TOKEN

MAX_ROOM = (1 << 63) - 1


class EmulatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to emulate. Ports: 0 lets the kernel choose. Times marked "engine" are divided by ``speed``.

    ``load_delay``: seconds that load reports are old. ``stream_interval``: tokens per streamed chunk, as in
    SGLang. ``handshake_timeout_s`` (engine): how long a prefill holds KV that nobody fetches, and a decode
    waits for KV after it has reserved room.
    ``waits_for_decode``: a prefill starts only when its decode side has reserved KV, as SGLang's bootstrap
    queue has it; else it starts at once and its KV waits in flight. ``tick_s``: timers fire no oftener, so
    chunks of steps shorter than that leave together.
    """

    engine: Literal["sglang"] = "sglang"
    role: Literal["prefill", "decode", "regular"] = "regular"
    dp_size: int = 1
    profile: str = DEFAULT_PROFILE
    speed: float = 1.0
    host: str = "127.0.0.1"
    port: int = 0
    bootstrap_port: int = 0
    model: str = "emulated"
    load_api: Literal["both", "v1", "legacy", "none"] = "both"
    stream_interval: int = 1
    kv_capacity_tokens: int | None = None
    load_delay: float = 0.0
    faults_enabled: bool = True
    server_version: str = "0.5.23"
    bytes_per_token: int = BYTES_PER_TOKEN
    default_output_tokens: int = 128
    handshake_timeout_s: float = 300.0
    waits_for_decode: bool = False
    tick_s: float = 0.001

    def __post_init__(self) -> None:
        if self.dp_size < 1 or self.speed <= 0 or self.stream_interval < 1 or self.bytes_per_token < 1:
            raise ValueError("dp_size, speed, stream_interval and bytes_per_token must be positive")
        load_profile(self.profile)

    @property
    def takes_routed_fields(self) -> bool:
        """Whether this version knows ``routed_dp_rank`` and the ``x-override-*`` headers."""
        parts = self.server_version.split(".")[:3]
        return [int(part) if part.isdigit() else 0 for part in parts] >= [0, 5, 10]


class EngineError(Exception):
    """An answer that isn't 200. ``code`` names the cause in ``snapshot().errors``."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message

    def body(self) -> dict[str, object]:
        """Error object in SGLang's shape."""
        kind = "BadRequestError" if self.status == 400 else "InternalServerError"
        return {
            "object": "error",
            "message": self.message,
            "type": kind,
            "param": None,
            "code": self.status,
        }
