"""The router's own API against its OpenAPI document: schemathesis looks for requests whose answers aren't as declared.

The router runs over emulators. Requests are drawn by hypothesis, always the same ones.
"""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from pdrouter.errors import InvariantViolation
from pdrouter.proxy import openapi
from pdrouter.proxy.bodies import TASKS, Api
from tests.lab import make_lab

schemathesis: Any = pytest.importorskip("schemathesis")

PATHS = frozenset(Api)
ABSENT = "http://127.0.0.1:1"
ASKED: dict[str, object] = {"model": "emulated", "messages": [{"role": "user", "content": "Why?"}]}
ASKED |= {"prompt": "Why?", "text": "Why?", "input": "Why?"}
SHORT: dict[str, object] = {
    "max_tokens": 2,
    "max_completion_tokens": 2,
    "max_output_tokens": 2,
    "sampling_params": {"max_new_tokens": 2},
}
TIMEOUT = "x-request-timeout-ms"

METHODS = ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
"""Those that a path must refuse if it doesn't have them; what isn't a method here gets 501."""

ALIKE = [api.value for api in Api if api not in TASKS and api not in (Api.TOKENIZE, Api.TRANSCRIPTIONS)]
"""These differ from others by nothing but their names."""

CONFIG = schemathesis.Config.from_dict(
    {
        "phases": {"coverage": {"unexpected-methods": METHODS}},
        "generation": {"allow-extra-parameters": False},  # other headers are no fault
    }
)
API = schemathesis.openapi.from_dict(json.loads(openapi.page()), config=CONFIG).exclude(path=ALIKE)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Run a router over a pair and a regular engine, in a thread of its own; at the end its books are right."""
    started: list[str] = []
    is_up, loop = threading.Event(), asyncio.new_event_loop()
    over = asyncio.Event()

    async def run() -> None:
        async with make_lab(1, 1, 1) as lab:
            lab.router.service.changes.add("regular", {"url": ABSENT})
            started.append(lab.url)
            is_up.set()
            await over.wait()
            await lab.settled(within_s=10)
            assert not lab.router.service.supervisor.counts.total()

    task = loop.create_task(run())
    task.add_done_callback(lambda _: is_up.set())
    thread = threading.Thread(target=loop.run_until_complete, args=(task,))
    thread.start()
    assert is_up.wait(10)
    try:
        yield started[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()
    task.result()


def stay_here(case: Any) -> None:
    """Let workers that are to join be on this machine, where nothing listens."""
    for given in (case.body, case.query):
        if isinstance(given, dict) and isinstance(given.get("url"), str) and len(given["url"]) % 2:
            given["url"] = ABSENT

    if isinstance(worker_id := case.path_parameters.get("worker_id"), str) and len(worker_id) % 2:
        case.path_parameters["worker_id"] = ABSENT.removeprefix("http://")


def make_sense(case: Any) -> None:
    """Of good requests: let every other one have a body that an engine may answer, in short, and enough time."""
    if case.path not in PATHS or case.meta.generation.mode is not schemathesis.GenerationMode.POSITIVE:
        return
    if isinstance(case.body, dict):
        case.body |= SHORT | (ASKED if len(case.body) % 2 else {})
    if TIMEOUT in (case.headers or {}):
        case.headers[TIMEOUT] = "60000"


@API.parametrize()  # type: ignore[untyped-decorator]
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_answers_are_as_declared(url: str, case: Any) -> None:
    """Whatever is asked: status, type, headers and body are as the document says, and no fault is the router's own."""
    stay_here(case)
    make_sense(case)
    response = case.call(base_url=url, timeout=10)
    # The router reads a part of each body; there is more that can be wrong than its schema says.
    excluded = [schemathesis.checks.positive_data_acceptance]
    if case.path in PATHS:
        excluded.append(schemathesis.checks.not_a_server_error)  # an engine's may be passed on
    case.validate_response(response, excluded_checks=excluded)
    assert response.status_code != InvariantViolation.status, response.text
