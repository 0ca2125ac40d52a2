"""Who may ask an emulated engine that was started with ``--api-key``."""

from collections.abc import Mapping

from pdrouter.sim.emulator_settings import EmulatorSettings

_OPEN_SGLANG = ("/health", "/metrics")
"""Source: SGLang 0.5.6 to 0.5.23 (``add_api_key_middleware``; later ``utils/auth.py``)."""

_GUARDED_VLLM = ("/v1", "/v2", "/inference", "/cohere")
"""Source: vLLM 0.32 (``entrypoints/serve/middleware/authenticate.py``)."""


def is_refused(settings: EmulatorSettings, path: str, headers: Mapping[str, str]) -> bool:
    """Whether a request lacks the key; the answer is 401 ``{"error": "Unauthorized"}`` on both engines.

    Bootstrap servers have no key.
    """
    if settings.api_key is None:
        return False
    is_open = path.startswith(_OPEN_SGLANG) if settings.engine == "sglang" else not path.startswith(_GUARDED_VLLM)
    return not is_open and headers.get("authorization") != f"Bearer {settings.api_key}"
