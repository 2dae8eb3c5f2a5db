"""Writing all of something to a descriptor, whatever it is."""

import fcntl
import os
import select


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Writes all of `data`; waits for a pipe that is full, also where it is set not to block.

    Raises OSError.
    """
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:
            select.select([], [fd], [])


def is_writable(fd: int) -> bool:
    """Whether `fd` is open for writing. It may still be full."""
    return _mode(fd) in {os.O_WRONLY, os.O_RDWR}


def is_readable(fd: int) -> bool:
    """Whether `fd` is open for reading."""
    return _mode(fd) in {os.O_RDONLY, os.O_RDWR}


def _mode(fd: int) -> int | None:
    try:
        return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    except (OSError, ValueError):
        return None
