"""Figures of a run, in memory that does not grow with the number of prompts."""

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from engine.control.messages import RankStatus

_GROWTH = math.log(1.02)
_SMALLEST_S = 1e-6


class Durations:
    """Mean and quantiles of many durations, kept as counts in buckets of 2 % width.

    A quantile is the true one or up to 2 % more, and never more than the longest.
    """

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self._count = 0
        self._total = 0.0
        self._longest = 0.0

    def add(self, seconds: float) -> None:
        self._count += 1
        self._total += seconds
        self._longest = max(self._longest, seconds)
        self._buckets[math.ceil(math.log(max(seconds, _SMALLEST_S)) / _GROWTH)] += 1

    @property
    def mean(self) -> float:
        return self._total / self._count if self._count else 0.0

    def quantile(self, share: float) -> float:
        """The duration that `share` (0 to 1) of all do not exceed."""
        left = math.ceil(share * self._count)
        for bucket, count in sorted(self._buckets.items()):
            left -= count
            if left <= 0:
                return min(math.exp(bucket * _GROWTH), self._longest)
        return 0.0


class Tally:
    """What a run has done so far. `prompts` counts input lines that hold something."""

    def __init__(self) -> None:
        self.prompts = 0
        self.ok = 0
        self.failed = 0
        self.skipped = 0  # done by an earlier run
        self.prompt_tokens = 0
        self.load_seconds = 0.0
        self.first_admission: float | None = None
        self.last_result: float | None = None
        self.waits = Durations()  # from submission to result
        self.computes = Durations()  # from start to result

    @property
    def seconds(self) -> float:
        """From the first admission to the last result."""
        if self.first_admission is None or self.last_result is None:
            return 0.0
        return self.last_result - self.first_admission


class Seconds(msgspec.Struct, frozen=True):
    mean: float
    p99: float


class RankShare(msgspec.Struct, frozen=True):
    """busy: share (0 to 1) of the time since the first batch that the rank computed."""

    rank: str
    role: str
    busy: float
    busy_seconds: float
    load_seconds: float
    tokens: int
    work_items: int


class Summary(msgspec.Struct, frozen=True):
    """The closing figures of a run, as `--json` prints them.

    prompts = ok + failed + skipped. prompt_tokens: of the prompts that this run computed.
    seconds: from the first admission to the last result. prompt_seconds: from a prompt's
    submission to its result, and compute_seconds from its start.
    """

    prompts: int
    ok: int
    failed: int
    skipped: int
    prompt_tokens: int
    load_seconds: float
    seconds: float
    tokens_per_s: float
    prompt_seconds: Seconds
    compute_seconds: Seconds
    attention_busy: float
    expert_busy: float
    ranks: list[RankShare]
    model: str
    dtype: str
    topology: str
    output: str

    @property
    def exit_code(self) -> int:
        return 3 if self.failed else 0


def summarize(
    tally: Tally, ranks: Sequence[RankStatus], *, model: str, dtype: str, topology: str, output: str
) -> Summary:
    shares = [
        RankShare(
            rank=str(status.id),
            role=status.id.role,
            busy=status.busy,
            busy_seconds=status.busy_seconds,
            load_seconds=status.load_seconds,
            tokens=status.tokens,
            work_items=status.work_items,
        )
        for status in sorted(ranks, key=lambda status: status.id)
    ]
    return Summary(
        prompts=tally.prompts,
        ok=tally.ok,
        failed=tally.failed,
        skipped=tally.skipped,
        prompt_tokens=tally.prompt_tokens,
        load_seconds=tally.load_seconds,
        seconds=tally.seconds,
        tokens_per_s=tally.prompt_tokens / tally.seconds if tally.seconds else 0.0,
        prompt_seconds=_seconds(tally.waits),
        compute_seconds=_seconds(tally.computes),
        attention_busy=_mean_busy(shares, "attention"),
        expert_busy=_mean_busy(shares, "expert"),
        ranks=shares,
        model=model,
        dtype=dtype,
        topology=topology,
        output=output,
    )


def _seconds(durations: Durations) -> Seconds:
    return Seconds(mean=durations.mean, p99=durations.quantile(0.99))


def _mean_busy(shares: Sequence[RankShare], role: str) -> float:
    busy = [share.busy for share in shares if share.role == role]
    return sum(busy) / len(busy) if busy else 0.0
