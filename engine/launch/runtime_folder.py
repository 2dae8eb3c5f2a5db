"""Where a running instance keeps its sockets and logs: one private folder an instance.

The path is short whatever TMPDIR is, because a ZeroMQ ipc address may not exceed about 107 bytes.
A folder belongs to the processes that hold a lock on it; one whose lock is free was left by a
process killed together with its zygote. Whoever looks at the folders next removes it.
"""

import contextlib
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from engine.echo import is_utf8
from engine.errors import UsageError

# The longest address: 40 + "/asapctl/" + 32 + "/attention-239.999".
_MAX_BASE = 40
_MAX_NAME = 32
_NAME = re.compile(r"[a-z0-9-]+")


def check_name(name: str) -> None:
    """Raises UsageError unless an instance may be called so."""
    if not _NAME.fullmatch(name) or name.startswith("-"):
        raise UsageError(
            f"{name!r} cannot be the name of an instance; take letters a to z, digits and hyphens"
        )
    if len(name) > _MAX_NAME:
        raise UsageError(f"the name {name} is too long; at most {_MAX_NAME} characters")


def base_folder() -> Path:
    """The user's folder for all instances, mode 0700.

    Raises OSError: it cannot be made, or is not ours, which is a PermissionError.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    fit = len(os.fsencode(runtime)) <= _MAX_BASE and is_utf8(Path(runtime))
    if Path(runtime).is_absolute() and fit and os.access(runtime, os.W_OK | os.X_OK):
        base = Path(runtime) / "asapctl"
    else:
        base = Path(f"/tmp/asapctl-{os.getuid()}")
    with contextlib.suppress(FileExistsError):  # whatever it is
        base.mkdir(mode=0o700)
    status = base.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(
            f"{base} is not a folder that only you can enter; remove it, or set "
            "XDG_RUNTIME_DIR to another place"
        )
    return base


def create_folder(name: str) -> Path:
    """Makes and locks the folder of the instance `name`; removes folders that nobody holds.

    The lock is on the folder itself and lasts as long as this process and what it forks.
    Raises OSError; FileExistsError when an instance of that name is running.
    """
    base = base_folder()
    with _only_us(base):
        _sweep(base)
        folder = base / name
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            raise FileExistsError(f'an instance named "{name}" is already running') from None
        (folder / "logs").mkdir()
        held = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)  # deliberately never closed
        fcntl.flock(held, fcntl.LOCK_EX)
    return folder


def living_folders() -> list[Path]:
    """The folders of the instances that run, by name; the others are removed. Raises OSError."""
    base = base_folder()
    with _only_us(base):
        return _sweep(base)


def is_held(folder: Path) -> bool:
    """Whether any process of the instance is left."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # Shared, so that two who ask at the same time do not take each other for the owner.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def remove_folder(folder: Path) -> None:
    """For its owner, who holds the lock."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_when_free(folder: Path, identity: os.stat_result, timeout_s: float = 5.0) -> None:
    """For others: removes the folder that had `identity` once its owner's last process is gone.

    Another instance may have taken its name by now, and keeps its folder.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError), _only_us(folder.parent):
            if not folder.exists() or not os.path.samestat(identity, folder.stat()):
                return
            if not is_held(folder):
                remove_folder(folder)
                return
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


def _sweep(base: Path) -> list[Path]:
    living = []
    for folder in sorted(base.iterdir()):
        if folder.is_symlink() or not folder.is_dir():
            continue
        if is_held(folder):
            living.append(folder)
        else:
            remove_folder(folder)
    return living


@contextlib.contextmanager
def _only_us(base: Path) -> Iterator[None]:
    """Nobody else makes or removes folders meanwhile, but for owners that remove their own."""
    fd = os.open(base, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
