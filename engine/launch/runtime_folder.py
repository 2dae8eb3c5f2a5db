"""Where a running instance keeps its sockets and logs: one private folder an instance.

The path is short whatever TMPDIR is, because a ZeroMQ ipc address may not exceed about 107 bytes.
A folder belongs to the processes that hold a lock on it; one whose lock is free was left by a
process killed together with its zygote, and is removed by the next instance that starts.
"""

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

_MAX_BASE = 60


def base_folder() -> Path:
    """The user's folder for all instances, mode 0700. Raises PermissionError if it is not ours."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and len(runtime) <= _MAX_BASE and os.access(runtime, os.W_OK | os.X_OK):
        base = Path(runtime) / "asapctl"
    else:
        base = Path(f"/tmp/asapctl-{os.getuid()}")
    base.mkdir(mode=0o700, exist_ok=True)
    status = base.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(
            f"{base} is not a folder that only you can enter; remove it or set XDG_RUNTIME_DIR"
        )
    return base


def create_folder(name: str) -> Path:
    """Makes and locks the folder of the instance `name`; removes folders that nobody holds.

    The lock is on the folder itself and lasts as long as this process and what it forks.
    Raises OSError.
    """
    base = base_folder()
    with _open(base) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        _sweep(base)
        folder = base / name
        folder.mkdir(mode=0o700)
        (folder / "logs").mkdir()
        held = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)  # deliberately never closed
        fcntl.flock(held, fcntl.LOCK_EX)
    return folder


def remove_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _sweep(base: Path) -> None:
    for folder in base.iterdir():
        if not folder.is_dir():
            continue
        with _open(folder) as fd:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            remove_folder(folder)


@contextlib.contextmanager
def _open(folder: Path) -> Iterator[int]:
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
