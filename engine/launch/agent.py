"""A node other than node 0: starts the ranks that node 0 says, and tells it of those that end."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import zmq

from engine.curve import Handshakes, Keys, secure_client
from engine.errors import RunError, UsageError
from engine.launch.endpoint import endpoint
from engine.launch.host import LocalHost
from engine.launch.nodes import NodeOptions
from engine.launch.orders import (
    BEAT_S,
    Beat,
    EndNode,
    EndRank,
    NodeHello,
    NodeLeaves,
    NodeRefused,
    NodeWelcome,
    Order,
    RankExited,
    StartRank,
    TellPeer,
    decode,
    encode,
    reason_of,
)
from engine.launch.plan import Plan
from engine.launch.supervisor import Exit, Supervisor
from engine.topology.ranks import RankId

_LINGER_MS = 1000


class Agent:
    """Speaks with node 0 over `socket`, and looks after this node's processes."""

    def __init__(
        self, plan: Plan, nodes: NodeOptions, supervisor: Supervisor, socket: zmq.Socket[bytes]
    ) -> None:
        self._plan = plan
        self._where = f"node 0 ({endpoint(nodes.host, nodes.port)})"
        self._supervisor = supervisor
        self._socket = socket
        self._host = LocalHost(plan, supervisor)
        self._timeout_s = plan.topology.comm.node_timeout_s
        self._heard = time.monotonic()
        self._beat_at = 0.0
        self._over = False
        self._early: list[Order] = []  # came with the welcome
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(supervisor.fileno(), zmq.POLLIN)
        supervisor.on_exit = self._on_exit

    def join(self, handshakes: Handshakes) -> None:
        """Introduces this node; returns when node 0 has taken it in. RunError: it does not."""
        timeout_s = self._plan.topology.comm.connect_timeout_s
        deadline = time.monotonic() + timeout_s
        first = [(i, id_, self._host.bell(i, id_)) for i, id_ in self._ranks()]
        hello = NodeHello(self._plan.node_rank, self._plan.address, self._plan.fingerprint(), first)
        while True:
            self._send(hello)
            orders = self._receive(BEAT_S)
            for place, order in enumerate(orders):
                match order:
                    case NodeWelcome(longest):
                        if refusal := self._plan.refusal(longest):
                            raise UsageError(refusal)
                        self._early = orders[place + 1 :]  # node 0 may not have waited
                        return
                    case NodeRefused(reason):
                        raise RunError(f"{self._where} refuses this node: {reason}")
            if handshakes.refused:
                raise RunError(
                    f"{self._where} does not let this node in: the secrets differ; give both the "
                    "same --secret-file"
                )
            if time.monotonic() > deadline:
                raise RunError(
                    f"{self._where} has not answered within {timeout_s:g} s ([comm] "
                    "connect_timeout_s); is it started, and can it be reached from here?"
                )

    def serve(self) -> None:
        """Until node 0 says that it is over. RunError: node 0 is lost, or the launch failed."""
        self._heard = time.monotonic()
        for order in self._early:
            self._obey(order)
        while not self._over:
            for order in self._receive(max(0.0, self._beat_at - time.monotonic())):
                self._obey(order)
            now = time.monotonic()
            if now >= self._beat_at:
                self._send(Beat())
                self._beat_at = now + BEAT_S
            if now - self._heard > self._timeout_s:
                raise RunError(
                    f"{self._where} has not been heard of for {now - self._heard:.0f} s: it is "
                    "down, or the network between is"
                )

    def leave(self, reason: str) -> None:
        """Tells node 0 that this node ends."""
        self._send(NodeLeaves(reason))

    def close(self) -> None:
        self._host.close()

    def _ranks(self) -> Iterator[tuple[int, RankId]]:
        yield from self._plan.placement.ranks_on(self._plan.node_rank)

    def _obey(self, order: Order) -> None:
        match order:
            case StartRank(instance, spec):
                self._host.start(instance, spec)
            case TellPeer(instance, id_, peer):
                self._host.tell(instance, id_, peer, None)
            case EndRank(instance, id_):
                self._host.kill(instance, id_)
            case EndNode(None):
                self._over = True
            case EndNode(reason):
                raise RunError(f"{self._where} ended the launch: {reason}")

    def _on_exit(self, exit_: Exit) -> None:
        death = self._host.death(exit_)
        if death is None:
            raise RunError(exit_.reason)
        where = f"on node {self._plan.node_rank}"
        death = msgspec.structs.replace(death, reason=f"{death.reason}, {where}")
        id_ = death.id
        following = RankId(id_.role, id_.rank, id_.incarnation + 1)
        self._send(RankExited(death, self._host.bell(death.instance, following)))

    def _send(self, order: Order) -> None:
        self._socket.send(encode(order))

    def _receive(self, wait_s: float) -> list[Order]:
        """What node 0 has sent, and meanwhile this node's processes are looked after."""
        ready = dict(self._poller.poll(math.ceil(wait_s * 1000)))
        if self._supervisor.fileno() in ready:
            self._supervisor.check()
        orders = []
        while self._socket.poll(0):
            orders.append(decode(self._socket.recv()))
            self._heard = time.monotonic()
        return orders


@contextmanager
def joined(
    plan: Plan,
    nodes: NodeOptions,
    keys: Keys,
    supervisor: Supervisor,
) -> Iterator[Agent]:
    """An agent that node 0 has taken in. However it ends, node 0 is told why."""
    with zmq.Context() as context:
        socket = context.socket(zmq.DEALER)
        handshakes = Handshakes(context, socket)
        socket.linger = _LINGER_MS
        socket.set_hwm(0)
        socket.identity = f"node-{plan.node_rank}-{os.getpid()}-{os.urandom(4).hex()}".encode()
        secure_client(socket, keys)
        socket.connect(f"tcp://{endpoint(nodes.host, nodes.port)}")
        agent = None
        try:
            agent = Agent(plan, nodes, supervisor, socket)
            agent.join(handshakes)
            yield agent
        except BaseException as error:
            if agent is not None:
                agent.leave(reason_of(error))
            raise
        finally:
            if agent is not None:
                agent.close()
            socket.close()
            handshakes.close()
