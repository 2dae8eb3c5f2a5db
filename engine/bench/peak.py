"""The machine's float32 peak: matrix products in one process of one thread a core, all at once, by
the fastest library that torch has.
"""

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
_LIBRARIES = ("torch", "onednn")
_SECONDS = 0.15  # for each library and size
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
        """Operations per second of all processes together, with the size and library that are
        fastest.
        """
        return max(
            self._measure(library, size, seconds) for library in _LIBRARIES for size in _SIZES
        )

    def _measure(self, library: str, size: int, seconds: float) -> float:
        try:
            for link in self._links:
                link.send((library, size, seconds))
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
    from torch.nn.functional import linear as torchs_own

    from engine.model.products import has_onednn, onednn_product

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    onednn = onednn_product() if has_onednn() else torchs_own
    while True:
        try:
            library, size, seconds = link.recv()
            left, right = torch.rand(2, size, size)
            product = onednn if library == "onednn" else torchs_own
            product(left, right, None)
            link.send(None)
            start = link.recv()
            time.sleep(max(0.0, start - time.monotonic()))
            count, began = 0, time.perf_counter()
            while (elapsed := time.perf_counter() - began) < seconds:
                product(left, right, None)
                count += 1
            link.send(2.0 * size**3 * count / elapsed)
        except (EOFError, OSError):
            return
