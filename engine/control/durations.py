"""Mean and quantiles of many durations, in memory that does not grow with their number."""

import math
from collections import Counter

_GROWTH = math.log(1.02)
_SMALLEST_S = 1e-6


class Durations:
    """Kept as counts in buckets of 2 % width.

    A quantile is the true one or up to 2 % more, and never more than the longest so far.
    """

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self._total = 0.0
        self._longest = 0.0
        self.count = 0

    def add(self, seconds: float) -> None:
        self.count += 1
        self._total += seconds
        self._longest = max(self._longest, seconds)
        self._buckets[math.ceil(math.log(max(seconds, _SMALLEST_S)) / _GROWTH)] += 1

    def merge(self, other: "Durations") -> None:
        """Adds all durations of `other`."""
        self.count += other.count
        self._total += other._total
        self._longest = max(self._longest, other._longest)
        self._buckets.update(other._buckets)

    @property
    def mean(self) -> float:
        return self._total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """The duration that `share` (0 to 1) of all do not exceed; 0 without any."""
        left = math.ceil(share * self.count)
        for bucket, count in sorted(self._buckets.items()):
            left -= count
            if left <= 0:
                return min(math.exp(bucket * _GROWTH), self._longest)
        return 0.0
