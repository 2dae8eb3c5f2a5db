"""Which lane of an attention rank advances next.

The members of a group exchange rows in every step, so all must take the same steps in the same
order. The first one decides and tells the others, over ZeroMQ as all control.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec
import zmq

from engine.errors import RunError
from engine.topology.ranks import RankId
from engine.worker.lane import Lane


class Turn(msgspec.Struct, frozen=True):
    """`lane` is to advance with `batch`."""

    lane: int
    batch: int


class Turns(Protocol):
    """next: the lane to advance now, None when there is none. Never blocks."""

    @property
    def sources(self) -> list[zmq.Socket[bytes]]:
        """For a poller: readable when `next` may have changed its mind."""

    def next(self, lanes: Sequence[Lane]) -> Lane | None: ...


class Leader:
    """Lanes take turns as they become ready. followers: addresses of the group's other members."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], followers: Sequence[str] = ()
    ) -> None:
        self._first = 0  # the lane to look at first
        self._followers = [_connected(context, address) for address in followers]

    @property
    def sources(self) -> list[zmq.Socket[bytes]]:
        return []

    def next(self, lanes: Sequence[Lane]) -> Lane | None:
        for offset in range(len(lanes)):
            lane = lanes[(self._first + offset) % len(lanes)]
            if lane.ready and lane.batch is not None:
                self._first = (lane.index + 1) % len(lanes)
                turn = msgspec.msgpack.encode(Turn(lane.index, lane.batch.id))
                for follower in self._followers:
                    follower.send(turn, zmq.NOBLOCK)
                return lane
        return None


class Follower:
    """Takes the leader's turns, each once its own lane is as far."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], me: RankId, address: str) -> None:
        self._turns: deque[Turn] = deque()
        self._socket = context.socket(zmq.PULL)
        self._socket.linger = 0
        self._socket.set_hwm(0)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise RunError(f"{me} cannot listen at {address}: {error.strerror}") from error

    @property
    def sources(self) -> list[zmq.Socket[bytes]]:
        return [self._socket]

    def next(self, lanes: Sequence[Lane]) -> Lane | None:
        while self._socket.poll(0):
            self._turns.append(msgspec.msgpack.decode(self._socket.recv(), type=Turn))
        if not self._turns:
            return None
        turn = self._turns[0]
        lane = lanes[turn.lane]
        if not lane.ready or lane.batch is None or lane.batch.id != turn.batch:
            return None
        self._turns.popleft()
        return lane


def _connected(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    socket.linger = 0
    socket.set_hwm(0)
    socket.connect(address)
    return socket
