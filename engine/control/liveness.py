"""Liveness is progress: who has work, and has made no headway for too long. Pure.

An attention rank with a batch is heard of all the time: it reports before each step it computes,
with how long that should take, and once a second while it waits for experts. An expert rank is
owed nothing until an attention rank says that it waits for it. So a long prompt is not a stall,
and of two ranks that stand still the one that the other waits for is named.
"""

from collections.abc import Collection
from dataclasses import dataclass

from engine.control.messages import Progress
from engine.topology.ranks import RankId

QUIET_S = 10.0
MARGIN = 5.0


@dataclass(slots=True)
class _Heard:
    at: float
    predicted_s: float = 0.0


class Liveness:
    """Time is an argument, in seconds on one monotonic clock. quiet_s: how long anybody may be
    silent. in_lockstep: an expert rank waits for all attention ranks, so it owes nothing until all
    that have work wait for it.
    """

    def __init__(self, quiet_s: float = QUIET_S, in_lockstep: bool = False) -> None:
        self._quiet_s = quiet_s
        self._in_lockstep = in_lockstep
        self._heard: dict[RankId, _Heard] = {}
        self._owes: dict[RankId, dict[int, float]] = {}  # attention rank -> expert -> since

    def heard(self, rank: RankId, now: float, progress: Progress | None = None) -> None:
        """`rank` sent something."""
        predicted = progress.predicted_s if progress is not None else 0.0
        self._heard[rank] = _Heard(now, predicted)
        if progress is not None and rank.role == "attention":
            before = self._owes.get(rank, {})
            self._owes[rank] = {expert: before.get(expert, now) for expert in progress.waits_for}

    def assigned(self, rank: RankId, now: float) -> None:
        """The attention rank was given a batch: its silence counts from now."""
        if rank in self._heard:
            self._heard[rank] = _Heard(now, self._heard[rank].predicted_s)

    def gone(self, rank: RankId) -> None:
        """That life of the rank is over."""
        self._heard.pop(rank, None)
        self._owes.pop(rank, None)
        if rank.role == "expert":
            for owed in self._owes.values():
                owed.pop(rank.rank, None)

    def stalled(self, now: float, working: Collection[int]) -> dict[RankId, float]:
        """The ranks without headway, and for how many seconds. working: attention ranks that have
        batches.
        """
        owed = self._owed(working)
        silent: dict[RankId, float] = {}
        for rank, heard in self._heard.items():
            since = heard.at
            if rank.role == "expert":
                if rank.rank not in owed:
                    continue
                since = max(since, owed[rank.rank])
            elif rank.rank not in working:
                continue
            if now - since > max(self._quiet_s, MARGIN * heard.predicted_s):
                silent[rank] = now - since
        return silent

    def _owed(self, working: Collection[int]) -> dict[int, float]:
        """The expert ranks that somebody, or in lockstep everybody, waits for, and since when."""
        since: dict[int, list[float]] = {}
        for rank, experts in self._owes.items():
            if rank.rank in working:
                for expert, begun in experts.items():
                    since.setdefault(expert, []).append(begun)
        if self._in_lockstep:
            return {e: max(begun) for e, begun in since.items() if len(begun) == len(working)}
        return {expert: min(begun) for expert, begun in since.items()}
