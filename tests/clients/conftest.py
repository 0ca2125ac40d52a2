"""Fleets for every client."""

from collections.abc import AsyncIterator

import pytest

from tests.clients.fleets import nothing_left
from tests.lab import Lab, make_lab


@pytest.fixture(params=["sglang", "vllm", "trtllm"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Lab]:
    """A prefill and a decode engine of each kind that has them; after each test it is at rest."""
    async with make_lab(engine={"engine": request.param, "speed": 50.0}, disaggregation="always") as lab:
        yield lab
        await nothing_left(lab)


@pytest.fixture
async def vllm_pair() -> AsyncIterator[Lab]:
    """A pair of the engine that has the most APIs; after each test it is at rest."""
    async with make_lab(engine={"engine": "vllm", "speed": 50.0}, disaggregation="always") as lab:
        yield lab
        await nothing_left(lab)
