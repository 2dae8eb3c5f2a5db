"""What a model computes in one process, on the CPU, in float32, by the plain code alone."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.comm.routing import plan_dispatch
from engine.device.fused import FusedOperators, using
from engine.model.attention import AttentionModel, PromptKV, Routed, Span
from engine.model.config import load_config
from engine.model.experts import ExpertModel
from engine.model.loading import load_attention, load_experts


class Reference:
    """The whole model of a checkpoint."""

    def __init__(self, model_dir: Path, dtype: torch.dtype = torch.float32) -> None:
        self.config = load_config(model_dir)
        self._attention: AttentionModel = load_attention(model_dir, self.config, dtype)
        self._all = range(self.config.experts)
        self._experts: ExpertModel = load_experts(model_dir, self.config, dtype, self._all)

    @torch.inference_mode()
    def run(self, token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Log-probabilities [tokens, vocabulary] of what follows each token, and for each token the
        smallest gap [tokens], over the layers, between the last expert that it chose and the first
        that it did not, in router logits.
        """
        with using(FusedOperators()):
            return self._run(token_ids)

    def _run(self, token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        count, model, config = len(token_ids), self._attention, self.config
        span, kv = Span(0, count), PromptKV(config, count, model.dtype, keep=False)
        hidden = model.embed(torch.tensor(token_ids))
        rope = model.rope(torch.arange(count))
        gaps = torch.full((count,), float("inf"))
        for layer in range(config.layers):
            hidden = model.attend(layer, hidden, rope, [span], [kv])
            if not config.is_moe(layer):
                hidden = model.dense(layer, hidden)
                continue
            routed = model.route(layer, hidden)
            gaps = torch.minimum(gaps, self._gaps(layer, routed))
            shared = model.shared(layer, routed.x)
            hidden = hidden + self._routed(layer, routed)
            if shared is not None:
                hidden = hidden + shared
        return model.logits(hidden).log_softmax(-1), gaps

    def _gaps(self, layer: int, routed: Routed) -> Tensor:
        gate = self._attention.get_parameter(f"model.layers.{layer}.mlp.gate.weight")
        ordered = F.linear(routed.x.float(), gate).sort(descending=True).values
        last = self.config.top_k - 1
        return ordered[:, last] - ordered[:, last + 1]

    def _routed(self, layer: int, routed: Routed) -> Tensor:
        (part,) = plan_dispatch(routed.experts, routed.weights, [self._all])
        out = torch.empty_like(routed.x)
        self._experts.serve(layer, routed.x, part.counts, part.row_index, part.weights, out)
        return out
