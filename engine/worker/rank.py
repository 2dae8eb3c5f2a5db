"""What every rank does alike: threads, log, the link to the controller, counters of work."""

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
import zmq

from engine import __version__
from engine.comm.primitives import Peer
from engine.control.messages import (
    Agreement,
    Hello,
    Message,
    Progress,
    Ready,
    Refused,
    Stop,
    Welcome,
    decode,
    encode,
)
from engine.errors import AsapError, RunError
from engine.model.architecture import ModelConfig
from engine.model.checkpoint import model_hash
from engine.worker.spec import RankSpec

_REPORT_EVERY_S = 0.2


class Meter:
    """Seconds that this rank computed, and how much it did. Everything else is waiting."""

    def __init__(self) -> None:
        self.busy_seconds = 0.0
        self.tokens = 0
        self.work_items = 0

    @contextmanager
    def working(self, tokens: int) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.busy_seconds += time.perf_counter() - start
        self.tokens += tokens
        self.work_items += 1


class ControlLink:
    """A rank's connection to the controller; `receive` never blocks, `wait` does."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], spec: RankSpec) -> None:
        self._spec = spec
        self._socket = context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.connect(spec.controller)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._reported = 0
        self._report_at = 0.0

    def hello(self, agreement: Agreement) -> None:
        """Introduces this rank and waits until the controller agrees. RunError: it refuses."""
        self.send(Hello(self._spec.id, os.getpid(), agreement))
        while not any(isinstance(message, Welcome) for message in self.receive()):
            self._poller.poll()

    def ready(self, load_seconds: float) -> None:
        self.send(Ready(load_seconds))

    def send(self, message: Message) -> None:
        self._socket.send(encode(message))

    def watch(self, socket: zmq.Socket[bytes]) -> None:
        """Makes `wait` end when `socket` is readable too."""
        self._poller.register(socket, zmq.POLLIN)

    def receive(self) -> list[Message]:
        """What the controller sent. Raises RunError when it refused this rank."""
        messages: list[Message] = []
        while self._socket.poll(0):
            message = decode(self._socket.recv())
            if isinstance(message, Refused):
                raise RunError(f"refused by the controller: {message.reason}")
            messages.append(message)
        return messages

    def wait(self, meter: Meter) -> None:
        """Blocks until something comes; before that, lets the controller know of new work."""
        timeout = None
        if meter.work_items != self._reported:
            timeout = math.ceil(max(0.0, self._report_at - time.monotonic()) * 1000)
        if not self._poller.poll(timeout):
            self.report(meter)
            self._poller.poll()

    def report(self, meter: Meter) -> None:
        """Sends the counters now."""
        self.send(Progress(meter.busy_seconds, meter.tokens, meter.work_items))
        self._reported = meter.work_items
        self._report_at = time.monotonic() + _REPORT_EVERY_S

    def report_if_due(self, meter: Meter) -> None:
        if meter.work_items != self._reported and time.monotonic() >= self._report_at:
            self.report(meter)


def own_agreement(spec: RankSpec, config: ModelConfig) -> Agreement:
    """What this rank finds on its own disk and in its own code, beside what it was told."""
    return msgspec.structs.replace(
        spec.agreement,
        version=__version__,
        model_hash=model_hash(Path(spec.model_dir)),
        hidden_size=config.hidden_size,
        layers=config.layers,
        experts=config.experts,
        top_k=config.top_k,
    )


def peers_of(spec: RankSpec, fds: list[int]) -> list[Peer]:
    if len(fds) != len(spec.peers):
        raise ValueError(f"{len(spec.peers)} windows expected, {len(fds)} came")
    return [
        Peer(id=peer.id, bell=peer.bell, fd=fd, shape=peer.shape)
        for peer, fd in zip(spec.peers, fds, strict=True)
    ]


def run_rank(payload: bytes, body: Callable[[RankSpec], None]) -> None:
    """Runs `body` as this process. An expected error ends the log with its message alone."""
    spec = msgspec.msgpack.decode(payload, type=RankSpec)
    level = os.environ.get("ASAPCTL_LOG", "info").upper()
    logging.basicConfig(level=level, format=f"%(asctime)s {spec.id}: %(message)s")
    torch.set_num_threads(spec.threads)
    torch.set_num_interop_threads(1)
    try:
        with torch.inference_mode():
            body(spec)
    except AsapError as error:
        print(error, flush=True)
        raise SystemExit(error.exit_code) from None
    except Exception as error:
        logging.exception("failed")
        print(f"{type(error).__name__}: {error}", flush=True)
        raise SystemExit(1) from None


def wants_to_stop(messages: list[Message]) -> bool:
    return any(isinstance(message, Stop) for message in messages)
