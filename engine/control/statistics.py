"""What an instance did lately: the figures of snapshots, from results and ranks' reports.

Pure: time is an argument (seconds on one monotonic clock, never going back). What is kept is one
bucket for each second of the last minute and a few seconds of reports for each rank, so memory
does not depend on how much happens.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from engine.control.durations import Durations
from engine.control.messages import HistoryPoint, Latency, Progress, RankStatus, Snapshot
from engine.topology.ranks import RankId, Role

MINUTE_S = 60
RATE_S = 10  # prompt tokens per second
RECENT_S = 5.0  # what a rank did in "the last seconds"
_SAMPLE_S = 0.1  # reports of a rank that are closer together count as one


@dataclass(slots=True)
class _Second:
    """What happened in one second. busy: seconds that all ranks of a role computed, together."""

    tokens: int = 0
    good: int = 0
    ttft: Durations = field(default_factory=Durations)
    busy: dict[Role, float] = field(default_factory=lambda: {"attention": 0.0, "expert": 0.0})


@dataclass(slots=True, frozen=True)
class _Sample:
    """Counters of a rank, of all its lives together, as they stood at `time`."""

    time: float
    busy: float = 0.0
    waits: float = 0.0
    tokens: int = 0
    work_items: int = 0


class _Rank:
    """The reports of one rank: the last ones, and one older than RECENT_S to compare with."""

    def __init__(self, now: float) -> None:
        self.incarnation = 0
        self.report = Progress(0.0, 0, 0)
        self.paced = 0.0
        self.samples: deque[_Sample] = deque([_Sample(now)])

    def add(self, incarnation: int, report: Progress, now: float) -> float:
        """Takes a report; returns the seconds computed since the one before."""
        before, last = self.report, self.samples[-1]
        if incarnation != self.incarnation or report.busy_seconds < before.busy_seconds:
            before = Progress(0.0, 0, 0)  # a new life counts from 0
        computed = max(0.0, report.busy_seconds - before.busy_seconds)
        self.paced += max(0.0, report.paced_seconds - before.paced_seconds)
        sample = _Sample(
            now,
            last.busy + computed,
            last.waits + max(0.0, report.wait_seconds - before.wait_seconds),
            last.tokens + max(0, report.tokens - before.tokens),
            last.work_items + max(0, report.work_items - before.work_items),
        )
        if len(self.samples) > 1 and now - self.samples[-2].time < _SAMPLE_S:
            self.samples.pop()
        self.samples.append(sample)
        while len(self.samples) > 2 and self.samples[1].time <= now - RECENT_S:
            self.samples.popleft()
        self.incarnation, self.report = incarnation, report
        return computed

    @property
    def total(self) -> _Sample:
        return self.samples[-1]

    def since_report(self, now: float) -> float:
        """Seconds since the last report, which no counter holds yet."""
        return max(0.0, now - self.total.time)

    def at(self, time: float) -> tuple[float, float, float]:
        """busy, waits and tokens as they were at `time`.

        What a report adds was done right before it: a rank that works reports often, one that is
        idle does not report, so a long gap was idle at its beginning.
        """
        for index in range(len(self.samples) - 1, 0, -1):
            old, new = self.samples[index - 1], self.samples[index]
            if old.time <= time:
                active = new.busy - old.busy + new.waits - old.waits
                active = min(max(active, 1e-9), new.time - old.time) or 1e-9
                left = min(1.0, max(0.0, new.time - time) / active)
                return (
                    new.busy - left * (new.busy - old.busy),
                    new.waits - left * (new.waits - old.waits),
                    new.tokens - left * (new.tokens - old.tokens),
                )
        first = self.samples[0]
        return first.busy, first.waits, float(first.tokens)


class Statistics:
    """The controller tells it what happens, and has it complete snapshots.

    ttft_slo_s: the target that goodput counts by. done, failures, prompt_tokens: since the start;
    tokens are of prompts that succeeded.
    """

    def __init__(self, ttft_slo_s: float | None = None) -> None:
        self.done = 0
        self.failures = 0
        self.prompt_tokens = 0
        self._slo = math.inf if ttft_slo_s is None else ttft_slo_s
        self._stated_slo = ttft_slo_s
        self._began: float | None = None
        self._seconds: dict[int, _Second] = {}
        self._ranks: dict[tuple[Role, int], _Rank] = {}

    def submitted(self, now: float) -> None:
        """A prompt came. The first thing that is heard of begins the time of rates."""
        self._begin(now)

    def finished(self, tokens: int, ttft_s: float, failed: bool, now: float) -> None:
        """A result went out: its prompt's tokens, and seconds since its submission."""
        self._begin(now)
        if failed:
            self.failures += 1
            return
        self.done += 1
        self.prompt_tokens += tokens
        second = self._second(math.floor(now), now)
        second.tokens += tokens
        second.good += ttft_s <= self._slo
        second.ttft.add(ttft_s)

    def progress(self, id_: RankId, report: Progress, now: float) -> None:
        """A rank reported. A new incarnation's counters begin at 0 and are added to the old."""
        self._begin(now)
        rank = self._ranks.get((id_.role, id_.rank))
        if rank is None:  # it has been there for at least as long as it says that it worked
            rank = _Rank(now - report.busy_seconds - report.wait_seconds)
            self._ranks[id_.role, id_.rank] = rank
        since = rank.since_report(now)
        computed = rank.add(id_.incarnation, report, now)
        # Right before the report, as in `_Rank.at`, and after the one before.
        for second, part in _seconds_of(now - min(computed, since, MINUTE_S), now):
            self._second(second, now).busy[id_.role] += part

    def complete(self, snapshot: Snapshot, now: float) -> Snapshot:
        """`snapshot` with its counts, rates, latencies and history."""
        self._begin(now)
        self._forget(now)
        assert self._began is not None
        ttft = Durations()
        for second in self._seconds.values():
            ttft.merge(second.ttft)
        return msgspec.structs.replace(
            snapshot,
            finished=self.done,
            failed=self.failures,
            uptime_s=now - self._began,
            prompt_tokens=self.prompt_tokens,
            tokens_per_s=self._rate("tokens", RATE_S, now),
            ttft=Latency(
                ttft.count, ttft.mean, ttft.quantile(0.5), ttft.quantile(0.9), ttft.quantile(0.99)
            ),
            goodput=self._rate("good", MINUTE_S, now),
            ttft_slo_s=self._stated_slo,
            history=self._history(snapshot.ranks, now),
        )

    def complete_rank(self, status: RankStatus, now: float, elapsed: float) -> RankStatus:
        """`status` with what this rank did: in all, and lately.

        elapsed: seconds that `busy` and `waits` are shares of; 0 before the first batch.
        """
        rank = self._ranks.get((status.id.role, status.id.rank))
        if rank is None:
            return status
        total, span = rank.total, _between(1.0, now - rank.samples[0].time, RECENT_S)
        busy, waits, tokens = rank.at(now - RECENT_S)
        state = rank.report.state
        more = rank.since_report(now)
        return msgspec.structs.replace(
            status,
            busy_seconds=total.busy,
            busy=_share(total.busy, elapsed),
            waits=_share(total.waits, elapsed),
            recent_busy=_share(total.busy - busy + more * (state == "computing"), span),
            recent_waits=_share(total.waits - waits + more * (state == "waiting"), span),
            tokens=total.tokens,
            tokens_per_s=max(0.0, total.tokens - tokens) / span,
            work_items=total.work_items,
            paced_seconds=rank.paced,
        )

    def _begin(self, now: float) -> None:
        if self._began is None:
            self._began = now

    def _second(self, second: int, now: float) -> _Second:
        found = self._seconds.get(second)
        if found is None:
            self._forget(now)
            found = self._seconds[second] = _Second()
        return found

    def _forget(self, now: float) -> None:
        # Seconds are not always first heard of in their order: a report tells of those before it.
        for second in [s for s in self._seconds if s < math.floor(now) - MINUTE_S]:
            del self._seconds[second]

    def _rate(self, what: str, width: int, now: float) -> float:
        """Per second, of the last `width` seconds, or since the beginning if that is later."""
        assert self._began is not None
        oldest = math.floor(now) - width + 1
        count = sum(getattr(second, what) for s, second in self._seconds.items() if s >= oldest)
        return float(count) / max(1.0, now - max(float(oldest), self._began))

    def _history(self, ranks: Sequence[RankStatus], now: float) -> list[HistoryPoint]:
        """The last whole seconds since the beginning, at most a minute of them."""
        assert self._began is not None
        roles: tuple[Role, Role] = ("attention", "expert")
        first = max(math.floor(now) - MINUTE_S, math.floor(self._began))
        busy = {role: [0.0] * (math.floor(now) - first) for role in roles}
        for second, what in self._seconds.items():
            if first <= second < math.floor(now):
                for role in roles:
                    busy[role][second - first] += what.busy[role]
        for (role, _), rank in self._ranks.items():
            if rank.report.state == "computing":  # for long, without a report
                for second, part in _seconds_of(max(rank.total.time, float(first)), now):
                    if second < math.floor(now):
                        busy[role][second - first] += part
        count = {role: sum(rank.id.role == role for rank in ranks) for role in roles}
        return [
            HistoryPoint(
                float(self._seconds[second].tokens) if second in self._seconds else 0.0,
                *(_share(busy[role][second - first], count[role]) for role in roles),
            )
            for second in range(first, math.floor(now))
        ]


def _seconds_of(start: float, end: float) -> Iterator[tuple[int, float]]:
    """The seconds that [start, end) touches, and how much of each."""
    for second in range(math.floor(start), math.ceil(end)):
        part = min(end, second + 1.0) - max(start, float(second))
        if part > 0:
            yield second, part


def _between(low: float, value: float, high: float) -> float:
    return max(low, min(value, high))


def _share(part: float, whole: float) -> float:
    return _between(0.0, part / whole, 1.0) if whole > 0 else 0.0
