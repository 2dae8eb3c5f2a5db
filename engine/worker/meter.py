"""What a rank has done and is doing, for its reports and its black box."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from engine.worker.black_box import BlackBox

# Of a rank that has computed nothing yet, in floating-point operations per second. Low: a step
# that is predicted to take too long only makes a stall be noticed later.
_FIRST_PACE = 1e9
# Bytes per second of a slow disk or network file system.
_DISK_PACE = 50e6


class Meter:
    """Seconds of computing and of waiting with work in hand; how much was done; at what pace.

    paced_seconds: of a paced rank, how many of the busy ones were to be spent.
    """

    def __init__(self, black_box: BlackBox) -> None:
        self.busy_seconds = 0.0
        self.tokens = 0
        self.work_items = 0
        self.predicted_s = 0.0
        self.paced_seconds = 0.0
        self._black_box = black_box
        self._pace = _FIRST_PACE
        self._waited = 0.0
        self._waits_since: float | None = None

    @property
    def wait_seconds(self) -> float:
        """Seconds of waiting with work in hand, those of a wait that goes on included."""
        if self._waits_since is None:
            return self._waited
        return self._waited + time.perf_counter() - self._waits_since

    def predict(self, flops: float, file_bytes: int = 0) -> None:
        """What the next step takes: floating-point operations, and bytes that it writes to disk."""
        self.predicted_s = flops / self._pace + file_bytes / _DISK_PACE

    def pace(self, seconds: float) -> None:
        """A paced step that is to take so long begins."""
        self.paced_seconds += seconds

    @contextmanager
    def computing(self, batch: int, tokens: int = 0, flops: float = 0.0) -> Iterator[None]:
        """One work item: `tokens` that are new to this rank, of `batch`."""
        self._black_box.write(batch, self.work_items)
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.busy_seconds += seconds
        self.tokens += tokens
        self.work_items += 1
        self._black_box.write(None, self.work_items)
        if flops and seconds > 0:
            # Slow steps count for longer than fast ones: a prediction should not be too short.
            pace = flops / seconds
            share = 0.5 if pace < self._pace or self._pace == _FIRST_PACE else 0.05
            self._pace += share * (pace - self._pace)

    @contextmanager
    def waiting(self, with_work: bool) -> Iterator[None]:
        self._waits_since = time.perf_counter() if with_work else None
        yield
        self._waited, self._waits_since = self.wait_seconds, None
