"""What the ranks of a self-test and the command say to each other: msgpack structs over ZeroMQ."""

import time
from typing import TypeAlias

import msgspec
import zmq

from engine.control.meeting import MeetingPlace
from engine.control.messages import StoreAsk, StorePut, encode
from engine.topology.ranks import RankId

# --- command -> rank -------------------------------------------------------------------------


class TryOperators(msgspec.Struct, frozen=True, tag=True):
    """Run every operator of the device beside the plain code; answered by Operators."""


class Exchange(msgspec.Struct, frozen=True, tag=True):
    """Send `count` messages over each pair of an attention rank and an expert rank.

    stall_s: how long an attention rank waits in vain before it fails. Attention ranks answer with
    Exchanged; expert ranks serve from now on.
    """

    count: int
    stall_s: float


class Measure(msgspec.Struct, frozen=True, tag=True):
    """To the members of one attention group: take the time of every pair; answered by Measured."""

    stall_s: float


class Account(msgspec.Struct, frozen=True, tag=True):
    """To expert ranks: say what came; answered by Accounted."""


# --- rank -> command -------------------------------------------------------------------------


class Here(msgspec.Struct, frozen=True, tag=True):
    """All peers of this rank have been heard of. device: the hardware's own name."""

    device: str


class OperatorResult(msgspec.Struct, frozen=True):
    """One operator on one device. fused: the device has its own; else the plain torch code ran.

    error: the largest difference from plain float32 on the CPU, absolute below 1 and relative
    above. problem: why there is none.
    """

    operator: str
    fused: bool
    tolerance: float
    error: float | None = None
    problem: str | None = None

    @property
    def good(self) -> bool:
        return self.error is not None and self.error <= self.tolerance


class Operators(msgspec.Struct, frozen=True, tag=True):
    results: list[OperatorResult]


class Exchanged(msgspec.Struct, frozen=True, tag=True):
    """messages: answered and right in every value. problems: what was not, the first few."""

    messages: int
    problems: list[str]


class PairTime(msgspec.Struct, frozen=True):
    """Of dispatch and combine with the expert rank `expert`, medians in seconds.

    empty_s: of one row from this rank. full_s: of a full window, `full_bytes` each way.
    """

    expert: int
    empty_s: float
    full_s: float
    full_bytes: int


class Measured(msgspec.Struct, frozen=True, tag=True):
    pairs: list[PairTime]


class Accounted(msgspec.Struct, frozen=True, tag=True):
    """items: work items that came, once and as they were sent. problems: as Exchanged's."""

    items: int
    problems: list[str]


Order: TypeAlias = TryOperators | Exchange | Measure | Account
Answer: TypeAlias = Here | Operators | Exchanged | Measured | Accounted

_encode = msgspec.msgpack.Encoder().encode
_decode_order = msgspec.msgpack.Decoder(Order).decode
_decode_answer = msgspec.msgpack.Decoder(Answer | StorePut | StoreAsk).decode


class Orders:
    """The rank's end. `source` is for a poller."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, me: RankId) -> None:
        self.source = context.socket(zmq.DEALER)
        self.source.linger = 0
        self.source.identity = str(me).encode()
        self.source.connect(address)

    def receive(self) -> Order | None:
        """The next order, None when there is none. Never blocks."""
        return _decode_order(self.source.recv()) if self.source.poll(0) else None

    def answer(self, answer: Answer) -> None:
        self.source.send(_encode(answer))

    def close(self) -> None:
        self.source.close()


class Answers:
    """The command's end; also where the ranks meet to build communicators."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._meeting = MeetingPlace()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def watch(self, fd: int) -> None:
        """Makes `receive` return when `fd` is readable too."""
        self._poller.register(fd, zmq.POLLIN)

    def send(self, to: RankId, order: Order) -> None:
        self._socket.send_multipart([str(to).encode(), _encode(order)])

    def receive(self, timeout_s: float) -> dict[str, Answer]:
        """What has come, by the rank's title; waits up to `timeout_s` seconds for something."""
        self._poller.poll(round(timeout_s * 1000))
        found: dict[str, Answer] = {}
        while self._socket.poll(0):
            sender, data = self._socket.recv_multipart()
            message = _decode_answer(data)
            if isinstance(message, StorePut | StoreAsk):
                for peer, answer in self._meeting.handle(sender, message):
                    self._socket.send_multipart([peer, encode(answer)])
            else:
                found[sender.decode()] = message
        return found

    def close(self) -> None:
        self._socket.close()


class Patience:
    """Runs out when nothing has come for `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.renew()

    def renew(self) -> None:
        self._until = time.monotonic() + self._seconds

    @property
    def left_s(self) -> float:
        return max(0.0, self._until - time.monotonic())
