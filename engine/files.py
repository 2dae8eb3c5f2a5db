"""Reading the small files of a model or a user, which may hold anything."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from engine.echo import plain
from engine.errors import UsageError

MIB = 1 << 20
# An index of a hundred thousand tensors comes to ten MiB.
MOST_JSON_BYTES = 64 * MIB


def read_file(path: Path, most_bytes: int, *, pipes: bool = False) -> bytes:
    """The content of a regular file, or of a pipe where `pipes`.

    Raises OSError, also for a device or a folder and for more than `most_bytes`.
    """
    kind = path.stat().st_mode
    if not (stat.S_ISREG(kind) or (pipes and stat.S_ISFIFO(kind))):
        reason = os.strerror(errno.EISDIR) if stat.S_ISDIR(kind) else "not a regular file"
        raise OSError(errno.EINVAL, reason, str(path))
    with path.open("rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"larger than {most_bytes // MIB} MiB", str(path))
    return data


def parse_json(data: bytes) -> Any:
    """Raises ValueError: not UTF-8, not JSON, or nested deeper than Python goes."""
    try:
        return json.loads(data.decode())
    except RecursionError:
        raise ValueError("nested too deep") from None


def is_file(path: Path) -> bool:
    """Whether there is a file that can be reached; False, too, where nobody may look."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def exists(path: Path) -> bool:
    """Whether there is something; True, too, where that cannot be told: who reads it finds out."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        pass
    return True


def absolute(path: str | Path, where: str, folder: Path | None = None) -> Path:
    """`path` with ~ expanded, counted from `folder` or else from the working folder.

    Raises UsageError, which names `where`: ~ stands for a user who is not known, or the name holds
    a line break, which no message could show.
    """
    if len(str(path).splitlines()) > 1:
        raise UsageError(f"{where}: {plain(str(path))} holds a line break; rename it")
    try:
        expanded = Path(path).expanduser()
    except RuntimeError:
        raise UsageError(
            f"{where}: {path} is in no home folder that is known; write the path out"
        ) from None
    return expanded.absolute() if folder is None else (folder / expanded).absolute()
