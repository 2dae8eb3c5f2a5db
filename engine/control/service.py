"""The controller's process: one thread, one ROUTER socket for clients and ranks alike."""

import logging
import math
import time

import msgspec
import zmq

from engine.control.controller import Controller, ControllerSpec
from engine.control.messages import Refused, decode, encode
from engine.control.statistics import Statistics
from engine.schedule.policy import AsapPolicy

log = logging.getLogger(__name__)

_TICK_S = 0.5  # how often to look for stalls while anybody waits for anything


def main(payload: bytes, _fds: list[int]) -> None:
    """Runs a controller until it is killed. `payload` is a ControllerSpec in msgpack."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s controller: %(message)s")
    spec = msgspec.msgpack.decode(payload, type=ControllerSpec)
    policy = AsapPolicy(
        groups=spec.groups,
        lanes=spec.agreement.lanes,
        min_batch_tokens=spec.min_batch_tokens,
        max_batch_tokens=spec.max_batch_tokens,
        exclusive_tokens=spec.exclusive_tokens,
        max_wait_s=spec.max_wait_s,
    )
    controller = Controller(spec, policy, Statistics(spec.ttft_slo_s))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.set_hwm(0)
        socket.linger = 0
        socket.bind(spec.address)
        _serve(controller, socket)


def _serve(controller: Controller, socket: zmq.Socket[bytes]) -> None:
    while True:
        now = time.monotonic()
        wake_at = controller.schedule(now)
        while controller.outbox:
            peer, message = controller.outbox.popleft()
            socket.send_multipart([peer, encode(message)])
        if controller.busy:
            wake_at = min(wake_at or math.inf, now + _TICK_S)
        socket.poll(None if wake_at is None else _milliseconds_until(wake_at))
        while socket.poll(0):
            peer, data = socket.recv_multipart()
            try:
                message = decode(data)
            except msgspec.DecodeError as error:
                log.warning("refused a message from %r: %s", peer, error)
                controller.outbox.append((peer, Refused(f"not a message: {error}")))
                continue
            controller.handle(peer, message, time.monotonic())


def _milliseconds_until(deadline: float) -> int:
    """Rounded up: waking before the deadline would mean asking in vain."""
    return math.ceil(max(0.0, deadline - time.monotonic()) * 1000)
