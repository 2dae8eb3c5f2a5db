"""Connections to the controllers of a running instance by somebody who does not own it."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import zmq

from engine.control.client import Client
from engine.control.messages import Snapshot
from engine.errors import UsageError
from engine.launch.registry import InstanceRecord

_TURN_S = 0.01


def controllers_of(record: InstanceRecord) -> list[str]:
    """The addresses of its controllers: one, or with `[instances] count` one for each."""
    return record.controllers or [record.controller]


@contextmanager
def attached(record: InstanceRecord) -> Iterator[list[Client]]:
    """A client of each controller. Raises UsageError for a node that has none."""
    if record.launch:
        raise UsageError(
            f'"{record.name}" is a node of a launch whose controllers are on {record.launch}: ask '
            "there; here are its logs (`asapctl logs`)"
        )
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        clients = []
        for address in controllers_of(record):
            clients.append(Client(context, address))
            stack.callback(clients[-1].close)
        yield clients


def fresh_snapshots(clients: Sequence[Client], timeout_s: float) -> list[Snapshot | None]:
    """Asks new clients for a snapshot each; None of those that do not answer in time."""
    if len(clients) == 1:
        return [clients[0].fresh_snapshot(timeout_s)]
    for client in clients:
        client.request_snapshot()
    deadline = time.monotonic() + timeout_s
    while (left := [c for c in clients if c.snapshot() is None]) and time.monotonic() < deadline:
        for client in left:
            client.receive(_TURN_S)
    return [client.snapshot() for client in clients]
