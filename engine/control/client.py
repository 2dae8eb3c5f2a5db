"""A client of the controller: submits prompts, receives results, asks how things stand."""

import math
import os
import time
from typing import Protocol

import zmq

from engine.control.messages import (
    Drain,
    Message,
    PrefillRequest,
    PrefillResult,
    Refused,
    Results,
    Snapshot,
    Submit,
    Watch,
    decode,
    encode,
)
from engine.errors import RunError


class Guard(Protocol):
    """Somebody who notices that the instance failed: `check` raises, after `fileno` is readable."""

    def fileno(self) -> int: ...

    def check(self) -> None: ...


class Client:
    """One connection to the controller at `address`. Not thread-safe.

    Every method raises RunError when the instance has failed.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, guard: Guard) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.identity = f"client-{os.getpid()}-{id(self):x}".encode()
        self._socket.connect(address)
        self._guard = guard
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(guard.fileno(), zmq.POLLIN)
        self._results: list[PrefillResult] = []
        self._snapshot: Snapshot | None = None

    def submit(self, requests: list[PrefillRequest]) -> None:
        self._send(Submit(requests))

    def drain(self) -> None:
        """Says that nothing more will come, so that no batch waits for company."""
        self._send(Drain())

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
        self._send(Watch())

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

    def close(self) -> None:
        self._socket.close()

    def _send(self, message: Message) -> None:
        self._guard.check()
        self._socket.send(encode(message))

    def _wait(self, timeout_s: float) -> None:
        ready = dict(self._poller.poll(math.ceil(timeout_s * 1000)))
        while self._socket.poll(0):
            self._take(decode(self._socket.recv()))
        if self._guard.fileno() in ready:
            self._guard.check()

    def _take(self, message: Message) -> None:
        match message:
            case Results(results):
                self._results.extend(results)
            case Snapshot():
                self._snapshot = message
            case Refused(reason):
                raise RunError(f"the controller refused this client: {reason}")
