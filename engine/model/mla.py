"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

The cache holds a token's normed latent and its one rotated key part, which all heads share; keys
and values of every head are expanded from them when attended to.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.model.architecture import Latent, ModelConfig
from engine.model.kv import PromptKV
from engine.model.layers import RMSNorm
from engine.model.products import Linear
from engine.model.rope import Rotation, rotate
from engine.model.spans import Span, attend

# DeepSeek norms its latents with this epsilon whatever the config says of the other norms.
_LATENT_EPS = 1e-6


class LatentAttention(nn.Module):
    def __init__(self, config: ModelConfig, shape: Latent, layer: int):
        super().__init__()
        hidden = config.hidden_size
        query_width = shape.heads * (shape.nope_dim + shape.rope_dim)
        self.layer = layer
        self.shape = shape
        self.window = config.sliding_window(layer)
        self.interleaved = config.rope.interleaved
        if shape.q_rank is None:
            self.q_proj = Linear(hidden, query_width, bias=False)
        else:
            self.q_a_proj = Linear(hidden, shape.q_rank, bias=shape.bias)
            self.q_a_layernorm = RMSNorm(shape.q_rank, _LATENT_EPS)
            self.q_b_proj = Linear(shape.q_rank, query_width, bias=False)
        self.kv_a_proj_with_mqa = Linear(hidden, shape.kv_rank + shape.rope_dim, bias=shape.bias)
        self.kv_a_layernorm = RMSNorm(shape.kv_rank, _LATENT_EPS)
        self.kv_b_proj = Linear(
            shape.kv_rank, shape.heads * (shape.nope_dim + shape.value_dim), bias=False
        )
        self.o_proj = Linear(shape.heads * shape.value_dim, hidden, bias=shape.bias)

    def forward(
        self, x: Tensor, rotation: Rotation, spans: Sequence[Span], kvs: Sequence[PromptKV]
    ) -> Tensor:
        query = self._queries(x, rotation)
        latent, rope_key = self._latents(x, rotation)

        mixed = x.new_empty(x.shape[0], self.shape.heads, self.shape.value_dim)
        row = 0
        for span, kv in zip(spans, kvs, strict=True):
            rows = slice(row, row + span.length)
            cached = kv.extend(self.layer, span.start, (latent[rows], rope_key[rows]))
            key, value = self.expand(*cached)
            mixed[rows] = attend(query[rows], key, value, self.window, self.shape.scale)
            row += span.length
        out: Tensor = self.o_proj(mixed.flatten(1))
        return out

    def expand(self, latent: Tensor, rope_key: Tensor) -> tuple[Tensor, Tensor]:
        """Cached latent [m, kv_rank] and rope key [m, rope_dim] as keys [m, heads, nope + rope]
        and values [m, heads, value_dim].
        """
        shape = self.shape
        both = self.kv_b_proj(latent).view(-1, shape.heads, shape.nope_dim + shape.value_dim)
        nope, value = both.split((shape.nope_dim, shape.value_dim), dim=-1)
        shared = rope_key[:, None].expand(-1, shape.heads, -1)
        return torch.cat((nope, shared), dim=-1), value

    def _queries(self, x: Tensor, rotation: Rotation) -> Tensor:
        shape = self.shape
        if shape.q_rank is None:
            query = self.q_proj(x)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        query = query.view(-1, shape.heads, shape.nope_dim + shape.rope_dim)
        nope, rope = query.split((shape.nope_dim, shape.rope_dim), dim=-1)
        return torch.cat((nope, rotate(rope, rotation, self.interleaved)), dim=-1)

    def _latents(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        shape = self.shape
        latent, rope = self.kv_a_proj_with_mqa(x).split((shape.kv_rank, shape.rope_dim), dim=-1)
        rotated = rotate(rope[:, None], rotation, self.interleaved)[:, 0]
        return self.kv_a_layernorm(latent), rotated
