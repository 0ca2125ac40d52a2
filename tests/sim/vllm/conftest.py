"""Fixtures of the emulated vLLM's tests."""

from typing import Any

import pytest

from .legs import make_pair


@pytest.fixture
def new_vllm_pair(client: Any) -> Any:
    """Maker of pairs."""
    return lambda **settings: make_pair(client, **settings)
