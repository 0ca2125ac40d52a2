"""Reading takes memory and work in proportion to the body, whatever it is full of."""

import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from pdrouter.config import Settings
from pdrouter.errors import ClientError
from pdrouter.options import intake_options
from pdrouter.proxy.bodies import Api
from pdrouter.proxy.reading import ReadingOptions, read_body, takes_long
from tests.properties.shapes import APIS, bodies

OPTIONS: ReadingOptions = intake_options(Settings()).reading

MEMORY_PER_BYTE = 80
"""The most that reading takes for each byte of a body: empty parts, of three bytes each."""

FIXED_BYTES = 700_000
"""What it may take beside: media are few, and each fills some blocks."""

CALLS_PER_BYTE = 5
INLINE_CALLS = 40_000
"""Calls within the event loop for one body; each takes a tenth of a microsecond, more or less."""


def read(api: Api, body: bytes) -> None:
    """Read or refuse a body."""
    with suppress(ClientError):
        read_body(api, [], body, OPTIONS)


def calls_of(work: Callable[[], None]) -> int:
    """Return how many functions are called, those in C too: the same at each run."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


def each(api: Api, size_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Yield the bodies, each seen before once: what is made once for all doesn't count."""
    for name, body in bodies(api, size_bytes):
        read(api, body)
        yield name, body


@pytest.mark.parametrize("api", APIS)
def test_memory_is_in_proportion(api: Api) -> None:
    """No shape takes more than a constant for each byte."""
    tracemalloc.start()
    try:
        for name, body in bodies(api, 12_000):
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            read(api, body)
            taken = tracemalloc.get_traced_memory()[1] - before
            assert taken <= MEMORY_PER_BYTE * len(body) + FIXED_BYTES, name
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("api", APIS)
def test_work_is_in_proportion(api: Api) -> None:
    """Four times as long a body takes four times as much, and never more than a constant for each byte."""
    longer = dict(each(api, 8000))
    for name, body in each(api, 2000):
        few, many = (calls_of(lambda body=body: read(api, body)) for body in (body, longer[name]))  # type: ignore[misc]
        assert many <= 4.5 * few + 500, name
        assert many <= CALLS_PER_BYTE * len(longer[name]) + 500, name


@pytest.mark.parametrize("api", APIS)
def test_the_event_loop_reads_what_is_short(api: Api) -> None:
    """A body that isn't read in a thread takes few calls, as long as it may be."""
    for size_bytes in (6000, 30_000, OPTIONS.inline_bytes - 200):
        for name, body in bodies(api, size_bytes):
            if not takes_long(body, OPTIONS):
                assert calls_of(lambda body=body: read(api, body)) <= INLINE_CALLS, name  # type: ignore[misc]
