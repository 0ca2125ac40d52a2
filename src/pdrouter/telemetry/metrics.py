"""Prometheus metrics: requests and phases as they happen, the load of every rank when it is asked for."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pdrouter.core.lifecycle import State
from pdrouter.core.router import Router
from pdrouter.core.snapshot import EndpointSnapshot

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
"""Bucket bounds in seconds: from a warm small prompt to the longest answers."""

_MAX_STATUSES = 64
"""Different (path, status) pairs that are counted apart (I9)."""


class Distribution(Collector):
    """A histogram of seconds that costs a bisection to add to; the exposition is prometheus-client's."""

    def __init__(self, name: str, help_text: str) -> None:
        self._name = name
        self._help = help_text
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Take note of a duration."""
        self._counts[bisect_left(_SECONDS, seconds)] += 1
        self._sum_s += seconds

    def collect(self) -> Iterator[Metric]:
        """Yield the buckets, each with all that are smaller."""
        bounds = [*map(floatToGoString, _SECONDS), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._help, buckets=buckets, sum_value=self._sum_s)


class Metrics:
    """What the data plane counts, in plain numbers that are read when somebody scrapes.

    It has a registry of its own, so that several routers can live in one process.
    """

    def __init__(self, router: Router, clock: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self.in_flight = 0
        self._requests: dict[tuple[str, int], int] = {}
        self._failures: dict[str, int] = {}
        self._first_token_s = Distribution(
            "pdrouter_time_to_first_token_seconds", "From the decision to the first token of the answer."
        )
        self._decode_s = Distribution("pdrouter_decode_seconds", "From the first token of the answer to its end.")
        self._duration_s = Distribution(
            "pdrouter_request_duration_seconds", "From the request's head to the end of its reply."
        )
        self.first_token = self._first_token_s.add
        self.decoded = self._decode_s.add
        phases = (self._first_token_s, self._decode_s, self._duration_s)
        for collector in (*phases, _DataPlaneCollector(self), _RouterCollector(router, clock)):
            self.registry.register(collector)

    def add_counters(self, name: str, help_text: str, read: Callable[[], Mapping[str, int]]) -> None:
        """Show counters that somebody else keeps, labelled ``event``."""
        self.registry.register(_ReadCollector(CounterMetricFamily(name, help_text, labels=["event"]), read))

    def add_gauges(self, name: str, help_text: str, read: Callable[[], Mapping[str, int]]) -> None:
        """Show levels that somebody else keeps, labelled ``of``."""
        self.registry.register(_ReadCollector(GaugeMetricFamily(name, help_text, labels=["of"]), read))

    def began(self) -> None:
        """Count a request in."""
        self.in_flight += 1

    def ended(self, path: str, status: int, duration_s: float) -> None:
        """Count a request out."""
        self.in_flight -= 1
        key = (path, status)
        if key not in self._requests and len(self._requests) >= _MAX_STATUSES:  # I9
            key = (path, 0)
        self._requests[key] = self._requests.get(key, 0) + 1
        self._duration_s.add(duration_s)

    def failed(self, code: str) -> None:
        """Count a failure."""
        self._failures[code] = self._failures.get(code, 0) + 1

    def families(self) -> Iterator[Metric]:
        """Yield requests and failures."""
        requests = CounterMetricFamily(
            "pdrouter_requests", "Requests answered, by path and status.", labels=["path", "status"]
        )
        for (path, status), count in self._requests.items():
            requests.add_metric([path, str(status) if status else "other"], count)
        yield requests
        failures = CounterMetricFamily("pdrouter_failures", "Requests that failed, by code.", labels=["code"])
        for code, count in self._failures.items():
            failures.add_metric([code], count)
        yield failures
        yield GaugeMetricFamily("pdrouter_requests_in_flight", "Requests under way.", value=self.in_flight)

    def render(self) -> bytes:
        """Return the exposition text."""
        return generate_latest(self.registry)


class _DataPlaneCollector(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.families()


class _ReadCollector(Collector):
    def __init__(self, family: CounterMetricFamily | GaugeMetricFamily, read: Callable[[], Mapping[str, int]]) -> None:
        self._family = family
        self._read = read

    def collect(self) -> Iterator[Metric]:
        self._family.samples = []
        for label, count in self._read().items():
            self._family.add_metric([label], count)
        yield self._family


class _RouterCollector(Collector):
    """Reads the core when it is scraped."""

    def __init__(self, router: Router, clock: Callable[[], float]) -> None:
        self._router = router
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        endpoints = self._router.snapshot(self._clock()).endpoints
        yield from _rank_gauges(endpoints)
        yield _endpoint_gauge(endpoints)
        yield self._breakers()
        yield from self._totals()

    def _breakers(self) -> Metric:
        breakers = CounterMetricFamily(
            "pdrouter_breakers", "Phases that breakers of endpoints and ranks began, and probes.", labels=["event"]
        )
        counts, ejections = self._router.outcomes.breakers.counts, self._router.ejections.counts
        for event in ("opened", "half_opened", "closed", "probes"):
            breakers.add_metric([event], counts[event])
        for event, count in ejections.items():
            breakers.add_metric([event], count)
        return breakers

    def _totals(self) -> Iterator[Metric]:
        router = self._router
        yield CounterMetricFamily("pdrouter_decisions", "Requests placed.", value=router.decided)
        alone = CounterMetricFamily(
            "pdrouter_decisions_alone", "Requests that one endpoint reads and answers, by its role.", labels=["role"]
        )
        for role, count in router.alone.items():
            alone.add_metric([role], count)
        yield alone
        if router.shadow is not None:
            shadow = CounterMetricFamily(
                "pdrouter_shadow_decisions",
                "Decisions at which the shadow policy looked on, by how its choice compares.",
                labels=["result"],
            )
            for result, count in router.shadow.counts.items():
                shadow.add_metric([result.value], count)
            yield shadow
        yield CounterMetricFamily(
            "pdrouter_journal_dropped",
            "Decisions that the journal let go for newer ones.",
            value=router.journal.dropped,
        )
        live = GaugeMetricFamily("pdrouter_requests_live", "Placed requests by phase.", labels=["phase"])
        phases = Counter(decision.state.value for decision in router.live.values())
        for state in (State.PREFILLING, State.DECODING):
            live.add_metric([state.value], phases[state.value])
        yield live
        yield GaugeMetricFamily(
            "pdrouter_prefix_entries",
            "Entries of the prefix index.",
            value=router.prefixes.entries + router.short_prompts.entries,
        )
        yield GaugeMetricFamily(
            "pdrouter_prefix_bytes",
            "Memory of the prefix index.",
            value=router.prefixes.used_bytes + router.short_prompts.used_bytes,
        )
        yield CounterMetricFamily(
            "pdrouter_prefix_evictions",
            "Entries evicted from the prefix index.",
            value=router.prefixes.evictions + router.short_prompts.evictions,
        )
        yield CounterMetricFamily(
            "pdrouter_prefix_losses",
            "Prompts of which an engine had cached less than predicted.",
            value=router.lost_prefixes,
        )
        rejected = CounterMetricFamily(
            "pdrouter_reports_rejected", "Rank reports that were no report, by reason.", labels=["reason"]
        )
        for reason, count in router.load.rejected_reports.items():
            rejected.add_metric([reason], count)
        yield rejected
        missing = CounterMetricFamily(
            "pdrouter_load_checks_failed", "Load checks that brought nothing, by reason.", labels=["reason"]
        )
        for reason, count in router.missing_reports.items():
            missing.add_metric([reason], count)
        yield missing


def _rank_gauges(endpoints: Sequence[EndpointSnapshot]) -> Iterator[Metric]:
    labels = ["endpoint", "role", "rank"]
    tokens = GaugeMetricFamily("pdrouter_rank_tokens", "Tokens on a rank, by source.", labels=[*labels, "source"])
    requests = GaugeMetricFamily("pdrouter_rank_requests", "Requests on a rank, by source.", labels=[*labels, "source"])
    ready = GaugeMetricFamily("pdrouter_rank_ready", "Whether a rank takes requests.", labels=labels)
    for one in endpoints:
        for rank in one.ranks:
            where = [one.endpoint.address, one.endpoint.role.value, str(rank.rank)]
            ready.add_metric(where, float(one.is_ready and rank.out is None))
            sources = {"ledger": rank.ledger, "effective": rank.effective, "reported": rank.reported}
            for source, amount in sources.items():
                if amount is not None and amount.tokens is not None:
                    tokens.add_metric([*where, source], amount.tokens)
                if amount is not None and amount.requests is not None:
                    requests.add_metric([*where, source], amount.requests)
    yield ready
    yield tokens
    yield requests


def _endpoint_gauge(endpoints: Sequence[EndpointSnapshot]) -> Metric:
    ready = GaugeMetricFamily(
        "pdrouter_endpoint_ready", "Whether an endpoint takes requests.", labels=["endpoint", "role"]
    )
    for one in endpoints:
        ready.add_metric([one.endpoint.address, one.endpoint.role.value], float(one.is_ready))
    return ready
