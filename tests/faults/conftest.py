"""These tests run on uvloop, as the router does in life."""

import asyncio
from collections.abc import Callable

import pytest
import uvloop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every test of this folder on uvloop."""
    return {"uvloop": uvloop.new_event_loop}
