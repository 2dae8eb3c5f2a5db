"""The nodes of a launch, as node 0 sees them: who has come, who is missing, who is lost."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

from engine.curve import Keys
from engine.errors import RunError, UsageError
from engine.launch.endpoint import endpoint, resolve
from engine.launch.host import Host, RemoteHost
from engine.launch.nodes import NodeOptions
from engine.launch.orders import (
    Death,
    NodeHello,
    NodeLeaves,
    NodeRefused,
    NodeWelcome,
    Order,
    RankExited,
    reason_of,
)
from engine.launch.plan import Plan
from engine.launch.switchboard import Said, Silent, Switchboard
from engine.topology.ranks import RankId

_POLL_S = 0.1
_BACKLOG = 512


class Cluster(AbstractContextManager["Cluster"]):
    """Nodes 1 and on. Listens from the beginning; leaving it ends their agents.

    on_death: a rank of another node ended, and may be started again. on_note is told of who comes
    and is refused; that is no reason to end what runs.
    """

    def __init__(
        self,
        plan: Plan,
        nodes: NodeOptions,
        keys: Keys,
        here: Host,
        on_note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.on_death: Callable[[Death], None] = lambda death: None
        self._on_note = on_note
        self._refused: dict[int, str] = {}  # by the rank that a node had
        self._plan = plan
        self._here = here
        self._remote: dict[int, RemoteHost] = {}
        self._nodes: dict[bytes, NodeHello] = {}  # by peer
        self._where = endpoint(nodes.host, nodes.port)
        listener = _listen(nodes)
        timeout_s = plan.topology.comm.node_timeout_s
        try:
            address = f"tcp://{endpoint(*listener.getsockname()[:2])}"
            self._switchboard = Switchboard(address, listener.fileno(), keys, timeout_s)
        except BaseException:
            listener.close()
            raise
        listener.detach()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._switchboard.close(None if error is None else reason_of(error))

    def fileno(self) -> int:
        """Readable when `check` has something to do."""
        return self._switchboard.fileno()

    def host_of(self, instance: int, id_: RankId) -> Host:
        node = self._plan.placement.node_of(instance, id_)
        return self._here if node == self._plan.node_rank else self._remote[node]

    def gather(self, on_wait: Callable[[list[int]], None], check: Callable[[], None]) -> None:
        """Waits until all nodes are here. on_wait is told those that are missing; check looks after
        the processes of this node meanwhile. RunError: one does not come in time.
        """
        timeout_s = self._plan.topology.comm.connect_timeout_s
        deadline = time.monotonic() + timeout_s
        while missing := sorted(set(range(1, self._plan.nnodes)) - self._remote.keys()):
            on_wait(missing)
            if time.monotonic() > deadline:
                refused = [self._refused[rank] for rank in missing if rank in self._refused]
                raise RunError(
                    f"{_nodes(missing)} did not come to {self._where} within {timeout_s:g} s "
                    "([comm] connect_timeout_s); "
                    + ("; ".join(refused) or "start the same command there, with --node-rank")
                )
            time.sleep(_POLL_S)
            check()
            self.check()

    def check(self) -> None:
        """Deals with what nodes have sent. Raises RunError when one is lost."""
        for event in self._switchboard.events():
            match event:
                case Silent(peer, seconds) if peer in self._nodes:
                    hello = self._nodes[peer]
                    raise RunError(
                        f"node {hello.node_rank} ({hello.address}) has not been heard of for "
                        f"{seconds:.0f} s: it is down, or the network between is"
                    )
                case Said(peer, order):
                    self._take(peer, order)

    def _take(self, peer: bytes, order: Order) -> None:
        hello = self._nodes.get(peer)
        if isinstance(order, NodeHello):
            if hello is None:
                self._greet(peer, order)
            else:  # again, because the answer took long
                self._switchboard.send(peer, NodeWelcome(self._plan.max_model_len))
        elif isinstance(order, NodeLeaves) and hello is not None:
            raise RunError(f"node {hello.node_rank} ({hello.address}) ended: {order.reason}")
        elif isinstance(order, RankExited) and hello is not None:
            self._remote[hello.node_rank].exited(order.death, order.bell)
            self.on_death(order.death)

    def _greet(self, peer: bytes, hello: NodeHello) -> None:
        rank = hello.node_rank
        ours, theirs = self._plan.fingerprint(), hello.fingerprint
        refused = None
        if not 1 <= rank < self._plan.nnodes:
            refused = f"there is no node {rank}: node 0 was started with {self._plan.nnodes} nodes"
        elif rank in self._remote:
            refused = f"node {rank} is here already; each node needs its own --node-rank"
        elif names := [name for name in ours | theirs if ours.get(name) != theirs.get(name)]:
            refused = "; ".join(
                f"{name}: {theirs.get(name, 'not set')} on node {rank}, "
                f"{ours.get(name, 'not set')} on node 0"
                for name in names
            )
        if refused is not None:
            self._switchboard.send(peer, NodeRefused(refused))
            self._refused[rank] = f"{hello.address} came as node {rank} and was refused: {refused}"
            self._on_note(self._refused[rank])
            return
        self._nodes[peer] = hello
        self._remote[rank] = RemoteHost(
            lambda order: self._switchboard.send(peer, order), hello.bells
        )
        self._switchboard.send(peer, NodeWelcome(self._plan.max_model_len))


def _listen(nodes: NodeOptions) -> socket.socket:
    """A socket that listens at the rendezvous endpoint, as it is written."""
    where = f"--rdzv-endpoint {endpoint(nodes.host, nodes.port)}"
    try:
        family, kind, protocol, _, address = resolve(nodes.host, nodes.port, socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        raise UsageError(
            f"{where}: cannot listen there: {error.strerror}; choose another port, the same on "
            "every node"
        ) from None
    return listener


def _nodes(ranks: list[int]) -> str:
    return f"node {ranks[0]}" if len(ranks) == 1 else f"nodes {', '.join(map(str, ranks))}"
