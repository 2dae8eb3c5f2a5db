"""An instance that outlives the command that started it.

`detach` forks before anything heavy is imported. The child is the supervisor, in a session of its
own; until it is ready it writes to the same screen and ends with its parent, and afterwards it
writes to its log and is on its own. The parent waits for that moment, or for the child's end.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_READY = b"r"

Settle = Callable[[Path], None]


def detach() -> Settle:
    """Forks; returns in the child alone. The parent exits: with 0 once the child has called what
    this returns, or else as the child did. A parent that is interrupted ends its child first.

    The function returned takes the file that all further output is appended to.
    """
    reader, writer = os.pipe()  # neither is inherited by programs that are started
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child != 0:
        os.close(writer)
        raise SystemExit(_await(child, reader))
    os.close(reader)
    _close_all_but({0, 1, 2, writer})
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    _signal_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(128 + signal.SIGTERM)

    def settle(log: Path) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
        os.chdir("/")  # the folder it was started in may be removed
        _signal_with_parent(0)
        os.write(writer, _READY)
        os.close(writer)

    return settle


def _close_all_but(kept: set[int]) -> None:
    """What the caller's shell left open, a pipe perhaps, would be held as long as the instance."""
    for fd in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if fd not in kept:
            with contextlib.suppress(OSError):  # the folder's own descriptor is gone by now
                os.close(fd)


def _await(child: int, reader: int) -> int:
    """The exit code of the parent."""
    try:
        if os.read(reader, 1) == _READY:
            return 0
        return _exit_code(child)
    except BaseException:  # an interrupt: KeyboardInterrupt, SystemExit
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)
        _exit_code(child)
        raise


def _exit_code(child: int) -> int:
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code >= 0:
        return code
    name = signal.Signals(-code).name
    sys.stderr.write(f"error: the instance was ended by {name} while it started\n")
    return 128 - code


def _signal_with_parent(number: int) -> None:
    """Has the kernel send `number` to this process when its parent ends; 0: nothing any more."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
