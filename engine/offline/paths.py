"""Where a run reads and writes, checked before anything is opened for writing."""

import os
import stat
import sys
from pathlib import Path

import msgspec

from engine.api.ids import id_hash
from engine.errors import UsageError
from engine.offline.forms import read_line
from engine.offline.lines import LineReader
from engine.offline.resume import Done, changed_line

STANDARD = "-"


class Input(msgspec.Struct, frozen=True):
    """An open input. size: bytes, None where that cannot be known (a pipe)."""

    fd: int
    name: str
    size: int | None
    path: Path | None


def open_input(name: str) -> Input:
    """`name`, or standard input for `-`. Raises UsageError: not there, a folder, empty."""
    if name == STANDARD:
        try:
            fd = os.dup(sys.stdin.fileno())
        except (AttributeError, OSError, ValueError):
            raise UsageError("standard input is closed; give a file of prompts") from None
        label, path = "standard input", None
    else:
        label, path = name, Path(name)
        if path.is_dir():
            raise UsageError(f"{name} is a folder; give a file of prompts, one JSON object a line")
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise UsageError(f"{name}: cannot read the input: {reason}") from None
    status = os.fstat(fd)
    regular = stat.S_ISREG(status.st_mode)
    if regular and status.st_size == 0:
        os.close(fd)
        raise no_prompts(label)
    return Input(fd, label, status.st_size if regular else None, path if regular else None)


def no_prompts(name: str) -> UsageError:
    return UsageError(f"{name} is empty; put one JSON object a line in it, each with a prompt")


def choose_output(source: Input, given: str | None) -> Path | None:
    """Where the results go; None for standard output. Raises UsageError: the input itself."""
    path: Path | None
    if given == STANDARD or (given is None and source.path is None):
        path = None
    elif given is not None:
        path = Path(given)
    else:
        assert source.path is not None
        path = source.path.with_suffix(".results.jsonl")
    if source.size is not None and _is_same(source.fd, path):
        raise UsageError(
            f"{path or 'standard output'} is the input itself; choose another output with -o"
        )
    return path


def check_unchanged(source: Input, done: Done, output: str) -> None:
    """Refuse, before anything is computed, an input whose done lines have changed since.

    Only a regular file can be read twice; lines of a pipe are compared as they come.
    """
    if source.path is None or not len(done):
        return
    seen: set[bytes] = set()
    fd = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        reader = LineReader(fd)
        while (line := reader.take()) is not None:
            origin, _ = read_line(line)
            key = id_hash(origin.custom_id)
            if key not in seen and done.holds(origin.custom_id, origin.record) is False:
                raise changed_line(origin, output)
            seen.add(key)
    finally:
        os.close(fd)


def _is_same(fd: int, output: Path | None) -> bool:
    try:
        status = os.fstat(sys.stdout.fileno()) if output is None else output.stat()
    except (OSError, ValueError, AttributeError):
        return False
    return os.path.samestat(status, os.fstat(fd))
