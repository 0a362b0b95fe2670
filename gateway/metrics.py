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
        self.prompt_tokens = counter("prompt_tokens", "Input units processed")
        self.generation_tokens = counter("generation_tokens", "Output units produced")
        self.cached_tokens = counter("cached_tokens", "Input units answered by a cache")
        self.queue_time = histogram("request_queue_time_seconds", "Waiting for admission", LATENCY)
        self.first_token = histogram("time_to_first_token_seconds", "Arrival to first answer", LATENCY)
        self.token_gap = histogram("inter_token_latency_seconds", "Between two answers of a job", GAP)
        self.whole = histogram("e2e_request_latency_seconds", "Arrival to last answer", LATENCY)
        self.prompt_size = histogram("request_prompt_tokens", "Input units per request", TOKENS)
        self.generation_size = histogram("request_generation_tokens", "Output units per request", TOKENS)
        self.registry.register(_Live(gates, source))

    def record_usage(self, model: str, task: str, usage: Usage) -> None:
        self.prompt_tokens.labels(model, task).inc(usage.input_tokens)
        self.generation_tokens.labels(model, task).inc(usage.output_tokens)
        self.cached_tokens.labels(model, task).inc(usage.cached_tokens)
        self.prompt_size.labels(model, task).observe(usage.input_tokens)
        self.generation_size.labels(model, task).observe(usage.output_tokens)

    def render(self) -> bytes:
        return generate_latest(self.registry)


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
