"""Prometheus metrics: what this process counts, and what the controllers' snapshots say."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

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
_Family: TypeAlias = type[GaugeMetricFamily] | type[CounterMetricFamily]

# The time at which each series began, which nobody asks for here.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """One process's metrics, in a registry of their own."""

    def __init__(self, max_queue: int, instances: int = 1) -> None:
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
        self._instances = _Instances(instances)
        registry.register(self._instances)

    def text(self, snapshots: Sequence[Snapshot | None], work: Sequence[int]) -> bytes:
        """Prometheus' text format. Of each instance its snapshot, None when its controller did not
        answer, and the predicted work that is left.
        """
        self._instances.update(snapshots, work)
        return generate_latest(self._registry)


class _Instances:
    """Prometheus' Collector interface over snapshots.

    Series of ranks name their instance where there are several.
    """

    def __init__(self, count: int) -> None:
        self._several = count > 1
        self._snapshots: list[Snapshot | None] = [None] * count
        self._work = [0] * count
        self._counts = [_Counts() for _ in range(count)]

    def update(self, snapshots: Sequence[Snapshot | None], work: Sequence[int]) -> None:
        self._snapshots, self._work = list(snapshots), list(work)
        for counts, snapshot in zip(self._counts, snapshots, strict=True):
            if snapshot is not None:
                counts.add(snapshot)

    def collect(self) -> Iterator[Metric]:
        there = {str(i): s for i, s in enumerate(self._snapshots) if s is not None}
        yield _gauge("asapctl_up", "1 when the controller answers.", bool(there))
        if there:
            missing = len(self._snapshots) - len(there)
            yield from _totals(list(there.values()), missing, self._counts)
        if self._several:
            yield from self._each()
        yield from _rank_metrics(there, self._several)

    def _each(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "asapctl_instance_up", "1 when its controller answers.", labels=["instance"]
        )
        work = GaugeMetricFamily(
            "asapctl_instance_predicted_work",
            "What its prompts from here will take, in tokens; long prompts count for more.",
            labels=["instance"],
        )
        for index, snapshot in enumerate(self._snapshots):
            up.add_metric([str(index)], snapshot is not None)
            work.add_metric([str(index)], self._work[index])
        yield up
        yield work
        for family, name, text, value in _INSTANCE:
            metric = family(f"asapctl_instance_{name}", text, labels=["instance"])
            for index, snapshot in enumerate(self._snapshots):
                if snapshot is not None:
                    metric.add_metric([str(index)], value(snapshot))
            yield metric


@dataclass
class _Counts:
    """An instance's counters over all its lives, so that sums never fall when it is lost."""

    before: tuple[int, int, int] = (0, 0, 0)  # of the lives that ended
    last: tuple[int, int, int] = (0, 0, 0)

    def add(self, snapshot: Snapshot) -> None:
        now = (snapshot.finished, snapshot.failed, snapshot.prompt_tokens)
        if any(new < old for new, old in zip(now, self.last, strict=True)):
            self.before = self.total
        self.last = now

    @property
    def total(self) -> tuple[int, int, int]:
        finished, failed, tokens = (a + b for a, b in zip(self.before, self.last, strict=True))
        return finished, failed, tokens


def _totals(
    snapshots: Sequence[Snapshot], missing: int, counts: Sequence[_Counts]
) -> Iterator[Metric]:
    """Of all instances together. missing: how many of them do not answer, each a problem."""
    ready = any(snapshot.ready for snapshot in snapshots)
    problems = missing + sum(len(snapshot.problems) for snapshot in snapshots)
    waiting = sum(snapshot.waiting for snapshot in snapshots)
    running = sum(snapshot.running for snapshot in snapshots)
    finished, failed, tokens = (
        sum(column) for column in zip(*(c.total for c in counts), strict=True)
    )
    yield _gauge("asapctl_ready", "1 when prompts are taken and computed.", ready)
    yield _gauge("asapctl_problems", "What is wrong; /health says it.", problems)
    yield _gauge("asapctl_prompts_waiting", "Prompts that have not started.", waiting)
    yield _gauge("asapctl_prompts_running", "Prompts being computed.", running)
    yield _counter("asapctl_prompts_finished", "Prompts with a result.", finished)
    yield _counter("asapctl_prompts_failed", "Prompts without one.", failed)
    yield _counter("asapctl_prompt_tokens", "Tokens of the former.", tokens)
    uptime = max(snapshot.uptime_s for snapshot in snapshots)
    yield _gauge("asapctl_uptime_seconds", "Age of the controller.", uptime)
    notes = sorted({snapshot.paced for snapshot in snapshots if snapshot.paced is not None})
    for note in notes[:1]:  # all instances are of one topology
        yield _gauge("asapctl_paced", f"1: {note}", 1)


_INSTANCE: tuple[tuple[_Family, str, str, Callable[[Snapshot], float]], ...] = (
    (GaugeMetricFamily, "ready", "1 when it takes and computes prompts.", lambda s: s.ready),
    (GaugeMetricFamily, "problems", "What is wrong with it.", lambda s: len(s.problems)),
    (GaugeMetricFamily, "prompts_waiting", "Prompts that have not started.", lambda s: s.waiting),
    (GaugeMetricFamily, "prompts_running", "Prompts being computed.", lambda s: s.running),
    (CounterMetricFamily, "prompts_finished", "Prompts with a result.", lambda s: s.finished),
    (CounterMetricFamily, "prompts_failed", "Prompts without one.", lambda s: s.failed),
    (CounterMetricFamily, "prompt_tokens", "Tokens of the former.", lambda s: s.prompt_tokens),
    (GaugeMetricFamily, "uptime_seconds", "Age of its controller.", lambda s: s.uptime_s),
)


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


def _rank_metrics(snapshots: Mapping[str, Snapshot], several: bool) -> Iterator[Metric]:
    """By the number of the instance."""
    if not snapshots:
        return
    labels = (*["instance"] * several, "role", "rank")
    tables = ((GaugeMetricFamily, _RANK_GAUGES), (CounterMetricFamily, _RANK_COUNTERS))
    for family, table in tables:
        for name, text, value in table:
            metric = family(f"asapctl_rank_{name}", text, labels=labels)
            for index, snapshot in snapshots.items():
                for rank in snapshot.ranks:
                    values = (*[index] * several, rank.id.role, str(rank.id.rank))
                    metric.add_metric(values, value(rank))
            yield metric


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
