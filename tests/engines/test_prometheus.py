"""Series in a Prometheus page."""

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from pdrouter.engines.prometheus import series


def test_what_the_client_library_writes_is_read() -> None:
    """Labels in any order and with anything in them, several series of a name; other names are passed over."""
    registry = CollectorRegistry()
    gauge = Gauge("vllm:num_requests_running", "Running", ["engine", "model_name"], registry=registry)
    gauge.labels("0", 'a "b" {c} \\ \n d').set(3)
    gauge.labels("12", "m").set(0.5)
    Gauge("vllm:num_requests_running_max", "Another", registry=registry).set(9)
    found = list(series(generate_latest(registry), "vllm:num_requests_running"))
    assert [value for _, value in found] == [3.0, 0.5]
    assert [labels["engine"] for labels, _ in found] == ["0", "12"]
    assert found[1][0]["model_name"] == "m"


@pytest.mark.invariant("I9")
def test_a_page_with_too_many_series() -> None:
    """No more of them are read than there can be ranks."""
    page = b"".join(b'a{rank="%d"} 1\n' % rank for rank in range(20_000))
    assert len(list(series(page, "a"))) == 16_384


def test_plain_and_broken_lines() -> None:
    """A series without labels is one; what isn't a number is none."""
    page = b'# HELP a A\na 1\na{} 2\na{x="1"} NaN\na{x="1"} many\na{x=1} 3\nb 4\n  a 5\na_total 6\na'
    values = [value for _, value in series(page, "a", "b")]
    assert values[:2] == [1.0, 2.0]
    assert values[-1] == 4.0
    assert len(values) == 4
