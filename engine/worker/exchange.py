"""One MoE layer of one batch, seen from its attention rank: dispatches out, combines in.

The tokens of the batch are cut into tiles of `window_tokens`. Each expert rank gets the tiles one
after another, as its region for this lane becomes free, without regard to the other expert
ranks. What comes back is added in rank order within a tile, so that the sum of a token has the
same bits whatever arrived first; a segment that is early stays in its window until its turn.

An expert rank without tokens of a tile is neither written to nor awaited, unless several attention
ranks dispatch together, as the members of a group or all groups in lockstep: then every one of them
dispatches to every expert rank, in as many tiles as the one with the most rows, since the expert
rank waits for all of them.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from engine.comm.layout import tiles
from engine.comm.primitives import Arrival, AttentionEndpoint
from engine.comm.routing import RankDispatch, plan_dispatch
from engine.worker.recorder import Recorder


class Routed(Protocol):
    """x [N, H]: what the experts compute on; experts [N, k] int64; weights [N, k] float32."""

    @property
    def x(self) -> Tensor: ...
    @property
    def experts(self) -> Tensor: ...
    @property
    def weights(self) -> Tensor: ...


@dataclass(slots=True)
class _Tile:
    """The tokens `span` of a batch. turns: the expert ranks still to be added, in order."""

    span: slice
    parts: dict[int, RankDispatch]
    turns: deque[int]
    arrived: dict[int, Arrival] = field(default_factory=dict)


class Exchange:
    """Never blocks: `send` writes what there is room for, `take` adds what has come.

    senders: how many attention ranks dispatch together. most_rows: of the one that has the most; by
    default those of `routed`.
    """

    def __init__(
        self,
        endpoint: AttentionEndpoint,
        *,
        lane: int,
        batch: int,
        layer: int,
        routed: Routed,
        bounds: Sequence[range],
        window_tokens: int,
        senders: int = 1,
        most_rows: int | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._recorder = recorder or Recorder()
        self._lane, self._batch, self._layer = lane, batch, layer
        self._x = routed.x
        self._tiles: list[_Tile] = []
        self._unsent: dict[int, deque[int]] = {}  # expert rank -> tiles
        self._repeats: set[tuple[int, int]] = set()  # expert rank and tile
        experts, weights = routed.experts.cpu(), routed.weights.cpu()  # the plan is the host's
        for span in tiles(most_rows or len(routed.x), window_tokens):
            plan = plan_dispatch(experts[span], weights[span], bounds)
            parts = {rank: part for rank, part in enumerate(plan) if part.n or senders > 1}
            for rank in parts:
                self._unsent.setdefault(rank, deque()).append(len(self._tiles))
            self._tiles.append(_Tile(span, parts, deque(parts)))
        self._open_tiles = sum(bool(tile.turns) for tile in self._tiles)

    @property
    def done(self) -> bool:
        """Every expert rank's part of every tile has been added."""
        return self._open_tiles == 0

    @property
    def awaited(self) -> set[int]:
        """The expert ranks whose part of some tile has not come."""
        return {rank for tile in self._tiles for rank in tile.turns if rank not in tile.arrived}

    def again(self, lost: Arrival) -> None:
        """Sends a dispatch again whose expert rank died before its answer was added."""
        self._tiles[lost.tile].arrived.pop(lost.expert, None)
        self._unsent[lost.expert].appendleft(lost.tile)
        self._repeats.add((lost.expert, lost.tile))
        self.send()

    def send(self) -> None:
        """Dispatches the next tile of every expert rank whose region is free."""
        for rank, unsent in self._unsent.items():
            if unsent and self._endpoint.is_free(rank, self._lane):
                number = unsent[0]
                tile = self._tiles[number]
                part = tile.parts[rank]
                work = self._lane, self._batch, self._layer, number
                span = self._recorder.span(
                    "dispatch", self._batch, self._lane, self._layer, number, rank, part.n
                )
                with span:
                    again = (rank, number) in self._repeats
                    sent = self._endpoint.dispatch_send(
                        rank, *work, self._x[tile.span], part, again
                    )
                if sent:
                    unsent.popleft()

    def take(self, arrival: Arrival, into: Tensor) -> None:
        """Adds the segment, and those that waited for it, into `into` [N, H]; sends what follows.

        Raises ValueError for an arrival of another layer, tile or batch.
        """
        tile = self._tiles[arrival.tile]
        if (arrival.batch, arrival.layer) != (self._batch, self._layer):
            raise ValueError(f"{arrival} came while batch {self._batch} is at layer {self._layer}")
        tile.arrived[arrival.expert] = arrival
        while tile.turns and tile.turns[0] in tile.arrived:
            rank = tile.turns.popleft()
            self._endpoint.combine_add(
                tile.arrived.pop(rank), tile.parts[rank].rows, into[tile.span]
            )
            if not tile.turns:
                self._open_tiles -= 1
        self.send()
