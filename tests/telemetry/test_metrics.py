"""Metrics: counters of what happened, gauges of every rank, and label sets that can't grow without bound."""

from random import Random

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdrouter.config import Settings
from pdrouter.core import events
from pdrouter.core.load import RankReport
from pdrouter.core.router import Router
from pdrouter.core.shadow import Result, ShadowOptions
from pdrouter.errors import UpstreamClosed
from pdrouter.telemetry.metrics import CONTENT_TYPE, Metrics
from tests.core.builders import decide, decode, facts, make_options, make_router, prefill

Labels = tuple[tuple[str, str], ...]
P, D = "p:1", "d:1"


def samples(metrics: Metrics) -> dict[tuple[str, Labels], float]:
    """Return what a scrape reads, by name and labels."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """Return one number of a scrape, ``None`` where it isn't told."""
    return samples(metrics).get((name, tuple(sorted(labels.items()))))


def make_pair() -> Router:
    """Return a router over a pair, two ranks each."""
    return make_router([prefill(P, dp_size=2), decode(D, dp_size=2)])


def on(address: str, rank: int, source: str) -> dict[str, str]:
    """Return the labels of a rank's number."""
    role = "prefill" if address == P else "decode"
    return {"endpoint": address, "role": role, "rank": str(rank), "source": source}


def test_every_rank_is_shown() -> None:
    """Ledger and effective load from the start; a report only where there is one."""
    metrics = Metrics(make_pair(), lambda: 3.0)
    for name in ("pdrouter_rank_tokens", "pdrouter_rank_requests"):
        for address in (P, D):
            for rank in (0, 1):
                assert value(metrics, name, **on(address, rank, "ledger")) == 0
                assert value(metrics, name, **on(address, rank, "effective")) == 0
                assert value(metrics, name, **on(address, rank, "reported")) is None
        assert sum(key[0] == name for key in samples(metrics)) == 8


def test_ledger_report_and_both_joined() -> None:
    """The report, what was placed since it, and their sum."""
    router = make_pair()
    metrics = Metrics(router, lambda: 3.0)
    ranks = [RankReport(0, tokens=50, requests=2), RankReport(1, tokens=70)]
    router.observe(events.LoadReported(P, ranks, 1.0), 1.0)
    decision = decide(router, facts(100, prefill_rank=0, decode_rank=1), 2.0)
    for name, reported, ours in (("tokens", 50, 100), ("requests", 2, 1)):
        assert value(metrics, f"pdrouter_rank_{name}", **on(P, 0, "reported")) == reported
        assert value(metrics, f"pdrouter_rank_{name}", **on(P, 0, "ledger")) == ours
        assert value(metrics, f"pdrouter_rank_{name}", **on(P, 0, "effective")) == reported + ours
        assert value(metrics, f"pdrouter_rank_{name}", **on(D, 1, "ledger")) == ours
    assert value(metrics, "pdrouter_rank_tokens", **on(P, 1, "reported")) == 70
    assert value(metrics, "pdrouter_rank_requests", **on(P, 1, "reported")) is None
    assert value(metrics, "pdrouter_requests_live", phase="prefilling") == 1
    router.observe(events.FirstTokenSeen(decision), 2.5)
    assert value(metrics, "pdrouter_requests_live", phase="decoding") == 1
    router.settle(decision, 3.0)
    assert value(metrics, "pdrouter_rank_tokens", **on(P, 0, "ledger")) == 0
    assert value(metrics, "pdrouter_requests_live", phase="decoding") == 0
    assert value(metrics, "pdrouter_decisions_total") == 1


def test_a_report_without_tokens() -> None:
    """Shows what it has."""
    router = make_pair()
    ranks = [RankReport(rank, requests=5) for rank in (0, 1)]
    router.observe(events.LoadReported(P, ranks, 1.0), 1.0)
    assert value(Metrics(router, lambda: 3.0), "pdrouter_rank_requests", **on(P, 0, "reported")) == 5
    assert value(Metrics(router, lambda: 3.0), "pdrouter_rank_tokens", **on(P, 0, "reported")) is None


def test_readiness_and_departure() -> None:
    """Ready or not is told; what has left isn't shown any more."""
    router = make_pair()
    metrics = Metrics(router, lambda: 3.0)
    router.observe(events.ReadinessChanged(P, "not reached"), 1.0)
    assert value(metrics, "pdrouter_endpoint_ready", endpoint=P, role="prefill") == 0
    assert value(metrics, "pdrouter_endpoint_ready", endpoint=D, role="decode") == 1
    router.observe(events.EndpointLeft(P), 2.0)
    assert not [key for key in samples(metrics) if ("endpoint", P) in key[1]]


def test_ranks_that_are_out() -> None:
    """By themselves or with their endpoint; what breakers do is counted."""
    router = make_pair()
    metrics = Metrics(router, lambda: 3.0)
    for number in range(2 * Settings().cb_failure_threshold):
        decision = decide(router, facts(decode_rank=number % 2), 1.0)
        error = UpstreamClosed("closed") if number % 2 else None
        router.settle(decision, 1.0, error, [decision.decode] if number % 2 else [])

    def ready(address: str, role: str) -> list[float | None]:
        return [value(metrics, "pdrouter_rank_ready", endpoint=address, role=role, rank=rank) for rank in "01"]

    assert (ready(P, "prefill"), ready(D, "decode")) == ([1, 1], [1, 0])
    assert value(metrics, "pdrouter_endpoint_ready", endpoint=D, role="decode") == 1
    assert value(metrics, "pdrouter_breakers_total", event="opened") == 1
    router.observe(events.ReadinessChanged(P, "down"), 2.0)
    assert ready(P, "prefill") == [0, 0]


def test_what_was_no_report_is_counted() -> None:
    """By reason: refused by the core, or never got."""
    router = make_pair()
    metrics = Metrics(router, lambda: 3.0)
    router.observe(events.LoadReported(P, [RankReport(0, tokens=-1), RankReport(1, tokens=5)], 1.0), 1.0)
    router.observe(events.LoadMissing(D, "status 500"), 1.0)
    assert value(metrics, "pdrouter_reports_rejected_total", reason="not_a_load") == 1
    assert value(metrics, "pdrouter_load_checks_failed_total", reason="status 500") == 1


def test_requests_are_counted_in_and_out() -> None:
    """By path and status, with their times."""
    metrics = Metrics(make_pair(), lambda: 3.0)
    for _ in range(3):
        metrics.began()
    assert value(metrics, "pdrouter_requests_in_flight") == 3
    metrics.ended("/generate", 200, 0.02)
    metrics.ended("/generate", 200, 700.0)
    metrics.first_token(0.003)
    assert value(metrics, "pdrouter_requests_in_flight") == 1
    assert value(metrics, "pdrouter_requests_total", path="/generate", status="200") == 2
    assert value(metrics, "pdrouter_request_duration_seconds_bucket", le="0.025") == 1
    assert value(metrics, "pdrouter_request_duration_seconds_bucket", le="+Inf") == 2
    assert value(metrics, "pdrouter_time_to_first_token_seconds_bucket", le="0.005") == 1
    assert value(metrics, "pdrouter_time_to_first_token_seconds_count") == 1


def test_failures_are_counted_by_code() -> None:
    """The stable code of the reply."""
    metrics = Metrics(make_pair(), lambda: 3.0)
    metrics.failed("no_ready_pair")
    metrics.failed("no_ready_pair")
    assert value(metrics, "pdrouter_failures_total", code="no_ready_pair") == 2


@pytest.mark.invariant("I9")
def test_statuses_can_not_grow_without_bound() -> None:
    """An engine that answers with ever new ones gets one line for the rest; none is lost, known ones stay apart."""
    metrics = Metrics(make_pair(), lambda: 3.0)
    for status in range(100, 1100):
        metrics.began()
        metrics.ended("/generate", status, 0.1)
    metrics.began()
    metrics.ended("/generate", 100, 0.1)
    counted = {key[1]: number for key, number in samples(metrics).items() if key[0] == "pdrouter_requests_total"}
    assert sum(counted.values()) == 1001
    assert len(counted) < 100
    assert value(metrics, "pdrouter_requests_total", path="/generate", status="100") == 2
    assert (value(metrics, "pdrouter_requests_total", path="/generate", status="other") or 0) > 900


def test_counters_of_others() -> None:
    """Are read when they are asked for."""
    counts = {"opened": 1}
    metrics = Metrics(make_pair(), lambda: 3.0)
    metrics.add_counters("pdrouter_upstream_connections", "Connections to engines.", lambda: counts)
    counts.update(opened=2, closed=1)
    assert value(metrics, "pdrouter_upstream_connections_total", event="opened") == 2
    assert value(metrics, "pdrouter_upstream_connections_total", event="closed") == 1


def test_two_routers_in_one_process() -> None:
    """Each has its own numbers."""
    first, second = Metrics(make_pair(), lambda: 3.0), Metrics(make_pair(), lambda: 3.0)
    first.began()
    assert value(first, "pdrouter_requests_in_flight") == 1
    assert value(second, "pdrouter_requests_in_flight") == 0


def test_the_text_is_prometheus_text() -> None:
    """Each name has help and type; labels are escaped; the content type says which version."""
    router = make_pair()
    router.observe(events.LoadMissing(D, 'status "x"\n\\'), 1.0)
    metrics = Metrics(router, lambda: 3.0)
    text = metrics.render().decode()
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")}
    assert names == {line.split()[2] for line in text.splitlines() if line.startswith("# HELP ")}
    assert all(name.startswith("pdrouter_") for name in names)
    assert value(metrics, "pdrouter_load_checks_failed_total", reason='status "x"\n\\') == 1
    assert CONTENT_TYPE.startswith(b"text/plain; version=0.0.4")


def test_a_shadow_is_counted() -> None:
    """By how its choice compares, from zero; without one there is no such metric."""
    name = "pdrouter_shadow_decisions_total"
    assert value(Metrics(make_pair(), lambda: 3.0), name, result="same") is None
    options = make_options(shadow=ShadowOptions(policy="least_work", rank_policy="least_work", chance=Random(1)))
    router = make_router([prefill(P), decode(D)], options)
    metrics = Metrics(router, lambda: 3.0)
    decide(router, facts(100), 1.0)
    counts = {result.value: value(metrics, name, result=result.value) for result in Result}
    assert counts == {"same": 1, "other_endpoint": 0, "other_rank": 0, "none": 0}


def test_what_the_journal_lets_go() -> None:
    """Is counted."""
    router = make_router([prefill(P), decode(D)], make_options(journal_decisions=2))
    for _ in range(5):
        decide(router, facts(100), 1.0)
    assert value(Metrics(router, lambda: 3.0), "pdrouter_journal_dropped_total") == 3
