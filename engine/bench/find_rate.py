"""The highest rate that meets a condition, which every lower rate meets and no higher one. Pure."""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

TOLERANCE = 0.05
MOST_TRIALS = 24


class Trial(NamedTuple):
    rate: float
    met: bool


@dataclass(frozen=True)
class Found:
    """rate: the highest that was tried and met; 0 where none did. trials: in order."""

    rate: float
    trials: tuple[Trial, ...]

    @property
    def too_high(self) -> float | None:
        """The lowest rate that was not met; None where all were."""
        return min((trial.rate for trial in self.trials if not trial.met), default=None)


class Search:
    """Tries `start`, goes up or down by a factor of `stride` until the edge lies between two rates,
    and then halves the interval between their logarithms until they are `tolerance` apart.

    It is assumed that what is met at a rate is met at every lower one. Where measuring is noise,
    the answer lies where it was met once. Ends after most_trials at the latest.

        while (rate := search.next_rate) is not None:
            search.tell(meets(rate))
    """

    def __init__(
        self,
        start: float,
        *,
        tolerance: float = TOLERANCE,
        stride: float = 2.0,
        most_trials: int = MOST_TRIALS,
    ) -> None:
        """Raises ValueError for numbers that a search cannot end or begin with."""
        if not (0 < start < math.inf and tolerance > 0 and stride > 1 and most_trials >= 1):
            raise ValueError(f"out of range: {start=} {tolerance=} {stride=} {most_trials=}")
        self._next = start
        self._tolerance = tolerance
        self._stride = stride
        self._most_trials = most_trials
        self._low = 0.0
        self._high = math.inf
        self._trials: list[Trial] = []

    @property
    def next_rate(self) -> float | None:
        """What to try next; None once the search has ended."""
        near = self._low > 0 and self._high <= self._low * (1 + self._tolerance)
        return None if near or len(self._trials) >= self._most_trials else self._next

    @property
    def found(self) -> Found:
        """What is known so far."""
        return Found(self._low, tuple(self._trials))

    def tell(self, met: bool) -> None:
        """Whether next_rate was met."""
        rate = self._next
        self._trials.append(Trial(rate, met))
        if met:
            self._low = rate
        else:
            self._high = rate
        if self._high == math.inf:
            self._next = rate * self._stride
        elif self._low == 0:
            self._next = rate / self._stride
        else:
            self._next = math.sqrt(self._low * self._high)


def find_rate(
    meets: Callable[[float], bool],
    start: float,
    *,
    tolerance: float = TOLERANCE,
    stride: float = 2.0,
    most_trials: int = MOST_TRIALS,
) -> Found:
    """See Search."""
    search = Search(start, tolerance=tolerance, stride=stride, most_trials=most_trials)
    while (rate := search.next_rate) is not None:
        search.tell(meets(rate))
    return search.found


async def find_rate_async(
    meets: Callable[[float], Awaitable[bool]],
    start: float,
    *,
    tolerance: float = TOLERANCE,
    stride: float = 2.0,
    most_trials: int = MOST_TRIALS,
) -> Found:
    """See Search."""
    search = Search(start, tolerance=tolerance, stride=stride, most_trials=most_trials)
    while (rate := search.next_rate) is not None:
        search.tell(await meets(rate))
    return search.found
