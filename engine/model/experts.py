"""The expert half of the network: some of the routed experts, of every MoE layer."""

from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor, nn

from engine.device.fused import ExpertTables, fused
from engine.model.architecture import ModelConfig
from engine.model.layers import gated
from engine.model.products import linear

# oneDNN prepares a kernel for each number of rows that it has not met lately: 0.3 ms, where the
# product itself takes 1. So products have multiples of so many rows.
_ROWS = 16

Shape3: TypeAlias = tuple[int, int, int]


def stacked_shapes(config: ModelConfig, count: int) -> tuple[Shape3, Shape3]:
    """Gate-up and down projections of `count` experts: [count, 2 I, H] and [count, H, I]."""
    hidden, intermediate = config.hidden_size, config.expert_intermediate
    return (count, 2 * intermediate, hidden), (count, hidden, intermediate)


class ExpertModel(nn.Module):
    """The experts in `experts` (indices within a layer) of every MoE layer."""

    def __init__(self, config: ModelConfig, experts: range):
        super().__init__()
        self.config = config
        self.experts = experts
        self.layers = nn.ModuleDict(
            {str(layer): _Experts(config, len(experts)) for layer in config.moe_layers}
        )
        self.requires_grad_(False)

    def flops(self, pairs: int) -> float:
        """Floating-point operations of `pairs` (token, expert) pairs: three products each."""
        return 6.0 * pairs * self.config.hidden_size * self.config.expert_intermediate

    def serve(
        self,
        layer: int,
        hidden: Tensor,
        counts: Tensor,
        row_index: Tensor,
        weights: Tensor,
        out: Tensor,
    ) -> None:
        """out[r] = sum over the experts e that row r goes to of weight * e(hidden[r]).

        hidden [n, H]; counts [E_local] int32, tokens of each local expert; row_index [p] int32 and
        weights [p] float32, sorted by expert: the first counts[0] belong to the first, and so on.
        out [n, H] is overwritten; it may lie in shared memory. Sums are taken in float32 in expert
        order, so a result does not depend on when anything arrived.
        """
        if (operator := fused(hidden.device).experts) is not None:
            operator(self.tables, layer, hidden, counts, row_index, weights, out)
            return
        experts, add_rows = self._layer(layer), fused(hidden.device).add_rows
        total = out if out.dtype == torch.float32 else torch.zeros_like(out, dtype=torch.float32)
        total.zero_()
        followed = torch.cat((row_index, row_index.new_zeros(_ROWS - 1)))
        begin = 0
        for local, count in enumerate(counts.tolist()):
            if count == 0:
                continue
            end = begin + count
            # Rows beyond are computed for nothing: few shapes are cheaper than exact ones.
            rows = followed[begin : begin - count // -_ROWS * _ROWS]
            result = experts(local, hidden.index_select(0, rows))[:count].float()
            if add_rows is None or not add_rows(total, rows[:count], weights[begin:end], result):
                total.index_add_(0, rows[:count], result.mul_(weights[begin:end, None]))
            begin = end
        if total is not out:
            out.copy_(total)

    @cached_property
    def tables(self) -> ExpertTables:
        """All layers' weights, as the operators of a device want them. To be read once they lie
        where they stay.
        """
        layers = self.config.moe_layers
        return ExpertTables(
            layers,
            [self._layer(layer).gate_up_proj for layer in layers],
            [self._layer(layer).down_proj for layer in layers],
        )

    def _layer(self, layer: int) -> "_Experts":
        experts = self.layers[str(layer)]
        assert isinstance(experts, _Experts)
        return experts


class _Experts(nn.Module):
    """One layer's local experts, stacked; gate and up in one, so that one product does both."""

    def __init__(self, config: ModelConfig, count: int):
        super().__init__()
        gate_up, down = stacked_shapes(config, count)
        self.gate_up_proj = nn.Parameter(torch.empty(gate_up))
        self.down_proj = nn.Parameter(torch.empty(down))

    def forward(self, expert: int, x: Tensor) -> Tensor:
        both = linear(x, self.gate_up_proj[expert])
        return linear(gated(both), self.down_proj[expert])
