"""The parts that every family shares."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.device.fused import fused
from engine.model.products import Linear


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv 1910.07467) over the last dimension, in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if (norm := fused(x.device).rms_norm) is not None:
            normed = norm(x, self.weight, self.eps)
            if normed is not None:
                return normed
        # By the length of a row, which needs no tensor of squares; in place where that is possible.
        wide = x.float()
        squares = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        factor = squares.div_(x.shape[-1]).add_(self.eps).rsqrt_()
        out: Tensor = (wide * factor).to(x.dtype)
        return out.mul_(self.weight)


def gated(both: Tensor) -> Tensor:
    """silu of the first half of [n, 2 I] times the second: [n, I]."""
    if (operator := fused(both.device).gated) is not None:
        out = operator(both)
        if out is not None:
            return out
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)): [N, H] -> [N, H]."""

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate, bias=False)
        self.up_proj = Linear(hidden, intermediate, bias=False)
        self.down_proj = Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)).mul_(self.up_proj(x)))
        return out
