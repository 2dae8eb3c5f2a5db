"""From a router's choice to one dispatch for each expert rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RankDispatch:
    """What one expert rank is sent of a batch (or tile).

    rows [n] int64: the batch's tokens that chose an expert of this rank; ascending, each once.
    counts [local experts] int32: pairs of each local expert; they sum to p.
    row_index [p] int32: for each (expert, token) pair the token's place in `rows`.
    weights [p] float32: the pair's routing weight.
    Pairs are sorted by (local expert, token).
    """

    rows: Tensor
    counts: Tensor
    row_index: Tensor
    weights: Tensor

    @property
    def n(self) -> int:
        return self.rows.shape[0]

    @property
    def p(self) -> int:
        return self.row_index.shape[0]


def plan_dispatch(experts: Tensor, weights: Tensor, bounds: Sequence[range]) -> list[RankDispatch]:
    """One RankDispatch for each expert rank, in rank order; one without tokens has n = 0.

    experts [N, k] int64: the distinct experts of each token. weights [N, k] float32.
    bounds: the experts of each rank, consecutive from 0 (`place_experts`).
    Raises ValueError when an expert belongs to no rank.
    """
    tokens, k = experts.shape
    flat = experts.reshape(-1)
    total = bounds[-1].stop
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < total:
        raise ValueError(f"a token chose expert {int(flat.max())}; the ranks hold 0 to {total - 1}")

    # Stable, so that the pairs of one expert stay in token order.
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=total).to(torch.int32)
    token_of_pair = order // k if k else order
    weight_of_pair = weights.reshape(-1)[order]

    parts: list[RankDispatch] = []
    start = 0
    for span in bounds:
        local_counts = counts[span.start : span.stop]
        stop = start + int(local_counts.sum())
        pair_tokens = token_of_pair[start:stop]
        present = torch.zeros(tokens, dtype=torch.bool, device=experts.device)
        present[pair_tokens] = True
        place = torch.cumsum(present, 0, dtype=torch.int32) - 1
        parts.append(
            RankDispatch(
                rows=present.nonzero().view(-1),
                counts=local_counts,
                row_index=place[pair_tokens],
                weights=weight_of_pair[start:stop],
            )
        )
        start = stop
    return parts


class Routing(NamedTuple):
    """The part of a dispatch that says which row goes to which expert; as in RankDispatch."""

    counts: Tensor
    row_index: Tensor
    weights: Tensor


def merge(parts: Sequence[Routing], rows: Sequence[int]) -> Routing:
    """One routing for the rows of all `parts` laid one after another; part i has rows[i] of them.

    Pairs are sorted by (local expert, part, token) again.
    """
    first_rows = [0, *accumulate(rows)]
    counts = torch.stack([part.counts for part in parts])
    experts = torch.arange(counts.shape[1], device=counts.device).repeat(len(parts))
    order = torch.argsort(experts.repeat_interleave(counts.flatten()), stable=True)
    row_index = torch.cat(
        [part.row_index + first for part, first in zip(parts, first_rows, strict=False)]
    )
    weights = torch.cat([part.weights for part in parts])
    return Routing(counts.sum(0, dtype=torch.int32), row_index[order], weights[order])
