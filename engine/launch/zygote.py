"""The zygote: one process with torch imported, from which every rank is forked.

Importing torch takes seconds, forking milliseconds, so the ranks of an instance (and a rank that
is started again) share one import. The zygote has no thread and touches no device. It also owns
what must not outlive the instance: it makes the runtime folder, and when the socket to its
supervisor closes, for whatever reason (SIGKILL included), it kills the ranks and removes that
folder. The ranks in turn are killed by the kernel when the zygote dies.

Supervisor and zygote talk over a SOCK_SEQPACKET pair: one msgpack struct a packet, file
descriptors beside it.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import NoReturn, TypeAlias

import msgspec

from engine.comm.packets import receive_packet, send_packet
from engine.launch.registry import taken
from engine.launch.runtime_folder import create_folder, remove_folder

_PR_SET_PDEATHSIG = 1


class Spawn(msgspec.Struct, frozen=True, tag=True):
    """Fork a process that runs `entry` ("package.module:function") on `payload`.

    The first descriptor beside it becomes the standard output and error of the process, the
    others are handed to `entry`.
    """

    entry: str
    title: str
    payload: bytes


class Started(msgspec.Struct, frozen=True, tag=True):
    """The runtime folder exists; sent once, before torch is imported."""

    folder: str


class Spawned(msgspec.Struct, frozen=True, tag=True):
    """Answers one Spawn, in order."""

    pid: int


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A forked process ended; `code` as subprocess has it: negative is a signal's number."""

    pid: int
    code: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The zygote itself cannot go on. of_usage: because of what its user asked for."""

    reason: str
    of_usage: bool = False


Event: TypeAlias = Started | Spawned | Exited | Failed
Entry: TypeAlias = Callable[[bytes, list[int]], None]

_decode_event = msgspec.msgpack.Decoder(Event).decode
_decode_spawn = msgspec.msgpack.Decoder(Spawn).decode


def send_spawn(link: socket.socket, request: Spawn, fds: list[int]) -> None:
    """Asks for one fork. `fds[0]` is the log. Raises OSError when the zygote is gone."""
    send_packet(link, msgspec.msgpack.encode(request), fds)


def receive_event(link: socket.socket) -> Event | None:
    """The next event, or None when the zygote is gone."""
    packet = receive_packet(link)
    return None if packet is None else _decode_event(packet[0])


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when `parent`, the process that forked it, ends.

    The check afterwards covers a parent that ended before the call.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


class _Zygote:
    def __init__(self, link: socket.socket, folder: Path) -> None:
        self.link = link
        self.folder = folder
        self.children: set[int] = set()
        # SIGCHLD wakes the selector through a socket pair.
        self.wake, self._wake_writer = socket.socketpair()
        self.wake.setblocking(False)
        self._wake_writer.setblocking(False)
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def send(self, event: Event) -> None:
        with contextlib.suppress(OSError):  # a supervisor that is gone is noticed on receiving
            self.link.send(msgspec.msgpack.encode(event))

    def serve(self) -> None:
        """Forks on request until the supervisor is gone."""
        with DefaultSelector() as selector:
            selector.register(self.link, EVENT_READ)
            selector.register(self.wake, EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self.wake in ready:
                    with contextlib.suppress(BlockingIOError):
                        self.wake.recv(4096)
                    self.reap()
                if self.link in ready:
                    packet = receive_packet(self.link)
                    if packet is None:
                        return
                    data, fds = packet
                    self.fork(_decode_spawn(data), fds)

    def reap(self, *, block: bool = False) -> None:
        while self.children:
            try:
                pid, status = os.waitpid(-1, 0 if block else os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.children.discard(pid)
            self.send(Exited(pid, os.waitstatus_to_exitcode(status)))

    def fork(self, request: Spawn, fds: list[int]) -> None:
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._run(request, fds, zygote)
        self.children.add(pid)
        self.send(Spawned(pid))
        for fd in fds:
            os.close(fd)

    def _run(self, request: Spawn, fds: list[int], zygote: int) -> NoReturn:
        """The life of a forked process. Never returns to the zygote's own code."""
        code = 1
        try:
            die_with_parent(zygote)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.link.close()
            self.wake.close()
            self._wake_writer.close()
            log, *rest = fds
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            import setproctitle

            setproctitle.setproctitle(request.title)
            module, function = request.entry.split(":")
            entry: Entry = getattr(import_module(module), function)
            entry(request.payload, rest)
            code = 0
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def end(self) -> None:
        for pid in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.reap(block=True)
        remove_folder(self.folder)


def _write_to(log: Path) -> None:
    """The screen and pipes of whoever started the instance are not held for as long as it runs."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def main(fd: int, name: str) -> None:
    """Runs the zygote on socket `fd`, with a runtime folder for the instance `name`."""
    link = socket.socket(fileno=fd)
    try:
        folder = create_folder(name)
    except FileExistsError:  # another one was faster
        link.send(msgspec.msgpack.encode(Failed(taken(name), of_usage=True)))
        return
    except OSError as error:
        link.send(msgspec.msgpack.encode(Failed(f"cannot make the runtime folder: {error}")))
        return
    try:
        zygote = _Zygote(link, folder)
    except BaseException:
        remove_folder(folder)
        raise
    try:
        _write_to(folder / "logs" / "zygote.log")
        zygote.send(Started(str(folder)))
        import setproctitle

        setproctitle.setproctitle("asapctl: zygote")
        try:
            import torch  # noqa: F401  (what the ranks are forked for)

            import engine.worker.attention
            import engine.worker.expert  # noqa: F401
        except (ImportError, OSError, RuntimeError) as error:
            zygote.send(Failed(f"cannot import torch: {error}"))
            return
        zygote.serve()
    finally:
        zygote.end()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
