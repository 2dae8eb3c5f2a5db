"""The supervisor: starts the processes of an instance, notices who ends, and ends them all.

It runs in the asapctl process itself. Ending is always the same and needs nobody's help: closing
the socket to the zygote, which kills the ranks and removes the runtime folder. A supervisor that
is killed closes that socket too.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, NoReturn

from engine.comm.packets import packet_pair
from engine.errors import AsapError, RunError, UsageError
from engine.launch import zygote
from engine.launch.kept_logs import keep_logs
from engine.launch.runtime_folder import living_folders, remove_when_free
from engine.launch.signals import handled_by

_START_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 15.0
_MOST_IN_FLIGHT = 128  # file descriptors
_SECRETS = ("ASAPCTL_SECRET", "ASAPCTL_API_KEY")


class Exit(NamedTuple):
    """The end of a process: `code` is negative for a signal, `reason` says it all in words."""

    title: str
    pid: int
    code: int
    reason: str


class Supervisor:
    """The processes of one instance. Use as a context manager; leaving it ends all of them.

    on_exit decides about each process that ends: it starts another, or raises the RunError that
    the instance fails with. Without it, the first one that ends is the failure.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = Path()
        self._identity: os.stat_result | None = None
        self.on_exit: Callable[[Exit], None] = _fail
        self._titles: dict[int, str] = {}
        self._spawning: list[str] = []
        self._failure: AsapError | None = None
        self._zygote: subprocess.Popen[bytes] | None = None
        self._in_flight = 0

    def __enter__(self) -> "Supervisor":
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("an instance is started from the main thread")
        self._link, theirs = packet_pair()
        try:
            with theirs:
                self._zygote = subprocess.Popen(
                    [sys.executable, "-m", "engine.launch.zygote", str(theirs.fileno()), self.name],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    cwd="/",  # nothing in the user's folder may shadow a module
                    env=_environment(),
                    start_new_session=True,  # the terminal's Ctrl-C is the supervisor's alone
                )
            self._await_folder()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def fileno(self) -> int:
        """Readable when `check` has something to say."""
        return self._link.fileno()

    def spawn(self, entry: str, title: str, payload: bytes, fds: Sequence[int] = ()) -> None:
        """Starts `title`, which runs `entry(payload, fds)`; its output goes to its own log."""
        self._make_room(len(fds) + 1)
        log = os.open(self.log_of(title), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            request = zygote.Spawn(entry, f"asapctl: {title}", payload)
            zygote.send_spawn(self._link, request, [log, *fds])
        except OSError:
            self.check()
            raise
        finally:
            os.close(log)
        self._spawning.append(title)

    def _make_room(self, fds: int) -> None:
        """Waits until the zygote has taken earlier descriptors, where there are many: the system
        lets a user have only so many on their way (ETOOMANYREFS).
        """
        while self._spawning and self._in_flight + fds > _MOST_IN_FLIGHT:
            select.select([self._link], [], [])
            self.check()
        if not self._spawning:
            self._in_flight = 0
        self._in_flight += fds

    def log_of(self, title: str) -> Path:
        return self.folder / "logs" / f"{title.replace(' ', '-')}.log"

    def runs(self, title: str) -> bool:
        """As far as `check` has heard."""
        return title in self._titles.values()

    def kill(self, title: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Signals the process of that title; `check` hears of its death like of any other."""
        for pid, name in self._titles.items():
            if name == title:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def check(self) -> None:
        """Deals with processes that have ended. Raises RunError once the instance has failed.

        Never blocks.
        """
        while self._failure is None and select.select([self._link], [], [], 0)[0]:
            self._take(zygote.receive_event(self._link))
        if self._failure is not None:
            raise self._failure

    def fail(self, error: RunError) -> NoReturn:
        """Ends the instance's life with `error`: its logs will be kept."""
        self._failure = self._failure or error
        raise self._failure

    def end(self) -> None:
        """Ends every process and removes the runtime folder. Never raises; may be repeated."""
        with handled_by(signal.SIG_IGN):
            if self._failure is not None and self._identity is not None:
                self._keep_logs()
            self._link.close()
            if self._zygote is not None:
                self._end_zygote(self._zygote)
            if self._identity is not None:
                remove_when_free(self.folder, self._identity)  # unless the zygote did
            else:
                with contextlib.suppress(OSError):  # it may have made one and not said so yet
                    living_folders()

    def _end_zygote(self, process: "subprocess.Popen[bytes]") -> None:
        if not (self._titles or self._spawning):
            process.kill()  # it may be importing torch; there is nothing to end but itself
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()  # its ranks die with it
            process.wait()

    def _await_folder(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while self.folder == Path():
            if not select.select([self._link], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise RunError(f"the zygote did not start within {_START_TIMEOUT_S:.0f} s")
            self._take(zygote.receive_event(self._link))
            if self._failure is not None:
                raise self._failure

    def _take(self, event: zygote.Event | None) -> None:
        match event:
            case zygote.Started(folder):
                self.folder = Path(folder)
                with contextlib.suppress(FileNotFoundError):  # the zygote has failed since
                    self._identity = self.folder.stat()
            case zygote.Spawned(pid):
                self._titles[pid] = self._spawning.pop(0)
            case zygote.Exited(pid, code):
                title = self._titles.pop(pid)
                try:
                    self.on_exit(Exit(title, pid, code, self._describe(title, pid, code)))
                except RunError as error:
                    self._failure = error
            case zygote.Failed(reason, of_usage):
                self._failure = UsageError(reason) if of_usage else RunError(reason)
            case None:
                assert self._zygote is not None
                code = self._zygote.wait()
                self._failure = RunError(f"the zygote (pid {self._zygote.pid}) {_ending(code)}")

    def _describe(self, title: str, pid: int, code: int) -> str:
        what = f"{title} (pid {pid}) {_ending(code)}"
        if code == -signal.SIGKILL:
            return f"{what}; if nobody killed it, the machine or its cgroup ran out of memory"
        reason = _last_line(self.log_of(title)) if code >= 0 else ""
        return f"{what}: {reason}" if reason else what

    def _keep_logs(self) -> None:
        """Puts the logs of a failed instance where its user can read them, and says where."""
        with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home folder
            kept = keep_logs(self.folder / "logs", self.name)
            if self._failure is not None:
                self._failure.args = (f"{self._failure}\nlogs: {kept}",)


def _fail(exit_: Exit) -> None:
    raise RunError(exit_.reason)


def _environment() -> dict[str, str]:
    """One thread a process, no accelerator plug-in imported before its rank asks for it, and no
    secret that processes are handed where they need it.
    """
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    kept = {name: value for name, value in os.environ.items() if name not in _SECRETS}
    return {
        **kept,
        **threads,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""
