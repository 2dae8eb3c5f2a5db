"""`asapctl` as a user runs it, and the memory and processor time of all its processes."""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from engine.errors import RunError


@contextmanager
def private_runtime() -> Iterator[dict[str, str]]:
    """An environment in which no other instance of this user is seen."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as folder:
        yield {**os.environ, "XDG_RUNTIME_DIR": folder, "ASAPCTL_LOG": "warning"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "asapctl", *arguments]


def finished(process: "subprocess.Popen[str]") -> str:
    """Waits for its end, and returns its standard output. RunError when it failed."""
    output, errors = process.communicate()
    if process.returncode:
        raise RunError(f"{process.args}: exit code {process.returncode}: {errors[-1000:]}")
    return output


def started(arguments: Sequence[str], environment: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command(*arguments),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def tree(pid: int) -> list[psutil.Process]:
    """A process and all that descend from it; empty when it is gone."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_seconds(pid: int) -> float:
    """Processor time of the living processes of a tree."""
    total = 0.0
    for process in tree(pid):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


class MemoryWatch:
    """The most memory that a tree of processes has, in bytes; what they share counts once."""

    def __init__(self, pid: int, every_s: float) -> None:
        self.most = 0
        self._pid = pid
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._every_s):
            self.most = max(self.most, sum(map(_proportional, tree(self._pid))))


def _proportional(process: psutil.Process) -> int:
    """Bytes of a process, each page divided by how many have it."""
    with suppress(OSError, psutil.NoSuchProcess):
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0
