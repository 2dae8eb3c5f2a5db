"""Watching an instance: asks its controller again and again, and draws what it answers."""

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType

from rich.console import Console, Group
from rich.live import Live

from asapctl.interrupts import uninterrupted
from asapctl.keys import Keys
from asapctl.status_fleet import FleetView, Shown
from asapctl.status_print import ANSWER_S, ascii_only
from asapctl.status_view import StatusView, health_of, is_good
from engine.control.client import Client
from engine.control.messages import Snapshot
from engine.launch.attached import attached
from engine.launch.registry import InstanceRecord, NoInstanceError, find_instance

_ASK_EVERY_S = 0.2
_TICK_S = 0.05


def watch(record: InstanceRecord, console: Console) -> bool:
    """Draws until the user quits or the instance ends; returns whether all was well then."""
    with attached(record) as clients, _Screen(console) as screen:
        watching = _Watching(record, clients, screen)
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


@dataclass
class _Watched:
    """One controller: the last that it said, and when."""

    client: Client
    heard: float
    shown: Snapshot | None = None

    def listen(self) -> bool:
        """Whether something new has come."""
        self.client.receive(0)
        snapshot = self.client.snapshot()
        if snapshot is self.shown:
            return False
        self.shown, self.heard = snapshot, time.monotonic()
        return True

    @property
    def silent_s(self) -> float:
        silent = time.monotonic() - self.heard
        return silent if silent > ANSWER_S else 0.0


class _Watching:
    def __init__(self, record: InstanceRecord, clients: Sequence[Client], screen: _Screen) -> None:
        self._record = record
        self._watched = [_Watched(client, time.monotonic()) for client in clients]
        self._screen = screen
        plain = ascii_only(screen.console)
        self._view = FleetView(plain) if len(clients) > 1 else StatusView(plain)
        self._asked = 0.0
        self.ended = False

    @property
    def good(self) -> bool:
        """Of the last that was heard; not, when nothing has been heard for a while."""
        return all(
            one.shown is not None
            and (self.ended or not one.silent_s)
            and is_good(health_of(one.shown))
            for one in self._watched
        )

    def step(self) -> bool:
        """Keys, questions, answers, and a new picture where there is something new."""
        now = time.monotonic()
        if now - self._asked >= _ASK_EVERY_S:
            self._asked = now
            for one in self._watched:
                one.client.request_snapshot()
        pressed = self._screen.keys.read(_TICK_S)
        if "quit" in pressed:
            return False
        for key in pressed:
            self._view.press(key)
        news = [one.listen() for one in self._watched]
        overdue = self._asked == now and any(one.silent_s for one in self._watched)
        if pressed or any(news) or overdue:
            self._draw()
        if overdue:
            self.ended = not self._is_there()
        return not self.ended

    def _draw(self) -> None:
        console = self._screen.console
        width, height = console.size
        if isinstance(self._view, FleetView):
            shown = [Shown(one.shown, one.silent_s) for one in self._watched]
            lines = self._view.lines(self._record, shown, width, height)
        else:
            (one,) = self._watched
            snapshot = one.shown or Snapshot(False, 0, 0, 0, 0, [])
            lines = self._view.lines(self._record, snapshot, width, height, one.silent_s)
        self._screen.draw(Group(*lines))

    def _is_there(self) -> bool:
        try:
            return find_instance(self._record.name).pid == self._record.pid
        except NoInstanceError:
            return False
