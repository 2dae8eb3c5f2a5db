"""Which experts a token goes to, and with what weights. In float32 whatever the model's dtype."""

import torch
from torch import Tensor, nn

from engine.device.fused import fused
from engine.model.architecture import ModelConfig, Router
from engine.model.products import linear


class Gate(nn.Module):
    """Scores [N, H] against the experts; returns experts [N, k] int64 and weights [N, k] float32.

    softmax: the top k probabilities. sigmoid (DeepSeek-V3, arXiv 2412.19437, equations 12 to 16):
    independent scores, chosen with a selection bias inside the best groups, weighed without it.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.router = config.router
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden_size))
        if self.router.kind == "sigmoid":
            self.e_score_correction_bias = nn.Buffer(torch.zeros(config.experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = linear(x.float(), self.weight)
        bias = self.e_score_correction_bias if self.router.kind == "sigmoid" else None
        if (gate := fused(x.device).gate) is not None:
            chosen = gate(logits, self.router, bias)
            if chosen is not None:
                return chosen
        if bias is None:
            weights, experts = logits.softmax(-1).topk(self.router.top_k)
        else:
            scores = logits.sigmoid()
            eligible = _in_best_groups(scores + bias, self.router)
            experts = eligible.topk(self.router.top_k).indices
            weights = scores.gather(1, experts)
        if self.router.normalize:
            # The epsilon keeps sigmoid scores that all vanish from dividing by zero.
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return experts, weights * self.router.scaling


def _in_best_groups(scores: Tensor, router: Router) -> Tensor:
    """`scores` [N, experts] with -inf outside each token's best groups: those whose two highest
    scores have the largest sums. Not 0, which could win over negative scores.
    """
    if router.top_groups == router.groups:
        return scores
    tokens, experts = scores.shape  # both by number: with no tokens, view cannot infer a size
    grouped = scores.view(tokens, router.groups, experts // router.groups)
    sums = grouped.topk(2, dim=-1).values.sum(-1)
    best = sums.topk(router.top_groups).indices
    outside = torch.ones_like(sums, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(outside[..., None], float("-inf")).flatten(1)
