"""A node as who starts ranks sees it: this one, or another one whose agent takes orders."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from engine.comm.packets import packet_pair
from engine.errors import RunError
from engine.launch.cores import core_of
from engine.launch.endpoint import endpoint
from engine.launch.orders import Death, EndRank, Order, StartRank, TellPeer
from engine.launch.plan import Plan
from engine.launch.supervisor import Exit, Supervisor
from engine.topology.ranks import RankId, Role
from engine.worker.black_box import create_black_box, read_black_box
from engine.worker.lifeline import send_peer
from engine.worker.spec import PeerSpec, RankSpec

ENTRIES: dict[Role, str] = {
    "attention": "engine.worker.attention:main",
    "expert": "engine.worker.expert:main",
}
_BACKLOG = 512


class Host(Protocol):
    """Ranks are named by instance and id; those of a host are told apart by it."""

    def bell(self, instance: int, id_: RankId) -> str:
        """Where this life of a rank, which is not started yet, will listen."""

    def start(self, instance: int, spec: RankSpec, windows: Sequence[int] = ()) -> None:
        """Starts a rank. What only the host knows of it (`LocalHost`), the host fills in."""

    def tell(self, instance: int, id_: RankId, peer: PeerSpec, window: int | None) -> None:
        """Sends a rank another life of a peer, with their window if there is one."""

    def kill(self, instance: int, id_: RankId) -> None: ...


def title_of(instance: int, id_: RankId, instances: int) -> str:
    """What a rank's process is called: the same in every life."""
    return str(id_) if instances == 1 else f"instance {instance} {id_}"


@dataclass
class _Life:
    """What this node holds of a rank's present life."""

    instance: int
    id: RankId
    lifeline: socket.socket
    black_box: int

    def close(self) -> None:
        self.lifeline.close()
        os.close(self.black_box)


class LocalHost:
    """This node. entries: what each role runs."""

    def __init__(
        self, plan: Plan, supervisor: Supervisor, entries: Mapping[Role, str] = ENTRIES
    ) -> None:
        self._plan = plan
        self._supervisor = supervisor
        self._entries = entries
        self._lives: dict[str, _Life] = {}
        self._listeners: dict[str, socket.socket] = {}

    def bell(self, instance: int, id_: RankId) -> str:
        if not self._plan.address:
            return self._local(instance, id_)
        title = self._title(instance, id_)
        if title not in self._listeners:
            self._listeners[title] = listen_at(self._plan.address)
        host, port = self._listeners[title].getsockname()[:2]
        return f"tcp://{endpoint(host, port)}"

    def start(self, instance: int, spec: RankSpec, windows: Sequence[int] = ()) -> None:
        plan, title = self._plan, self._title(instance, spec.id)
        device = plan.device_of(instance, spec.id)
        first, size = spec.id.rank - spec.shard.member, spec.shard.size
        team = [RankId(spec.id.role, first + m, spec.id.incarnation) for m in range(size)]
        listener = self._listeners.pop(title, None)
        spec = msgspec.structs.replace(
            spec,
            model_dir=str(plan.model_dir),
            hardware=None if plan.pacing is None else plan.pacing.hardware,
            device="cpu" if device is None else device.kind,
            environment=plan.environment_of(device),
            turns=[f"{self._local(instance, member)}.turns" for member in team],
            listens=listener is not None,
            address=plan.address or "127.0.0.1",
            core=core_of(plan, instance, spec.id),
        )
        ours, theirs = packet_pair()
        ours.setblocking(False)
        life = self._lives[title] = _Life(instance, spec.id, ours, create_black_box())
        heard = [] if listener is None else [listener.fileno()]
        with theirs:
            fds = [theirs.fileno(), life.black_box, *heard, *windows]
            entry = self._entries[spec.id.role]
            self._supervisor.spawn(entry, title, msgspec.msgpack.encode(spec), fds)
        if listener is not None:
            listener.close()

    def tell(self, instance: int, id_: RankId, peer: PeerSpec, window: int | None) -> None:
        life = self._lives.get(self._title(instance, id_))
        if life is None:
            return
        try:
            send_peer(life.lifeline, peer, window)
        except BlockingIOError:  # it has not read for many deaths: it will not come back
            self.kill(instance, id_)
        except OSError:  # it is dead too, and will be started again as a peer of this life
            pass

    def kill(self, instance: int, id_: RankId) -> None:
        self._supervisor.kill(self._title(instance, id_))

    def death(self, exit_: Exit) -> Death | None:
        """What is known of a rank's end; None when it is no rank that ended."""
        life = self._lives.pop(exit_.title, None)
        if life is None:
            return None
        batch, work_items = read_black_box(life.black_box)
        life.close()
        return Death(life.instance, life.id, exit_.pid, exit_.reason, batch, work_items)

    def close(self) -> None:
        for life in self._lives.values():
            life.close()
        for listener in self._listeners.values():
            listener.close()

    def _title(self, instance: int, id_: RankId) -> str:
        return title_of(instance, id_, self._plan.instances)

    def _local(self, instance: int, id_: RankId) -> str:
        name = self._title(instance, id_).replace(" ", "-")
        return f"ipc://{self._supervisor.folder}/{name}.{id_.incarnation}"


class RemoteHost:
    """Another node. order: sends its agent something. bells: where ranks will listen."""

    def __init__(
        self, order: Callable[[Order], None], bells: Sequence[tuple[int, RankId, str]]
    ) -> None:
        self._order = order
        self._bells = {(instance, id_.role, id_.rank): bell for instance, id_, bell in bells}

    def bell(self, instance: int, id_: RankId) -> str:
        return self._bells[instance, id_.role, id_.rank]

    def start(self, instance: int, spec: RankSpec, windows: Sequence[int] = ()) -> None:
        assert not windows  # nothing is shared between nodes
        self._order(StartRank(instance, spec))

    def tell(self, instance: int, id_: RankId, peer: PeerSpec, window: int | None) -> None:
        self._order(TellPeer(instance, id_, peer))

    def kill(self, instance: int, id_: RankId) -> None:
        self._order(EndRank(instance, id_))

    def exited(self, death: Death, bell: str) -> None:
        """A rank of it ended; its next life will listen at `bell`."""
        self._bells[death.instance, death.id.role, death.id.rank] = bell


def listen_at(address: str) -> socket.socket:
    """A socket that listens at any free port of `address`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise RunError(f"cannot listen at {address}: {error.strerror}") from None
    return listener
