"""Short prompts over live engines, under ``cache_aware``."""

import asyncio
from collections.abc import Mapping

import pytest

from tests.lab import CHAT, GENERATE, make_lab

PROMPT = "What is the answer to it?"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"model": "emulated", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}),
        (GENERATE, {"text": PROMPT, "sampling_params": {"max_new_tokens": 2}}),
        (GENERATE, {"input_ids": list(range(25)), "sampling_params": {"max_new_tokens": 2}}),
    ],
)
@pytest.mark.parametrize("at_once", [1, 12])
async def test_a_repeated_prompt_goes_to_the_worker_that_has_it(
    path: str, body: Mapping[str, object], at_once: int
) -> None:
    """One after the other, and all at once."""
    async with make_lab(0, 0, 2, policy="cache_aware") as lab:
        for _ in range(0, 12, at_once):
            replies = await asyncio.gather(*(lab.post(path, body) for _ in range(at_once)))
            assert {reply.status for reply in replies} == {200}
        assert sorted(worker.snapshot().total_requests for worker in lab.workers) == [0, 12]
