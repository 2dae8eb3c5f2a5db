"""Grouped-query attention (arXiv 2305.13245), optionally with normed queries and keys."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.model.architecture import GroupedQuery, ModelConfig
from engine.model.kv import PromptKV
from engine.model.layers import RMSNorm
from engine.model.products import Linear
from engine.model.rope import Rotation, rotate
from engine.model.spans import Span, attend


class GroupedQueryAttention(nn.Module):
    def __init__(self, config: ModelConfig, shape: GroupedQuery, layer: int):
        super().__init__()
        hidden, width = config.hidden_size, shape.head_dim
        self.layer = layer
        self.shape = shape
        self.window = config.sliding_window(layer)
        self.interleaved = config.rope.interleaved
        self.q_proj = Linear(hidden, shape.heads * width, bias=shape.bias)
        self.k_proj = Linear(hidden, shape.kv_heads * width, bias=shape.bias)
        self.v_proj = Linear(hidden, shape.kv_heads * width, bias=shape.bias)
        self.o_proj = Linear(shape.heads * width, hidden, bias=shape.bias)
        self.q_norm = RMSNorm(width, config.norm_eps) if shape.qk_norm else None
        self.k_norm = RMSNorm(width, config.norm_eps) if shape.qk_norm else None

    def forward(
        self, x: Tensor, rotation: Rotation, spans: Sequence[Span], kvs: Sequence[PromptKV]
    ) -> Tensor:
        tokens, width = x.shape[0], self.shape.head_dim
        query = self.q_proj(x).view(tokens, -1, width)
        key = self.k_proj(x).view(tokens, -1, width)
        value = self.v_proj(x).view(tokens, -1, width)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query = rotate(query, rotation, self.interleaved)
        key = rotate(key, rotation, self.interleaved)

        mixed = torch.empty_like(query)
        row = 0
        for span, kv in zip(spans, kvs, strict=True):
            rows = slice(row, row + span.length)
            keys, values = kv.extend(self.layer, span.start, (key[rows], value[rows]))
            mixed[rows] = attend(query[rows], keys, values, self.window, self.shape.scale)
            row += span.length
        out: Tensor = self.o_proj(mixed.flatten(1))
        return out
