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
            return norm(x, self.weight, self.eps)
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = F.rms_norm(x.float(), self.weight.shape, eps=self.eps)
        return self.weight * wide.to(x.dtype)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)): [N, H] -> [N, H]."""

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate, bias=False)
        self.up_proj = Linear(hidden, intermediate, bias=False)
        self.down_proj = Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out
