"""What every rank does alike: its start, its link to the controller, its reports."""

import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
import psutil
import torch
import zmq

from engine import __version__
from engine.control.clock import this_machine
from engine.control.messages import (
    Agreement,
    Hello,
    Message,
    Progress,
    RankSpans,
    Ready,
    Refused,
    Spans,
    Welcome,
    decode,
    encode,
)
from engine.curve import secure_client
from engine.device.base import Device, open_device
from engine.errors import AsapError, RunError
from engine.model.architecture import ModelConfig
from engine.model.checkpoint import model_hash
from engine.worker.black_box import BlackBox
from engine.worker.heap import keep_freed_memory
from engine.worker.lifeline import Lifeline
from engine.worker.meter import Meter
from engine.worker.recorder import Recorder
from engine.worker.spec import RankSpec

_REPORT_EVERY_S = 0.2
_HEARTBEAT_S = 1.0  # while waiting with work in hand
_HELLO_AGAIN_S = 0.2


class ControlLink:
    """A rank's connection to the controller; `receive` never blocks, `wait` does.

    progress builds the report; it is called when one is due.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], spec: RankSpec) -> None:
        self._spec = spec
        self._socket = context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        secure_client(self._socket, spec.keys)
        self._socket.connect(spec.controller)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._report_at = 0.0
        self._stale = False  # something happened since the last report

    def hello(self, agreement: Agreement) -> None:
        """Introduces this rank and waits until the controller agrees. RunError: it refuses.

        It asks again and again: the controller may not have heard yet that its last life is over.
        """
        while True:
            self.send(Hello(self._spec.id, os.getpid(), agreement))
            deadline = time.monotonic() + _HELLO_AGAIN_S
            while (left := deadline - time.monotonic()) > 0:
                self._poller.poll(math.ceil(left * 1000))
                if any(isinstance(message, Welcome) for message in self.receive()):
                    return

    def ready(self, load_seconds: float, inflection_tokens: int | None = None) -> None:
        self.send(Ready(load_seconds, inflection_tokens))
        self._stale = True  # the first report tells of its memory, before there is any work

    def send(self, message: Message) -> None:
        self._socket.send(encode(message))

    def watch(self, *sources: zmq.Socket[bytes] | int) -> None:
        """Makes `wait` end when one of these is readable too."""
        for source in sources:
            self._poller.register(source, zmq.POLLIN)

    def receive(self) -> list[Message]:
        """What the controller sent. Raises RunError when it refused this rank."""
        messages: list[Message] = []
        while self._socket.poll(0):
            message = decode(self._socket.recv())
            if isinstance(message, Refused):
                raise RunError(f"refused by the controller: {message.reason}")
            messages.append(message)
        return messages

    def report(self, progress: Callable[[], Progress]) -> None:
        """Sends a report now."""
        self.send(progress())
        self._report_at = time.monotonic() + _REPORT_EVERY_S
        self._stale = False

    def send_spans(self, recorder: Recorder) -> None:
        """Ends a recording."""
        spans, dropped = recorder.take()
        ours = this_machine(), time.monotonic()
        self.send(Spans(RankSpans(self._spec.id, os.getpid(), spans, dropped, *ours)))

    def report_step(self, progress: Callable[[], Progress], predicted_s: float) -> None:
        """To be called before every step. A report goes out now and then, and before a long step:
        during that, nothing will be heard of this rank.
        """
        self._stale = True
        if time.monotonic() >= self._report_at or predicted_s > _REPORT_EVERY_S:
            self.report(progress)

    def wait(
        self, progress: Callable[[], Progress], with_work: bool, until: float = math.inf
    ) -> None:
        """Blocks until something comes, or until the (monotonic) time `until`.

        Reports what has not been reported before that, and keeps reporting while there is work
        that others hold up.
        """
        if self._stale:
            left = max(0.0, min(self._report_at, until) - time.monotonic())
            if self._poller.poll(math.ceil(left * 1000)) or time.monotonic() >= until:
                return
            self.report(progress)
        while True:
            left = min(_HEARTBEAT_S if with_work else math.inf, until - time.monotonic())
            timeout = None if math.isinf(left) else math.ceil(max(0.0, left) * 1000)
            if self._poller.poll(timeout) or time.monotonic() >= until:
                return
            self.report(progress)


class Memory:
    """This process's resident memory in bytes, read at most once a second."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._read_at = 0.0
        self._bytes = 0

    def read(self) -> int:
        now = time.monotonic()
        if now >= self._read_at:
            self._bytes = self._process.memory_info().rss
            self._read_at = now + 1.0
        return self._bytes


class Start(Protocol):
    """What a rank does with what it was handed."""

    def __call__(
        self, spec: RankSpec, device: Device, windows: list[int], lifeline: Lifeline, meter: Meter
    ) -> None: ...


def run_rank(payload: bytes, fds: list[int], start: Start) -> None:
    """Runs `start` as this process. An expected error ends the log with its message alone.

    payload: a RankSpec. fds: lifeline, black box, then the windows, if any, in the order of its
    peers.
    """
    spec = msgspec.msgpack.decode(payload, type=RankSpec)
    level = os.environ.get("ASAPCTL_LOG", "info").upper()
    logging.basicConfig(level=level, format=f"%(asctime)s {spec.id}: %(message)s")
    os.environ.update(spec.environment)  # a mask counts from before the device is opened
    keep_freed_memory()
    if spec.core is not None:
        os.sched_setaffinity(0, {spec.core})
    torch.set_num_threads(spec.threads)
    torch.set_num_interop_threads(1)
    lifeline, black_box, *windows = fds
    try:
        with torch.inference_mode():
            device = open_device(spec.device)
            device.address = spec.address
            start(spec, device, windows, Lifeline(lifeline), Meter(BlackBox(black_box)))
    except AsapError as error:
        print(error, flush=True)
        raise SystemExit(error.exit_code) from None
    except Exception as error:
        logging.exception("failed")
        print(f"{type(error).__name__}: {error}", flush=True)
        raise SystemExit(1) from None


def own_agreement(spec: RankSpec, config: ModelConfig) -> Agreement:
    """What this rank finds on its own disk and in its own code, beside what it was told."""
    return msgspec.structs.replace(
        spec.agreement,
        version=__version__,
        model_hash=model_hash(Path(spec.model_dir), weights=spec.hardware is None),
        hidden_size=config.hidden_size,
        layers=config.layers,
        experts=config.experts,
        top_k=config.top_k,
    )
