"""Figures of a run, in memory that does not grow with the number of prompts."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from engine.control.durations import Durations
from engine.control.messages import RankStatus
from engine.echo import encodable


class Tally:
    """What a run has done so far. `prompts` counts input lines that hold something.

    bytes_before: of the lines that an earlier run has done, as far as they are known; bytes_done:
    of those that this run has finished.
    """

    def __init__(self, bytes_before: int = 0) -> None:
        self.prompts = 0
        self.ok = 0
        self.failed = 0
        self.skipped = 0  # done by an earlier run
        self.failures: Counter[str] = Counter()  # by the error's code
        self.first_failure: str | None = None
        self.bytes_before = bytes_before
        self.bytes_done = 0
        self.bytes_skipped = 0
        self.prompt_tokens = 0
        self.load_seconds = 0.0
        self.first_admission: float | None = None
        self.last_result: float | None = None
        self.waits = Durations()  # from submission to result
        self.computes = Durations()  # from start to result

    def skip(self, size: int) -> None:
        """A line of `size` bytes was done by an earlier run."""
        self.skipped += 1
        self.bytes_skipped += size
        self.bytes_before = max(self.bytes_before, self.bytes_skipped)

    def fail(self, code: str, message: str, size: int) -> None:
        self.failed += 1
        self.bytes_done += size
        self.failures[code] += 1
        self.first_failure = self.first_failure or message

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
    restarts: int


class Summary(msgspec.Struct, frozen=True):
    """The closing figures of a run, as `--json` prints them.

    prompts = ok + failed + skipped. failures: how many failed with each code; first_failure: the
    message of the first. restarts: of ranks whose process ended. prompt_tokens: of the prompts that
    this run computed. seconds: from the first admission to the last result. prompt_seconds: from a
    prompt's submission to its result, and compute_seconds from its start. paced: as in Snapshot.
    """

    prompts: int
    ok: int
    failed: int
    skipped: int
    failures: dict[str, int]
    first_failure: str | None
    prompt_tokens: int
    load_seconds: float
    seconds: float
    tokens_per_s: float
    prompt_seconds: Seconds
    compute_seconds: Seconds
    attention_busy: float
    expert_busy: float
    restarts: int
    ranks: list[RankShare]
    model: str
    dtype: str
    topology: str
    output: str
    paced: str | None = None

    @property
    def exit_code(self) -> int:
        return 3 if self.failed else 0


def summarize(
    tally: Tally,
    ranks: Sequence[RankStatus],
    *,
    model: str,
    dtype: str,
    topology: str,
    output: str,
    paced: str | None = None,
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
            restarts=status.deaths,
        )
        for status in sorted(ranks, key=lambda status: status.id)
    ]
    return Summary(
        prompts=tally.prompts,
        ok=tally.ok,
        failed=tally.failed,
        skipped=tally.skipped,
        failures=dict(tally.failures.most_common()),
        first_failure=tally.first_failure,
        prompt_tokens=tally.prompt_tokens,
        load_seconds=tally.load_seconds,
        seconds=tally.seconds,
        tokens_per_s=tally.prompt_tokens / tally.seconds if tally.seconds else 0.0,
        prompt_seconds=_seconds(tally.waits),
        compute_seconds=_seconds(tally.computes),
        attention_busy=_mean_busy(shares, "attention"),
        expert_busy=_mean_busy(shares, "expert"),
        restarts=sum(share.restarts for share in shares),
        ranks=shares,
        model=model,
        dtype=dtype,
        topology=encodable(topology),
        output=encodable(output),
        paced=paced,
    )


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count:,} {noun}s"


def _seconds(durations: Durations) -> Seconds:
    return Seconds(mean=durations.mean, p99=durations.quantile(0.99))


def _mean_busy(shares: Sequence[RankShare], role: str) -> float:
    busy = [share.busy for share in shares if share.role == role]
    return sum(busy) / len(busy) if busy else 0.0
