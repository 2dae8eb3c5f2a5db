"""The values that ranks exchange to build a communicator, kept by the controller.

So a communicator's ranks meet over the connection that they have anyway, as safe as that is; no
other port is opened, and no name is looked up.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from datetime import timedelta

import zmq
from torch.distributed.distributed_c10d import Store

from engine.control.meeting import communicator_name
from engine.control.messages import (
    Message,
    StoreAsk,
    StorePut,
    StoreValues,
    decode,
    encode,
)
from engine.curve import Keys, secure_client
from engine.topology.ranks import RankId

Connect = Callable[[], "zmq.Socket[bytes]"]


class ControlStore(Store):
    """torch.distributed's Store, as far as process groups use it. For one thread at a time.

    connect: a new connection to the controller. name: the communicator's.
    """

    def __init__(self, connect: Connect, name: str, timeout: timedelta) -> None:
        super().__init__()
        self._name = name
        self._timeout = timeout
        self._socket = connect()

    def set(self, key: str, value: str | bytes) -> None:
        self._send(StorePut(self._name, key, _bytes(value)))

    def get(self, key: str) -> bytes:
        return self._ask(StoreAsk(self._name, [key]), self._timeout)[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask(StoreAsk(self._name, keys), timeout or self._timeout)

    def check(self, keys: list[str]) -> bool:
        return len(self._ask(StoreAsk(self._name, keys, wait=False), self._timeout)) == len(keys)

    def add(self, key: str, amount: int) -> int:
        put = StorePut(self._name, key, b"%d" % amount, add=True)
        return int(self._ask(put, self._timeout)[key])

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def _send(self, message: Message) -> None:
        self._socket.send(encode(message))

    def _ask(self, message: StoreAsk | StorePut, timeout: timedelta) -> dict[str, bytes]:
        self._send(message)
        deadline = time.monotonic() + timeout.total_seconds()
        while (left := deadline - time.monotonic()) > 0:
            if self._socket.poll(max(1, round(left * 1000))):
                answer = decode(self._socket.recv())
                if isinstance(answer, StoreValues):
                    return answer.values
        raise RuntimeError(f"nobody else came to {self._name} within {timeout.total_seconds():g} s")


class ControlMeeting:
    """`engine.comm.process_group.Meeting` at the controller at `address`."""

    def __init__(self, address: str, timeout_s: float, keys: Keys | None = None) -> None:
        self.timeout = timedelta(seconds=timeout_s)
        self._address = address
        self._keys = keys

    def store(self, *lives: RankId) -> Store:
        return ControlStore(self._connect, communicator_name(*lives), self.timeout)

    def _connect(self) -> zmq.Socket[bytes]:
        socket = _context().socket(zmq.DEALER)
        socket.linger = 0
        secure_client(socket, self._keys)
        socket.connect(self._address)
        return socket


@functools.cache
def _context() -> zmq.Context[zmq.Socket[bytes]]:
    """Never terminated: that would wait for the threads that wait for ranks that never came."""
    return zmq.Context()


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
