"""What is counted for /metrics, in a registry of the server's own: its requests, and what the engine has counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.server.health import bytes_read, drives

if TYPE_CHECKING:
    from runtime.server.worker import Worker

SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
"""From a small model to a long prompt at one token a second."""


class Metrics:
    """The counters of the server, and the page."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "expertstream_requests", "Requests by how they ended", ["outcome"], registry=self.registry
        )
        self.prompt_tokens = Counter(
            "expertstream_prompt_tokens", "Prompt tokens that were processed", registry=self.registry
        )
        self.cached_tokens = Counter(
            "expertstream_cached_tokens", "Prompt tokens that were known already", registry=self.registry
        )
        self.completion_tokens = Counter("expertstream_completion_tokens", "Tokens generated", registry=self.registry)
        self.first_token = Histogram(
            "expertstream_time_to_first_token_seconds",
            "From the start of a prompt to the first token",
            buckets=SECONDS,
            registry=self.registry,
        )
        for outcome in ("answered", "cancelled", "failed", "refused"):
            self.requests.labels(outcome)

    def watch(self, worker: Worker) -> None:
        """Have the page show also what the engine and its drives count, as it is when it is asked for."""
        self.registry.register(_Engine(worker))

    def page(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)


class _Engine(Collector):
    """What is counted elsewhere."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        worker = self._worker
        for name, what, value in (
            ("ready", "Whether requests are answered", worker.state == "ready"),
            ("queue_running", "Requests being answered", worker.running is not None),
            ("queue_waiting", "Requests that wait", worker.waiting),
            ("snapshot_bytes", "Memory held by what is known of conversations", worker.snapshots.held_bytes),
        ):
            yield GaugeMetricFamily(f"expertstream_{name}", what, float(value))
        if worker.state != "ready":
            return
        engine = worker.engine
        stats = engine.experts.stats
        yield GaugeMetricFamily("expertstream_cache_bytes", "Memory held by experts", float(stats.bytes_held))
        yield _counter("cache", "Experts wanted, by outcome", "outcome", {"hit": stats.hits, "miss": stats.misses})
        yield _counter("cache_evictions", "Experts dropped for others", "cache", {"experts": stats.evictions})
        read = CounterMetricFamily("expertstream_read_bytes", "Bytes read", labels=["drive", "kind"])
        for of, nbytes in bytes_read(engine).items():
            read.add_metric(of, float(nbytes))
        yield read
        by_drive = drives(engine)
        yield _counter("drive_reads", "Reads that ended well", "drive", {name: d.reads for name, d in by_drive.items()})
        yield _counter("drive_errors", "Reads that failed", "drive", {name: d.errors for name, d in by_drive.items()})
        last = "Times that the last of what was asked for together came from this drive"
        yield _counter("drive_landed_last", last, "drive", {name: d.landed_last for name, d in by_drive.items()})


def _counter(name: str, what: str, label: str, values: dict[str, int]) -> Metric:
    family = CounterMetricFamily(f"expertstream_{name}", what, labels=[label])
    for key, value in values.items():
        family.add_metric([key], float(value))
    return family
