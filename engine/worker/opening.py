"""From a rank's spec to what it talks through: peers, transport, its attention group."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest

import torch
import zmq

from engine.comm.channel import Transport
from engine.comm.collectives import TensorParallel
from engine.comm.doorbell import Ear
from engine.comm.primitives import Peer
from engine.comm.process_group import ProcessGroupTransport
from engine.comm.shm import ShmTransport
from engine.curve import Gatekeeper
from engine.device.base import Device
from engine.device.cpu import Cpu
from engine.errors import RunError
from engine.topology.ranks import RankId
from engine.worker.spec import RankSpec
from engine.worker.store import ControlMeeting

log = logging.getLogger(__name__)


@contextmanager
def listening(
    spec: RankSpec, context: zmq.Context[zmq.Socket[bytes]], fds: list[int]
) -> Iterator[Ear]:
    """Where the rank is to listen. Takes the socket, if there is one, out of `fds`."""
    fd = fds.pop(0) if spec.listens else None
    with Gatekeeper(context, spec.keys, log) as gatekeeper:
        yield Ear(spec.bell, fd, spec.keys, gatekeeper)


def peers_of(spec: RankSpec, windows: Sequence[int]) -> list[Peer]:
    """The peers with their windows, for an endpoint's constructor."""
    return [
        Peer(peer.id, peer.bell, peer.shape, fd) for peer, fd in zip_longest(spec.peers, windows)
    ]


def close_windows(windows: Sequence[int]) -> None:
    """To be called once an endpoint has mapped them."""
    for fd in windows:
        os.close(fd)


def transport_of(spec: RankSpec, dtype: torch.dtype, device: Device) -> Transport:
    """Payload lies in the device's memory only where the device's own backend carries it."""
    if spec.transport == "shm":
        return ShmTransport(dtype)
    carrier = Cpu(spec.address) if spec.transport == "gloo" else device
    return ProcessGroupTransport(spec.id, dtype, _meeting(spec), carrier, spec.overlap)


def team_of(spec: RankSpec, device: Device) -> TensorParallel:
    """The attention group of this rank; blocks until all its members are there."""
    shard = spec.shard
    if shard.size == 1:
        return TensorParallel.solo()
    meeting = _meeting(spec)
    first = spec.id.rank - shard.member
    members = (RankId("attention", first + m, spec.id.incarnation) for m in range(shard.size))
    try:
        store = meeting.store(*members)
        group = device.process_group(store, shard.member, shard.size, meeting.timeout)
    except RuntimeError as error:
        raise RunError(f"{spec.id} cannot meet the other members of its group: {error}") from None
    return TensorParallel(group, shard.member, shard.size)


def _meeting(spec: RankSpec) -> ControlMeeting:
    return ControlMeeting(spec.controller, spec.connect_timeout_s, spec.keys)
