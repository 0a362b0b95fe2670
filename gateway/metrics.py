"""What the gateway counts, in Prometheus' text format. Names follow those that LLM dashboards already know."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from polymux.core.vocabulary import Usage
from polymux.gateway.limits import Gates

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
GAP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
PACES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 32768, 131072)


class StatsSource(Protocol):
    """Where the engines' own gauges come from: the service."""

    @property
    def stats(self) -> Mapping[str, float]: ...


class Metrics:
    """One registry per application, so that several can live in one process."""

    def __init__(self, gates: Gates, source: StatsSource) -> None:
        self.registry = CollectorRegistry()
        where = ("model", "task")

        def counter(name: str, text: str, labels: tuple[str, ...] = where) -> Counter:
            return Counter(f"polymux_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"polymux_{name}", text, where, buckets=buckets, registry=self.registry)

        self.requests = counter("http_requests", "HTTP answers by status", ("method", "route", "status"))
        self.success = counter("request_success", "Choices completed", (*where, "finished_reason"))
        self.failure = counter("request_failure", "Jobs that failed", (*where, "code"))
        self.aborted = counter("num_aborted_requests", "Jobs whose client left")
        self.rejected = counter("admission_rejections", "Requests refused because the queue was full")
        self.tokens = (
            counter("prompt_tokens", "Input units processed"),
            counter("generation_tokens", "Output units produced"),
            counter("cached_tokens", "Input units answered by a cache"),
        )
        self.queue_time = histogram("request_queue_time_seconds", "Waiting for admission", LATENCY)
        self.first_token = histogram("time_to_first_token_seconds", "Arrival to first answer", LATENCY)
        self.token_gap = histogram("inter_token_latency_seconds", "Between two answers of a job", GAP)
        self.whole = histogram("e2e_request_latency_seconds", "Arrival to last answer", LATENCY)
        self.pace = histogram("sound_real_time_factor", "Seconds that a second of sound took, made or heard", PACES)
        self.sizes = (
            histogram("request_prompt_tokens", "Input units per request", TOKENS),
            histogram("request_generation_tokens", "Output units per request", TOKENS),
        )
        self.registry.register(_Live(gates, source))
        self._meters: dict[tuple[str, str], Meters] = {}

    def of(self, model: str, task: str) -> Meters:
        """The meters of one model and task, looked up once per pair and not once per token."""
        meters = self._meters.get((model, task))
        if meters is None:
            meters = self._meters[model, task] = Meters(self, model, task)
        return meters

    def render(self) -> bytes:
        return generate_latest(self.registry)


class Meters:
    """What one model's calls of one task are counted by."""

    def __init__(self, metrics: Metrics, model: str, task: str) -> None:
        where = (model, task)
        self._success = metrics.success
        self._failure = metrics.failure
        self._where = where
        self.aborted = metrics.aborted.labels(*where)
        self.rejected = metrics.rejected.labels(*where)
        self.queue_time = metrics.queue_time.labels(*where)
        self.first_token = metrics.first_token.labels(*where)
        self.token_gap = metrics.token_gap.labels(*where)
        self.whole = metrics.whole.labels(*where)
        self._pace = metrics.pace.labels(*where)
        self._tokens = [counter.labels(*where) for counter in metrics.tokens]
        self._sizes = [histogram.labels(*where) for histogram in metrics.sizes]

    def count_success(self, reason: str) -> None:
        self._success.labels(*self._where, reason).inc()

    def count_failure(self, code: str) -> None:
        self._failure.labels(*self._where, code).inc()

    def record_pace(self, elapsed: float, seconds: float) -> None:
        """What `seconds` of sound took."""
        if seconds > 0:
            self._pace.observe(elapsed / seconds)

    def record_usage(self, usage: Usage) -> None:
        for counter, amount in zip(self._tokens, (usage.input_tokens, usage.output_tokens, usage.cached_tokens)):
            counter.inc(amount)
        for histogram, amount in zip(self._sizes, (usage.input_tokens, usage.output_tokens)):
            histogram.observe(amount)


class _Live(Collector):
    """Gauges read when somebody asks: the gates' fill and what the engines last reported."""

    def __init__(self, gates: Gates, source: StatsSource) -> None:
        self.gates = gates
        self.source = source

    def collect(self) -> Iterable[Metric]:
        running = GaugeMetricFamily("polymux_num_requests_running", "Choices with the engine", labels=["model"])
        waiting = GaugeMetricFamily("polymux_num_requests_waiting", "Choices waiting for admission", labels=["model"])
        for model, gate in self.gates:
            running.add_metric([model], gate.running)
            waiting.add_metric([model], gate.waiting)
        yield running
        yield waiting
        for name, value in _named(self.source.stats):
            gauge = GaugeMetricFamily(f"polymux_engine_{name}", "Reported by the engine")
            gauge.add_metric([], value)
            yield gauge


def _named(stats: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    for name, value in stats.items():
        yield re.sub(r"[^a-zA-Z0-9_]", "_", name).removeprefix("polymux_"), float(value)
