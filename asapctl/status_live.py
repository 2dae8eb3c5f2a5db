"""Watching an instance: asks its controller again and again, and draws what it answers."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import msgspec
import zmq
from rich.console import Console, Group
from rich.live import Live

from asapctl.interrupts import uninterrupted
from asapctl.keys import Keys
from asapctl.status_view import StatusView, health_of, is_good
from engine.control.client import Client
from engine.control.messages import Snapshot
from engine.errors import RunError
from engine.launch.registry import InstanceRecord, NoInstanceError, find_instance

ANSWER_S = 2.0  # a controller that takes longer is called silent
_ASK_EVERY_S = 0.2
_TICK_S = 0.05


@contextmanager
def attach(record: InstanceRecord) -> Iterator[Client]:
    """A client of a running instance that does not own it."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        client = Client(context, record.controller)
        stack.callback(client.close)
        yield client


def one_snapshot(record: InstanceRecord) -> Snapshot:
    """Raises RunError when the controller does not answer in time."""
    with attach(record) as client:
        snapshot = client.fresh_snapshot(ANSWER_S)
    if snapshot is None:
        raise silence(record)
    return snapshot


def silence(record: InstanceRecord) -> RunError:
    """What to say of a controller that does not answer."""
    return RunError(
        f"instance {record.name}: its controller did not answer within {ANSWER_S:.0f} s; "
        f"its logs are in {record.logs}"
    )


def print_json(record: InstanceRecord) -> bool:
    """One object on standard output; returns whether the instance is as it should be."""
    snapshot = one_snapshot(record)
    _print(msgspec.json.encode(described(record, snapshot)).decode())
    return is_good(health_of(snapshot))


def described(record: InstanceRecord, snapshot: Snapshot) -> dict[str, Any]:
    """What `--json` prints: the health, the instance's record and the snapshot's fields."""
    fields: dict[str, Any] = msgspec.to_builtins(snapshot)
    del fields["type"]
    return {
        "health": health_of(snapshot),
        "instance": msgspec.to_builtins(record),
        **fields,
    }


def print_picture(record: InstanceRecord, console: Console) -> bool:
    """Everything at once, on standard output; returns whether all is as it should be."""
    snapshot = one_snapshot(record)
    view = StatusView(ascii_only=_ascii_only(console))
    with console.capture() as picture:
        for line in view.lines(record, snapshot, console.width):
            console.print(line)
    _print(picture.get().rstrip("\n"))
    return is_good(health_of(snapshot))


def watch(record: InstanceRecord, console: Console) -> bool:
    """Draws until the user quits or the instance ends; returns whether all was well then."""
    with attach(record) as client, _Screen(console) as screen:
        watching = _Watching(record, client, screen)
        while watching.step():
            pass
    if watching.ended:
        print(f"instance {record.name} has ended", file=sys.stderr)
    return watching.good


class _Screen:
    """The terminal while it is ours: alternate screen, keys, and what Ctrl-Z asks for."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.keys = Keys()
        self._stack = ExitStack()
        self._live: Live | None = None
        self._suspend = False

    def __enter__(self) -> "_Screen":
        before = signal.signal(signal.SIGTSTP, self._on_suspend)
        self._stack.callback(signal.signal, signal.SIGTSTP, before)
        try:
            with uninterrupted():
                self._open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        with uninterrupted():
            self._stack.close()

    def draw(self, group: Group) -> None:
        with uninterrupted():
            if self._suspend:
                self._suspend = False
                self._taken.close()
                os.kill(os.getpid(), signal.SIGSTOP)
                self._open()
            assert self._live is not None
            self._live.update(group, refresh=True)

    def _open(self) -> None:
        taken = ExitStack()
        self._taken = self._stack.enter_context(taken)
        taken.enter_context(self.keys)
        self._live = Live(
            console=self.console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        taken.enter_context(self._live)

    def _on_suspend(self, number: int, frame: FrameType | None) -> None:
        self._suspend = True


class _Watching:
    def __init__(self, record: InstanceRecord, client: Client, screen: _Screen) -> None:
        self._record = record
        self._client = client
        self._screen = screen
        self._view = StatusView(ascii_only=_ascii_only(screen.console))
        self._shown: Snapshot | None = None
        self._asked = 0.0
        self._heard = time.monotonic()
        self.ended = False

    @property
    def good(self) -> bool:
        """Of the last that was heard; not, when nothing has been heard for a while."""
        if self._shown is None or (not self.ended and self._silent_s > 0):
            return False
        return is_good(health_of(self._shown))

    @property
    def _silent_s(self) -> float:
        silent = time.monotonic() - self._heard
        return silent if silent > ANSWER_S else 0.0

    def step(self) -> bool:
        """Keys, questions, answers, and a new picture where there is something new."""
        now = time.monotonic()
        if now - self._asked >= _ASK_EVERY_S:
            self._asked = now
            self._client.request_snapshot()
        pressed = self._screen.keys.read(_TICK_S)
        if "quit" in pressed:
            return False
        for key in pressed:
            self._view.press(key)
        self._client.receive(0)
        snapshot = self._client.snapshot()
        if snapshot is not self._shown:
            self._shown, self._heard = snapshot, time.monotonic()
            self._draw()
        elif pressed or (self._silent_s and self._asked == now):
            self._draw()
        if self._silent_s and self._asked == now:
            self.ended = not self._is_there()
        return not self.ended

    def _draw(self) -> None:
        console = self._screen.console
        width, height = console.size
        snapshot = self._shown or Snapshot(False, 0, 0, 0, 0, [])
        lines = self._view.lines(self._record, snapshot, width, height, self._silent_s)
        self._screen.draw(Group(*lines))

    def _is_there(self) -> bool:
        try:
            return find_instance(self._record.name).pid == self._record.pid
        except NoInstanceError:
            return False


def _ascii_only(console: Console) -> bool:
    return not console.encoding.lower().startswith("utf")


def _print(text: str) -> None:
    """Raises RunError when standard output takes it not."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except OSError as error:
        # Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise RunError(f"standard output: {error.strerror}") from None
