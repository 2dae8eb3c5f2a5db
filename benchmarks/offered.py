"""Prompts that come at their times to a running instance, whatever it makes of them."""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from engine.bench.workload import random_prompts
from engine.control.client import Client
from engine.control.messages import PrefillRequest, TraceReport
from engine.errors import RunError

_TRACE_GRACE_S = 12.0
Length: TypeAlias = Callable[[random.Random], int]


class Coming(NamedTuple):
    """A prompt of so many tokens, at_s seconds after the beginning."""

    at_s: float
    tokens: int


@dataclass(frozen=True)
class Outcome:
    """ttft: of each prompt, in seconds from when it was to come; of one that was given up, how long
    it had waited by then, which is less than it would have been. late_s: the most that the driver
    itself was behind.
    """

    tokens: list[int]
    ttft: list[float]
    given_up: int
    late_s: float
    trace: TraceReport | None = None

    @property
    def mean(self) -> float:
        return statistics.fmean(self.ttft)

    @property
    def p99(self) -> float:
        return sorted(self.ttft)[math.ceil(0.99 * len(self.ttft)) - 1]

    @property
    def shortest_quarter(self) -> float:
        """Mean TTFT of the quarter of the prompts that is the shortest."""
        by_length = sorted(zip(self.tokens, self.ttft, strict=True))
        return statistics.fmean(ttft for _, ttft in by_length[: math.ceil(len(by_length) / 4)])


def lognormal(mean: float, sigma: float, least: int, most: int) -> Length:
    """Lengths of so many tokens in the mean; those below `least` or above `most` are left out."""
    mu = math.log(mean) - sigma**2 / 2

    def draw(rng: random.Random) -> int:
        while not least <= (length := round(rng.lognormvariate(mu, sigma))) <= most:
            pass
        return length

    return draw


def poisson(rate: float, seconds: float, length: Length, seed: int) -> list[Coming]:
    """The same seed gives the same prompts in the same order at every rate. At least one."""
    rng = random.Random(seed)
    coming: list[Coming] = []
    at = 0.0
    while not coming or at <= seconds:
        coming.append(Coming(at, length(rng)))
        at += rng.expovariate(rate)
    return coming


def offer(
    client: Client,
    coming: Sequence[Coming],
    patience_s: float,
    vocabulary: int,
    trace_s: float = 0.0,
) -> Outcome:
    """Submits each prompt at its time. patience_s: how long to wait for results after the last one
    came; what is missing then is cancelled. trace_s: how many seconds to record, from the middle.

    Raises RunError for a prompt that fails.
    """
    prompts = random_prompts([each.tokens for each in coming], vocabulary)
    ttft: dict[int, float] = {}
    late = 0.0
    submitted = 0
    start = time.monotonic()
    trace_at = start + coming[-1].at_s / 2 if trace_s else math.inf
    deadline = start + coming[-1].at_s + patience_s
    while len(ttft) < len(coming) and (now := time.monotonic()) < deadline:
        if now >= trace_at:
            client.start_trace(trace_s)
            trace_at = math.inf
        due = []
        while submitted < len(coming) and start + coming[submitted].at_s <= now:
            due.append(PrefillRequest(submitted, prompts[submitted]))
            late = max(late, now - start - coming[submitted].at_s)
            submitted += 1
        if due:
            client.submit(due)
        following = start + coming[submitted].at_s if submitted < len(coming) else deadline
        for result in client.receive(max(0.0, min(following, trace_at) - time.monotonic())):
            if result.error is not None:
                raise RunError(f"a prompt of {coming[result.key].tokens} tokens: {result.error}")
            ttft[result.key] = time.monotonic() - start - coming[result.key].at_s
    missing = [key for key in range(len(coming)) if key not in ttft]
    client.cancel(missing)
    end = time.monotonic() - start
    ttft |= {key: end - coming[key].at_s for key in missing}
    return Outcome(
        tokens=[each.tokens for each in coming],
        ttft=[ttft[key] for key in range(len(coming))],
        given_up=len(missing),
        late_s=late,
        trace=client.await_trace(trace_s + _TRACE_GRACE_S) if trace_s else None,
    )
