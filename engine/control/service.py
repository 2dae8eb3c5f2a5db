"""The controller's process: one thread, one ROUTER socket for clients and ranks alike."""

import logging
import math
import time
from collections.abc import Mapping

import msgspec
import zmq

from engine.control.clock import this_machine
from engine.control.controller import Controller, ControllerSpec
from engine.control.messages import Refused, decode, encode
from engine.control.statistics import Statistics
from engine.curve import Gatekeeper, secure_server
from engine.schedule.build import make_policy

log = logging.getLogger(__name__)

_TICK_S = 0.5  # how often to look for stalls while anybody waits for anything


# Before the identities of peers of other nodes, so that none is taken for one of this node.
_ELSEWHERE = b"elsewhere "


def main(payload: bytes, fds: list[int]) -> None:
    """Runs a controller until it is killed. `payload` is a ControllerSpec in msgpack; fds: with
    several nodes, the socket that is bound at `spec.remote`.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s controller: %(message)s")
    spec = msgspec.msgpack.decode(payload, type=ControllerSpec)
    policy = make_policy(
        spec.policy,
        groups=spec.groups,
        lanes=spec.agreement.lanes,
        min_batch_tokens=spec.min_batch_tokens,
        max_batch_tokens=spec.max_batch_tokens,
        exclusive_tokens=spec.exclusive_tokens,
        chunk_tokens=spec.chunk_tokens,
        max_wait_s=spec.max_wait_s,
    )
    controller = Controller(spec, policy, this_machine(), Statistics(spec.ttft_slo_s))
    with zmq.Context() as context, Gatekeeper(context, spec.keys, log) as gatekeeper:
        sockets = {b"": _router(context)}
        sockets[b""].bind(spec.address)
        if spec.remote is not None:
            remote = sockets[_ELSEWHERE] = _router(context)
            secure_server(remote, spec.keys)
            gatekeeper.watch(remote)
            remote.set(zmq.USE_FD, fds[0])
            remote.bind(spec.remote)
        _serve(controller, sockets)


def _router(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.ROUTER)
    socket.set_hwm(0)
    socket.linger = 0
    return socket


def _serve(controller: Controller, sockets: Mapping[bytes, zmq.Socket[bytes]]) -> None:
    """sockets: by the prefix that their peers have here."""
    poller = zmq.Poller()
    for socket in sockets.values():
        poller.register(socket, zmq.POLLIN)
    while True:
        now = time.monotonic()
        wake_at = controller.schedule(now)
        while controller.outbox:
            peer, message = controller.outbox.popleft()
            prefix = _ELSEWHERE if peer.startswith(_ELSEWHERE) else b""
            sockets[prefix].send_multipart([peer.removeprefix(prefix), encode(message)])
        if controller.busy:
            wake_at = min(wake_at or math.inf, now + _TICK_S)
        poller.poll(None if wake_at is None else _milliseconds_until(wake_at))
        for prefix, socket in sockets.items():
            while socket.poll(0):
                identity, data = socket.recv_multipart()
                peer = prefix + identity
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
