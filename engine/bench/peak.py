"""The machine's float32 peak: matrix products in one process of one thread a core, all at once."""

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType

from engine.errors import RunError

# Square matrices of different sizes: which is fastest differs between machines.
_SIZES = (512, 1024, 1536)
_SECONDS = 0.3  # for each size
_START_S = 0.02  # from the order to the beginning, which all processes wait for


class Peak:
    """Processes that multiply matrices when asked to, and otherwise wait. A context manager."""

    def __init__(self, processes: int) -> None:
        self._count = processes
        self._links: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def __enter__(self) -> "Peak":
        # Not forked: threads and ZeroMQ's sockets of this process are no concern of theirs.
        context = multiprocessing.get_context("spawn")
        for _ in range(self._count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._links.append(ours)
            self._processes.append(process)
        self.measure(_SECONDS / 3)  # they are there, and warm
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for link in self._links:
            link.close()
        for process in self._processes:
            process.join(_SECONDS + 5)
            process.kill()

    def measure(self, seconds: float = _SECONDS) -> float:
        """Operations per second of all processes together, with the size that is fastest."""
        return max(self._measure(size, seconds) for size in _SIZES)

    def _measure(self, size: int, seconds: float) -> float:
        try:
            for link in self._links:
                link.send((size, seconds))
            for link in self._links:  # the first time they import torch
                link.recv()
            start = time.monotonic() + _START_S
            for link in self._links:
                link.send(start)
            return sum(float(link.recv()) for link in self._links)
        except (EOFError, OSError):
            raise RunError("a process that measures the peak of matrix products ended") from None


def _work(link: Connection) -> None:
    """Answers each order with operations per second, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            size, seconds = link.recv()
            left, right = torch.rand(2, size, size)
            out = torch.mm(left, right)
            link.send(None)
            start = link.recv()
            time.sleep(max(0.0, start - time.monotonic()))
            count, began = 0, time.perf_counter()
            while (elapsed := time.perf_counter() - began) < seconds:
                torch.mm(left, right, out=out)
                count += 1
            link.send(2.0 * size**3 * count / elapsed)
        except (EOFError, OSError):
            return
