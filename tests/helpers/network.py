"""Both halves of a model in one process, joined by the plainest possible exchange."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.model.attention import AttentionModel, Routed, Span
from engine.model.config import load_config
from engine.model.experts import ExpertModel
from engine.model.kv import PromptKV
from engine.model.loading import load_attention, load_experts


class Prompt:
    """A prompt on its way through the network, whole or in chunks."""

    def __init__(self, attention: AttentionModel, token_ids: list[int], keep: bool = False):
        self.token_ids = token_ids
        self.kv = PromptKV(attention.config, len(token_ids), attention.dtype, keep)
        self.logits: list[Tensor] = []


class Network:
    """An attention side and its experts, spread over `ranks` expert ranks."""

    def __init__(self, model_dir: Path, ranks: int = 1, dtype: torch.dtype = torch.float32):
        self.config = load_config(model_dir)
        self.attention = load_attention(model_dir, self.config, dtype)
        bounds = [self.config.experts * i // ranks for i in range(ranks + 1)]
        self.experts = [
            load_experts(model_dir, self.config, dtype, range(*pair))
            for pair in itertools.pairwise(bounds)
        ]

    def logits(self, token_ids: list[int]) -> Tensor:
        """[tokens, vocabulary] of one whole prompt."""
        prompt = Prompt(self.attention, token_ids)
        self.step([(prompt, Span(0, len(token_ids)))])
        return torch.cat(prompt.logits)

    def step(self, batch: Sequence[tuple[Prompt, Span]]) -> None:
        """Takes a packed batch through all layers; adds its logits to each prompt's."""
        model = self.attention
        spans = [span for _, span in batch]
        kvs = [prompt.kv for prompt, _ in batch]
        ids = [i for p, s in batch for i in p.token_ids[s.start : s.start + s.length]]
        positions = torch.cat([torch.arange(s.start, s.start + s.length) for s in spans])
        hidden = model.embed(torch.tensor(ids))
        rope = model.rope(positions)
        for layer in range(self.config.layers):
            hidden = model.attend(layer, hidden, rope, spans, kvs)
            if not self.config.is_moe(layer):
                hidden = model.dense(layer, hidden)
                continue
            routed = model.route(layer, hidden)
            shared = model.shared(layer, routed.x)
            for experts in self.experts:
                hidden = hidden + serve(experts, layer, routed)
            if shared is not None:
                hidden = hidden + shared
        parts = model.logits(hidden).split([s.length for s in spans])
        for (prompt, _), part in zip(batch, parts, strict=True):
            prompt.logits.append(part)


def serve(experts: ExpertModel, layer: int, routed: Routed) -> Tensor:
    """What one expert rank adds to each row: [N, H]."""
    counts, rows, weights = [], [], []
    for expert in experts.experts:
        token, slot = (routed.experts == expert).nonzero(as_tuple=True)
        counts.append(len(token))
        rows.append(token)
        weights.append(routed.weights[token, slot])
    out = torch.full_like(routed.x, float("nan"))  # serve overwrites all of it
    experts.serve(
        layer,
        routed.x,
        torch.tensor(counts, dtype=torch.int32),
        torch.cat(rows).int(),
        torch.cat(weights),
        out,
    )
    return out
