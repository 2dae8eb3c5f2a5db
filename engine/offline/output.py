"""The file that results are appended to: whole lines only, one run at a time."""

import errno
import fcntl
import os
import stat
import sys
from pathlib import Path
from types import TracebackType

from engine.errors import RunError, UsageError


class Output:
    """An open output: a regular file, or something that only takes bytes (a pipe, a device).

    name: how messages call it. path: None for standard output. fd: open for reading and writing
    where `regular`. created: nothing was there before; a file that stays empty is removed again.
    """

    def __init__(
        self, fd: int, name: str, path: Path | None = None, *, created: bool = False
    ) -> None:
        self.fd = fd
        self.name = name
        self.path = path
        self._created = created
        self.regular = stat.S_ISREG(os.fstat(fd).st_mode)
        self._may_cut = self.regular and path is not None

    def append(self, line: bytes) -> None:
        """Write one whole line. Raises RunError when that fails; then nothing of it stays."""
        start = os.lseek(self.fd, 0, os.SEEK_END) if self._may_cut else 0
        try:
            left = memoryview(line)
            while left:
                left = left[os.write(self.fd, left) :]
        except BaseException as error:
            if self._may_cut:
                os.ftruncate(self.fd, start)
            if isinstance(error, OSError):
                raise self._failed(error) from None
            raise

    def close(self) -> None:
        if self._created and self.path is not None and os.fstat(self.fd).st_size == 0:
            self.path.unlink(missing_ok=True)
        os.close(self.fd)

    def __enter__(self) -> "Output":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _failed(self, error: OSError) -> RunError:
        if error.errno == errno.EPIPE:
            return RunError(f"{self.name}: the reader has closed it; the results so far were sent")
        remedy = "the results so far are kept; make room and run the same command again"
        if not self._may_cut:
            remedy = "write to a file that can hold the results (-o)"
        return RunError(f"{self.name}: cannot write: {error.strerror}; {remedy}")


def check_output(path: Path) -> None:
    """Raises UsageError when `open_output` could not open `path`; leaves no trace."""
    real = Path(os.path.realpath(path))
    target = real if real.exists() else real.parent
    if real.is_dir():
        error: OSError | None = IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    elif not target.exists():
        error = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    elif not target.is_dir() and target != real:
        error = NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    elif not os.access(target, os.W_OK):
        error = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    else:
        error = None
    if error is not None:
        raise _unusable(path, real, error)


def open_output(path: Path) -> Output:
    """Open `path` for appending, creating it; hold its lock. Raises UsageError.

    The path that is opened is the real one, so that replacing the file keeps links to it.
    """
    real = Path(os.path.realpath(path))
    while True:
        created = not real.exists()
        try:
            fd = _open(real)
        except OSError as error:
            raise _unusable(path, real, error) from None
        output = Output(fd, str(path), real, created=created)
        if not output.regular or _lock(fd, real):
            return output
        os.close(fd)  # replaced by another run between opening and locking: open the new one


def _open(real: Path) -> int:
    flags = os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    if real.exists() and not real.is_file():
        return os.open(real, os.O_WRONLY | flags, 0o666)
    return os.open(real, os.O_RDWR | flags, 0o666)


def _unusable(path: Path, real: Path, error: OSError) -> UsageError:
    if error.errno == errno.ENOENT:
        reason = f"there is no folder {real.parent}; make it, or choose another -o"
    else:
        reason = f"{error.strerror}; choose another -o"
    return UsageError(f"{path}: cannot write results here: {reason}")


def standard_output() -> Output:
    """Standard output, for results that go to a pipe or the screen."""
    return Output(os.dup(sys.stdout.fileno()), "standard output")


def replace(output: Output, new_fd: int, new_path: Path) -> None:
    """Put the file `new_path` (open as `new_fd`) in the place of `output`, lock included."""
    assert output.path is not None
    fcntl.flock(new_fd, fcntl.LOCK_EX)
    os.fsync(new_fd)
    new_path.replace(output.path)
    os.close(output.fd)
    output.fd = new_fd


def _lock(fd: int, path: Path) -> bool:
    """False when `path` is another file by now. Raises UsageError when another run has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise UsageError(
            f"{path}: another run is writing its results here; wait for it or choose another -o"
        ) from None
    except OSError:
        return True  # a file system without locks
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
