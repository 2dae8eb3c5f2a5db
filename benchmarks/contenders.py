"""The policies that are compared: what each runs on, and which of its layouts is the best."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.offered import Coming, Length, Outcome, offer, poisson
from engine.control.client import Client
from engine.control.messages import RankStatus
from engine.errors import RunError
from engine.launch.checks import plan_of
from engine.launch.running import start_instance

_STEP = 1.08  # between the rates that are tried
_LEAST_STEP = -64  # a hundredth of the first rate
_SNAPSHOT_S = 10.0
_ALONE = 5
_PATIENCE_S = 60.0


@dataclass(frozen=True)
class Layout:
    """What one policy runs on. overrides: of the topology."""

    policy: str
    topology: str
    overrides: tuple[str, ...]
    model: Path | None = None

    @property
    def name(self) -> str:
        words = [each.partition(".")[2] for each in self.overrides]
        return f"{self.policy}: {', '.join(words)}" if words else self.policy

    @contextmanager
    def running(self) -> Iterator[Client]:
        sets = [f"schedule.policy={self.policy}", *self.overrides]
        with start_instance(plan_of(self.topology, sets, self.model)) as client:
            yield client


@dataclass(frozen=True)
class Load:
    """Prompts that come for `seconds`. slo_s: the TTFT that counts as good."""

    seconds: float
    length: Length
    slo_s: float
    vocabulary: int

    def run(self, client: Client, rate: float, seed: int, trace_s: float = 0.0) -> Outcome:
        coming = poisson(rate, self.seconds, self.length, seed)
        return offer(client, coming, 2 * self.slo_s, self.vocabulary, trace_s)


@dataclass(frozen=True)
class Limits:
    """The highest rates, in prompts a second, that keep within the target: by mean, and by p99."""

    mean: float
    p99: float


def limits(layout: Layout, load: Load, seed: int, first_rate: float) -> Limits:
    """By bisection over rates that lie _STEP apart. Each rate runs on an instance that is idle."""
    known: dict[int, Outcome] = {}

    def outcome(step: int) -> Outcome:
        if step not in known:
            with layout.running() as client:
                known[step] = load.run(client, first_rate * _STEP**step, seed)
        return known[step]

    def highest(within: Callable[[Outcome], bool]) -> float:
        return first_rate * _STEP ** _last(lambda step: within(outcome(step)))

    return Limits(
        mean=highest(lambda found: found.mean <= load.slo_s),
        p99=highest(lambda found: found.p99 <= load.slo_s),
    )


def best_layout(
    layouts: Sequence[Layout], load: Load, first_rate: float, say: Callable[[str], None]
) -> tuple[Layout, list[tuple[Layout, Limits]]]:
    """By the mean, on prompts that are not measured later."""
    found = []
    for layout in layouts:
        found.append((layout, limits(layout, load, seed=-1, first_rate=first_rate)))
        say(f"{layout.name}: {found[-1][1].mean:.2f}/s by mean, {found[-1][1].p99:.2f}/s by p99")
    best, _ = max(found, key=lambda each: (each[1].mean, each[1].p99))
    return best, found


def overhead(client: Client) -> float:
    """Of paced ranks: the share of their busy time that no table asked for, but this machine."""
    snapshot = client.fresh_snapshot(_SNAPSHOT_S)
    ranks: list[RankStatus] = [] if snapshot is None else snapshot.ranks
    busy = sum(rank.busy_seconds for rank in ranks)
    return 1 - sum(rank.paced_seconds for rank in ranks) / busy if busy else 0.0


def time_alone(layout: Layout, tokens: int, vocabulary: int) -> float:
    """Median time in seconds of a prompt that has an instance to itself, and does not wait."""
    at_once = replace(layout, overrides=(*layout.overrides, "schedule.max_wait_ms=0"))
    with at_once.running() as client:
        runs = [
            offer(client, [Coming(0.0, tokens)], _PATIENCE_S, vocabulary).mean
            for _ in range(_ALONE + 1)
        ]
    return statistics.median(runs[1:])  # the first one warms up


def _last(holds: Callable[[int], bool]) -> int:
    """The last step, of all whole numbers, for which it holds, as it does for all before. Steps
    outward from 0 double, then it is bisected.
    """
    low, high, stride = 0, 0, 4
    if holds(0):
        high = stride
        while holds(high):
            low, stride = high, 2 * stride
            high = low + stride
    else:
        low = -stride
        while not holds(low):
            if low < _LEAST_STEP:
                raise RunError("no rate keeps within the target, not even one prompt alone")
            high, stride = low, 2 * stride
            low = high - stride
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
