"""The ranks of a running instance: starting them, and starting those again that died."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from engine import __version__
from engine.comm.windows import create_windows
from engine.control.messages import Agreement, RankDied
from engine.curve import Keys
from engine.launch.host import Host
from engine.launch.orders import Death
from engine.launch.plan import Plan
from engine.topology.ranks import RankId, Role
from engine.topology.shard import Shard
from engine.worker.spec import PeerSpec, RankSpec


@dataclass
class _Life:
    """A rank's present life. doomed: it is to go because another member of its group died."""

    id: RankId
    bell: str
    doomed: bool = False


class Ranks:
    """instance: which one. controller: its address, for ranks. host_of: where a rank is.

    Windows belong to a pair of lives: whoever is started again gets new ones with every peer,
    and each living peer is sent its end of them. The members of an attention group live and die
    together, since they compute every step together; in lockstep, so do all groups.
    """

    def __init__(
        self,
        plan: Plan,
        controller: str,
        host_of: Callable[[RankId], Host],
        instance: int = 0,
        keys: Keys | None = None,
    ) -> None:
        self._plan = plan
        self._controller = controller
        self._host_of = host_of
        self._instance = instance
        self._keys = keys
        self._lives: dict[tuple[Role, int], _Life] = {}
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

    def start(self) -> None:
        """Starts all of them. RunError when there is no memory for the windows."""
        for id_ in self.ids:
            self._begin(id_)
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
                self._start(id_, peers, [windows[pair] for pair in pairs if pair in windows])
        finally:
            for fd in windows.values():
                os.close(fd)  # the packets to the zygote hold their own

    def restart(self, death: Death) -> RankDied:
        """Starts the rank that died again; returns what the controller has to know.

        A member of an attention group takes the others with it: they are ended, and when the last
        one has gone, all of them start again.
        """
        old = self._lives.pop((death.id.role, death.id.rank))
        team = self._team_of(old.id)
        left = [life for id_ in team if (life := self._lives.get((id_.role, id_.rank)))]
        for life in left:
            life.doomed = True
            self.kill(life.id)
        if not left:
            again = [RankId(id_.role, id_.rank, old.id.incarnation + 1) for id_ in team]
            living = [life.id for life in self._lives.values() if life.id.role != old.id.role]
            for new in again:
                self._begin(new)
            for new in again:
                self._start_again(new, living)
        new = RankId(old.id.role, old.id.rank, old.id.incarnation + 1)
        # Whatever one that was to go computed, it did not die of it.
        batch = None if old.doomed else death.batch
        return RankDied(old.id, new, death.reason, batch, death.work_items, old.doomed)

    def kill(self, id_: RankId) -> None:
        self._host_of(id_).kill(self._instance, id_)

    def _start_again(self, new: RankId, peers: list[RankId]) -> None:
        windows = [self._window(new if new.role == "expert" else peer) for peer in peers]
        try:
            self._start(new, peers, [window for window in windows if window is not None])
            for peer, window in zip(peers, windows, strict=True):
                told = self._peer(new, peer)
                self._host_of(peer).tell(self._instance, peer, told, window)
        finally:
            for window in windows:
                if window is not None:
                    os.close(window)

    def _begin(self, id_: RankId) -> None:
        bell = self._host_of(id_).bell(self._instance, id_)
        self._lives[id_.role, id_.rank] = _Life(id_, bell)

    def _start(self, id_: RankId, peers: list[RankId], windows: list[int]) -> None:
        plan, size = self._plan, self._plan.tensor_parallel
        spec = RankSpec(
            id=id_,
            model_dir=str(plan.model_dir),
            agreement=self.agreement,
            controller=self._controller,
            bell=self._lives[id_.role, id_.rank].bell,
            peers=[self._peer(peer, id_) for peer in peers],
            experts=[(span.start, span.stop) for span in plan.experts],
            shard=Shard(id_.rank % size if id_.role == "attention" else 0, size),
            transport=plan.transport,
            overlap=id_.role == "expert" or plan.topology.attention.overlap,
            connect_timeout_s=plan.topology.comm.connect_timeout_s,
            keys=self._keys,
            senders=plan.senders,
            find_inflection=self._most_to_try(id_),
        )
        self._host_of(id_).start(self._instance, spec, windows)

    def _most_to_try(self, id_: RankId) -> int | None:
        """Tokens; None for a rank that has no inflection point to find."""
        schedule = self._plan.topology.schedule
        if schedule.min_batch_tokens != "auto" or id_.role == "attention" or id_.incarnation:
            return None
        return schedule.max_batch_tokens

    def _team_of(self, id_: RankId) -> list[RankId]:
        """All that live and die with the rank; an expert rank is alone."""
        size = self._plan.senders
        if id_.role == "expert" or size == 1:
            return [id_]
        first = id_.rank // size * size
        return [RankId(id_.role, rank, id_.incarnation) for rank in range(first, first + size)]

    def _window(self, expert: RankId) -> int | None:
        if self._plan.transport != "shm":
            return None
        return create_windows(self._plan.windows[expert.rank].total_bytes)

    def _peer(self, peer: RankId, of: RankId) -> PeerSpec:
        expert = peer if peer.role == "expert" else of
        return PeerSpec(
            peer, self._lives[peer.role, peer.rank].bell, self._plan.windows[expert.rank]
        )
