"""The file that results are appended to: whole lines only, one run at a time."""

import errno
import fcntl
import os
import stat
import sys
from pathlib import Path
from types import TracebackType

from engine.errors import RunError, UsageError
from engine.streams import is_writable, write_all


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
            write_all(self.fd, line)
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
    try:
        target = path
        if not _is_there(path):
            target = Path(os.path.realpath(path)).parent
            if not stat.S_ISDIR(target.stat().st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        elif path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _unusable(path, error) from None


def open_output(path: Path) -> Output:
    """Open `path` for appending, creating it; hold its lock. Raises UsageError.

    The path that is opened is the real one, so that replacing the file keeps links to it. What is
    no file of that name (a pipe, a device, /dev/stdout) is opened as it is named.
    """
    try:
        real = Path(os.path.realpath(path))
        while True:
            created = not _is_there(path)
            if not created and not real.is_file():
                return Output(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), str(path))
            fd = os.open(real, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            if _lock(fd, real):
                return Output(fd, str(path), real, created=created)
            os.close(fd)  # replaced by another run between opening and locking: open the new one
    except OSError as error:
        raise _unusable(path, error) from None


def _is_there(path: Path) -> bool:
    """Raises OSError when that cannot be told."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    return True


def _unusable(path: Path, error: OSError) -> UsageError:
    if error.errno == errno.ENOENT:
        folder = Path(os.path.realpath(path)).parent
        reason = f"there is no folder {folder}; make it, or choose another -o"
    else:
        reason = f"{error.strerror}; choose another -o"
    return UsageError(f"{path}: cannot write results here: {reason}")


def check_standard_output() -> None:
    """Raises UsageError when nothing can be written there."""
    if not is_writable(1):
        raise UsageError("standard output is closed; open it, or name a file for results with -o")


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
