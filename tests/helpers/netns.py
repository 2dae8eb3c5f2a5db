"""Several hosts on this machine: network namespaces, each with one cable to a common switch.

They share files and processes, as nothing that is tested looks at those of another host, but no
address: what one of them reaches at another has gone through the network.
"""

import ctypes
import itertools
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from os import getpid, kill
from pathlib import Path
from typing import Any

import psutil
import pytest

_NAME = "asapctl-{}-{}"  # the process that made it, and which
_sets = itertools.count()
_FOLDER = Path("/run/netns")


class Host:
    """address, address6: its own, of private ranges (address6 is None where there is no IPv6)."""

    def __init__(self, number: int, switch: str) -> None:
        self.name = f"{switch}host{number}"
        self.address = f"10.77.0.{number + 1}"
        self.address6: str | None = f"fd77::{number + 1}"
        self._switch = switch
        self._port = f"port{number}"

    def make(self) -> None:
        _ip("netns", "add", self.name)
        _ip("-n", self.name, "link", "set", "lo", "up")
        cable = ("link", "add", self._port, "type", "veth", "peer", "name", "eth0")
        _ip("-n", self._switch, *cable, "netns", self.name)
        _ip("-n", self._switch, "link", "set", self._port, "master", "br0", "up")
        _ip("-n", self.name, "address", "add", f"{self.address}/24", "dev", "eth0")
        if Path("/proc/sys/net/ipv6").exists():
            # Without waiting to hear whether somebody has it already.
            _ip("-n", self.name, "address", "add", f"{self.address6}/64", "dev", "eth0", "nodad")
        else:
            self.address6 = None
        _ip("-n", self.name, "link", "set", "eth0", "up")

    def command(self, arguments: Sequence[str]) -> list[str]:
        """What runs `arguments` on this host; it becomes the command, so its pid is that too."""
        return ["nsenter", f"--net={_FOLDER / self.name}", *arguments]

    def popen(self, arguments: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
        return subprocess.Popen(self.command(arguments), **options)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The sockets that this thread opens inside, and threads that it starts, are this host's;
        of the processes that it starts, none may be meant for elsewhere.
        """
        with Path("/proc/thread-self/ns/net").open() as own, (_FOLDER / self.name).open() as there:
            _set_namespace(there.fileno())
            try:
                yield
            finally:
                _set_namespace(own.fileno())

    def processes(self) -> list[psutil.Process]:
        return _inside(self.name)

    def cut(self) -> None:
        """Pulls the cable: nobody is told, and nothing arrives any more."""
        _ip("-n", self._switch, "link", "set", self._port, "down")

    def heal(self) -> None:
        _ip("-n", self._switch, "link", "set", self._port, "up")


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """`count` hosts, out of reach of other such; what still runs on them is killed in the end.

    Skips the test, with the reason, where they cannot be made.
    """
    if missing := [tool for tool in ("ip", "nsenter") if shutil.which(tool) is None]:
        pytest.skip(f"no network namespaces without {' and '.join(missing)}")
    remove_leftovers()
    switch = _NAME.format(getpid(), f"net{next(_sets)}")
    made = [Host(number, switch) for number in range(count)]
    try:
        try:
            _ip("netns", "add", switch)
            _ip("-n", switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", switch, "link", "set", "br0", "up")
            for host in made:
                host.make()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield made
    finally:
        for name in [host.name for host in made] + [switch]:
            _remove(name)


def remove_leftovers() -> None:
    """What tests that were killed have left."""
    for path in _FOLDER.glob(_NAME.format("*", "*")):
        found = re.fullmatch(_NAME.format(r"(\d+)", r"\w+"), path.name)
        if found and not psutil.pid_exists(int(found[1])):
            _remove(path.name)


def _remove(name: str) -> None:
    path = _FOLDER / name
    if not path.exists():
        return
    for process in _inside(name):
        with suppress(ProcessLookupError):
            kill(process.pid, signal.SIGKILL)
    with suppress(subprocess.CalledProcessError):
        _ip("netns", "delete", name)


def _inside(name: str) -> list[psutil.Process]:
    found = []
    for pid in _ip("netns", "pids", name).split():
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(int(pid)))
    return found


def _set_namespace(descriptor: int) -> None:
    """Moves the calling thread; os.setns needs Python 3.12."""
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*arguments: str) -> str:
    done = subprocess.run(
        ["ip", *arguments], capture_output=True, check=True, text=True, timeout=30
    )
    return done.stdout
