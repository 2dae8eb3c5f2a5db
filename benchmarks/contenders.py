"""The policies that are compared: what each runs on, and which of its layouts is the best."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.offered import Load
from engine.bench.find_rate import find_rate
from engine.bench.summary import Summary, Times
from engine.control.client import Client
from engine.control.messages import RankStatus
from engine.errors import RunError
from engine.launch.checks import plan_of
from engine.launch.running import start_instance

STEP = 1.2  # between the rates that are tried
_TOLERANCE = STEP - 1 + 1e-6
_FAR = STEP**4  # a stride where nothing is known yet
_NEARER = STEP**2  # where the other judge's limit is
_MOST_TRIALS = 16
_SNAPSHOT_S = 10.0
_ALONE = 5

# What is held against the target.
JUDGES: dict[str, Callable[[Times], float]] = {
    "mean": lambda ttft: ttft.mean,
    "p99": lambda ttft: ttft.p99,
}


@dataclass(frozen=True)
class Layout:
    """What one policy runs on. overrides: of the topology; those in `fixed` too, which all layouts
    have.
    """

    policy: str
    topology: str
    overrides: tuple[str, ...]
    model: Path | None = None
    fixed: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        words = [each.partition(".")[2] for each in self.overrides]
        return f"{self.policy}: {', '.join(words)}" if words else self.policy

    @contextmanager
    def running(self) -> Iterator[Client]:
        sets = [f"schedule.policy={self.policy}", *self.fixed, *self.overrides]
        with start_instance(plan_of(self.topology, sets, self.model)) as client:
            yield client


@dataclass(frozen=True)
class Limit:
    """The highest rate, in prompts a second, at which `judge` keeps within the target: between
    `met`, the highest that was tried and did, and the next one. met: 0 where none did.
    """

    layout: Layout
    judge: str
    rate: float
    met: float


class Probe:
    """A running layout under load at rates STEP apart, each tried once."""

    def __init__(self, layout: Layout, client: Client, load: Load, seed: int) -> None:
        self._layout = layout
        self._client = client
        self._load = load
        self._seed = seed
        self._known: dict[int, Times] = {}
        load.warm_up(client)

    def met(self, judge: str, rate: float) -> bool:
        return JUDGES[judge](self._ttft(rate)) <= self._load.slo_s

    def limit(self, judge: str, near: float, stride: float = STEP) -> Limit:
        """near: where to begin to look."""
        start = STEP ** _step(near)
        found = find_rate(
            lambda rate: self.met(judge, rate),
            start,
            tolerance=_TOLERANCE,
            stride=stride,
            most_trials=_MOST_TRIALS,
        )
        low, high = found.rate, found.too_high
        if not low:
            return Limit(self._layout, judge, 0.0, 0.0)
        if high is None:
            raise RunError(f"{self._layout.name}: no rate is too high; look further than {low}/s")
        return Limit(self._layout, judge, self._crossing(judge, low, high), low)

    def _crossing(self, judge: str, low: float, high: float) -> float:
        """Where the target is met, if the logarithm of TTFT is linear between two rates."""
        below, above = (math.log(JUDGES[judge](self._ttft(rate))) for rate in (low, high))
        share = (math.log(self._load.slo_s) - below) / (above - below)
        return low * math.pow(high / low, share)

    def _ttft(self, rate: float) -> Times:
        step = _step(rate)
        if step not in self._known:
            self._known[step] = ttft_of(self._load.run(self._client, STEP**step, self._seed))
        return self._known[step]


def best_layouts(
    layouts: Sequence[Layout], load: Load, near: float, say: Callable[[str], None]
) -> tuple[dict[str, Limit], list[dict[str, str]]]:
    """Of one policy, by each judge, on prompts that are not measured later; and a row of each
    layout. One that misses the target where an earlier one met it is not looked at further.
    """
    best: dict[str, Limit] = {}
    rows = []
    for layout in layouts:
        row = {"layout": layout.name}
        with layout.running() as client:
            probe = Probe(layout, client, load, seed=-1)
            for judge in JUDGES:
                leader = best.get(judge)
                if leader is not None and not probe.met(judge, leader.met):
                    row[judge] = f"less than {leader.met:.2f}/s"
                    continue
                known = leader or best.get("mean")
                stride = STEP if leader else _NEARER if known else _FAR
                limit = probe.limit(judge, known.met if known else near, stride)
                row[judge] = f"{limit.rate:.2f}/s" if limit.rate else "never"
                if limit.rate > (leader.rate if leader else 0.0):
                    best[judge] = limit
        say(", ".join(f"{name} {value}" for name, value in row.items()))
        rows.append(row)
    if len(best) < len(JUDGES):
        raise RunError(f"{layouts[0].policy}: no layout keeps within the target at any rate")
    for row in rows:
        taken = [judge for judge, limit in best.items() if limit.layout.name == row["layout"]]
        row["taken for"] = ", ".join(taken)
    return best, rows


def limits(best: dict[str, Limit], load: Load, seed: int) -> dict[str, float]:
    """The highest rate by each judge, each on the layout that is best for it."""
    found: dict[str, float] = {}
    for layout in {limit.layout: None for limit in best.values()}:
        with layout.running() as client:
            probe = Probe(layout, client, load, seed)
            for judge, limit in best.items():
                if limit.layout == layout:
                    found[judge] = probe.limit(judge, limit.met).rate
                    if not found[judge]:
                        raise RunError(f"{layout.name}: it misses the target at every rate now")
    return found


def ttft_of(summary: Summary) -> Times:
    """Of a load of which no prompt failed."""
    assert summary.ttft is not None
    return summary.ttft


def overhead(client: Client) -> float:
    """Of paced ranks: the share of their busy time that no table asked for, but this machine. 0 of
    others.
    """
    snapshot = client.fresh_snapshot(_SNAPSHOT_S)
    ranks: list[RankStatus] = [] if snapshot is None else snapshot.ranks
    busy = sum(rank.busy_seconds for rank in ranks)
    paced = sum(rank.paced_seconds for rank in ranks)
    return 1 - paced / busy if paced else 0.0


def time_alone(layout: Layout, load: Load, tokens: int) -> float:
    """Median time in seconds of a prompt that has an instance to itself, and does not wait."""
    at_once = replace(layout, overrides=(*layout.overrides, "schedule.max_wait_ms=0"))
    with at_once.running() as client:
        runs = [load.time_at_once(client, tokens) for _ in range(_ALONE + 1)]
    return statistics.median(runs[1:])  # the first one warms up


def _step(rate: float) -> int:
    """Of the nearest rate that is tried."""
    return round(math.log(rate, STEP))
