"""The logs of an instance as one stream of whole lines, in the order of their time."""

import heapq
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.errors import UsageError

_LOOK_S = 0.1
_CHUNK = 1 << 16
_TIME = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[,.]\d{3}")


@dataclass(frozen=True)
class Line:
    """source: "attention-0", "controller". text: without its end."""

    source: str
    text: str


@dataclass
class _File:
    """A log that is read as it grows. What has no end yet is kept back."""

    path: Path
    rest: bytes = b""
    stamp: bytes = b""  # of the latest line that had one; those without belong to it

    def __post_init__(self) -> None:
        # Kept open: the folder may be moved or removed, and the last lines are still read.
        self._file = self.path.open("rb", buffering=0)

    def read(self, last: bool = False) -> Iterator[tuple[bytes, Line]]:
        """Whole lines that came since, with their times. last: nothing more will come."""
        while data := self._file.read(_CHUNK):
            *whole, self.rest = (self.rest + data).split(b"\n")
            yield from map(self._line, whole)
        if last and self.rest:
            yield self._line(self.rest)
            self.rest = b""

    def _line(self, data: bytes) -> tuple[bytes, Line]:
        if match := _TIME.match(data):
            self.stamp = match[0].replace(b".", b",")
        return self.stamp, Line(self.path.stem, data.rstrip(b"\r").decode(errors="replace"))

    def close(self) -> None:
        self._file.close()


class Logs:
    """The logs in the folder `logs`, of all processes or of the one called `source`.

    Use as a context manager. Raises UsageError when there is no such log.
    """

    def __init__(self, logs: Path, source: str | None = None) -> None:
        self._folder = logs
        self._source = None if source is None else _normal(source)
        self._files: dict[str, _File] = {}
        self._open_new()
        if self._source is not None and self._source not in self._files:
            names = ", ".join(path.stem for path in sorted(logs.glob("*.log"))) or "none"
            raise UsageError(f'there is no log of "{source}"; there are: {names}')

    def __enter__(self) -> "Logs":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def read(self, last: bool = False) -> Iterator[Line]:
        """The lines that came since the last call, in the order of their time. last: nothing more
        will come, so that a line without an end is one too.
        """
        self._open_new()
        files = [file.read(last) for file in self._files.values()]
        for _, line in heapq.merge(*files, key=lambda timed: timed[0]):
            yield line

    def follow(self, alive: Callable[[], bool]) -> Iterator[Line]:
        """Yields lines as they come, for as long as the instance is alive and then to the end."""
        while alive():
            yield from self.read()
            time.sleep(_LOOK_S)
        yield from self.read(last=True)

    def _open_new(self) -> None:
        for path in sorted(self._folder.glob("*.log")):
            if path.stem not in self._files and self._source in {None, path.stem}:
                try:
                    self._files[path.stem] = _File(path)
                except FileNotFoundError:
                    continue  # the instance ended this very moment


def _normal(source: str) -> str:
    """ "expert 0" and "expert:0" are what the log is called too."""
    return re.sub(r"[ :.]+", "-", source.strip())
