"""The ranks of a running instance: starting them, and starting those again that died."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from engine import __version__
from engine.comm.packets import packet_pair
from engine.comm.windows import create_windows
from engine.control.messages import Agreement, RankDied
from engine.launch.plan import Plan
from engine.launch.supervisor import Exit, Supervisor
from engine.topology.ranks import RankId, Role
from engine.topology.shard import Shard
from engine.worker.black_box import create_black_box, read_black_box
from engine.worker.lifeline import send_peer
from engine.worker.spec import PeerSpec, RankSpec

ENTRIES: dict[Role, str] = {
    "attention": "engine.worker.attention:main",
    "expert": "engine.worker.expert:main",
}


@dataclass
class _Life:
    """A rank's present life, and what the supervisor holds of it. doomed: it is to go because
    another member of its attention group died.
    """

    id: RankId
    lifeline: socket.socket
    black_box: int
    doomed: bool = False

    def close(self) -> None:
        self.lifeline.close()
        os.close(self.black_box)


class Ranks:
    """entries: what each role runs.

    Windows belong to a pair of lives: whoever is started again gets new ones with every peer,
    and each living peer is sent its end of them. The members of an attention group live and die
    together, since they compute every step together.
    """

    def __init__(
        self,
        plan: Plan,
        supervisor: Supervisor,
        controller: str,
        entries: Mapping[Role, str] = ENTRIES,
    ) -> None:
        self._plan = plan
        self._supervisor = supervisor
        self._controller = controller
        self._entries = entries
        self._lives: dict[str, _Life] = {}  # by title, which is the same in every life
        self.agreement = Agreement(
            version=__version__,
            model=str(plan.model_dir),
            model_hash=plan.model_hash,
            dtype=plan.dtype,
            hidden_size=plan.config.hidden_size,
            layers=plan.config.layers,
            experts=plan.config.experts,
            top_k=plan.config.top_k,
            lanes=plan.lanes,
            window_tokens=plan.window_tokens,
        )
        experts = [RankId("expert", rank) for rank in range(len(plan.experts))]
        ranks = plan.groups * plan.tensor_parallel
        attention = [RankId("attention", rank) for rank in range(ranks)]
        self.ids = attention + experts
        self._place = {(id_.role, id_.rank): place for place, id_ in enumerate(self.ids)}

    def start(self) -> None:
        """Starts all of them. RunError when there is no memory for the windows."""
        windows = {
            (a, e): window
            for a in self.ids
            for e in self.ids
            if (a.role, e.role) == ("attention", "expert")
            and (window := self._window(e)) is not None
        }
        try:
            for id_ in reversed(self.ids):  # experts first: they load longest
                peers = [other for other in self.ids if other.role != id_.role]
                pairs = [(p, id_) if p.role == "attention" else (id_, p) for p in peers]
                self._spawn(id_, peers, [windows[pair] for pair in pairs if pair in windows])
        finally:
            for fd in windows.values():
                os.close(fd)  # the packets to the zygote hold their own

    def restart(self, exit_: Exit) -> RankDied:
        """Starts the rank of that title again; returns what the controller has to know.

        A member of an attention group takes the others with it: they are ended, and when the last
        one has gone, all of them start again.
        """
        old = self._lives.pop(exit_.title)
        batch, work_items = read_black_box(old.black_box)
        old.close()
        team = self._team_of(old.id)
        left = [life for id_ in team if (life := self._lives.get(str(id_))) is not None]
        for life in left:
            life.doomed = True
            self._supervisor.kill(str(life.id))
        if not left:
            for id_ in team:
                self._start_again(RankId(id_.role, id_.rank, old.id.incarnation + 1))
        new = RankId(old.id.role, old.id.rank, old.id.incarnation + 1)
        if old.doomed:
            batch = None  # whatever it computed, it did not die of it
        return RankDied(old.id, new, exit_.reason, batch, work_items, old.doomed)

    def _start_again(self, new: RankId) -> None:
        peers = [life.id for life in self._lives.values() if life.id.role != new.role]
        windows = [self._window(new if new.role == "expert" else peer) for peer in peers]
        try:
            self._spawn(new, peers, [window for window in windows if window is not None])
            for peer, window in zip(peers, windows, strict=True):
                try:
                    send_peer(self._lives[str(peer)].lifeline, self._peer(new, peer), window)
                except BlockingIOError:  # it has not read for many deaths: it will not come back
                    self._supervisor.kill(str(peer))
                except OSError:  # it is dead too, and will be started again with windows to `new`
                    pass
        finally:
            for window in windows:
                if window is not None:
                    os.close(window)

    def close(self) -> None:
        for life in self._lives.values():
            life.close()

    def _team_of(self, id_: RankId) -> list[RankId]:
        """All members of the rank's attention group; an expert rank is alone."""
        size = self._plan.tensor_parallel
        if id_.role == "expert" or size == 1:
            return [id_]
        first = id_.rank // size * size
        return [RankId(id_.role, rank, id_.incarnation) for rank in range(first, first + size)]

    def _window(self, expert: RankId) -> int | None:
        if self._plan.transport != "shm":
            return None
        return create_windows(self._plan.windows[expert.rank].total_bytes)

    def _spawn(self, id_: RankId, peers: list[RankId], windows: list[int]) -> None:
        ours, theirs = packet_pair()
        ours.setblocking(False)
        life = self._lives[str(id_)] = _Life(id_, ours, create_black_box())
        device = self._plan.ranks[self._place[id_.role, id_.rank]].device
        team = self._team_of(id_)
        spec = RankSpec(
            id=id_,
            model_dir=str(self._plan.model_dir),
            agreement=self.agreement,
            controller=self._controller,
            bell=self._bell(id_),
            peers=[self._peer(peer, id_) for peer in peers],
            experts=[(span.start, span.stop) for span in self._plan.experts],
            shard=self._shard(id_),
            turns=[f"{self._bell(member)}.turns" for member in team],
            device="cpu" if device is None else device.kind,
            environment=self._plan.environment_of(device),
            transport=self._plan.transport,
            overlap=id_.role == "expert" or self._plan.topology.attention.overlap,
            connect_timeout_s=self._plan.topology.comm.connect_timeout_s,
        )
        with theirs:
            fds = [theirs.fileno(), life.black_box, *windows]
            self._supervisor.spawn(
                self._entries[id_.role], str(id_), msgspec.msgpack.encode(spec), fds
            )

    def _shard(self, id_: RankId) -> Shard:
        size = self._plan.tensor_parallel
        return Shard(id_.rank % size if id_.role == "attention" else 0, size)

    def _peer(self, peer: RankId, of: RankId) -> PeerSpec:
        expert = peer if peer.role == "expert" else of
        return PeerSpec(peer, self._bell(peer), self._plan.windows[expert.rank])

    def _bell(self, id_: RankId) -> str:
        return f"ipc://{self._supervisor.folder}/{id_.role}-{id_.rank}.{id_.incarnation}"
