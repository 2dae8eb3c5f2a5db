"""A client of the controller: submits prompts, receives results, asks how things stand."""

import math
import os
import time
from typing import Protocol

import zmq

from engine.control.messages import (
    Cancel,
    Drain,
    Ended,
    KillRank,
    Message,
    PrefillRequest,
    PrefillResult,
    Quit,
    Refused,
    Results,
    Snapshot,
    StartTrace,
    Submit,
    TraceReport,
    Watch,
    decode,
    encode,
)
from engine.errors import RunError
from engine.topology.ranks import RankId


class Guard(Protocol):
    """The supervisor's side of a client: it looks after the processes while the client waits.

    `check` is called when `fileno` is readable; it raises RunError once the instance has failed.
    """

    def fileno(self) -> int: ...

    def check(self) -> None: ...

    def kill(self, id_: RankId) -> None: ...

    def end(self, reason: str | None) -> None: ...


class Client:
    """One connection to the controller at `address`. Not thread-safe.

    With a guard every method raises RunError when the instance has failed. Without one, nothing
    is heard of a controller that is gone. ended: the controller said that the instance has done
    all that it was asked to before it was told to quit.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        guard: Guard | None = None,
    ) -> None:
        self.ended = False
        self._socket = context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.identity = f"client-{os.getpid()}-{id(self):x}".encode()
        self._socket.connect(address)
        self._guard = guard
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        if guard is not None:
            self._poller.register(guard.fileno(), zmq.POLLIN)
        self._results: list[PrefillResult] = []
        self._snapshot: Snapshot | None = None
        self._trace: TraceReport | None = None

    def submit(self, requests: list[PrefillRequest]) -> None:
        self.send(Submit(requests))

    def cancel(self, keys: list[int]) -> None:
        """Nobody waits for these any more: no result will come."""
        self.send(Cancel(keys))

    def quit(self) -> None:
        """Has the instance take no more requests, finish those that it has, and end."""
        self.send(Quit())

    def drain(self) -> None:
        """Says that nothing more will come, so that no batch waits for company."""
        self.send(Drain())

    def receive(self, timeout_s: float) -> list[PrefillResult]:
        """Results that have come; waits up to `timeout_s` seconds for the first of them."""
        deadline = time.monotonic() + timeout_s
        while not self._results and (left := deadline - time.monotonic()) > 0:
            self._wait(left)
        self._wait(0)
        results, self._results = self._results, []
        return results

    def request_snapshot(self) -> None:
        """Asks for a snapshot; `snapshot` returns it once it has come."""
        self.send(Watch())

    def snapshot(self) -> Snapshot | None:
        """The latest snapshot that has come, None before the first. Does not wait."""
        return self._snapshot

    def fresh_snapshot(self, timeout_s: float) -> Snapshot | None:
        """Asks for a snapshot and waits for it; None when it does not come in time."""
        self._snapshot = None
        self.request_snapshot()
        deadline = time.monotonic() + timeout_s
        while self._snapshot is None and (left := deadline - time.monotonic()) > 0:
            self._wait(left)
        return self._snapshot

    def trace(self, seconds: float, timeout_s: float) -> TraceReport | None:
        """What every rank does in the next `seconds`; None when no answer comes in time."""
        self.start_trace(seconds)
        return self.await_trace(seconds + timeout_s)

    def start_trace(self, seconds: float) -> None:
        """Has every rank record what it does from now on; `await_trace` returns it."""
        self._trace = None
        self.send(StartTrace(seconds))

    def await_trace(self, timeout_s: float) -> TraceReport | None:
        """The trace that was started last; None when it does not come in time."""
        deadline = time.monotonic() + timeout_s
        while self._trace is None and (left := deadline - time.monotonic()) > 0:
            self._wait(left)
        return self._trace

    def filenos(self) -> list[int]:
        """What an event loop waits for; `receive(0)` is due when one is readable, and, since the
        socket's tells of changes alone, after everything that was sent.
        """
        guard = [] if self._guard is None else [self._guard.fileno()]
        return [self._socket.fileno(), *guard]

    def close(self) -> None:
        self._socket.close()

    def send(self, message: Message) -> None:
        """Never blocks."""
        self._socket.send(encode(message))
        if self._guard is not None:
            self._guard.check()

    def _wait(self, timeout_s: float) -> None:
        ready = dict(self._poller.poll(math.ceil(timeout_s * 1000)))
        while self._socket.poll(0):
            self._take(decode(self._socket.recv()))
        if self._guard is not None and self._guard.fileno() in ready:
            self._guard.check()

    def _take(self, message: Message) -> None:
        match message:
            case Results(results):
                self._results.extend(results)
            case Snapshot():
                self._snapshot = message
            case TraceReport():
                self._trace = message
            case KillRank(id_, _) if self._guard is not None:
                self._guard.kill(id_)
            case Ended(reason) if self._guard is not None:
                self.ended = True
                self._guard.end(reason)
            case Refused(reason):
                raise RunError(f"the controller refused this client: {reason}")
