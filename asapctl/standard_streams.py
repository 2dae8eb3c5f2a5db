"""Standard input, output and error of the program, whatever its user has connected them to.

What is written to standard error is for whoever looks: when nobody can see it any more, the work
goes on. What is written to standard output was asked for: when it gets lost, that is an error.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import TYPE_CHECKING

from engine.errors import RunError
from engine.streams import write_all

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class ReaderGoneError(RunError):
    """Nobody reads standard output any more."""


def prepare() -> None:
    """Fills what is closed, and has `sys.stdout` and `sys.stderr` deal with failures.

    A closed stream stays one that can be neither read nor written, but no file opened later gets
    its number, and with it what is meant for the stream.
    """
    for fd, flags in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, flags), True)  # the lowest that is free
    sys.stdout = _text(_Needed(1, "w", closefd=False), sys.stdout)
    sys.stderr = _text(_Lost(2, "w", closefd=False), sys.stderr)


def _text(raw: io.FileIO, before: object) -> io.TextIOWrapper:
    """Keeps nothing back. What the encoding has no character for (a file's name may be any bytes)
    is escaped.
    """
    encoding = getattr(before, "encoding", None) or "utf-8"
    return io.TextIOWrapper(
        raw,
        encoding=encoding,
        errors="backslashreplace",
        write_through=True,
    )


class _Needed(io.FileIO):
    """Raises RunError when it cannot be written."""

    def write(self, data: ReadableBuffer, /) -> int:
        view = memoryview(data).cast("B")
        try:
            write_all(self.fileno(), view)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise ReaderGoneError("standard output: its reader has closed it") from None
            what = "it is closed" if error.errno == errno.EBADF else error.strerror
            raise RunError(f"standard output: cannot write: {what}") from None
        return len(view)


class _Lost(io.FileIO):
    """Whatever cannot be written is lost."""

    def write(self, data: ReadableBuffer, /) -> int:
        view = memoryview(data).cast("B")
        with contextlib.suppress(OSError):
            write_all(self.fileno(), view)
        return len(view)
