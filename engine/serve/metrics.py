"""Prometheus metrics: what this process counts, and what the controller's snapshot says."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.control.messages import RankStatus, Snapshot

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_RANK = ("role", "rank")

# The time at which each series began, which nobody asks for here.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """One process's metrics, in a registry of their own."""

    def __init__(self, max_queue: int) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "asapctl_http_requests",
            "Requests that were answered; status 499: the client left first.",
            ("path", "status"),
            registry=registry,
        )
        self.ttft = Histogram(
            "asapctl_ttft_seconds",
            "Time to first token: from submission to the controller to the result.",
            registry=registry,
            buckets=_SECONDS,
        )
        self.latency = Histogram(
            "asapctl_http_request_seconds",
            "From a request's headers to the end of its answer, of prompts that were computed.",
            registry=registry,
            buckets=_SECONDS,
        )
        self.queue = Gauge(
            "asapctl_http_queue",
            "Prompts that hold a place: being tokenised, waiting or running.",
            registry=registry,
        )
        Gauge("asapctl_http_queue_limit", "Most of them.", registry=registry).set(max_queue)
        self.kv_files = Gauge("asapctl_kv_files", "KV caches on disk.", registry=registry)
        self.kv_bytes = Gauge("asapctl_kv_bytes", "Their bytes.", registry=registry)
        self._instance = _Instance()
        registry.register(self._instance)

    def text(self, snapshot: Snapshot | None) -> bytes:
        """Prometheus' text format. snapshot: None when the controller did not answer."""
        self._instance.snapshot = snapshot
        return generate_latest(self._registry)


class _Instance:
    """Prometheus' Collector interface over a snapshot."""

    snapshot: Snapshot | None = None

    def collect(self) -> Iterator[Metric]:
        up = self.snapshot is not None
        yield _gauge("asapctl_up", "1 when the controller answers.", up)
        if self.snapshot is not None:
            yield from instance_metrics(self.snapshot)


def instance_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    """The instance's series, the totals first, then those of its ranks."""
    yield _gauge("asapctl_ready", "1 when prompts are taken and computed.", snapshot.ready)
    yield _gauge("asapctl_problems", "What is wrong; /health says it.", len(snapshot.problems))
    yield _gauge("asapctl_prompts_waiting", "Prompts that have not started.", snapshot.waiting)
    yield _gauge("asapctl_prompts_running", "Prompts being computed.", snapshot.running)
    yield _counter("asapctl_prompts_finished", "Prompts with a result.", snapshot.finished)
    yield _counter("asapctl_prompts_failed", "Prompts without one.", snapshot.failed)
    yield _counter("asapctl_prompt_tokens", "Tokens of the former.", snapshot.prompt_tokens)
    yield _gauge("asapctl_uptime_seconds", "Age of the controller.", snapshot.uptime_s)
    yield from _rank_metrics(snapshot.ranks)


_RANK_GAUGES: tuple[tuple[str, str, Callable[[RankStatus], float]], ...] = (
    ("up", "1 when it is loaded and alive.", lambda rank: rank.ready and rank.state != "dead"),
    ("stalled", "1 when it has work and no progress.", lambda rank: rank.state == "stalled"),
    ("queue", "Work items that wait for it.", lambda rank: rank.queue),
    ("memory_bytes", "Resident memory.", lambda rank: rank.memory_bytes),
    ("load_seconds", "What loading its weights took.", lambda rank: rank.load_seconds),
    ("busy_ratio", "Share of the last seconds that it computed.", lambda rank: rank.recent_busy),
)
_RANK_COUNTERS: tuple[tuple[str, str, Callable[[RankStatus], float]], ...] = (
    ("busy_seconds", "Time that it computed.", lambda rank: rank.busy_seconds),
    ("tokens", "Tokens that it computed.", lambda rank: rank.tokens),
    ("work_items", "Steps of work that it finished.", lambda rank: rank.work_items),
    ("restarts", "How often it was started again.", lambda rank: rank.deaths),
)


def _rank_metrics(ranks: Sequence[RankStatus]) -> Iterator[Metric]:
    for name, text, value in _RANK_GAUGES:
        gauge = GaugeMetricFamily(f"asapctl_rank_{name}", text, labels=_RANK)
        for rank in ranks:
            gauge.add_metric((rank.id.role, str(rank.id.rank)), value(rank))
        yield gauge
    for name, text, value in _RANK_COUNTERS:
        counter = CounterMetricFamily(f"asapctl_rank_{name}", text, labels=_RANK)
        for rank in ranks:
            counter.add_metric((rank.id.role, str(rank.id.rank)), value(rank))
        yield counter


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
