"""Settings of an emulated engine, and the error that it answers with."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from pdrouter.sim.profiles import DEFAULT_PROFILE, load_profile
from pdrouter.sim.sglang_version import SglangVersion, sglang_version
from pdrouter.sim.text import BYTES_PER_TOKEN

MAX_ROOM = (1 << 63) - 1

_VERSIONS: Mapping[str, str] = {"sglang": "0.5.23", "vllm": "0.32.0", "trtllm": "1.2.0", "openai": "1"}


class EmulatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to emulate. Ports: 0 lets the kernel choose. Times marked "engine" are divided by ``speed``.

    ``load_delay``: seconds that load reports are old. ``stream_interval``: tokens per streamed chunk, as in
    SGLang. ``handshake_timeout_s`` (engine): how long a prefill holds KV that nobody fetches, and a decode
    waits for KV after it has reserved room.
    ``waits_for_decode``: a prefill starts only when its decode side has reserved KV, as SGLang's bootstrap
    queue has it; else it starts at once and its KV waits in flight. ``tick_s``: timers fire no oftener, so
    chunks of steps shorter than that leave together. ``bootstrap_port``: where the other side fetches KV.

    ``api_key``: what ``--api-key`` asks for, of SGLang and vLLM.

    SGLang: ``dp_attention``: its ranks share one tensor-parallel group, else they are replicas. ``load_balance_method``
    of its ranks; auto is follow_bootstrap_room for a prefill, else round_robin. ``load_api`` auto: as its version has
    it. ``prefill_patience_s`` (engine): how long a decode waits for a prefill engine that is gone. ``start_s``
    (engine): how long ``/health`` says that it isn't ready yet. ``takes_overrides``: what
    ``SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES`` switches on.

    vLLM: ``kv_connector`` None is nixl for prefill and decode, and none for regular engines. ``dp_start_rank``: the
    first of its ranks, which are numbered over all servers of a deployment. ``kv_hold_timeout_s`` (engine): how long
    an answered prefill keeps its KV, TensorRT-LLM's too. ``storage_dir``: the store of shared_storage.
    ``tells_cached_tokens``, ``tracks_server_load``, ``takes_aborts``: what ``--enable-prompt-tokens-details``,
    ``--enable-server-load-tracking`` and ``--tokens-only`` switch on.
    """

    engine: Literal["sglang", "vllm", "trtllm", "openai"] = "sglang"
    role: Literal["prefill", "decode", "regular"] = "regular"
    dp_size: int = 1
    profile: str = DEFAULT_PROFILE
    speed: float = 1.0
    host: str = "127.0.0.1"
    port: int = 0
    bootstrap_port: int = 0
    model: str = "emulated"
    load_api: Literal["auto", "both", "v1", "legacy", "none"] = "auto"
    stream_interval: int = 1
    kv_capacity_tokens: int | None = None
    load_delay: float = 0.0
    faults_enabled: bool = True
    server_version: str | None = None
    bytes_per_token: int = BYTES_PER_TOKEN
    default_output_tokens: int = 128
    handshake_timeout_s: float = 300.0
    waits_for_decode: bool = False
    tick_s: float = 0.001
    dp_attention: bool = False
    load_balance_method: Literal["auto", "round_robin", "follow_bootstrap_room"] = "auto"
    takes_overrides: bool = False
    prefill_patience_s: float = 14.0
    start_s: float = 0.0
    kv_connector: Literal["nixl", "mooncake", "p2p_nccl", "shared_storage"] | None = None
    dp_start_rank: int = 0
    kv_hold_timeout_s: float = 480.0
    storage_dir: str | None = None
    tells_cached_tokens: bool = True
    tracks_server_load: bool = False
    takes_aborts: bool = False
    api_key: str | None = None

    def __post_init__(self) -> None:
        if self.dp_size < 1 or self.speed <= 0 or self.stream_interval < 1 or self.bytes_per_token < 1:
            raise ValueError("dp_size, speed, stream_interval and bytes_per_token must be positive")
        if self.dp_start_rank < 0:
            raise ValueError("dp_start_rank must not be negative")
        if self.engine == "openai" and self.role != "regular":
            raise ValueError("an openai engine is a regular one")
        if self.kv_connector is not None and self.engine != "vllm":
            raise ValueError("kv_connector is vLLM's")
        if self.kv_connector == "shared_storage" and self.storage_dir is None:
            raise ValueError("shared_storage needs storage_dir")
        if self.kv_connector == "p2p_nccl" and self.role == "regular":
            raise ValueError("p2p_nccl needs a role: prefill or decode")
        if self.api_key is not None and self.engine not in ("sglang", "vllm"):
            raise ValueError("api_key is SGLang's and vLLM's")
        load_profile(self.profile)

    @property
    def version(self) -> str:
        """Version that it says it is."""
        return self.server_version or _VERSIONS[self.engine]

    @property
    def sglang(self) -> SglangVersion:
        """What its version of SGLang does."""
        return sglang_version(self.version)

    @property
    def follows_rooms(self) -> bool:
        """SGLang: whether a request that names no rank runs on the one that its room gives."""
        if self.sglang.always_follows:
            return self.role != "regular"
        if self.load_balance_method == "auto":
            return self.role == "prefill"
        return self.load_balance_method == "follow_bootstrap_room"

    @property
    def load_paths(self) -> frozenset[str]:
        """SGLang: where it tells its load."""
        v1, legacy = self.sglang.has_loads, self.sglang.has_get_load
        if self.load_api != "auto":
            v1, legacy = self.load_api in {"both", "v1"}, self.load_api in {"both", "legacy"}
        return frozenset(["/v1/loads"] * v1 + ["/get_load"] * legacy)


class EngineError(Exception):
    """An answer that isn't 200. ``code`` names the cause in ``snapshot().errors``."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message

    @property
    def kind(self) -> str:
        """Name of the kind of error, as OpenAI-like servers tell it."""
        return "BadRequestError" if self.status == 400 else "InternalServerError"
