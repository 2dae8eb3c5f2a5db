"""Three ways to bring bytes to another process and back: shared memory and a doorbell, ZeroMQ,
gloo.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
import zmq
from torch import Tensor

from benchmarks.pair import WAIT_S, other_process
from engine.comm.doorbell import Bell, BellBox, BellRinger, Ear, Kind
from engine.comm.layout import WindowShape
from engine.comm.windows import Window, create_windows
from engine.errors import RunError
from engine.topology.ranks import RankId

RoundTrip = Callable[[], None]
_ENDS = (RankId("attention", 0), RankId("expert", 0))
_FLOAT32 = 4


class _Bells:
    """One end's doorbells. side: 0 or 1."""

    def __init__(self, folder: str, side: int) -> None:
        self._me, peer = _ENDS[side], _ENDS[1 - side]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._box = BellBox(self._context, self._me, Ear(_address(folder, side)))
        self._box.expect([peer])
        self._ringer = BellRinger(self._context, peer, _address(folder, 1 - side))

    def ring(self, size: int) -> None:
        self._ringer.ring(Bell(Kind.DISPATCH, self._me, 0, n=size))

    def wait(self) -> None:
        if not self._box.socket.poll(WAIT_S * 1000):
            raise RunError(f"{self._me} waited {WAIT_S} s and nothing came")
        self._box.drain()

    def close(self) -> None:
        self._ringer.close()
        self._box.close()
        self._context.term()


def _address(folder: str, side: int) -> str:
    return f"ipc://{folder}/{side}"


@contextmanager
def shared_memory(size: int) -> Iterator[RoundTrip]:
    """Copied into a window, from there into its other half by the peer, and out again."""
    shape = WindowShape(1, size // _FLOAT32, 1, 0, _FLOAT32, lanes=1)
    fd = create_windows(shape.total_bytes)
    region = Window(fd, shape, torch.float32).region(0)
    os.close(fd)
    source, into = _both(size)
    with (
        tempfile.TemporaryDirectory(prefix="asapctl-") as folder,
        other_process(_echo_bells, folder, region.hidden[0], region.out[0]),
        closing(_Bells(folder, 0)) as bells,
    ):

        def trip() -> None:
            region.hidden[0].copy_(source)
            bells.ring(size)
            bells.wait()
            into.copy_(region.out[0])

        yield trip


def _echo_bells(folder: str, came: Tensor, answer: Tensor) -> None:
    bells = _Bells(folder, 1)
    while True:
        bells.wait()
        answer.copy_(came)
        bells.ring(answer.numel())


@contextmanager
def zeromq(size: int) -> Iterator[RoundTrip]:
    """Through ZeroMQ's own messages, without the copies that pyzmq would add."""
    source, into = _both(size)
    with (
        tempfile.TemporaryDirectory(prefix="asapctl-") as folder,
        other_process(_echo_messages, _address(folder, 0)),
        zmq.Context() as context,
        context.socket(zmq.PAIR) as socket,
    ):
        socket.linger = 0
        socket.bind(_address(folder, 0))
        payload = memoryview(source.numpy().data)

        def trip() -> None:
            socket.send(payload, copy=False)
            if not socket.poll(WAIT_S * 1000):
                raise RunError(f"nothing came through ZeroMQ for {WAIT_S} s")
            answer = socket.recv(copy=False)
            into.copy_(torch.frombuffer(answer.buffer, dtype=torch.float32))

        yield trip


def _echo_messages(address: str) -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.connect(address)
        while True:
            socket.send(socket.recv(copy=False), copy=False)


@contextmanager
def gloo(size: int) -> Iterator[RoundTrip]:
    """torch.distributed's send and recv between two ranks."""
    source, into = _both(size)
    with tempfile.TemporaryDirectory(prefix="asapctl-") as folder:
        store = f"file://{folder}/store"
        with other_process(_echo_gloo, store, size):
            _join(store, 0)

            def trip() -> None:
                dist.send(source, 1)
                dist.recv(into, 1)

            try:
                yield trip
            finally:
                dist.destroy_process_group()


def _echo_gloo(store: str, size: int) -> None:
    _join(store, 1)
    buffer, _ = _both(size)
    with suppress(RuntimeError):  # the other end has what it wanted, and is gone
        while True:
            dist.recv(buffer, 0)
            dist.send(buffer, 0)


def _join(store: str, rank: int) -> None:
    wait = timedelta(seconds=WAIT_S)
    dist.init_process_group("gloo", store, timeout=wait, world_size=2, rank=rank)


def _both(size: int) -> tuple[Tensor, Tensor]:
    """What is sent, and where it comes back to: `size` bytes each."""
    return torch.rand(size // _FLOAT32), torch.zeros(size // _FLOAT32)


CARRIERS = {
    "shared memory + doorbell": shared_memory,
    "ZeroMQ ipc": zeromq,
    "gloo": gloo,
}
