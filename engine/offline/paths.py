"""Where a run reads and writes, checked before anything is opened for writing."""

import os
import re
import stat
import sys
from pathlib import Path

import msgspec

from engine.api.ids import id_hash
from engine.errors import UsageError
from engine.offline.forms import read_line
from engine.offline.lines import LineReader
from engine.offline.resume import Done, changed_line
from engine.streams import is_readable

STANDARD = "-"

_START = 4096
_MAGIC = {
    magic: (f"compressed with {tool}", f"unpack it first ({unpack})")
    for magic, tool, unpack in (
        (b"\x1f\x8b", "gzip", "gunzip"),
        (b"\x28\xb5\x2f\xfd", "zstd", "unzstd"),
        (b"\xfd7zXZ\0", "xz", "unxz"),
        (b"BZh", "bzip2", "bunzip2"),
        (b"PK\x03\x04", "zip", "unzip"),
    )
} | {
    b"PAR1": ("a Parquet file", "write its rows as JSON, one object a line"),
    b"\xff\xfe": ("UTF-16", "save it as UTF-8"),
    b"\xfe\xff": ("UTF-16", "save it as UTF-8"),
}
_ARRAY = re.compile(rb'(\xef\xbb\xbf)?\s*\[\s*["{]')
_SPREAD = re.compile(rb"(\xef\xbb\xbf)?\s*\{[ \t\r]*\n")


class Input(msgspec.Struct, frozen=True):
    """An open input. size: bytes, None where that cannot be known (a pipe)."""

    fd: int
    name: str
    size: int | None
    path: Path | None


def open_input(name: str) -> Input:
    """`name`, or standard input for `-`. Raises UsageError: not there, a folder, empty."""
    label, path = ("standard input", None) if name == STANDARD else (name, Path(name))
    try:
        fd = _open_stdin() if path is None else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise _unreadable(label, error) from None
    status = os.fstat(fd)
    regular = stat.S_ISREG(status.st_mode)
    try:
        if stat.S_ISDIR(status.st_mode):
            raise UsageError(f"{label} is a folder; give a file of prompts, one JSON object a line")
        if regular:
            if status.st_size == 0:
                raise no_prompts(label)
            check_start(os.pread(fd, _START, os.lseek(fd, 0, os.SEEK_CUR)), label)
    except OSError as error:
        os.close(fd)
        raise _unreadable(label, error) from None
    except UsageError:
        os.close(fd)
        raise
    return Input(fd, label, status.st_size if regular else None, path if regular else None)


def _open_stdin() -> int:
    try:
        fd = sys.stdin.fileno()
    except (AttributeError, ValueError):
        fd = -1
    if not is_readable(fd):
        raise UsageError("standard input is closed; give a file of prompts")
    return os.dup(fd)


def _unreadable(label: str, error: Exception) -> UsageError:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return UsageError(f"{label}: cannot read the input: {reason}")


def check_start(data: bytes, name: str) -> None:
    """Raises UsageError when an input that begins with `data` is plainly something else."""
    for magic, (what, remedy) in _MAGIC.items():
        if data.startswith(magic):
            raise UsageError(f"{name} is {what}; {remedy}")
    if _ARRAY.match(data):
        raise UsageError(
            f"{name} is one JSON array; put one object a line, without brackets and commas "
            f"(jq -c '.[]' makes it so)"
        )
    if _SPREAD.match(data):
        raise UsageError(
            f"{name} spreads an object over several lines; put each on one line "
            "(jq -c . makes it so)"
        )


def no_prompts(name: str) -> UsageError:
    return UsageError(f"{name} is empty; put one JSON object a line in it, each with a prompt")


def named_output(source: Path | None, given: str | None) -> Path | None:
    """Where results go by the words of the command; None for standard output.

    source: the input where it is a regular file. Of all endings only .jsonl is left out of the
    output's name, so that inputs that differ in their endings do not share one.
    """
    if given == STANDARD:
        return None
    if given is not None:
        return Path(given)
    if source is None:
        return None
    stem = source.stem if source.suffix == ".jsonl" else source.name
    return source.with_name(f"{stem}.results.jsonl")


def choose_output(source: Input, given: str | None) -> Path | None:
    """Where the results go; None for standard output. Raises UsageError: the input itself."""
    path = named_output(source.path, given)
    if source.size is not None and _is_same(source.fd, path):
        raise UsageError(
            f"{path or 'standard output'} is the input itself; choose another output with -o"
        )
    return path


def check_unchanged(source: Input, done: Done, output: str, chosen: bool = True) -> int:
    """Refuse, before anything is computed, an input whose done lines have changed since.

    chosen: the user has named the output. Otherwise one that holds nothing of this input is refused
    too: it is the output of another one, whose name is like this one's.

    Returns how many bytes of the input the done lines take. Only a regular file can be read twice;
    lines of a pipe are compared as they come, and count 0 here.
    """
    if source.path is None or not len(done):
        return 0
    seen: set[bytes] = set()
    size = 0
    fd = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        reader = LineReader(fd, name=source.name)
        while (line := reader.take()) is not None:
            origin, _ = read_line(line)
            key = id_hash(origin.custom_id)
            if key not in seen:
                state = done.holds(origin.custom_id, origin.record)
                if state is False:
                    raise changed_line(origin, output)
                size += line.size if state else 0
            seen.add(key)
    finally:
        os.close(fd)
    if not size and not chosen:
        raise UsageError(
            f"{output} holds results, but none of {source.name}; choose another output with -o, or "
            "start anew with --overwrite"
        )
    return size


def _is_same(fd: int, output: Path | None) -> bool:
    try:
        status = os.fstat(sys.stdout.fileno()) if output is None else output.stat()
    except (OSError, ValueError, AttributeError):
        return False
    return os.path.samestat(status, os.fstat(fd))
