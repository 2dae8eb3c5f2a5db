"""Messages that both ends of a pair can predict, so that each can check every value.

What a message is follows from who sends it to whom and its number. Values are small whole numbers,
exact in every dtype: what differs at all was damaged on the way.
"""

import random
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from engine.comm.layout import WindowShape
from engine.comm.routing import RankDispatch, Routing, plan_dispatch

_VALUES = 8
_FACTORS = 3
_EXTREME = 0.1  # the share of messages that are empty, of one row, or full
_TILES = 1000
# Numbers from here on are for taking the time: nobody looks at what they carry.
TIMED = 1 << 40


class Place(NamedTuple):
    """Where a message goes: the same for all members of an attention group."""

    lane: int
    layer: int
    tile: int


@dataclass(frozen=True)
class Traffic:
    """shape: of the windows with expert rank `expert`. layers: of the model. device: where rows
    are wanted.
    """

    shape: WindowShape
    expert: int
    layers: int
    dtype: torch.dtype
    device: torch.device

    def place(self, group: int, number: int) -> Place:
        rng = random.Random(f"place {group} {self.expert} {number}")
        lane = rng.randrange(self.shape.lanes)
        return Place(lane, rng.randrange(self.layers), rng.randrange(_TILES))

    def source(self, sender: int, number: int) -> Tensor:
        """[rows, hidden]: what attention rank `sender` picks the rows of a message from."""
        rng = random.Random(f"source {sender} {self.expert} {number}")
        first = rng.randrange(self.shape.rows)
        return self._table[first : first + self.shape.rows]

    def part(self, sender: int, number: int) -> RankDispatch:
        """Which rows, and to which experts with what weights. Empty, small and full ones all come,
        and more small ones than large ones.
        """
        rng = random.Random(f"part {sender} {self.expert} {number}")
        rows, local = self.shape.rows, self.shape.local_experts
        n = rng.choice((0, 1, rows)) if rng.random() < _EXTREME else int(rows ** rng.random())
        k = rng.randint(1, min(self.shape.top_k, local))
        step = rng.randint(1, rows // n) if n else 1
        picked = torch.arange(n) * step + rng.randint(0, max(0, rows - 1 - (n - 1) * step))
        first = rng.randrange(local)
        experts = (torch.arange(n)[:, None] * rng.randint(1, local) + torch.arange(k)) + first
        weights = (torch.arange(n * k).view(n, k) + first) % 2 + 1.0
        (compact,) = plan_dispatch(experts % local, weights, [range(local)])
        return RankDispatch(picked, compact.counts, compact.row_index, compact.weights)

    def answer(self, layer: int, hidden: Tensor, routing: Routing | RankDispatch) -> Tensor:
        """What expert rank `expert` makes of hidden [n, H], float32: for each pair, the row times
        its weight and a factor of its expert, and the rank and the layer once. Below 256, so that
        a bfloat16 holds it.
        """
        local = torch.arange(len(routing.counts), device=hidden.device)
        factors = (local % _FACTORS + 1).repeat_interleave(routing.counts)
        scale = torch.zeros(len(hidden), device=hidden.device)
        scale.index_add_(0, routing.row_index.long(), factors * routing.weights)
        # A token has few experts; the remainder keeps the product small whatever their number.
        return hidden.float() * (scale % 16)[:, None] + (self.expert % 32 + layer % 32)

    @cached_property
    def _table(self) -> Tensor:
        """[2 rows, hidden]; the same wherever it is made."""
        generator = torch.Generator().manual_seed(self.expert)
        shape = (2 * self.shape.rows, self.shape.hidden)
        return torch.randint(_VALUES, shape, generator=generator).to(self.device, self.dtype)
