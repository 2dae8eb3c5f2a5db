"""Spends the time that a table says, and keeps count of it."""

import time
from collections.abc import Callable

# Operations per second that steps are predicted with before the first one: one of a paced part is
# a nanosecond, so that predictions are the table's.
OPERATIONS_PER_S = 1e9


def sleep_until(end: float) -> None:
    """end: monotonic seconds."""
    if (left := end - time.monotonic()) > 0:
        time.sleep(left)


class Pacer:
    """count: is told how long each step is to take, without what this machine needs for itself.
    until: how to let time pass up to a (monotonic) time.
    """

    def __init__(
        self, count: Callable[[float], None], until: Callable[[float], None] = sleep_until
    ) -> None:
        self._count = count
        self._until = until

    def step(self, start: float, seconds: float) -> None:
        """Returns `seconds` after `start`: what has been done since is a part of the step."""
        self._count(seconds)
        self._until(start + seconds)
